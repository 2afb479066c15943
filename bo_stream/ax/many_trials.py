"""Ax's analyses for experiments of thousands of trials."""

from __future__ import annotations

from ax.analysis.analysis import Analysis
from ax.analysis.best_trials import BestTrials
from ax.analysis.diagnostics import DiagnosticAnalysis
from ax.analysis.healthcheck.predictable_metrics import PredictableMetricsAnalysis
from ax.analysis.plotly.sensitivity import SensitivityAnalysisPlot
from ax.analysis.plotly.utility_progression import UtilityProgressionAnalysis
from ax.analysis.summary import Summary


def analyses(*metrics: str) -> list[Analysis]:
    """Progress, best trials, sensitivity and fit: Ax's analyses that take thousands of trials.

    For ``client.compute_analyses``, whose default has contour plots and pictures of each trial's
    effect besides. Ax predicts contours at a point for each pair of trials, and looks each point up
    among all trials: O(n³), from some hundred trials on more than all the rest. It draws effects
    with a trace for each trial: 15 s at 500 trials, where all analyses here took 4.5 s, and 17 s
    at 2,000 trials (processor time, three inputs).

    Args:
        metrics: Whose sensitivity to the parameters is analysed.

    Example:
        >>> client.compute_analyses(analyses("loss"))
    """
    sensitivities = (SensitivityAnalysisPlot(metric_name=metric) for metric in metrics)
    return [
        UtilityProgressionAnalysis(),
        BestTrials(),
        Summary(),
        *sensitivities,
        DiagnosticAnalysis(),
        PredictableMetricsAnalysis(),
    ]
