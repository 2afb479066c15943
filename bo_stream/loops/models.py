"""Models and kernels that a run offers by name, its settings, and functions of a user.

Whatever loads torch is imported in the functions: the help pages do without.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import bo_stream
from bo_stream.errors import UsageError, check_one_of, check_seed, check_whole, make_plain

if TYPE_CHECKING:
    from gpytorch.kernels import Kernel
    from torch import Tensor

    from bo_stream import OSVGP, AutoGP
    from bo_stream.models.base import StreamingGP


def import_function(name: str, what: str) -> Callable[..., Any]:
    """Import ``package.module:function``; modules in the working directory are found too.

    A module that cannot be imported, or has no such function, is a ``UsageError``; ``what`` names
    the function's purpose in it.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise UsageError(f"Expected {what} as package.module:function, got {name!r}.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        advice = "Run from its folder, or install it."
        if isinstance(error, SystemExit):
            advice = 'Put what it does as a script under: if __name__ == "__main__".'
        raise UsageError(
            f"{what} {name!r}: module {module_name!r} cannot be imported "
            f"({type(error).__name__}: {error}). {advice}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        found = "nothing" if function is None else f"a {type(function).__name__}"
        raise UsageError(
            f"{what} {name!r}: expected a function named {attribute!r} in {module_name!r}, found "
            f"{found}."
        )
    return function


# --- models and kernels that a loop offers by name, for inputs in the unit cube ------------------


Option = int | float | str
Options = Mapping[str, Option]

LIKELIHOODS = {
    "gaussian": "GaussianLikelihood",
    "laplace": "LaplaceLikelihood",
    "student": "StudentTLikelihood",
}
"""Names of GPyTorch's classes."""

AUTO = "auto"
"""Name of the kind that is used where none is named."""

EXACT = "exact"
"""Name of the exact family of model auto."""

MOST_ON_GRID = 4
"""Largest number of inputs of a model on a grid."""


@dataclass(frozen=True)
class ModelKind:
    """A kind of model that a loop can be run with.

    Attributes:
        name: Name of the class in ``bo_stream``.
        options: Names and defaults of the options; a given value has the default's type.
        describe: Function that returns the size of a model as plain values.
        build: Function of inputs, outcomes, kernel and the options that are given that builds a
            model; None: the class itself, whose defaults are those of ``options``.
        retracts: Whether it takes outcomes out exactly, however many came since, where it is on a
            grid or stores all rows.
        most_inputs: Largest number of inputs; None: any.
        on_grid: Whether it is on a grid, or can be, and takes a number of nodes per dimension.
        knows_noise: Whether it takes noise variances of outcomes.
    """

    name: str
    options: Options
    describe: Callable[[Any], dict[str, Any]]
    build: Callable[[Tensor, Tensor, Kernel, Mapping[str, Any]], StreamingGP] | None = None
    retracts: bool = False
    most_inputs: int | None = None
    on_grid: bool = False
    knows_noise: bool = True

    @property
    def model(self) -> type[StreamingGP]:
        """Class of the model."""
        return getattr(bo_stream, self.name)


def checked_model(name: str, given: Options) -> dict[str, Option]:
    """Check a model's name and options, and convert these to their types.

    Raises:
        UsageError: No such model or option, or a value of another type.
    """
    check_one_of("model", name, MODELS)
    kind = MODELS[name]
    checked: dict[str, Option] = {}
    for key, value in given.items():
        if key not in kind.options:
            names = ", ".join(kind.options)
            raise UsageError(f"Expected options of {name} ({names}), got {key!r}.")
        type_of = type(kind.options[key])
        try:
            typed = type_of(value)
        except ValueError:
            typed = None
        if typed is None or (type_of is int and float(value) != typed):
            expected = {int: "a whole number", float: "a number"}[type_of]
            raise UsageError(f"Expected {key} of model {name} to be {expected}, got {value!r}.")
        checked[key] = typed
    return checked


def retracts(name: str, dim: int) -> bool:
    """Return whether a model of a data set of ``dim`` inputs takes outcomes out exactly."""
    return MODELS[name].retracts and dim <= MOST_ON_GRID


def build_model(
    name: str,
    given: Options,
    X: Tensor,
    Y: Tensor,
    kernel: Kernel,
    grid: tuple[int, ...] | None,
    family: str | tuple[str, ...] | None = None,
    Yvar: Tensor | None = None,
) -> StreamingGP:
    """Build a model of the first outcomes, ``n x 1``, at inputs in the unit cube, ``n x d``.

    Args:
        name: A name in ``MODELS``.
        given: Options that differ from the defaults; one out of range is a ``UsageError``.
        X: Inputs.
        Y: Outcomes.
        kernel: Kernel of d inputs. Where the model is on a grid, or may get onto one, Matérn
            kernels of the distance are taken for products over inputs, from the first outcome on.
        grid: Nodes per dimension of a model on a grid, one number or d; None: its default.
        family: That model auto is in and stays in: ``exact``, with the kernel as it is, or
            ``WISKI``; or those that it goes through, one after the other; None: all. Given a grid
            it is WISKI.
        Yvar: Known noise variances of the outcomes, ``n x 1``, NaN where unknown; None: of all.
            For a kind that ``knows_noise``.
    """
    from bo_stream.bases.kernels import as_product

    kind, options = MODELS[name], dict[str, Any](given)
    if kind.on_grid and X.shape[-1] <= MOST_ON_GRID and family != EXACT:
        kernel = as_product(kernel, X.shape[-1])
    if name == AUTO and (grid is not None or family is not None):
        options["families"] = "WISKI" if grid is not None else family
    if grid is not None:
        options["grid_size"] = grid * X.shape[-1] if len(grid) == 1 else grid
    if Yvar is not None:
        options["train_Yvar"] = Yvar
    try:
        if kind.build is None:
            return kind.model(X, Y, covar_module=kernel, **options)
        return kind.build(X, Y, kernel, options)
    except ValueError as error:
        raise UsageError(f"This model cannot be built: {error}") from error


def unit_cube(X: Tensor) -> Tensor:
    """Return the bounds of the unit cube that inputs are in, ``2 x d``."""
    import torch

    return torch.tensor([[0.0] * X.shape[-1], [1.0] * X.shape[-1]]).to(X)


def _auto(X: Tensor, Y: Tensor, kernel: Kernel, options: Mapping[str, Any]) -> AutoGP:
    """Build with the library's choice of ``max_exact`` where 0 is given."""
    most = options.get("max_exact") or None
    chosen = {**options, "max_exact": most, "bounds": unit_cube(X)}
    return bo_stream.AutoGP(X, Y, covar_module=kernel, **chosen)


def _describe_auto(model: AutoGP) -> dict[str, Any]:
    """Return the family in use and the cost of each hand-over; None: an error was not computed."""
    from bo_stream.models.auto.auto import family_model

    moves = [
        {key: None if value != value else value for key, value in asdict(move).items()}
        for move in model.history
    ]
    about = {"family": model.family, "max_exact": model.max_exact, "hand_overs": moves}
    if model.family == "WISKI":
        about |= MODELS["wiski"].describe(family_model(model))
    return about


def _osvgp(X: Tensor, Y: Tensor, kernel: Kernel, options: Mapping[str, Any]) -> OSVGP:
    """Learn hyperparameters from the first outcomes in twenty times as many steps as later."""
    from botorch.models.transforms.outcome import Standardize
    from gpytorch import likelihoods

    from bo_stream.errors import check_whole

    options = {**MODELS["osvgp"].options, **options}
    name, steps = options["likelihood"], check_whole("hyper_steps", options["hyper_steps"], 0)
    check_one_of("likelihood", name, LIKELIHOODS)
    model = bo_stream.OSVGP(
        X,
        Y,
        getattr(likelihoods, LIKELIHOODS[name])().to(X),
        covar_module=kernel,
        outcome_transform=Standardize(m=1),
        max_points=options["max_points"],
        hyper_steps=20 * steps,
    )
    model.hyper_steps = steps
    return model


MODELS: dict[str, ModelKind] = {
    AUTO: ModelKind(
        "AutoGP",
        {"max_exact": 0, "max_rank": 1024, "max_points": 512},
        _describe_auto,
        _auto,
        retracts=True,
        on_grid=True,
    ),
    "wiski": ModelKind(
        "WISKI",
        {"max_rank": 1024},
        lambda model: {
            "grid_size": model.grid_size,
            "rank": model.rank,
            "dropped": model.dropped,
            "interpolation_error": model.interpolation_error(),
        },
        lambda X, Y, kernel, options: bo_stream.WISKI(
            X, Y, covar_module=kernel, bounds=unit_cube(X), **options
        ),
        retracts=True,
        most_inputs=MOST_ON_GRID,
        on_grid=True,
    ),
    "osgpr": ModelKind(
        "OSGPR",
        {"max_points": 512, "window": 512},
        lambda model: {"inducing_points": len(model.inducing_points)},
    ),
    "osvgp": ModelKind(
        "OSVGP",
        {"likelihood": "student", "max_points": 512, "hyper_steps": 5},
        lambda model: {"inducing_points": len(model.inducing_points)},
        _osvgp,
        knows_noise=False,
    ),
    "clustered": ModelKind(
        "ClusteredGP",
        {"resolution": 0.0, "max_centres": 1024},
        lambda model: {"centres": len(model.centres), "resolution": model.resolution},
        # a resolution of 0 is the library's, as fine as max_centres allow
        lambda X, Y, kernel, options: bo_stream.ClusteredGP(
            X,
            Y,
            covar_module=kernel,
            **{**options, "resolution": options.get("resolution") or None},
        ),
    ),
    "local": ModelKind(
        "LocalGP",
        {"max_size": 100, "w_gen": 0.5, "nearest": 3},
        lambda model: {"local_models": int(model.num_models)},
    ),
}
"""Kinds by the name that a user gives."""

RETRACTING = ", ".join(name for name, kind in MODELS.items() if kind.retracts)
"""Names of the models that take outcomes out exactly, for messages."""

OPTIONS = "; ".join(
    f"{name}: {', '.join(f'{key}={value}' for key, value in kind.options.items())}"
    for name, kind in MODELS.items()
)
"""Every option with its default, for a help page."""


def model_record(name: str, model: StreamingGP) -> dict[str, Any]:
    """Return size, hyperparameters and log of a model of a kind in ``MODELS`` as plain values."""
    values = {
        key: {
            name.replace("raw_", ""): (raw if limit is None else limit.transform(raw)).tolist()
            for name, raw, limit in module.named_parameters_and_constraints()
        }
        for key, module in (("likelihood", model.likelihood), ("kernel", model.covar_module))
    }
    return {
        "class": type(model).__name__,
        **MODELS[name].describe(model),
        **values,
        "outcome_scale": model.outcome_scale().tolist(),
        "numerical_log": [asdict(event) for event in model.numerical_log],
    }


_NU = {"matern12": 0.5, "matern32": 1.5, "matern52": 2.5}
"""Smoothness ν of the Matérn kernels, by name."""


def _kernel(name: str, dim: int) -> Kernel:
    """Build BoTorch's default kernel, or a Matérn with the priors of the WISKI malaria study."""
    from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
    from gpytorch.kernels import MaternKernel, ScaleKernel
    from gpytorch.priors import GammaPrior

    if name == "rbf":
        return get_covar_module_with_dim_scaled_prior(dim)
    matern = MaternKernel(nu=_NU[name], ard_num_dims=dim, lengthscale_prior=GammaPrior(3.0, 6.0))
    return ScaleKernel(matern, outputscale_prior=GammaPrior(2.0, 0.15))


KERNELS: dict[str, Callable[[int], Kernel]] = {
    name: partial(_kernel, name) for name in ("rbf", *_NU)
}
"""Functions of the number of inputs that build a kernel, by name."""


def many_input_kernel(name: str, dim: int) -> Kernel:
    """Build a scaled kernel whose lengthscales are expected to grow with the root of the inputs.

    Their prior is that of Hvarfner et al. (2024), log-normal of location ``√2 + log(d) / 2`` and
    scale √3, and so is where they begin, its mode. The variance's prior is log-normal about 1, of
    scale 2. All are learned as logarithms.

    Args:
        name: A name in ``KERNELS``.
        dim: Number d of inputs, in the unit cube.
    """
    import torch
    from gpytorch.constraints import Positive
    from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
    from gpytorch.priors import LogNormalPrior

    location = math.sqrt(2.0) + 0.5 * math.log(dim)

    def positive(initial: float) -> Positive:
        return Positive(transform=torch.exp, inv_transform=torch.log, initial_value=initial)

    options = {
        "ard_num_dims": dim,
        "lengthscale_prior": LogNormalPrior(location, math.sqrt(3.0)),
        "lengthscale_constraint": positive(math.exp(location - 3.0)),
    }
    if name == "rbf":
        stationary: Kernel = RBFKernel(**options)
    else:
        stationary = MaternKernel(nu=_NU[name], **options)
    return ScaleKernel(
        stationary,
        outputscale_prior=LogNormalPrior(0.0, 2.0),
        outputscale_constraint=positive(1.0),
    )


LEARNED = "learned"
"""Name of the choice among ``SMOOTHNESS``."""

SMOOTHNESS = ("matern12", "matern32", "matern52", "rbf")
"""Names of kernels from rough to smooth."""


# --- settings that sampling and optimization have in common, and when a model is learned again ----


REFIT = 1.3
"""Growth of the data beyond ``OFTEN`` at which hyperparameters are learned again."""

OFTEN = 100
"""Number of observations up to which they are learned at every trial, as in Ax."""


def refit_is_due(count: int, fitted_at: int, growth: float | None) -> bool:
    """Return whether hyperparameters are to be learned again from a number of observations.

    Args:
        count: The number of observations.
        fitted_at: Their number at the last refit; 0: none yet.
        growth: Factor by which it must have grown; 0: learn once; None: with each new one up to
            ``OFTEN``, then whenever the number beyond ``OFTEN`` has grown by ``REFIT``.
    """
    if fitted_at == 0:
        return True
    if growth is None:
        often = count <= OFTEN or count - OFTEN >= REFIT * (fitted_at - OFTEN)
        return count > fitted_at and often
    return 0.0 < growth * fitted_at <= count


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Model, precision and batches of a run; a value out of range is a ``UsageError``.

    Attributes:
        q: Points chosen at a time.
        initial: Points to start with.
        model: A name in ``MODELS``.
        model_options: Options of the model that differ from the defaults.
        kernel: A name in ``KERNELS``.
        grid: For a model on a grid: nodes per dimension, one number or d; None: the model's default
            for the kernel. Model ``auto`` is on that grid from the first observation on then.
        refit: Growth factor of the number of observations after which the hyperparameters are
            learned again; 0: they are learned once, from the first points.
        seed: Seed of all that is random, from 0 to ``2**63 - 1``.
        device: A torch device.
        dtype: ``float64`` or ``float32``.
    """

    _kernels: ClassVar[tuple[str, ...]] = tuple(KERNELS)

    q: int
    initial: int = 10
    model: str = AUTO
    model_options: Mapping[str, Option] = field(default_factory=dict)
    kernel: str = "matern52"
    grid: tuple[int, ...] | None = None
    refit: float
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float64"

    def __post_init__(self) -> None:
        make_plain(self, ("refit",))
        for name, least in (("q", 1), ("initial", 2)):
            check_whole(name, getattr(self, name), least)
        check_seed(self.seed)
        if self.grid is not None:
            nodes = self.grid if isinstance(self.grid, list | tuple) else (self.grid,)
            object.__setattr__(self, "grid", tuple(check_whole("grid", each) for each in nodes))
        options = checked_model(self.model, self.model_options)
        object.__setattr__(self, "model_options", options)
        if self.grid is not None and not MODELS[self.model].on_grid:
            names = ", ".join(name for name, kind in MODELS.items() if kind.on_grid)
            raise UsageError(
                f"A grid is for model {names}, got {self.grid} with model {self.model}."
            )
        check_one_of("kernel", self.kernel, self._kernels)
        check_one_of("dtype", self.dtype, ("float64", "float32"))
        if self.refit != 0.0 and not 1.0 < self.refit < math.inf:
            raise UsageError(
                f"Expected refit above 1 (a growth factor), or 0 for never, got {self.refit:g}."
            )
        import torch

        try:
            torch.zeros(1, device=self.device).item()
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UsageError(f"Device {self.device!r} cannot be used: {reason}") from error

    def check_inputs(self, dim: int) -> None:
        """Raise a ``UsageError`` unless model and grid take ``dim`` inputs."""
        most = MODELS[self.model].most_inputs
        if most is not None and dim > most:
            others = ", ".join(name for name, kind in MODELS.items() if kind.most_inputs is None)
            raise UsageError(
                f"Expected at most {most} inputs with model {self.model}, which is on a grid, "
                f"got {dim}. Use fewer, or another model: {others}."
            )
        if self.grid is not None and dim > MOST_ON_GRID:
            raise UsageError(
                f"Expected at most {MOST_ON_GRID} inputs on a grid, got {dim}. Give no grid."
            )
        if self.grid is not None and len(self.grid) not in (1, dim):
            raise UsageError(f"Expected grid to be one number or {dim}, got {self.grid}.")
