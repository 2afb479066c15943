"""Whether two models have the same hyperparameters and the same basis; what differs is named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from torch import Tensor
from torch.nn import Module

from bo_stream.bases.grid.mesh import Mesh
from bo_stream.distributed.additivity import inner_memory
from bo_stream.models.base import StreamingGP
from bo_stream.models.inducing.memory import InducingMemory
from bo_stream.models.wiski.memory import OnGrid

_PLAIN = (bool, int, float, str)


def check_alike(mine: StreamingGP, theirs: StreamingGP) -> None:
    """Check that two models differ in their observations only.

    The standardisation of outcomes may differ: memories hold outcomes in their own units.

    Raises:
        UnsupportedError: They differ in class, in a hyperparameter or in their basis; the message
            names what differs.
    """
    if type(mine) is not type(theirs):
        _refuse("classes", type(mine).__name__, type(theirs).__name__)
    ours, others = dict(parts_of(mine)), dict(parts_of(theirs))
    for name in (*ours, *others):
        a, b = ours.get(name), others.get(name)
        if not _is_equal(a, b):
            _refuse(name, a, b)
    _check_basis(inner_memory(mine), inner_memory(theirs))


def _refuse(what: str, mine: object, theirs: object) -> None:
    raise UnsupportedError(
        f"Expected sums of one model, got different {what}: {_spelled(mine)} and "
        f"{_spelled(theirs)}. Make them from one zero(model), or express one of them in the other "
        "hyperparameters by rebased(sums, model)."
    )


def _spelled(value: object) -> str:
    text = str(value.tolist()) if isinstance(value, Tensor) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def parts_of(model: StreamingGP) -> Iterator[tuple[str, Any]]:
    """List hyperparameters, classes and plain options of kernel, mean, likelihood and inputs."""
    for name in ("covar_module", "mean_module", "likelihood", "input_transform", "stem"):
        module = getattr(model, name, None)
        if isinstance(module, FixedNoiseGaussianLikelihood):  # its noise follows the observations
            yield name, type(module).__name__
        elif isinstance(module, Module):
            yield from _settings_of(module, name)


def _settings_of(root: Module, start: str) -> Iterator[tuple[str, Any]]:
    for path, module in root.named_modules(prefix=start):
        yield path, type(module).__name__
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for name, value in own:
            yield f"{path}.{name}", value.detach()
        for name, option in vars(module).items():
            if isinstance(option, _PLAIN) and name != "training":
                yield f"{path}.{name}", option


def _is_equal(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b.to(a))
    return type(a) is type(b) and a == b


def _check_basis(mine: Any, theirs: Any) -> None:
    """Check that grids share their nodes, and that inducing points which stay are the same."""
    if isinstance(mine, OnGrid) and isinstance(theirs, OnGrid):
        grid, rounding = mine.grid, max(_rounding(mine), _rounding(theirs))
        other = theirs.grid
        if grid.groups != other.groups or not _shares_nodes(grid, other.aligned(grid, rounding)):
            _refuse("grids", _grid(mine), _grid(theirs))
    elif isinstance(mine, InducingMemory) and mine.allocator is None:
        a, b = mine.values.Z, theirs.values.Z
        if not torch.equal(a, b):
            _refuse("inducing points", a, b)


def _shares_nodes(grid: Mesh, other: Mesh) -> bool:
    return other.lies_in(grid.grown_over(other))


def _rounding(memory: Any) -> float:
    rounding: float = memory.rounding
    return rounding


def _grid(memory: OnGrid) -> str:
    return f"{memory.grid.size} nodes over {memory.grid.bounds.tolist()}"
