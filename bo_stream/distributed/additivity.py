"""Which models add up: whether parts of a stream, merged, are the model of the whole stream."""

from __future__ import annotations

import warnings

from botorch.exceptions.errors import UnsupportedError

from bo_stream.models.auto.auto import AutoGP
from bo_stream.models.base import StreamingGP
from bo_stream.models.clustered.clustered import ClusteredGP
from bo_stream.models.decoupled.decoupled import DecoupledGP
from bo_stream.models.inducing.osgpr import OSGPR
from bo_stream.models.inducing.osvgp import OSVGP
from bo_stream.models.local.local import LocalGP
from bo_stream.models.outcomes.likelihood import LikelihoodOutcomes
from bo_stream.models.quadruply_stochastic.qsgp import QSGP
from bo_stream.models.quadruply_stochastic.qsrvm import QSRVM
from bo_stream.models.wiski.heteroscedastic import HeteroscedasticWISKI
from bo_stream.warnings import ProjectionWarning, users_stack_level

_EXACT = (
    "Those of WISKI, DirichletWISKI, BayesianLastLayer and of OSGPR with inducing_points and "
    "window=0 add up exactly."
)

_SEPARATE: dict[type[StreamingGP], str] = {
    AutoGP: "it chooses a family and learns hyperparameters along with its stream, in each part "
    "others. Take a model of the family itself",
    DecoupledGP: "its posterior is learned by steps on a bound and is not a sum over observations",
    QSGP: "its posterior is learned by steps on a bound and is not a sum over observations",
    QSRVM: "its posterior is learned by steps on a bound and is not a sum over observations",
}
"""Models that cannot be summed, and why."""


def check_additive(model: StreamingGP) -> None:
    """Refuse a model whose parts cannot be summed; warn of one whose sums are an approximation.

    Raises:
        UnsupportedError: The model cannot be summed.
    """
    reason = _SEPARATE.get(type(model))
    if reason is not None:
        raise UnsupportedError(
            f"Expected a model whose statistics add up, got a {type(model).__name__}: {reason}. "
            f"{_EXACT}"
        )
    gap = approximation(model)
    if gap is not None:
        warnings.warn(
            f"Parts of a stream, merged, are only nearly the {type(model).__name__} of the whole "
            f"stream: {gap}. {_EXACT}",
            ProjectionWarning,
            stacklevel=users_stack_level(),
        )


def approximation(model: StreamingGP) -> str | None:
    """Say how merged parts of a stream differ from the whole stream; None if they do not."""
    if isinstance(model._units, LikelihoodOutcomes):
        return "each outcome enters by the posterior that its part has at that time"
    if isinstance(model, HeteroscedasticWISKI):
        return (
            "where Yvar is unknown, the noise is learned from what each part predicts, and each "
            "begins with the prior"
        )
    if isinstance(model, ClusteredGP):
        return (
            "parts that place other centres move some inputs twice. It is exact where the tree "
            "covers all inputs before the start"
        )
    if isinstance(model, OSGPR | OSVGP) and model.allocator is not None:
        return "each part places inducing points of its own. Give inducing_points"
    if isinstance(model, OSGPR) and model.window > 0:
        return (
            "posteriors are exact, but a fit sees other rows in its window. It is exact with "
            "window=0"
        )
    if isinstance(model, LocalGP):
        return "which local model takes a row depends on the rows before it"
    return None
