"""Replay of active sampling on a map that is known, scored as it goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bo_stream.loops.datasets import Dataset
from bo_stream.loops.models import unit_cube
from bo_stream.loops.predictions import Score, score
from bo_stream.loops.sampling.sampling import ActiveSampling
from bo_stream.loops.sampling.settings import Settings
from bo_stream.loops.sampling.state import SamplingState
from bo_stream.models.base import StreamingGP


class SamplingReplay:
    """Replay of a known map: an :class:`ActiveSampling` asks, and is told what it asked for.

    It never sees another outcome. The strategy ``random`` does not ask it, but tells it the next
    points of the pool, whose order is random. Both begin with the first points of the pool. The
    points where the values are to be known are the test inputs.

    Attributes:
        split: The map.
        settings: Resolved settings.
        sampling: What was asked and told, and the model.
        curve: Scores so far.

    Example:
        >>> settings = Settings(steps=100).resolved(*data.X.shape)
        >>> for step in SamplingReplay(PoolSplit.of(data, settings), settings).run():
        ...     print(step.number, step.score)
    """

    def __init__(
        self,
        split: PoolSplit,
        settings: Settings,
        state: SamplingState | None = None,
        curve: Sequence[Score] = (),
    ) -> None:
        """Begin with resolved settings, or go on with state and scores, maybe of fewer steps.

        The split was made with the same settings.
        """
        self.split, self.settings, self.curve = split, settings, list(curve)
        pool_X, test_X = split.pool_X, split.test_X
        self.sampling = ActiveSampling(pool_X, settings, test_X, unit_cube(pool_X), state)

    @property
    def state(self) -> SamplingState:
        """State of the sampling."""
        return self.sampling.state

    @property
    def model(self) -> StreamingGP:
        """Model of the picks without the outliers."""
        return self.sampling.model

    @property
    def observations(self) -> int:
        """Number of points chosen so far, the initial ones included."""
        return self.sampling.observations

    @property
    def steps_done(self) -> int:
        """Number of steps after the start."""
        return max(0, self.observations - self.settings.initial) // self.settings.q

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return bool(self.curve) and self.steps_done >= (self.settings.steps or 0)

    def run(self) -> Iterator[Step]:
        """Do the steps that are left, and yield each once it is complete."""
        while not self.finished:
            yield self.advance()

    def advance(self) -> Step:
        """Do the start, if that is still to be done, or else one step."""
        chosen, refits = self._chosen(), len(self.state.refits)
        self.sampling.tell(chosen, self.split.pool_Y[chosen])
        done, refitted = self.steps_done, len(self.state.refits) > refits
        score_due = done % (self.settings.score_every or 1) == 0 or done == self.settings.steps
        scored = self._score() if score_due else None
        return Step(done, self.observations, tuple(chosen), refitted, scored)

    def _chosen(self) -> list[int]:
        settings, told = self.settings, self.observations
        if not self.curve:
            return list(range(settings.initial))
        if settings.strategy == "random":
            return list(range(told, told + settings.q))
        return self.sampling.ask(settings.q)

    def _score(self) -> Score:
        self.curve.append(self.score_now())
        return self.curve[-1]

    def score_now(self) -> Score:
        """Score the model as it is, without adding to the curve."""
        split = self.split
        scored = score(self.model, split.test_X, split.test_Y, self.settings.threshold)
        return replace(scored, observations=self.observations)

    def picked_rows(self) -> list[int]:
        """Return the rows of the data that were chosen, in order."""
        return self.split.pool_rows[self.state.picks].tolist()

    def outlying_rows(self) -> list[int]:
        """Return those of :meth:`picked_rows` that the model is without, in order."""
        return self.split.pool_rows[self.sampling.outliers].tolist()


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
