"""Classes and functions that a model's file may name: others are not even imported."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any, TypeAlias

import gpytorch
import torch

Trusted: TypeAlias = Callable[..., Any]
"""A class or a function that a file may name."""

_PACKAGES = (
    "bo_stream.allocation",
    "bo_stream.bases",
    "bo_stream.collective",
    "bo_stream.mapping",
    "bo_stream.marginal_likelihood",
    "bo_stream.models",
    "bo_stream.observation_space",
    "bo_stream.process",
    "bo_stream.weights",
    "bo_stream.likelihoods.binomial",
    "bo_stream.likelihoods.outcome_model",
    "bo_stream.likelihoods.sites",
    "bo_stream.warnings",
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
nor names of modules."""

_FUNCTIONS = frozenset(
    {
        "bo_stream.bases.grid.kernel._matern12",
        "bo_stream.bases.grid.kernel._matern32",
        "bo_stream.bases.grid.kernel._matern52",
        "bo_stream.bases.grid.kernel._periodic",
        "bo_stream.bases.grid.kernel._spectral_component",
        "bo_stream.bases.grid.kernel._squared_exponential",
        "bo_stream.models.construction._concentration0",
        "bo_stream.models.construction._concentration1",
        "bo_stream.models.construction._set_concentration0",
        "bo_stream.models.construction._set_concentration1",
        "botorch.models.transforms.utils.interaction_features",
        "gpytorch.means.constant_mean._ensure_updated_strategy_flag_set",
        "gpytorch.utils.transforms.inv_sigmoid",
        "gpytorch.utils.transforms.inv_softplus",
    }
)
"""Functions that are trusted."""

_BUILTINS: Mapping[str, Trusted] = {
    "torch.exp": torch.exp,
    "torch.log": torch.log,
    "torch.nn.functional.one_hot": torch.nn.functional.one_hot,
    "torch.nn.functional.softplus": torch.nn.functional.softplus,
    "torch.sigmoid": torch.sigmoid,
    "torch.tanh": torch.tanh,
}
"""Functions that are trusted and do not know their own names."""

_METHODS = re.compile(r"_load_state_hook_ignore_shapes|_\w+_(param|closure)")
"""Methods that GPyTorch's modules have as hooks, and as readers and writers of priors."""


