"""The models that a loop offers by name, for inputs in the unit cube, with their options."""

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

    from bo_stream import OSGPR, OSVGP, WISKI, ClusteredGP, LocalGP
    from bo_stream.models.base import StreamingGP
    from bo_stream.models.inducing.inducing_gp import InducingGP


def _scaled_matern(nu: float) -> Callable[[int], Kernel]:
    """A scaled Matérn kernel with the priors of the WISKI paper's malaria study."""

    def build(dim: int) -> Kernel:
        from gpytorch.kernels import MaternKernel, ScaleKernel
        from gpytorch.priors import GammaPrior

        matern = MaternKernel(nu=nu, ard_num_dims=dim, lengthscale_prior=GammaPrior(3.0, 6.0))
        return ScaleKernel(matern, outputscale_prior=GammaPrior(2.0, 0.15))

    return build


def _rbf(dim: int) -> Kernel:
    """BoTorch's own default."""
    from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior

    kernel: Kernel = get_covar_module_with_dim_scaled_prior(dim)
    return kernel


KERNELS: dict[str, Callable[[int], Kernel]] = {
    "rbf": _rbf,
    "matern12": _scaled_matern(0.5),
    "matern32": _scaled_matern(1.5),
    "matern52": _scaled_matern(2.5),
}
"""Name to a function of the number of inputs, for inputs in the unit cube."""


Option = int | float | str
Options = Mapping[str, Option]
Builder: TypeAlias = "Callable[[Tensor, Tensor, Kernel, Mapping[str, Any]], StreamingGP]"


@dataclass(frozen=True)
class ModelKind:
    """A model that a loop can be run with.

    Attributes:
        name: Of its class in ``bo_stream``.
        build: Makes one of inputs, outcomes, a kernel and all its options.
        options: Names and defaults; a value that is given has the default's type.
        describe: What to say of one beside its hyperparameters, as plain values.
        retracts: Whether it takes outcomes out exactly, whatever came since.
        most_inputs: None: any number.
        on_grid: Whether it takes a number of nodes per dimension.
        unlearned: Options with which one that is built has its default hyperparameters.
    """

    name: str
    build: Builder
    options: Options
    describe: Callable[[Any], dict[str, Any]]
    retracts: bool = False
    most_inputs: int | None = None
    on_grid: bool = False
    unlearned: Options = field(default_factory=dict)

    @property
    def model(self) -> type[StreamingGP]:
        """Its class."""
        model: type[StreamingGP] = getattr(bo_stream, self.name)
        return model


def _wiski(X: Tensor, Y: Tensor, kernel: Kernel, options: Mapping[str, Any]) -> WISKI:
    import torch

    box = torch.tensor([[0.0] * X.shape[-1], [1.0] * X.shape[-1]]).to(X)
    return bo_stream.WISKI(X, Y, covar_module=kernel, bounds=box, **options)


def _osgpr(X: Tensor, Y: Tensor, kernel: Kernel, options: Mapping[str, Any]) -> OSGPR:
    return bo_stream.OSGPR(X, Y, covar_module=kernel, **options)


def _osvgp(X: Tensor, Y: Tensor, kernel: Kernel, options: Mapping[str, Any]) -> OSVGP:
    """Many steps of the hyperparameters on the first outcomes, few on later ones."""
    from botorch.models.transforms.outcome import Standardize

    from bo_stream.allocation.allocator import checked_number

    name, others = _split(options, "likelihood")
    steps, others = _split(others, "hyper_steps")
    steps = checked_number("hyper_steps", steps, least=0)
    model = bo_stream.OSVGP(
        X,
        Y,
        _likelihood(name).to(X),
        covar_module=kernel,
        outcome_transform=Standardize(m=1),
        hyper_steps=FIRST_STEPS * steps,
        **others,
    )
    model.hyper_steps = steps
    return model


