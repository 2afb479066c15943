"""Models and kernels that a loop offers by name, for inputs in the unit cube."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import bo_stream
from bo_stream.loops.errors import UsageError

if TYPE_CHECKING:
    from gpytorch.kernels import Kernel
    from gpytorch.likelihoods import Likelihood
    from torch import Tensor

    from bo_stream import OSGPR, OSVGP, WISKI, ClusteredGP
    from bo_stream.models.base import StreamingGP


Option = int | float | str
Options = Mapping[str, Option]
Builder: TypeAlias = "Callable[[Tensor, Tensor, Kernel, Mapping[str, Any]], StreamingGP]"


FIRST_STEPS = 20
"""Factor of the number of hyperparameter steps on the first outcomes."""

LIKELIHOODS = {
    "gaussian": "GaussianLikelihood",
    "laplace": "LaplaceLikelihood",
    "student": "StudentTLikelihood",
}
"""Names of GPyTorch's classes."""


@dataclass(frozen=True)
class ModelKind:
    """A kind of model that a loop can be run with.

    Attributes:
        name: Name of the class in ``bo_stream``.
        options: Names and defaults of the options; a given value has the default's type.
        describe: Function that returns the size of a model as plain values.
        build: Function of inputs, outcomes, kernel and all options that builds a model; None: the
            class itself.
        retracts: Whether it takes outcomes out exactly, whatever came since.
        most_inputs: Largest number of inputs; None: any.
        on_grid: Whether it takes a number of nodes per dimension.
        unlearned: Options that leave the hyperparameters of a new model at their defaults.
    """

    name: str
    options: Options
    describe: Callable[[Any], dict[str, Any]]
    build: Builder | None = None
    retracts: bool = False
    most_inputs: int | None = None
    on_grid: bool = False
    unlearned: Options = field(default_factory=dict)

    @property
    def model(self) -> type[StreamingGP]:
        """Class of the model."""
        model: type[StreamingGP] = getattr(bo_stream, self.name)
        return model


def checked_model(name: str, given: Options, dim: int | None = None) -> dict[str, Option]:
    """Check a model's name and options, and convert the options to their types.

    Args:
        name: A name in ``MODELS``.
        given: Some of its options.
        dim: Number of inputs, if known.

    Raises:
        UsageError: No such model or option, a value of another type, or too many inputs.
    """
    if name not in MODELS:
        raise UsageError(f"Expected model to be one of {', '.join(MODELS)}, got {name!r}.")
    kind = MODELS[name]
    if dim is not None and kind.most_inputs is not None and dim > kind.most_inputs:
        others = ", ".join(key for key, other in MODELS.items() if other.most_inputs is None)
        raise UsageError(
            f"Expected at most {kind.most_inputs} inputs with model {name}, which is on a grid, "
            f"got {dim}. Use fewer, or another model: {others}."
        )
    return {key: _checked_option(name, key, value) for key, value in given.items()}


def _checked_option(model: str, key: str, value: Option) -> Option:
    options = MODELS[model].options
    if key not in options:
        raise UsageError(f"Expected options of {model} ({', '.join(options)}), got {key!r}.")
    kind = type(options[key])
    try:
        typed = kind(value)
    except ValueError:
        typed = None
    if typed is None or (kind is int and float(value) != typed):
        expected = {int: "a whole number", float: "a number"}[kind]
        raise UsageError(f"Expected {key} of model {model} to be {expected}, got {value!r}.")
    return typed


def check_grid(model: str, grid: tuple[int, ...] | None) -> None:
    """Check that a grid is given only for a model on a grid.

    Raises:
        UsageError: The model is on none.
    """
    if grid is not None and not MODELS[model].on_grid:
        names = ", ".join(name for name, kind in MODELS.items() if kind.on_grid)
        raise UsageError(f"A grid is for model {names}, got {grid} with model {model}.")


def build_model(
    name: str, given: Options, X: Tensor, Y: Tensor, kernel: Kernel, grid: tuple[int, ...] | None
) -> StreamingGP:
    """Build a model of the first outcomes.

    Args:
        name: A name in ``MODELS``.
        given: Options that differ from the defaults.
        X: Inputs in the unit cube, ``n x d``.
        Y: Outcomes, ``n x 1``.
        kernel: Kernel of d inputs.
        grid: Nodes per dimension of a model on a grid, one number or d; None: its default.

    Raises:
        UsageError: An option is out of range.
    """
    kind = MODELS[name]
    options: dict[str, Any] = {**kind.options, **given}
    if grid is not None:
        options["grid_size"] = grid * X.shape[-1] if len(grid) == 1 else grid
    try:
        if kind.build is None:
            return kind.model(X, Y, covar_module=kernel, **options)
        return kind.build(X, Y, kernel, options)
    except ValueError as error:
        raise UsageError(f"This model cannot be built: {error}") from error