_FORMER: Mapping[str, str] = {
    "bo_stream.allocation.novelty": "bo_stream.allocation.oips",
    "bo_stream.allocation.selection": "bo_stream.allocation.allocator",
    "bo_stream.allocation.simple": "bo_stream.allocation.allocator",
    "bo_stream.bases.basis": "bo_stream.bases.inducing",
    "bo_stream.bases.functions": "bo_stream.bases.inducing",
    "bo_stream.bases.grid.cellwise": "bo_stream.bases.grid.statistics",
    "bo_stream.bases.grid.integrals": "bo_stream.bases.grid.interpolation",
    "bo_stream.bases.grid.interpolated_kernel": "bo_stream.bases.grid.interpolation",
    "bo_stream.bases.grid.resolution": "bo_stream.bases.grid.kernel",
    "bo_stream.bases.grid.sensitivity": "bo_stream.bases.grid.contraction",
    "bo_stream.bases.product_matern": "bo_stream.bases.kernels",
    "bo_stream.bases.sampled": "bo_stream.bases.spectral",
    "bo_stream.bases.stems": "bo_stream.bases.kernels",
    "bo_stream.mapping.kernel": "bo_stream.mapping",
    "bo_stream.mapping.positions": "bo_stream.mapping",
    "bo_stream.models.auto.comparison": "bo_stream.models.auto.families",
    "bo_stream.models.auto.sites": "bo_stream.models.auto.families",
    "bo_stream.models.auto.view": "bo_stream.models.auto.auto",
    "bo_stream.models.clustered.memory": "bo_stream.models.clustered.inference",
    "bo_stream.models.decoupled.bound": "bo_stream.models.decoupled.posterior",
    "bo_stream.models.decoupled.growth": "bo_stream.models.decoupled.collapse",
    "bo_stream.models.decoupled.memory": "bo_stream.models.decoupled.posterior",
    "bo_stream.models.held_sites": "bo_stream.models.outcomes.likelihood",
    "bo_stream.models.inducing.inducing_model": "bo_stream.models.inducing.osgpr",
    "bo_stream.models.inducing.osvgp": "bo_stream.models.inducing.osgpr",
    "bo_stream.models.input_transforms": "bo_stream.models.construction",
    "bo_stream.models.last_layer.memory": "bo_stream.models.last_layer.inference",
    "bo_stream.models.last_layer.network": "bo_stream.models.last_layer.inference",
    "bo_stream.models.latest_inputs": "bo_stream.models.botorch_hooks",
    "bo_stream.models.local.inference": "bo_stream.models.local",
    "bo_stream.models.local.local": "bo_stream.models.local",
    "bo_stream.models.local.memory": "bo_stream.models.local",
    "bo_stream.models.outcomes.counts": "bo_stream.models.outcomes.likelihood",
    "bo_stream.models.outcomes.labels": "bo_stream.models.outcomes.gaussian",
    "bo_stream.models.outcomes.prediction": "bo_stream.models.outcomes.base",
    "bo_stream.models.outcomes.selection": "bo_stream.models.outcomes.base",
    "bo_stream.models.outcomes.transform": "bo_stream.models.outcomes.base",
    "bo_stream.models.prior": "bo_stream.models.inference",
    "bo_stream.models.quadruply_stochastic.choice": "bo_stream.models.quadruply_stochastic.memory",
    "bo_stream.models.quadruply_stochastic.control_variate": (
        "bo_stream.models.quadruply_stochastic.function_process"
    ),
    "bo_stream.models.quadruply_stochastic.qsrvm": "bo_stream.models.quadruply_stochastic.qsgp",
    "bo_stream.models.shell.updates": "bo_stream.models.botorch_hooks",
    "bo_stream.models.stochastic.optimisers": "bo_stream.models.stochastic.budget",
    "bo_stream.models.stochastic.sharded": "bo_stream.models.stochastic.training",
    "bo_stream.models.wiski.grid_prior": "bo_stream.models.wiski.memory",
    "bo_stream.models.wiski.labels": "bo_stream.models.wiski.inference",
    "bo_stream.models.wiski.learning": "bo_stream.models.wiski.cache",
    "bo_stream.models.wiski.log_noise": "bo_stream.models.wiski.heteroscedastic_inference",
    "bo_stream.models.wiski.rows": "bo_stream.models.wiski.memory",
    "bo_stream.models.wiski.sites": "bo_stream.models.wiski.wiski",
    "bo_stream.process.observation_space": "bo_stream.observation_space",
    "bo_stream.process.process": "bo_stream.process",
    "bo_stream.sufficient_statistics": "bo_stream.weights",
}
"""Where the classes and functions of former modules are now, for files of former versions."""


_FORMER_NAMES: Mapping[str, str] = {
    "bo_stream.likelihoods.sites.Prior": "SitePrior",
    "bo_stream.models.decoupled.learner.Schedule": "DecoupledSchedule",
    "bo_stream.models.local.Rows": "LocalRows",
}
"""Present names of classes by their former full names in their present modules."""

_FORMER_FIELDS: Mapping[str, Mapping[str, tuple[str, str | None]]] = {
    "bo_stream.models.base.StreamingGP": {"_units": ("_outcomes", None)},
    "bo_stream.weights.WeightPosterior": {"base_root": ("base", "bo_stream.weights.DenseRoot")},
}
"""Present names of the fields of a class, and of classes below it, by their former names, and the
class that the value is now the one field of; None: of none."""


class UntrustedError(Exception):
    """A file names a class or function that is not trusted."""


