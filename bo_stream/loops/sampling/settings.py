"""Settings of active sampling, and of its replays on a map that is known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from bo_stream.errors import UsageError, check_one_of, check_whole
from bo_stream.loops.models import MODELS, names_that_retract, retracts
from bo_stream.loops.settings import RunSettings

Strategy = Literal["nipv", "random"]

STRATEGIES: tuple[Strategy, ...] = ("nipv", "random")
STRATEGY_NAMES: dict[Strategy, str] = {"nipv": "least variance", "random": "random choice"}
"""Names for readers."""

USUAL_OUTLIERS = 8.0
"""Threshold for outliers, in standard deviations, where the model can retract them."""


@dataclass(frozen=True, kw_only=True)
class SamplingSettings(RunSettings):
    """Settings that, with what is told, determine every choice; see also ``RunSettings``.

    Attributes:
        outliers: Threshold in standard deviations of the posterior predictive distribution;
            observations farther from what all others predict are left out of the model until the
            next refit (:func:`bo_stream.loops.sampling.outliers.leave_outliers_out`); 0: none are
            left out; None: 8 for a model on a grid, which can retract, else 0.
    """

    q: int = 6
    refit: float = 1.5
    outliers: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.outliers and not self.outliers > 0.0:
            raise UsageError(
                f"Expected outliers above 0 (standard deviations), or 0 for none, got "
                f"{self.outliers:g}."
            )
        if self.outliers and not MODELS[self.model].retracts:
            raise UsageError(
                f"Outliers are left out of model {names_that_retract()}, which can retract them, "
                f"got outliers {self.outliers:g} with model {self.model}. Set it to 0."
            )

    def outlier_threshold(self, dim: int) -> float:
        """Return the threshold for ``dim`` inputs, 0 for none.

        Raises:
            UsageError: Outliers are to be left out, but the model cannot retract them.
        """
        can = retracts(self.model, dim)
        if self.outliers is None:
            return USUAL_OUTLIERS if can else 0.0
        if self.outliers and not can:
            raise UsageError(
                f"Outliers are left out of models on a grid, which can retract them, got outliers "
                f"{self.outliers:g} with {dim} inputs. Set it to 0."
            )
        return self.outliers


@dataclass(frozen=True, kw_only=True)
class Settings(SamplingSettings):
    """Settings of a replay that, with the data, determine every choice; see also its parents.

    Attributes:
        steps: Choices; None: 500, or as many as the pool allows.
        pool: Points to choose from; None: 12,000, or what the data have beside the test points.
        test: Held-out points, on which the error is measured and over which the variance is
            integrated; None: 10,000, or a quarter of the data.
        score_every: Steps between scores; None: a twenty-fifth of all.
        strategy: ``nipv``, least integrated posterior variance, or ``random``.
    """

    steps: int | None = None
    pool: int | None = None
    test: int | None = None
    score_every: int | None = None
    strategy: Strategy = "nipv"

    def __post_init__(self) -> None:
        for name, least in (("steps", 0), ("pool", 1), ("test", 2), ("score_every", 1)):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), least)
        check_one_of("strategy", self.strategy, STRATEGIES)
        super().__post_init__()

    def resolved(self, rows: int, dim: int) -> Self:
        """Return the settings for ``rows`` rows of ``dim`` inputs, with all but the grid filled in.

        Raises:
            UsageError: The data have too few rows, or another number of inputs than ``grid``.
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
