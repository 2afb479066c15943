"""Diagnostics: the stability of a model's linear systems, and how well it predicts."""

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

__all__ = [
    "Estimate",
    "Stability",
    "Verdict",
    "condition_limit",
    "condition_number",
    "leave_one_out",
    "stability",
    "stability_of_points",
    "stability_of_precision",
    "trace_limit",
    "without",
]
