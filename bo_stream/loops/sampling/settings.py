"""Settings and state of active sampling; settings of its replays; outcomes that are set aside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast

import torch
from botorch.exceptions.errors import InputDataError
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.posteriors.posterior import Posterior
from torch import Tensor

from bo_stream.diagnostics.cross_validation import leave_one_out
from bo_stream.diagnostics.validation import ProgressiveValidation
from bo_stream.errors import UsageError, check_one_of, check_whole
from bo_stream.loops.models import (
    AUTO,
    KERNELS,
    LEARNED,
    MODELS,
    RETRACTING,
    RunSettings,
    retracts,
)
from bo_stream.loops.run import ModelFile
from bo_stream.models.base import StreamingGP
from bo_stream.models.fitting import relearn

Strategy = Literal["chosen", "random"]
Goal = Literal["map", "exceedance"]

STRATEGIES: tuple[Strategy, ...] = ("chosen", "random")
GOALS: tuple[Goal, ...] = ("map", "exceedance")

_CHOICES: dict[Goal, str] = {"map": "least variance", "exceedance": "fewest wrong calls"}

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
            next refit (:func:`bo_stream.loops.sampling.settings.leave_outliers_out`); 0: none are
            left out; None: 8 for a model of at most four inputs that can retract, else 0.
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


def strategy_name(strategy: Strategy, goal: Goal) -> str:
    """Name a strategy for readers."""
    return "random choice" if strategy == "random" else _CHOICES[goal]


@dataclass
class SamplingState:
    """State that determines the next choice, with the candidates and the settings.

    Attributes:
        model: Model of the picks without the outliers; None: there is none yet.
        picks: Candidates that were told, in the order of telling.
        outcomes: Their outcomes.
        pending: Candidates that were asked for and not told, in the order of asking.
        refits: Numbers of observations at which the hyperparameters were learned.
        kernel: Name of the model's kernel; empty while there is no model.
        kernels: Name of the kernel after each refit.
        unlikely: Names of kernels that were clearly less likely than another, with the number of
            observations at which they were.
        onto_grid_at: Number of observations at which an exact model went onto a grid; None: it has
            not.
        outliers: Positions in ``picks``, in order, of those that the model is without: outliers at
            the last refit, and later ones that wait for the next.
        validation: Record of how well each outcome was predicted, outliers included.
    """

    model: StreamingGP | None = None
    picks: list[int] = field(default_factory=list)
    outcomes: list[float] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    refits: list[int] = field(default_factory=list)
    outliers: list[int] = field(default_factory=list)
    kernel: str = ""
    kernels: list[str] = field(default_factory=list)
    unlikely: dict[str, int] = field(default_factory=dict)
    onto_grid_at: int | None = None
    validation: ProgressiveValidation = field(default_factory=ProgressiveValidation)

    def record(self) -> dict[str, Any]:
        """Return all but the model, as values for JSON."""
        names = [field.name for field in fields(self) if field.name not in ("model", "validation")]
        values = {name: getattr(self, name) for name in names}
        return {**values, "validation": self.validation.state()}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> SamplingState:
        """Read a record of :meth:`record`, without a model."""
        onto_grid_at = record["onto_grid_at"]
        return cls(
            None,
            **{name: [int(n) for n in record[name]] for name in _POSITIONS},
            outcomes=[float(value) for value in record["outcomes"]],
            kernel=str(record["kernel"]),
            kernels=[str(name) for name in record["kernels"]],
            unlikely={str(name): int(n) for name, n in record.get("unlikely", {}).items()},
            onto_grid_at=None if onto_grid_at is None else int(onto_grid_at),
            validation=ProgressiveValidation.of_state(record["validation"]),
        )

    def load_model(
        self, file: ModelFile | None, path: Path, settings: SamplingSettings, candidates: int
    ) -> None:
        """Check a state that was read, and load its model.

        Args:
            file: Of the model, next to the index; None: there is no model.
            path: Index that the state is from.
            settings: Of the sampling.
            candidates: Number of candidates.

        Raises:
            UsageError: The state does not agree with itself, its model or the number of candidates,
                or the model cannot be read.
        """
        observations = None if file is None else file.observations
        told, picks, outliers = len(self.picks), set(self.picks), set(self.outliers)
        known = [*self.picks, *self.pending]
        agrees = (
            self.outliers == sorted(outliers)
            and outliers <= set(range(told))
            and set(known) <= set(range(candidates))
            and len(set(known)) == len(known)
            and told == len(self.outcomes)
            and (observations is None or told == observations + len(outliers))
            and (self.kernel in KERNELS if observations is not None else not self.kernel)
            and len(self.kernels) == len(self.refits)
        )
        if not agrees:
            raise UsageError(
                f"{path} contradicts itself: {told:,} picks, {len(picks):,} of them distinct, "
                f"{len(self.outliers):,} outliers, {len(self.outcomes):,} outcomes, "
                f"{len(self.pending):,} pending of {candidates:,} candidates, and a model of "
                f"{observations or 0:,} observations."
            )
        if file is not None:
            self.model = file.read(path.parent, MODELS[settings.model].model, settings.device)


_POSITIONS = ("picks", "pending", "refits", "outliers")


# --- outliers of a model: observations far from what all others predict --------------------------


ONE_IN = 100
"""Least number of observations per outlier: if there are more, the noise is heavy-tailed."""

_MOST_PASSES = 3
"""Most changes of the set of outliers in a refit."""


def leave_outliers_out(
    model: StreamingGP, X: Tensor, Y: Tensor, outliers: Sequence[int], threshold: float
) -> list[int]:
    """Take outliers out of a model after a refit, and learn again where that changes them.

    An outlier is an observation more than ``threshold`` standard deviations of the posterior
    predictive distribution, noise included, from its mean given all other observations in the
    model. It returns to the model once it is no outlier any more, because observations near it
    agree or because the hyperparameters are others. The refit before is to all new observations, so
    that hyperparameters which were learned from few do not rule out what contradicts them. Without
    outliers the model stays as it is, at the cost of a leave-one-out prediction of all
    observations, O(n r²) on a grid.

    Args:
        model: Model of the observations without the previous outliers, changed in place. It
            retracts exactly, as WISKI does.
        X: Inputs of all observations, outliers included, ``n x d``.
        Y: Their outcomes, ``n x 1``.
        outliers: Previous outliers, as rows of X, in increasing order.
        threshold: Number of standard deviations.

    Returns:
        The outliers, which the model is without, as rows of X, in increasing order.
    """
    previous = list(outliers)
    for _ in range(_MOST_PASSES):
        deviations = _deviations(model, X, Y, previous)
        largest = deviations.argsort(descending=True, stable=True)[: len(X) // ONE_IN]
        result = sorted(largest[deviations[largest] > threshold].tolist())
        if result == previous:
            break
        new = [i for i in result if i not in previous]
        back = [i for i in previous if i not in result]
        if new:
            model.retract(X[new], Y[new])
        if back:
            model.update(X[back], Y[back])
        relearn(model)
        previous = result
    return previous


@torch.no_grad()
def _deviations(model: StreamingGP, X: Tensor, Y: Tensor, outliers: Sequence[int]) -> Tensor:
    """Compute standardised leave-one-out errors, ``n``.

    They are zero for all observations in the model where rounding hides how much each weighs.
    """
    out = torch.zeros(len(X), dtype=torch.bool, device=X.device)
    out[list(outliers)] = True
    deviations = torch.zeros_like(Y[:, 0])
    try:
        others = leave_one_out(model, X[~out], Y[~out]).posterior
        deviations[~out] = _standardized(others, Y[~out])
    except InputDataError:
        model.log_event("leave-one-out predictions that rounding hides")
    deviations[out] = deviations_from_prediction(model, X[out], Y[out])
    return deviations


@torch.no_grad()
def deviations_from_prediction(model: StreamingGP, X: Tensor, Y: Tensor) -> Tensor:
    """Compute standardised errors, ``n``, of predictions of outcomes that are not in a model.

    Inputs are ``n x d``, outcomes ``n x 1``; the predictive distributions include the noise.
    """
    return _standardized(model.posterior(X, observation_noise=True), Y)


def _standardized(posterior: Posterior, Y: Tensor) -> Tensor:
    normal = cast(GPyTorchPosterior, posterior)
    return ((Y[:, 0] - normal.mean.reshape(-1)).abs()) / normal.variance.reshape(-1).sqrt()
