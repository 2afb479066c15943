"""Sums over observations, computed anywhere, for a model: zero, accumulate, merge, finish.

A sum over a stream is the sum of sums over its parts, so that any engine can sum the parts:
``merge`` is associative, ``zero`` its neutral element. The sums of a model are stored as a model
of the same hyperparameters with no other observations.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from torch import Tensor
from torch.nn import Module

from bo_stream.diagnostics.approximation import BY_STEPS
from bo_stream.models.auto.families import EXACT
from bo_stream.models.auto.inference import AutoMemory
from bo_stream.models.base import StreamingGP
from bo_stream.models.clustered.inference import ClusterMemory
from bo_stream.models.construction import restore_products
from bo_stream.models.inducing.inference import CollapsedInference
from bo_stream.models.inducing.memory import InducingMemory
from bo_stream.models.local import LocalGP
from bo_stream.models.outcomes.likelihood import LikelihoodOutcomes
from bo_stream.models.wiski.heteroscedastic import HeteroscedasticWISKI
from bo_stream.models.wiski.memory import OnGrid
from bo_stream.storage.objects import model_bytes, read_model_bytes
from bo_stream.storage.trusted import Trusted
from bo_stream.warnings import ProjectionWarning, users_stack_level

_EXACT = (
    "Those of WISKI, DirichletWISKI, BayesianLastLayer and of OSGPR with inducing_points and "
    "window=0 add up exactly."
)

_PLAIN = (bool, int, float, str)

M = TypeVar("M", bound=StreamingGP)


@dataclass(frozen=True)
class Sums:
    """Sums over observations, at one set of values of a model's hyperparameters.

    They can be pickled. For a grid model of d inputs with at most
    ``bo_stream.models.wiski.memory.MOST_ROWS`` observations they are the observations themselves,
    beyond that O(7^d) numbers a cell of the grid, for any number of observations.

    Attributes:
        model: The hyperparameters, and the observations as the model's memory has them.
    """

    model: StreamingGP

    @property
    def rows(self) -> float:
        """Number of observations."""
        return self.model.num_observations

    def to_bytes(self) -> bytes:
        """Return the content of a file that :func:`bo_stream.describe_file` describes.

        Raises:
            ValueError: The model has a value that is neither a tensor, a plain value nor an object
                of an importable class, such as a lambda.
        """
        return model_bytes(self.model, self.model._description())

    @classmethod
    def from_bytes(cls, content: bytes, trusted: Sequence[Trusted] = ()) -> Sums:
        """Read sums that :meth:`to_bytes` wrote, without running code from them.

        Args:
            content: The bytes.
            trusted: Classes and functions of your own that they may name; see
                :meth:`StreamingGP.load`.

        Raises:
            ValueError: The bytes are of another format or version, damaged, or name a class or
                function that is not trusted.
        """
        kind: Any = StreamingGP
        model: StreamingGP = read_model_bytes(content, "The content", kind, trusted)
        restore_products(model)
        return cls(model)


def zero(model: StreamingGP) -> Sums:
    """Make sums of no observations at the hyperparameters that a model has now.

    Known noise variances of zero, or below 1e-10 of the outcomes' variance (on a grid 1e-6), are
    raised depending on the earlier observations in the sums: with such variances the parts of a
    stream differ a little from the whole.

    Args:
        model: Model whose kernel, basis, bounds, transforms and units the sums use; it is copied.
            An ``AutoGP`` must have left the exact family; rows that it still stores besides the
            statistics are not in the sums, and it stores none after :func:`finish`.

    Raises:
        UnsupportedError: Sums over parts of its stream cannot be merged; the message gives the
            reason and the models that can. Or it is conditioned on hypothetical observations.

    Warns:
        ProjectionWarning: Merged parts are an approximation of the whole stream; it says how.
    """
    name, reason = type(model).__name__, None
    if isinstance(model, BY_STEPS):
        reason = "its posterior is learned by steps on a bound and is not a sum over observations"
    elif isinstance(model.memory, AutoMemory) and model.memory.family == EXACT:
        reason = (
            "it is exact so far and holds all its rows. Move it to the family that it would go on "
            'in: model.move_to("WISKI"), or "OSGPR"'
        )
    if reason is not None:
        raise UnsupportedError(
            f"Expected a model whose statistics add up, got a {name}: {reason}. {_EXACT}"
        )
    memory, inference, gap = inner_memory(model), model.inference, None
    if isinstance(model.memory, AutoMemory):
        inference = model.memory.inference
    if isinstance(model.outcomes, LikelihoodOutcomes):
        gap = "each outcome enters by the posterior that its part has at that time"
    elif isinstance(model, HeteroscedasticWISKI):
        gap = (
            "where Yvar is unknown, the noise is learned from what each part predicts, and each "
            "begins with the prior"
        )
    elif isinstance(memory, ClusterMemory):
        gap = (
            "parts that place other centres move some inputs twice. It is exact where the tree "
            "covers all inputs before the start"
        )
    elif isinstance(memory, InducingMemory) and memory.allocator is not None:
        gap = "each part places inducing points of its own. Give inducing_points"
    elif isinstance(inference, CollapsedInference) and inference.window > 0:
        gap = (
            "posteriors are exact, but a fit sees other rows in its window. It is exact with "
            "window=0"
        )
    elif isinstance(model, LocalGP):
        gap = "which local model takes a row depends on the rows before it"
    if gap is not None:
        warnings.warn(
            f"Parts of a stream, merged, are only nearly the {name} of the whole stream: {gap}. "
            f"{_EXACT}",
            ProjectionWarning,
            stacklevel=users_stack_level(),
        )
    empty = model._shallow_copy().clear()
    if isinstance(model.memory, AutoMemory):  # which would begin again
        empty._memory = model.memory
        set_inner_memory(empty, model.memory.inference.cleared(memory, model.prior))
    inner = inner_memory(empty)
    if isinstance(inner, OnGrid):  # which may grow as far as the model's may
        set_inner_memory(empty, replace(inner, first=memory.first))  # type: ignore[type-var]
    return Sums(deepcopy(empty).eval())


def accumulate(sums: Sums, X: Tensor, Y: Tensor, Yvar: Tensor | None = None) -> Sums:
    """Add n observations to sums, in place, and return them.

    It costs as much as the model's ``update``: on a grid, batches of many rows a cell are fastest.

    Args:
        sums: Changed by this; bad input leaves them as they were.
        X: ``batch_shape x n x d``, as for the model's ``update``.
        Y: ``batch_shape x n x m``, or labels.
        Yvar: Known noise variances shaped as Y; NaN: unknown.

    Raises:
        BotorchTensorDimensionError: Shapes do not fit the model.
        InputDataError: Dtype, device, NaN, infinity, negative variance; on a grid, inputs too far
            outside.
    """
    sums.model.update(X, Y, Yvar)
    return sums


def merge(sums: Sums, other: Sums) -> Sums:
    """Return the sums over the observations of both; neither changes.

    Grids that have grown differently are joined exactly. Cost O(size of the sums).

    Raises:
        UnsupportedError: They are of different classes, hyperparameters or bases, which is named.
    """
    check_alike(sums.model, other.model)
    both = sums.model._shallow_copy()
    both.likelihood = deepcopy(both.likelihood)  # its noise is the mean of known noise
    return Sums(both.merge(other.model))


def finish(model: M, sums: Sums) -> M:
    """Add all observations of sums to a model, in place, and return it.

    A call that raises leaves the model as it was.

    Raises:
        UnsupportedError: The sums are of another class, other hyperparameters or another basis,
            which is named; or the model is conditioned on hypothetical observations.
        InputDataError: The grid would become too wide.
    """
    check_alike(model, sums.model)
    return model.merge(sums.model)


def rebased(sums: Sums, model: StreamingGP) -> Sums:
    """Return sums in the present hyperparameters of a model; the given sums do not change.

    Exact for models on a grid, whose sums do not depend on the hyperparameters. At inducing points
    it is a congruence: the observations act as observations of the process at the points.

    Args:
        sums: Sums of the same class, inputs, outputs and transforms.
        model: Model whose hyperparameters are used.

    Raises:
        UnsupportedError: The class, the number of inputs or outputs, or a transform differs.
    """
    empty = zero(model)
    return Sums(empty.model.merge(sums.model))


# --- a model's memory, or that of its present family ----------------------------------------------


def inner_memory(model: StreamingGP) -> Any:
    """Return a model's memory, or the memory of its present family."""
    memory = model.memory
    return memory.inner if isinstance(memory, AutoMemory) else memory