def name_of(value: Any) -> str | None:
    """Return the full name of a class or function, None if it cannot be imported by a name."""
    for name, builtin in _BUILTINS.items():
        if value is builtin:
            return name
    module, name = value.__module__, value.__qualname__
    return f"{module}.{name}" if _attribute(module, name) is value else None


def check_trusted(trusted: object) -> None:
    """Check that these are classes and functions, in a list or another collection.

    Raises:
        ValueError: They are not.
    """
    named = isinstance(trusted, Collection) and all(hasattr(x, "__qualname__") for x in trusted)
    if not named:
        got = " ".join(repr(trusted).split())[:80]
        raise ValueError(
            "Expected trusted to be a list of classes and functions, such as [MyKernel], got "
            f"{got}."
        )


def resolve_all(names: Mapping[str, str], trusted: Sequence[Trusted]) -> dict[str, Trusted]:
    """Return the classes and functions of full names in a file; ``trusted`` are the caller's own.

    Raises:
        UntrustedError: One is not trusted.
    """
    own = {f"{each.__module__}.{each.__qualname__}": each for each in trusted}
    result = {alias: own.get(name) or _resolve(name) for alias, name in names.items()}
    unknown = sorted(names[alias] for alias, each in result.items() if each is None)
    if unknown:
        raise UntrustedError(
            f"names {', '.join(unknown)}, which would run when it is loaded and is not trusted. If "
            "these are classes or functions of your own and you trust the file, load it with "
            f"trusted=[{', '.join(name.rpartition('.')[2] for name in unknown)}]."
        )
    return {alias: each for alias, each in result.items() if each is not None}


def _resolve(name: str) -> Trusted | None:
    """Return the class or function of a full name, also of a former module; None: not trusted."""
    if name in _BUILTINS:
        return _BUILTINS[name]
    module_name, _, attribute = name.rpartition(".")
    module_name = _FORMER.get(module_name, module_name)
    attribute = _FORMER_NAMES.get(f"{module_name}.{attribute}", attribute)
    if f"{module_name}.{attribute}" in _FUNCTIONS:
        return _attribute(module_name, attribute)
    if any(f"{module_name}.".startswith(f"{package}.") for package in _PACKAGES):
        found = _attribute(module_name, attribute)
        defined_there = isinstance(found, type) and found.__module__ == module_name
        return found if defined_there else None
    return None


def present_fields(kind: type, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an object that a former version wrote, as its class has them now."""
    classes = (f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__)
    former = {k: v for each in classes for k, v in _FORMER_FIELDS.get(each, {}).items()}
    fields = {}
    for field, value in state.items():
        name, holder = former.get(field, (field, None))
        made: Any = None if holder is None else _resolve(holder)
        fields[name] = value if made is None else made(value)
    return fields


def _attribute(module_name: str, attribute: str) -> Any:
    try:
        return getattr(importlib.import_module(module_name), attribute, None)
    except ImportError:
        return None


def method_of(owner: object, name: str, trusted: Sequence[Trusted]) -> Trusted:
    """Return a hook of a module, or a method of one of the caller's own classes.

    The owner is an object, or for a static method a class.

    Raises:
        UntrustedError: It is none of these.
    """
    own = tuple(each for each in trusted if isinstance(each, type))
    if isinstance(owner, type):
        if owner in own and isinstance(inspect.getattr_static(owner, name, None), staticmethod):
            return getattr(owner, name)
    else:
        method = inspect.getattr_static(type(owner), name, None)
        is_hook = isinstance(owner, gpytorch.Module) and _METHODS.fullmatch(name)
        if (is_hook or isinstance(owner, own)) and isinstance(method, FunctionType):
            return MethodType(method, owner)
    kind = owner if isinstance(owner, type) else type(owner)
    raise UntrustedError(f"asks for {name!r} of {kind.__name__}, which is not trusted.")
