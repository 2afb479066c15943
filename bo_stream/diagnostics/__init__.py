"""What a model is sure of: the stability of its linear systems."""

from bo_stream.diagnostics.certificate import (
    Stability,
    stability,
    stability_of_points,
    stability_of_precision,
)
from bo_stream.diagnostics.condition import (
    Estimate,
    Verdict,
    condition_limit,
    condition_number,
    trace_limit,
)

__all__ = [
    "Estimate",
    "Stability",
    "Verdict",
    "condition_limit",
    "condition_number",
    "stability",
    "stability_of_points",
    "stability_of_precision",
    "trace_limit",
]