def set_inner_memory(model: StreamingGP, inner: Any) -> None:
    """Replace a model's memory, or the memory of its present family; rows are dropped."""
    memory = model.memory
    if isinstance(memory, AutoMemory):
        inner = replace(memory, inner=inner, rows=None)
    model._set_memory(inner)


# --- whether two models have the same hyperparameters and the same basis --------------------------


def check_alike(mine: StreamingGP, theirs: StreamingGP) -> None:
    """Check that two models differ in their observations only.

    The standardisation of outcomes may differ: memories store outcomes in their own units.

    Raises:
        UnsupportedError: They differ in class, in a hyperparameter or in their basis; the message
            names what differs.
    """
    if type(mine) is not type(theirs):
        _refuse("classes", type(mine).__name__, type(theirs).__name__)
    ours, others = dict(parts_of(mine)), dict(parts_of(theirs))
    for name in (*ours, *others):
        a, b = ours.get(name), others.get(name)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            is_equal = a.shape == b.shape and torch.equal(a, b.to(a))
        else:
            is_equal = type(a) is type(b) and a == b
        if not is_equal:
            _refuse(name, a, b)
    memories: list[Any] = [inner_memory(mine), inner_memory(theirs)]
    here, there = memories
    if isinstance(here, OnGrid) and isinstance(there, OnGrid):
        grid, other, rounding = here.grid, there.grid, max(each.rounding for each in memories)
        has_groups = grid.groups == other.groups
        other = other.aligned(grid, rounding) if has_groups else other
        if not has_groups or not other.lies_in(grid.grown_over(other)):  # other nodes
            texts = (
                f"{each.grid.size} nodes over {each.grid.bounds.tolist()}" for each in memories
            )
            _refuse("grids", *texts)
    elif isinstance(here, InducingMemory) and here.allocator is None:
        points = here.values.Z, there.values.Z
        if not torch.equal(*points):
            _refuse("inducing points", *points)


def parts_of(model: StreamingGP) -> Iterator[tuple[str, Any]]:
    """List hyperparameters, classes and plain options of kernel, mean, likelihood and inputs."""
    for name in ("covar_module", "mean_module", "likelihood", "input_transform", "stem"):
        module = getattr(model, name, None)
        if isinstance(module, FixedNoiseGaussianLikelihood):  # its noise is of the observations
            yield name, type(module).__name__
        elif isinstance(module, Module):
            for path, part in module.named_modules(prefix=name):
                yield path, type(part).__name__
                own = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
                for key, value in own:
                    yield f"{path}.{key}", value.detach()
                for key, option in vars(part).items():
                    if isinstance(option, _PLAIN) and key != "training":
                        yield f"{path}.{key}", option


def _refuse(what: str, *values: object) -> None:
    """Raise an error that names what differs between two models, and both values."""
    texts = [str(v.tolist()) if isinstance(v, Tensor) else repr(v) for v in values]
    mine, theirs = (text if len(text) <= 80 else f"{text[:77]}..." for text in texts)
    raise UnsupportedError(
        f"Expected sums of one model, got different {what}: {mine} and {theirs}. Make them from "
        "one zero(model), or express one of them in the other hyperparameters by rebased(sums, "
        "model)."
    )