def _clustered(X: Tensor, Y: Tensor, kernel: Kernel, options: Mapping[str, Any]) -> ClusteredGP:
    """A resolution of 0 is the library's default: as fine as ``max_centres`` allow."""
    resolution, others = _split(options, "resolution")
    return bo_stream.ClusteredGP(X, Y, covar_module=kernel, resolution=resolution or None, **others)


def _local(X: Tensor, Y: Tensor, kernel: Kernel, options: Mapping[str, Any]) -> LocalGP:
    return bo_stream.LocalGP(X, Y, covar_module=kernel, **options)


def _split(options: Mapping[str, Any], name: str) -> tuple[Any, dict[str, Any]]:
    return options[name], {key: value for key, value in options.items() if key != name}


FIRST_STEPS = 20
"""Times as many steps of the hyperparameters on the first outcomes."""

LIKELIHOODS = {
    "gaussian": "GaussianLikelihood",
    "laplace": "LaplaceLikelihood",
    "student": "StudentTLikelihood",
}
"""Name to GPyTorch's class."""


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


def _describe_points(model: InducingGP[Any]) -> dict[str, Any]:
    return {"inducing_points": len(model.inducing_points)}


def _describe_clusters(model: ClusteredGP) -> dict[str, Any]:
    return {"centres": len(model.centres), "resolution": model.resolution}


def _describe_parts(model: LocalGP) -> dict[str, Any]:
    return {"local_models": int(model.num_models)}


MODELS: dict[str, ModelKind] = {
    "wiski": ModelKind(
        "WISKI",
        _wiski,
        {"max_rank": 1024},
        _describe_grid,
        retracts=True,
        most_inputs=4,
        on_grid=True,
    ),
    "osgpr": ModelKind("OSGPR", _osgpr, {"max_points": 512, "window": 512}, _describe_points),
    "osvgp": ModelKind(
        "OSVGP",
        _osvgp,
        {"likelihood": "student", "max_points": 512, "hyper_steps": 5},
        _describe_points,
        unlearned={"hyper_steps": 0},
    ),
    "clustered": ModelKind(
        "ClusteredGP", _clustered, {"resolution": 0.0, "max_centres": 1024}, _describe_clusters
    ),
    "local": ModelKind(
        "LocalGP", _local, {"max_size": 100, "w_gen": 0.5, "nearest": 3}, _describe_parts
    ),
}
"""By the name that a user gives."""


def checked_model(name: str, given: Options, dim: int | None = None) -> dict[str, Option]:
    """The given options of a model, each of the right type.

    Args:
        name: In ``MODELS``.
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
    """Refuse a grid for a model without one.

    Raises:
        UsageError: So it is.
    """
    if grid is not None and not MODELS[model].on_grid:
        names = ", ".join(name for name, kind in MODELS.items() if kind.on_grid)
        raise UsageError(f"A grid is for model {names}, got {grid} with model {model}.")


def build_model(
    name: str, given: Options, X: Tensor, Y: Tensor, kernel: Kernel, grid: tuple[int, ...] | None
) -> StreamingGP:
    """A model of the first outcomes.

    Args:
        name: In ``MODELS``.
        given: Options other than the defaults.
        X: In the unit cube, ``n x d``.
        Y: ``n x 1``.
        kernel: Of d inputs.
        grid: Nodes per dimension of a model on a grid, one number or d; None: its default.

    Raises:
        UsageError: An option is out of range.
    """
    kind = MODELS[name]
    options: dict[str, Any] = {**kind.options, **given}
    if grid is not None:
        options["grid_size"] = grid * X.shape[-1] if len(grid) == 1 else grid
    try:
        return kind.build(X, Y, kernel, options)
    except ValueError as error:
        raise UsageError(f"This model cannot be built: {error}") from error


def options_help() -> str:
    """Every option with its default, for a help page."""
    parts = (
        f"{name}: {', '.join(f'{key}={value}' for key, value in kind.options.items())}"
        for name, kind in MODELS.items()
    )
    return "; ".join(parts)
