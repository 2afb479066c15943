"""Every setting of an active-sampling run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from bo_stream.loops.errors import UsageError
from bo_stream.loops.models import KERNELS, MODELS, Option, check_grid, checked_model

if TYPE_CHECKING:
    import torch


Strategy = Literal["nipv", "random"]

STRATEGIES: tuple[Strategy, ...] = ("nipv", "random")
STRATEGY_NAMES: dict[Strategy, str] = {
    "nipv": "least variance",
    "random": "random choice",
}
"""What readers are shown."""

DTYPES = ("float64", "float32")

_DEFAULT_STEPS = 500
_DEFAULT_POOL = 12_000
_DEFAULT_TEST = 10_000
_TEST_SHARE = 4
_SCORES = 25
_OUTLIERS = 8.0


@dataclass(frozen=True)
class Settings:
    """What determines a run on given data, to the last choice.

    Attributes:
        q: Points chosen at a time.
        steps: Choices; None: 500, or as many as the pool allows.
        pool: Points to choose from; None: 12,000, or what the data have beside the test points.
        test: Held-out points, on which the error is measured and over which the variance is
            integrated; None: 10,000, or a quarter of the data.
        initial: Points drawn at random to start with.
        model: A name in ``bo_stream.loops.models.MODELS``.
        model_options: Those of its options that are not the defaults.
        kernel: A name in ``bo_stream.loops.models.KERNELS``.
        grid: For a model on a grid: nodes per dimension, one number or d; None: the model's default
            for the kernel.
        seed: Of the split, the first points and the random strategy.
        device: A torch device.
        dtype: ``float64`` or ``float32``.
        refit: The hyperparameters are learned anew whenever the observations have become this many
            times as many as at the last refit; 0: only once, from the first points.
        outliers: Observations that are more than so many standard deviations of the posterior
            predictive distribution from what all others predict are left out of the model until
            the next refit, which decides anew
            (:func:`bo_stream.loops.sampling.outliers.leave_outliers_out`); 0: none; None: 8 for a
            model that can retract, else 0.
        score_every: Steps between scores; None: a twenty-fifth of all.
        strategy: ``nipv``, least integrated posterior variance, or ``random``.
    """

    q: int = 6
    steps: int | None = None
    pool: int | None = None
    test: int | None = None
    initial: int = 10
    model: str = "wiski"
    model_options: Mapping[str, Option] = field(default_factory=dict)
    kernel: str = "matern52"
    grid: tuple[int, ...] | None = None
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float64"
    refit: float = 1.5
    outliers: float | None = None
    score_every: int | None = None
    strategy: Strategy = "nipv"

    def __post_init__(self) -> None:
        """Check each setting by itself.

        Raises:
            UsageError: One is out of range.
        """
        for name, least in (("q", 1), ("initial", 2), ("seed", 0)):
            check_whole(name, getattr(self, name), least)
        for name, least in (("steps", 0), ("pool", 1), ("test", 2), ("score_every", 1)):
            check_at_least(name, getattr(self, name), least)
        options = checked_model(self.model, self.model_options)
        object.__setattr__(self, "model_options", options)
        check_grid(self.model, self.grid)
        check_one_of("kernel", self.kernel, tuple(KERNELS))
        check_one_of("dtype", self.dtype, DTYPES)
        check_one_of("strategy", self.strategy, STRATEGIES)
        if self.refit != 0.0 and not self.refit > 1.0:
            raise UsageError(
                f"Expected refit above 1 (a growth factor), or 0 for never, got {self.refit:g}."
            )
        self._check_outliers()
        check_device(self.device)

    def _check_outliers(self) -> None:
        """Refuse a threshold that is none, or a model that cannot retract."""
        if self.outliers is None or self.outliers == 0.0:
            return
        if not self.outliers > 0.0:
            raise UsageError(
                f"Expected outliers above 0 (standard deviations), or 0 for none, got "
                f"{self.outliers:g}."
            )
        if not MODELS[self.model].retracts:
            names = ", ".join(name for name, kind in MODELS.items() if kind.retracts)
            raise UsageError(
                f"Outliers are left out of model {names}, which can retract them, got outliers "
                f"{self.outliers:g} with model {self.model}. Set it to 0."
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        return torch_dtype(self.dtype)

    @property
    def observations(self) -> int:
        """Observations at the end of the run."""
        return self.initial + self.q * (self.steps or 0)

    def resolved(self, rows: int, dim: int) -> Self:
        """The same settings for data of this size, with nothing left open but the grid.

        Raises:
            UsageError: The data have too few rows, or another number of inputs than ``grid``.
        """
        checked_model(self.model, self.model_options, dim)
        test = min(_DEFAULT_TEST, rows // _TEST_SHARE) if self.test is None else self.test
        pool = min(_DEFAULT_POOL, max(rows - test, 0)) if self.pool is None else self.pool
        if pool + test > rows or pool < self.initial:
            raise UsageError(
                f"The data have {rows:,} rows, too few for pool {pool:,} and test {test:,} with "
                f"{self.initial:,} initial points. Make them smaller."
            )
        if self.grid is not None and len(self.grid) not in (1, dim):
            raise UsageError(f"Expected grid to be one number or {dim}, got {self.grid}.")
        most = (pool - self.initial) // self.q
        steps = min(_DEFAULT_STEPS, most) if self.steps is None else self.steps
        if steps > most:
            raise UsageError(
                f"{steps:,} steps of {self.q} after {self.initial} initial points need a pool of "
                f"{self.initial + self.q * steps:,}, got {pool:,}: at most {most:,} steps."
            )
        every = max(1, steps // _SCORES) if self.score_every is None else self.score_every
        usual = _OUTLIERS if MODELS[self.model].retracts else 0.0
        outliers = usual if self.outliers is None else self.outliers
        return replace(
            self, test=test, pool=pool, steps=steps, score_every=every, outliers=outliers
        )

    def as_record(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """From plain values, as JSON gives them back."""
        grid = record.get("grid")
        known = {field.name: record[field.name] for field in fields(cls)}
        return cls(**{**known, "grid": None if grid is None else tuple(grid)})


def check_at_least(name: str, value: int | None, least: int) -> None:
    """As :func:`check_whole`, where None is a value too."""
    if value is not None:
        check_whole(name, value, least)


def check_whole(name: str, value: int, least: int) -> None:
    """Refuse a number that is not whole or below the least.

    Raises:
        UsageError: So it is.
    """
    if not isinstance(value, int):
        raise UsageError(
            f"Expected {name} to be a whole number of at least {least}, got {value!r}."
        )
    if value < least:
        raise UsageError(f"Expected {name} of at least {least}, got {value}.")


def check_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a name that is none of the choices.

    Raises:
        UsageError: So it is.
    """
    if value not in choices:
        raise UsageError(f"Expected {name} to be one of {', '.join(choices)}, got {value!r}.")


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name in ``DTYPES``."""
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


def check_device(device: str) -> None:
    """Refuse a device that torch cannot use.

    Raises:
        UsageError: So it is.
    """
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"Device {device!r} cannot be used: {reason}") from error
