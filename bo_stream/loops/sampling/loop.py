"""Active sampling: choose sites, observe them, update the model, at the same cost each time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bo_stream.acquisition import PoolSelector
from bo_stream.acquisition.weight_space import lives_in_features
from bo_stream.diagnostics.validation import ProgressiveValidation
from bo_stream.loops.datasets import Dataset
from bo_stream.loops.models import KERNELS, build_model
from bo_stream.loops.predictions import Score, score
from bo_stream.loops.sampling.outliers import ONE_IN, deviations_from_prediction, leave_outliers_out
from bo_stream.loops.sampling.settings import Settings, Strategy
from bo_stream.models.base import StreamingGP
from bo_stream.models.shell.fitting import relearn

SOME_POINTS = 512
"""Number of test inputs that stand for all where each has a covariance with every candidate."""


class ActiveSampling:
    """Loop over a pool: q points at a time, chosen by a strategy, are put into a model.

    Model ``auto`` is on a grid from the start where there are at most four inputs, because the
    variance is averaged over all test inputs in features only; with more it is exact at first.

    Only the order of the split is random, so a state that was saved and loaded goes on to the same
    choices. The cost of a step does not grow, refits and scores aside; refits come at geometrically
    growing numbers of observations, and leave outliers out of the model (``Settings.outliers``).

    Example:
        >>> settings = Settings(steps=100).resolved(*data.X.shape)
        >>> for step in ActiveSampling(PoolSplit.of(data, settings), settings).run():
        ...     print(step.number, step.score)
    """

    def __init__(
        self, split: PoolSplit, settings: Settings, state: SamplingState | None = None
    ) -> None:
        """Begin a run with resolved settings, or go on with the state of one, maybe of fewer steps.

        The split was made with the same settings.
        """
        self.split, self.settings = split, settings
        if state is None:
            picks = list(range(settings.initial))
            X, Y = split.pool_X[picks], split.pool_Y[picks]
            kernel, options = KERNELS[settings.kernel](X.shape[-1]).to(X), settings.model_options
            model = build_model(settings.model, options, X, Y, kernel, settings.grid, True)
            state = SamplingState(model, picks)
        self.state = state
        self._choose = choice_rule(settings.strategy, split, self.state.model)

    @property
    def observations(self) -> int:
        """Number of points chosen so far, the initial ones included."""
        return len(self.state.picks)

    @property
    def steps_done(self) -> int:
        """Number of steps after the start."""
        return (self.observations - self.settings.initial) // self.settings.q

    @property
    def progress(self) -> int:
        """A number that grows with each :meth:`advance`."""
        return self.observations + bool(self.state.curve)

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return bool(self.state.curve) and self.steps_done >= (self.settings.steps or 0)

    def run(self) -> Iterator[Step]:
        """Do the steps that are left, and yield each once it is complete."""
        while not self.finished:
            yield self.advance()

    def advance(self) -> Step:
        """Do the start, if that is still to be done, or else one step."""
        if not self.state.curve:
            self._refit()
            return Step(0, self.observations, tuple(self.state.picks), True, self._score())
        chosen = self._choose(self.settings.q, self.state.picks)
        waiting = self._improbable(chosen)
        began = time.perf_counter()
        self.state.validation.add(
            self.state.model, self.split.pool_X[chosen], self.split.pool_Y[chosen]
        )
        self._update([pick for i, pick in enumerate(chosen) if i not in waiting])
        self.state.validation.add_time(len(chosen), time.perf_counter() - began)
        self.state.outliers.extend(self.observations + i for i in waiting)
        self.state.picks.extend(chosen)
        refitted = self.settings.refit_is_due(self.observations, self.state.refits)
        if refitted:
            self._refit()
        done = self.steps_done
        score_due = done % (self.settings.score_every or 1) == 0 or done == self.settings.steps
        scored = self._score() if score_due else None
        return Step(done, self.observations, tuple(chosen), refitted, scored)

    def _update(self, picks: list[int]) -> None:
        if picks:
            self.state.model.update(self.split.pool_X[picks], self.split.pool_Y[picks])

    def _improbable(self, chosen: list[int]) -> list[int]:
        """Find the places in ``chosen`` of outcomes far from the prediction.

        They wait for the next refit, which learns from them before it decides on outliers.
        """
        threshold, most = self.settings.outliers, self.observations // ONE_IN
        room = most - len(self.state.outliers)
        if not threshold or room <= 0:
            return []
        X, Y = self.split.pool_X[chosen], self.split.pool_Y[chosen]
        far = deviations_from_prediction(self.state.model, X, Y) > threshold
        return [i for i, is_far in enumerate(far.tolist()) if is_far][:room]

    def _refit(self) -> None:
        """Take in what waits since the last refit, learn from it, and leave outliers out."""
        state, threshold = self.state, self.settings.outliers
        last = state.refits[-1] if state.refits else 0
        self._update([state.picks[place] for place in state.outliers if place >= last])
        state.outliers = [place for place in state.outliers if place < last]
        relearn(state.model)
        if threshold:
            X, Y = self.split.pool_X[state.picks], self.split.pool_Y[state.picks]
            state.outliers = leave_outliers_out(state.model, X, Y, state.outliers, threshold)
        state.refits.append(self.observations)

    def _score(self) -> Score:
        self.state.curve.append(self.score_now())
        return self.state.curve[-1]

    def score_now(self) -> Score:
        """Score the model as it is, without adding to the curve."""
        scored = score(self.state.model, self.split.test_X, self.split.test_Y)
        return replace(scored, observations=self.observations)

    def picked_rows(self) -> list[int]:
        """Return the rows of the data that were chosen, in order."""
        return self.split.pool_rows[self.state.picks].tolist()

    def outlying_rows(self) -> list[int]:
        """Return those of :meth:`picked_rows` that the model is without, in order."""
        rows = self.picked_rows()
        return [rows[i] for i in self.state.outliers]


@dataclass(frozen=True)
class PoolSplit:
    """A data set in random order, split into a pool and test points, inputs in the unit cube.

    Attributes:
        pool_X: Candidates, ``N x d``.
        pool_Y: Their outcomes, to be looked at only once chosen, ``N x 1``.
        pool_rows: Their rows in the data, ``N``.
        test_X: Held-out inputs, ``t x d``.
        test_Y: Held-out outcomes, ``t x 1``.
    """

    pool_X: Tensor
    pool_Y: Tensor
    pool_rows: Tensor
    test_X: Tensor
    test_Y: Tensor

    @classmethod
    def of(cls, data: Dataset, settings: Settings) -> PoolSplit:
        """Split by the seed of resolved settings, in the same way for every strategy."""
        order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(settings.seed))
        test_rows, rest = order[: settings.test], order[settings.test :]
        pool_rows = rest[: settings.pool]
        like = torch.empty(0, dtype=getattr(torch, settings.dtype), device=settings.device)
        X = torch.from_numpy(data.unit_X).to(like)
        Y = torch.from_numpy(data.y).unsqueeze(-1).to(like)
        return cls(X[pool_rows], Y[pool_rows], pool_rows, X[test_rows], Y[test_rows])


@dataclass
class SamplingState:
    """State of a run; with split and settings it determines the next choice.

    Attributes:
        model: Model of the picks without the outliers.
        picks: Positions in the pool, in the order of choice, the initial points first.
        curve: Scores so far.
        refits: Numbers of observations at which the hyperparameters were learned.
        outliers: Places in ``picks``, in order, of those that the model is without: outliers at the
            last refit, and later ones that wait for the next.
        validation: Record of how well each choice was predicted, outliers included.
    """

    model: StreamingGP
    picks: list[int]
    curve: list[Score] = field(default_factory=list)
    refits: list[int] = field(default_factory=list)
    outliers: list[int] = field(default_factory=list)
    validation: ProgressiveValidation = field(default_factory=ProgressiveValidation)


@dataclass(frozen=True)
class Step:
    """Record of one step.

    Attributes:
        number: 0 for the start, then counted from 1.
        observations: Number of observations after it, outliers included.
        chosen: Positions in the pool.
        refitted: Whether hyperparameters were learned.
        score: Score of the model after it, where it was scored.
    """

    number: int
    observations: int
    chosen: tuple[int, ...]
    refitted: bool
    score: Score | None


def choice_rule(
    strategy: Strategy, split: PoolSplit, model: StreamingGP
) -> Callable[[int, Sequence[int]], list[int]]:
    """Return the function of q and the picks that chooses q other positions in the pool.

    ``nipv`` greedily chooses the points that leave the least posterior variance, averaged over the
    test inputs, or over ``SOME_POINTS`` of them where the model needs the covariance of each with
    every candidate: qNIPV over a pool, as in the WISKI paper's malaria study. The choice is a
    function of model and picks: what the selector caches between choices only saves time.
    ``random`` takes the next points of the pool, whose order is random.
    """
    if strategy == "random":
        return lambda q, picks: list(range(len(picks), len(picks) + q))
    points = split.test_X if lives_in_features(model) else split.test_X[:SOME_POINTS]
    selector = PoolSelector(model, split.pool_X, points)
    return lambda q, picks: selector.select(q, exclude=torch.tensor(picks)).tolist()
