"""Which models add up: whether parts of a stream, merged, are the model of the whole stream."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from botorch.exceptions.errors import UnsupportedError

from bo_stream.models.auto.families import EXACT
from bo_stream.models.auto.inference import AutoMemory
from bo_stream.models.base import StreamingGP
from bo_stream.models.clustered.memory import ClusterMemory
from bo_stream.models.decoupled.decoupled import DecoupledGP
from bo_stream.models.inducing.inference import CollapsedInference
from bo_stream.models.inducing.memory import InducingMemory
from bo_stream.models.local.local import LocalGP
from bo_stream.models.outcomes.likelihood import LikelihoodOutcomes
from bo_stream.models.quadruply_stochastic.qsgp import QSGP
from bo_stream.models.quadruply_stochastic.qsrvm import QSRVM
from bo_stream.models.wiski.heteroscedastic import HeteroscedasticWISKI
from bo_stream.models.wiski.memory import OnGrid
from bo_stream.warnings import ProjectionWarning, users_stack_level

_EXACT = (
    "Those of WISKI, DirichletWISKI, BayesianLastLayer and of OSGPR with inducing_points and "
    "window=0 add up exactly."
)

BY_STEPS = (DecoupledGP, QSGP, QSRVM)
"""Models whose posteriors are learned by steps on a bound."""


def check_additive(model: StreamingGP) -> None:
    """Refuse a model whose parts cannot be summed; warn of one whose sums are an approximation.

    Raises:
        UnsupportedError: The model cannot be summed.
    """
    name, reason = type(model).__name__, None
    if isinstance(model, BY_STEPS):
        reason = "its posterior is learned by steps on a bound and is not a sum over observations"
    elif isinstance(model._memory, AutoMemory) and model._memory.family == EXACT:
        reason = (
            "it is exact so far and holds all its rows. Move it to the family that it would go on "
            'in: model.move_to("WISKI"), or "OSGPR"'
        )
    if reason is not None:
        raise UnsupportedError(
            f"Expected a model whose statistics add up, got a {name}: {reason}. {_EXACT}"
        )
    gap = approximation(model)
    if gap is not None:
        warnings.warn(
            f"Parts of a stream, merged, are only nearly the {name} of the whole stream: {gap}. "
            f"{_EXACT}",
            ProjectionWarning,
            stacklevel=users_stack_level(),
        )


def approximation(model: StreamingGP) -> str | None:
    """Say how merged parts of a stream differ from the whole stream; None if they do not."""
    memory, inference = inner_memory(model), model._inference
    if isinstance(model._memory, AutoMemory):
        inference = model._memory.inference
    if isinstance(model._units, LikelihoodOutcomes):
        return "each outcome enters by the posterior that its part has at that time"
    if isinstance(model, HeteroscedasticWISKI):
        return (
            "where Yvar is unknown, the noise is learned from what each part predicts, and each "
            "begins with the prior"
        )
    if isinstance(memory, ClusterMemory):
        return (
            "parts that place other centres move some inputs twice. It is exact where the tree "
            "covers all inputs before the start"
        )
    if isinstance(memory, InducingMemory) and memory.allocator is not None:
        return "each part places inducing points of its own. Give inducing_points"
    if isinstance(inference, CollapsedInference) and inference.window > 0:
        return (
            "posteriors are exact, but a fit sees other rows in its window. It is exact with "
            "window=0"
        )
    if isinstance(model, LocalGP):
        return "which local model takes a row depends on the rows before it"
    return None


def inner_memory(model: StreamingGP) -> Any:
    """Return a model's memory, or that of the family that it is in."""
    memory = model._memory
    return memory.inner if isinstance(memory, AutoMemory) else memory


def set_inner_memory(model: StreamingGP, inner: Any) -> None:
    """Replace a model's memory, or that of the family that it is in, which then holds no rows."""
    memory = model._memory
    if isinstance(memory, AutoMemory):
        inner = replace(memory, inner=inner, rows=None)
    model._set_memory(inner)


def empty_copy(model: StreamingGP) -> StreamingGP:
    """Return a model without observations that shares hyperparameters, in the same family."""
    former, empty = inner_memory(model), model._shallow_copy().clear()
    if isinstance(model._memory, AutoMemory):  # which would begin anew
        empty._memory = model._memory
        set_inner_memory(empty, model._memory.inference.cleared(former, model._prior))
    inner = inner_memory(empty)
    if isinstance(inner, OnGrid):  # which may grow as far as the model's may
        set_inner_memory(empty, replace(inner, first=former.first))  # type: ignore[type-var]
    return empty
