"""Ax's analyses for experiments of thousands of trials."""

from __future__ import annotations

from ax.analysis.analysis import Analysis
from ax.analysis.diagnostics import DiagnosticAnalysis
from ax.analysis.healthcheck.predictable_metrics import PredictableMetricsAnalysis
from ax.analysis.plotly.sensitivity import SensitivityAnalysisPlot
from ax.analysis.results import ResultsAnalysis


def analyses(*metrics: str) -> list[Analysis]:
    """Results, sensitivity and fit: those of Ax's analyses that take thousands of trials.

    For ``client.compute_analyses``, whose default has contour plots besides. Ax predicts them at a
    point for each pair of trials, and looks each point up among all trials: O(n³), from some
    hundred trials on more than all the rest.

    Args:
        metrics: Whose sensitivity to the parameters is analysed.

    Example:
        >>> client.compute_analyses(analyses("loss"))
    """
    sensitivities = (SensitivityAnalysisPlot(metric_name=metric) for metric in metrics)
    return [
        ResultsAnalysis(),
        *sensitivities,
        DiagnosticAnalysis(),
        PredictableMetricsAnalysis(),
    ]
