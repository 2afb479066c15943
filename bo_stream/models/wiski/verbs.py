"""What every model on a grid can be asked, and do, beside the verbs of all models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError
from torch import Tensor

from bo_stream.bases.grid import resolution
from bo_stream.bases.grid.mesh import Sizes
from bo_stream.models.base import StreamingGP
from bo_stream.models.shell.construction import checked_projection
from bo_stream.models.shell.posteriors import keeps_tensors
from bo_stream.models.wiski.cache import GridCache, Whitening
from bo_stream.models.wiski.inference import GridInference
from bo_stream.models.wiski.resolution import GridSize
from bo_stream.models.wiski.rows import Memory

M = TypeVar("M", bound=StreamingGP)
T = TypeVar("T")

Part = tuple[GridInference, Memory, GridCache | None]
"""Inference, memory and cache of a model's process, beside those of its noise."""


class Attribute(property, Generic[T]):
    """A read-only attribute of several classes that a function of the model computes."""

    if TYPE_CHECKING:

        def __init__(self, fget: Callable[[Any], T]) -> None: ...

        def __get__(self, instance: Any, owner: type | None = None, /) -> T: ...  # type: ignore[override]


def process_part(model: StreamingGP) -> Part:
    """Return inference, memory and cache of a grid model's process."""
    inference: Any = model._inference
    part: Part = inference.part(model._memory, model._cache)
    return part


def _set_part(model: StreamingGP, *part: GridInference | Memory | GridCache | None) -> None:
    inference: Any = model._inference
    model._inference, model._memory, model._cache = inference.with_part(
        part, model._memory, model._cache
    )


def bounds(model: StreamingGP) -> Tensor:
    """Return the box that the grid covers, ``2 x d``, in transformed inputs.

    Models built with these bounds and this ``grid_size`` share its nodes, up to the rounding of the
    dtype; not so those with grids over common inputs that have grown.
    """
    box: Tensor = model._memory.grid.bounds
    return box.to(model.train_targets)


def grid_size(model: StreamingGP) -> tuple[int, ...] | Sizes:
    """Return nodes per dimension (of each grid of a sum), one beyond the box at each end too."""
    size: tuple[int, ...] | Sizes = model._memory.grid.size
    return size


def interpolation_error(model: StreamingGP) -> float:
    """Bound the error of the interpolated kernel, in parts of the prior variance."""
    inference, memory, _ = process_part(model)
    return resolution.interpolation_error(inference.kernel(model._prior), memory.grid)


def _whitened(model: StreamingGP) -> Whitening:
    inference, memory, cache = process_part(model)
    whitening, cache = inference.whitened(memory, cache, model._prior)
    _set_part(model, inference, memory, cache)
    return whitening


def rank(model: StreamingGP) -> int:
    """Count the r features at the present hyperparameters."""
    return _whitened(model).basis.rank


def dropped(model: StreamingGP) -> float:
    """Return the part of the kernel's trace that the r features leave out."""
    return _whitened(model).basis.dropped


@torch.no_grad()
def solved_gram(model: StreamingGP) -> Tensor:
    """Return what the observations add to the identity in the matrix that a posterior solves.

    ``Φᵀ N⁻¹ Φ`` of the whitened features at the present hyperparameters, ``batch_shape x m x r x
    r``: the precision of the weights is ``I`` more.
    """
    return model._prior.evidence(_whitened(model).memory).gram


def truncate(model: M, left_out: float) -> M:
    """Keep only as many features as the noise level asks for, at the present hyperparameters.

    Sets ``tolerance``; the memory stays whole, so a later call undoes it. A posterior from few
    observations that are held as rows is exact all the same. With 1e-4 a posterior on 500 noisy
    outcomes in 3-D had half the features, its mean was off by 0.001 of its standard deviation and
    its variance by 0.2 %.

    Args:
        model: Itself.
        left_out: Prior variance that may be left out, in parts of the noise variance.

    Raises:
        ValueError: It is not in [0, 1).
        UnsupportedError: The model is conditioned on hypothetical data.
    """
    model._check_not_conditioned("truncate")
    inference, memory, _ = process_part(model)
    _set_part(model, inference.truncated(left_out, memory, model._prior), memory, None)
    model._set_memory(model._memory)
    return model


