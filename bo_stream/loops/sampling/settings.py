"""Settings of active sampling, and of its replays on a map that is known."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from bo_stream.errors import UsageError, check_one_of, check_whole, make_plain
from bo_stream.loops.models import (
    AUTO,
    KERNELS,
    LEARNED,
    MODELS,
    RETRACTING,
    RunSettings,
    retracts,
)
from bo_stream.loops.optimization.trials import LARGEST

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

Strategy = Literal["chosen", "random"]
Goal = Literal["map", "exceedance"]

STRATEGIES: tuple[Strategy, ...] = ("chosen", "random")
GOALS: tuple[Goal, ...] = ("map", "exceedance")

_CHOICES: dict[Goal, str] = {"map": "least variance", "exceedance": "fewest wrong calls"}

COARSEST = 1e-3
"""Largest rounding error of an outcome, in standard deviations of all."""

_EQUAL = 1e-12
"""Difference of outcomes, over the largest, that is taken for rounding."""

USUAL_OUTLIERS = 8.0
"""Threshold for outliers, in standard deviations, where the model can retract them."""


@dataclass(frozen=True, kw_only=True)
class SamplingSettings(RunSettings):
    """Settings that, with the observations, determine every choice; see also ``RunSettings``.

    Attributes:
        kernel: A name in ``bo_stream.loops.models.KERNELS``, or ``learned``: of the four, from
            rough to smooth, the one of the largest marginal likelihood. A refit goes from one,
            at first Matérn-1/2, to the next while that is clearly likelier. Models other than
            ``auto``, and one on a given grid, have Matérn-5/2 then.
        goal: ``map``: choose for the least variance of the values; ``exceedance``: for the fewest
            points called on the wrong side of the threshold.
        threshold: That values are above or below, in the units of the outcomes; needed by
            ``exceedance``.
        outliers: Threshold in standard deviations of the posterior predictive distribution;
            observations farther from what all others predict are left out of the model until the
            next refit (:func:`bo_stream.loops.sampling.state.leave_outliers_out`), one of 20 to 199
            and one in a hundred of more; 0: none are left out; None: 8 for a model of at most four
            inputs that can retract, else 0. With refit 0, too, none are: they would never return.
    """

    _kernels: ClassVar[tuple[str, ...]] = (LEARNED, *KERNELS)

    q: int = 6
    kernel: str = LEARNED
    refit: float = 1.5
    goal: Goal = "map"
    threshold: float | None = None
    outliers: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        make_plain(self, ("threshold", "outliers"))
        check_one_of("goal", self.goal, GOALS)
        if self.threshold is not None and not isfinite(self.threshold):
            raise UsageError(f"Expected a finite threshold, got {self.threshold:g}.")
        if self.goal == "exceedance" and self.threshold is None:
            raise UsageError(
                "Goal exceedance needs the threshold that values are above or below: give "
                "threshold, in the units of the target."
            )
        if self.outliers and not self.outliers > 0.0:
            raise UsageError(
                f"Expected outliers above 0 (standard deviations), or 0 for none, got "
                f"{self.outliers:g}."
            )
        if self.outliers and not MODELS[self.model].retracts:
            raise UsageError(
                f"Outliers are left out of model {RETRACTING}, which can retract them, "
                f"got outliers {self.outliers:g} with model {self.model}. Set it to 0."
            )

    @property
    def learns_smoothness(self) -> bool:
        """Whether kernels are compared by their marginal likelihoods."""
        return self.kernel == LEARNED and self.model == AUTO and self.grid is None

    def outlier_threshold(self, dim: int) -> float:
        """Return the threshold for ``dim`` inputs, 0 for none, as where there are no refits.

        Raises:
            UsageError: Outliers are to be left out, but the model cannot retract them.
        """
        can = retracts(self.model, dim)
        if self.outliers and not can:
            raise UsageError(
                f"Outliers are left out of models on a grid, which can retract them, got outliers "
                f"{self.outliers:g} with {dim} inputs. Set it to 0."
            )
        if not self.refit:
            return 0.0
        if self.outliers is None:
            return USUAL_OUTLIERS if can else 0.0
        return self.outliers


@dataclass(frozen=True, kw_only=True)
class Settings(SamplingSettings):
    """Settings of a replay that, with the data, determine every choice; see also its parents.

    Attributes:
        steps: Choices; None: 500, or as many as the pool allows.
        pool: Points to choose from; None: 12,000, or all but the test points.
        test: Held-out points, on which the error is measured and over which the variance is
            integrated; None: 10,000, or a quarter of the data.
        score_every: Steps between scores; None: a twenty-fifth of all.
        strategy: ``chosen``, by the goal, or ``random``.
    """

    steps: int | None = None
    pool: int | None = None
    test: int | None = None
    score_every: int | None = None
    strategy: Strategy = "chosen"

    def __post_init__(self) -> None:
        for name, least in (("steps", 0), ("pool", 1), ("test", 2), ("score_every", 1)):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), least)
        check_one_of("strategy", self.strategy, STRATEGIES)
        super().__post_init__()

    def resolved(self, rows: int, dim: int) -> Self:
        """Return the settings for ``rows`` rows of ``dim`` inputs, with all but the grid filled in.

        Raises:
            UsageError: The data have too few rows for a choice, or another number of inputs than
                ``grid``.
        """
        test = min(10_000, rows // 4) if self.test is None else self.test
        pool = min(12_000, max(rows - test, 0)) if self.pool is None else self.pool
        if pool + test > rows or pool < self.initial:
            raise UsageError(
                f"The data have {rows:,} rows, too few for pool {pool:,} and test {test:,} with "
                f"{self.initial:,} initial points. Make them smaller."
            )
        self.check_inputs(dim)
        outliers = self.outlier_threshold(dim)
        most = (pool - self.initial) // self.q
        if self.steps is None and most == 0:
            raise UsageError(
                f"Expected q of at most the {pool - self.initial:,} candidates that are left of a "
                f"pool of {pool:,} after {self.initial:,} initial points, got {self.q:,}. Choose a "
                "smaller q (-q), fewer initial points or a larger pool."
            )
        steps = min(500, most) if self.steps is None else self.steps
        if steps > most:
            raise UsageError(
                f"{steps:,} steps of {self.q} after {self.initial} initial points need a pool of "
                f"{self.initial + self.q * steps:,}, got {pool:,}: at most {most:,} steps."
            )
        every = max(1, steps // 25) if self.score_every is None else self.score_every
        return replace(
            self, test=test, pool=pool, steps=steps, score_every=every, outliers=outliers
        )


def strategy_name(strategy: Strategy, goal: Goal) -> str:
    """Name a strategy for readers."""
    return "random choice" if strategy == "random" else _CHOICES[goal]


def check_outcomes(outcomes: ArrayLike, dtype: str, all_of_them: bool = True) -> None:
    """Raise a ``UsageError`` if a model cannot tell outcomes apart, which may all be equal.

    They are above 1e75 in size, float32 may round them by over ``COARSEST``, or their standard
    deviation is below ``LEAST_SPREAD``, of which there is only a warning if more are to come.
    """
    import numpy as np
    from linear_operator.utils.warnings import NumericalWarning

    from bo_stream.models.outcomes.base import LEAST_SPREAD
    from bo_stream.warnings import users_stack_level

    values = np.asarray(outcomes, dtype=np.float64)
    largest = np.abs(values).max()
    most = min(LARGEST, float(np.finfo(dtype).max))
    if largest > most:
        raise UsageError(
            f"Expected outcomes of at most {most:.3g} in size, got {largest:.3g}. Give them in "
            "another unit."
        )
    spread = values.max() - values.min()
    if spread == 0.0:
        return
    deviation = (values / spread).std() * spread  # the squares of tiny ones are 0
    if deviation < LEAST_SPREAD and spread > _EQUAL * largest:
        message = (
            f"Expected outcomes with a standard deviation of at least {LEAST_SPREAD:g}, or equal "
            f"ones, got {deviation:.3g}, which models take for none. Give them in another unit."
        )
        if all_of_them:
            raise UsageError(message)
        warnings.warn(message, NumericalWarning, stacklevel=users_stack_level())
    step = largest * np.finfo(dtype).eps
    if dtype != "float64" and step > COARSEST * deviation:
        raise UsageError(
            f"Outcomes of up to {largest:.3g} with a standard deviation of {deviation:.3g} "
            f"differ by too little for dtype {dtype}, which rounds them to steps of "
            f"{step:.2g}. Take dtype float64, or subtract a number near them from all."
        )