def options_help() -> str:
    """List every option with its default, for a help page."""
    parts = (
        f"{name}: {', '.join(f'{key}={value}' for key, value in kind.options.items())}"
        for name, kind in MODELS.items()
    )
    return "; ".join(parts)


def _wiski(X: Tensor, Y: Tensor, kernel: Kernel, options: Mapping[str, Any]) -> WISKI:
    import torch

    box = torch.tensor([[0.0] * X.shape[-1], [1.0] * X.shape[-1]]).to(X)
    return bo_stream.WISKI(X, Y, covar_module=kernel, bounds=box, **options)


def _osvgp(X: Tensor, Y: Tensor, kernel: Kernel, options: Mapping[str, Any]) -> OSVGP:
    """Learn the hyperparameters in many steps from the first outcomes, in few from later ones."""
    from botorch.models.transforms.outcome import Standardize

    from bo_stream.allocation.allocator import checked_number

    others = dict(options)
    likelihood = _likelihood(others.pop("likelihood")).to(X)
    steps = checked_number("hyper_steps", others.pop("hyper_steps"), least=0)
    model = bo_stream.OSVGP(
        X,
        Y,
        likelihood,
        covar_module=kernel,
        outcome_transform=Standardize(m=1),
        hyper_steps=FIRST_STEPS * steps,
        **others,
    )
    model.hyper_steps = steps
    return model


def _clustered(X: Tensor, Y: Tensor, kernel: Kernel, options: Mapping[str, Any]) -> ClusteredGP:
    """Build with the library's resolution, as fine as ``max_centres`` allow, where 0 is given."""
    resolution = options["resolution"] or None
    return bo_stream.ClusteredGP(X, Y, covar_module=kernel, **{**options, "resolution": resolution})


def _likelihood(name: str) -> Likelihood:
    if name not in LIKELIHOODS:
        names = ", ".join(LIKELIHOODS)
        raise UsageError(f"Expected likelihood to be one of {names}, got {name!r}.")
    from gpytorch import likelihoods

    likelihood: Likelihood = getattr(likelihoods, LIKELIHOODS[name])()
    return likelihood


def _describe_grid(model: WISKI) -> dict[str, Any]:
    return {
        "grid_size": model.grid_size,
        "rank": model.rank,
        "dropped": model.dropped,
        "interpolation_error": model.interpolation_error(),
    }


def _describe_points(model: OSGPR | OSVGP) -> dict[str, Any]:
    return {"inducing_points": len(model.inducing_points)}


MODELS: dict[str, ModelKind] = {
    "wiski": ModelKind(
        "WISKI",
        {"max_rank": 1024},
        _describe_grid,
        _wiski,
        retracts=True,
        most_inputs=4,
        on_grid=True,
    ),
    "osgpr": ModelKind("OSGPR", {"max_points": 512, "window": 512}, _describe_points),
    "osvgp": ModelKind(
        "OSVGP",
        {"likelihood": "student", "max_points": 512, "hyper_steps": 5},
        _describe_points,
        _osvgp,
        unlearned={"hyper_steps": 0},
    ),
    "clustered": ModelKind(
        "ClusteredGP",
        {"resolution": 0.0, "max_centres": 1024},
        lambda model: {"centres": len(model.centres), "resolution": model.resolution},
        _clustered,
    ),
    "local": ModelKind(
        "LocalGP",
        {"max_size": 100, "w_gen": 0.5, "nearest": 3},
        lambda model: {"local_models": int(model.num_models)},
    ),
}
"""Kinds by the name that a user gives."""


def _scaled_matern(nu: float) -> Callable[[int], Kernel]:
    """Return a builder of scaled Matérn kernels with the priors of the WISKI malaria study."""

    def build(dim: int) -> Kernel:
        from gpytorch.kernels import MaternKernel, ScaleKernel
        from gpytorch.priors import GammaPrior

        matern = MaternKernel(nu=nu, ard_num_dims=dim, lengthscale_prior=GammaPrior(3.0, 6.0))
        return ScaleKernel(matern, outputscale_prior=GammaPrior(2.0, 0.15))

    return build


def _rbf(dim: int) -> Kernel:
    """Build BoTorch's default kernel."""
    from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior

    kernel: Kernel = get_covar_module_with_dim_scaled_prior(dim)
    return kernel


KERNELS: dict[str, Callable[[int], Kernel]] = {
    "rbf": _rbf,
    "matern12": _scaled_matern(0.5),
    "matern32": _scaled_matern(1.5),
    "matern52": _scaled_matern(2.5),
}
"""Functions of the number of inputs that build a kernel, by name."""
