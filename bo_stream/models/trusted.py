"""Read a pickled model without running what its file says: what a file may name is listed here."""

from __future__ import annotations

import importlib
import inspect
import pickle
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, BinaryIO, TypeAlias

import gpytorch
import numpy as np
import torch

Trusted: TypeAlias = Callable[..., Any]
"""A class or a function that a file may name."""

_PACKAGES = (
    "bo_stream.allocation",
    "bo_stream.bases",
    "bo_stream.models",
    "bo_stream.process.process",
    "bo_stream.sufficient_statistics",
    "bo_stream.likelihoods.sites",
    "bo_stream.weights",
    "botorch.models.kernels",
    "botorch.models.transforms",
    "botorch.models.utils.inducing_point_allocators",
    "gpytorch.constraints",
    "gpytorch.kernels",
    "gpytorch.likelihoods",
    "gpytorch.means",
    "gpytorch.priors",
    "gpytorch.utils.quadrature",
    "torch.distributions",
    "torch.nn.modules",
)
"""Classes that are defined in these are trusted: they compute, and touch neither files, processes
nor names of modules. Torch trusts those of its tensors by itself."""

_OTHERS = frozenset(
    {
        "bo_stream.bases.grid.kernel._matern12",
        "bo_stream.bases.grid.kernel._matern32",
        "bo_stream.bases.grid.kernel._matern52",
        "bo_stream.bases.grid.kernel._periodic",
        "bo_stream.bases.grid.kernel._spectral_component",
        "bo_stream.bases.grid.kernel._squared_exponential",
        "bo_stream.models.input_transforms._concentration0",
        "bo_stream.models.input_transforms._concentration1",
        "bo_stream.models.input_transforms._set_concentration0",
        "bo_stream.models.input_transforms._set_concentration1",
        "functools.partial",
        "gpytorch.means.constant_mean._ensure_updated_strategy_flag_set",
        "gpytorch.utils.transforms.inv_sigmoid",
        "gpytorch.utils.transforms.inv_softplus",
        "numpy._core.multiarray._reconstruct",
        "numpy.core.multiarray._reconstruct",
        "numpy.dtype",
        "numpy.ndarray",
        "torch._C._VariableFunctionsClass",
        "torch._C._nn.one_hot",
    }
)
"""What else is trusted, by full name."""

_NUMBERS = tuple(type(np.dtype(name)) for name in ("bool", "int32", "int64", "float32", "float64"))
"""Classes of the dtypes that arrays in a file may have."""

_TORCH_FUNCTIONS = frozenset({"exp", "log", "sigmoid", "tanh"})
"""Functions of ``torch`` that a pickle takes from a class by ``getattr``."""

_GETATTR = "builtins.getattr"
_METHODS = re.compile(r"_load_state_hook_ignore_shapes|_\w+_(param|closure)")
"""Methods that GPyTorch's modules keep as hooks, and as readers and writers of priors."""


def read_pickle(
    path: str | Path, map_location: str | torch.device | None, trusted: Sequence[Trusted] = ()
) -> Any:
    """Read what ``torch.save`` wrote; only classes and functions that are trusted are called.

    Args:
        path: Of the file.
        map_location: Device of the tensors, as in ``torch.load``.
        trusted: Classes and functions of the caller's own that the file may name.

    Raises:
        OSError: The file cannot be opened.
        ValueError: It is damaged, none of ``torch.save``, or names what is not trusted.
    """
    with Path(path).open("rb") as file:
        try:
            allowed = _allowed(_names(file), trusted)
            file.seek(0)
            with torch.serialization.safe_globals(allowed):
                return torch.load(file, map_location=map_location, weights_only=True)
        except _UntrustedError as error:
            raise ValueError(f"{path} {error}") from error
        except Exception as error:  # torch raises errors of many classes on damaged files
            raise ValueError(f"{path} is damaged or no model file: {_reason(error)}.") from error


class _UntrustedError(Exception):
    """The file names what is not trusted."""


def _names(file: BinaryIO) -> list[str]:
    """Full names of what a file wants to call, without those that torch trusts."""
    return torch.serialization.get_unsafe_globals_in_checkpoint(file)


def _allowed(
    names: Iterable[str], trusted: Sequence[Trusted]
) -> list[Trusted | tuple[Trusted, str]]:
    """Of the names in a file, what they stand for.

    Raises:
        _UntrustedError: One is not trusted.
    """
    own = {f"{each.__module__}.{each.__qualname__}": each for each in trusted}
    known = {**own, _GETATTR: _method_reader(trusted)}
    found = {name: known.get(name) or _resolve(name) for name in names}
    unknown = sorted(name for name, each in found.items() if each is None)
    if unknown:
        raise _UntrustedError(
            f"names {', '.join(unknown)}, which would run when it is loaded and is not trusted. If "
            "these are classes or functions of your own and you trust the file, load it with "
            f"trusted=[{', '.join(name.rpartition('.')[2] for name in unknown)}]."
        )
    chosen = {(each, name) for name, each in found.items() if each is not None}
    return list((chosen | {*_NUMBERS}) - {*torch.serialization.get_safe_globals()})


def _resolve(name: str) -> Trusted | None:
    module_name, _, attribute = name.rpartition(".")
    if name in _OTHERS:
        return _attribute(module_name, attribute)
    if any(f"{module_name}.".startswith(f"{package}.") for package in _PACKAGES):
        found = _attribute(module_name, attribute)
        defined_there = isinstance(found, type) and found.__module__ == module_name
        return found if defined_there else None
    return None


def _attribute(module_name: str, attribute: str) -> Any:
    try:
        return getattr(importlib.import_module(module_name), attribute, None)
    except ImportError:
        return None


def _method_reader(trusted: Sequence[Trusted]) -> Trusted:
    """What stands for ``getattr``: it reads methods that modules keep, and nothing else."""
    own = tuple(each for each in trusted if isinstance(each, type))

    def method_of(owner: object, name: str) -> Any:
        if owner is torch._C._VariableFunctionsClass and name in _TORCH_FUNCTIONS:  # type: ignore[attr-defined]
            return getattr(torch, name)
        method = inspect.getattr_static(type(owner), name, None)
        kept = isinstance(owner, gpytorch.Module) and _METHODS.fullmatch(name)
        if (kept or isinstance(owner, own)) and isinstance(method, FunctionType):
            return MethodType(method, owner)
        if owner in own and isinstance(inspect.getattr_static(owner, name, None), staticmethod):
            return getattr(owner, name)
        raise pickle.UnpicklingError(f"it asks for {name!r} of {type(owner).__name__}")

    return method_of


def _reason(error: Exception) -> str:
    """An error in one line, without torch's advice to trust the file."""
    text = str(error).rpartition(_ADVICE)[2].partition(_MORE_ADVICE)[0]
    return " ".join(text.split())[:200].rstrip(".") or type(error).__name__


_ADVICE, _MORE_ADVICE = "WeightsUnpickler error: ", "Check the documentation of torch.load"
