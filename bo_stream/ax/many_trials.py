"""A choice of Ax's analyses for experiments of thousands of trials."""

from __future__ import annotations

from ax.analysis.analysis import Analysis
from ax.analysis.best_trials import BestTrials
from ax.analysis.diagnostics import DiagnosticAnalysis
from ax.analysis.healthcheck.predictable_metrics import PredictableMetricsAnalysis
from ax.analysis.plotly.sensitivity import SensitivityAnalysisPlot
from ax.analysis.plotly.utility_progression import UtilityProgressionAnalysis
from ax.analysis.summary import Summary


def analyses(*metrics: str) -> list[Analysis]:
    """Return Ax's analyses of progress, best trials, sensitivity and fit.

    For ``client.compute_analyses``, whose default also draws contours and the effect of each trial.
    Ax predicts contours at a point for each pair of trials and looks each point up among all
    trials, O(n³): from some hundred trials on that takes longer than all the rest. The effects are
    a trace for each trial: 15 s at 500 trials, where all analyses here took 4.5 s, and 17 s at
    2,000 trials (processor time, three inputs).

    Args:
        metrics: Metrics whose sensitivity to the parameters is analysed.

    Example:
        >>> client.compute_analyses(analyses("loss"))
    """
    return [
        UtilityProgressionAnalysis(),
        BestTrials(),
        Summary(),
        *(SensitivityAnalysisPlot(metric_name=metric) for metric in metrics),
        DiagnosticAnalysis(),
        PredictableMetricsAnalysis(),
    ]
