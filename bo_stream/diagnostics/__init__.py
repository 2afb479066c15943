"""Diagnostics: whether a model can be trusted, how stable it is, and how well it predicts."""

from bo_stream.diagnostics.alarms import Alarm
from bo_stream.diagnostics.certificate import (
    Estimate,
    Stability,
    Verdict,
    condition_limit,
    condition_number,
    stability,
    stability_of_points,
    stability_of_precision,
    trace_limit,
)
from bo_stream.diagnostics.cross_validation import leave_one_out, without
from bo_stream.diagnostics.trust import TrustReport, report
from bo_stream.diagnostics.validation import ProgressiveValidation

__all__ = [
    "Alarm",
    "Estimate",
    "ProgressiveValidation",
    "Stability",
    "TrustReport",
    "Verdict",
    "condition_limit",
    "condition_number",
    "leave_one_out",
    "report",
    "stability",
    "stability_of_points",
    "stability_of_precision",
    "trace_limit",
    "without",
]