@keeps_tensors
def refine(model: M, grid_size: GridSize) -> M:
    """Move to a finer (or coarser) grid over the same box, hyperparameters kept.

    Observations that are still held as rows move to the new grid, exactly. Of others, what is
    observed from now on has the new grid's interpolation error, and the posterior is exactly that
    of the new grid's kernel with the past observations interpolated twice (from the new grid to the
    old nodes, from those to the data), whose statistics stay on the old grid. So the past keeps the
    old grid's error, and memory and the cost of a refit grow by one grid per call. Once there are
    observations on both grids, ``retract`` is refused, for it is not kept which is where.

    Args:
        model: Itself.
        grid_size: Nodes per dimension, one number or d, at least 4; for a sum of kernels also such
            a tuple for each grid.

    Raises:
        ValueError: The size is out of range or too large for memory.
        UnsupportedError: The model is conditioned on hypothetical data.
    """
    model._check_not_conditioned("refine")
    inference, memory, _ = process_part(model)
    _set_part(model, *inference.refined(memory, grid_size, model._prior), None)
    model._set_memory(model._memory)
    return model


def batch_log_marginal_likelihood(
    model: StreamingGP, X: Tensor, Y: Tensor, Yvar: Tensor | None = None, recalibrate: bool = False
) -> Tensor:
    """Return the likelihood of these observations instead of those in memory.

    Differentiable in the hyperparameters and in the stem; exact where no feature is left out. Cost
    O(n r² + r³). Shaped as ``log_marginal_likelihood``; that of the mean where noise has a model.

    Args:
        model: Itself.
        X: ``batch_shape x n x d``.
        Y: ``batch_shape x n x m``, or labels.
        Yvar: Known noise variances shaped as Y; NaN: unknown.
        recalibrate: Calibrate the stem on X, as part of what is differentiated.
    """
    Y, Yvar, _ = model._units.checked(model, X, Y, Yvar, "batch_log_marginal_likelihood")
    inputs = model.calibrated_inputs(X) if recalibrate else model.hypothetical_inputs(X)
    inference, memory, _ = process_part(model)
    value = inference.batch_log_marginal_likelihood(
        memory.grid, inputs, model._measured(Y, Yvar), model._prior
    )
    return model._from_per_output(value)


def reproject(model: M, X: Tensor, Y: Tensor, former: Tensor, Yvar: Tensor | None = None) -> M:
    """Replace observations by themselves as the stem projects them now.

    Exact: equal to a memory that they had entered by the present stem.

    Args:
        model: Itself.
        X: ``n x d``, observed before.
        Y: ``n x m``, or labels.
        former: Their coordinates when they entered, ``n x k``: what ``coordinates`` was.
        Yvar: Known noise variances shaped as Y; NaN: unknown.

    Raises:
        BotorchTensorDimensionError: ``former`` has another shape.
        InputDataError: As ``update``, and more observations than are in memory.
        UnsupportedError: There are observations on several grids, after ``refine``; or the model is
            conditioned on hypothetical data.
    """
    model._check_not_conditioned("reproject")
    Y, Yvar, _ = model._units.checked(model, X, Y, Yvar, "reproject")
    model._check_retractable(X)
    if former.shape != (*X.shape[:-1], model._process_dim):
        raise BotorchTensorDimensionError(
            f"Expected former of shape `{tuple(X.shape[:-1])} x {model._process_dim}`, the "
            f"coordinates of X, got {tuple(former.shape)}."
        )
    new = model._observations(X, Y, Yvar, 1.0)
    old = replace(new, X=checked_projection(former.to(new.X)), sign=-1.0)
    inference, memory, cache = process_part(model)
    _set_part(model, inference, *inference.replaced(memory, cache, old, new, model._prior))
    model._refresh_fixed_noise()
    return model
