"""Which points of the pool to look at next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from bo_stream.acquisition import PoolSelector
from bo_stream.acquisition.weight_space import lives_in_features
from bo_stream.loops.settings import Strategy
from bo_stream.loops.survey import Survey
from bo_stream.models.streaming_gp import StreamingGP

SOME_POINTS = 512
"""Test inputs that stand for all of them."""


class ChoiceRule(Protocol):
    """Chooses the next points."""

    def choose(self, q: int, picks: Sequence[int]) -> list[int]:
        """Choose q positions in the pool that are not among the picks."""


class LeastIntegratedVariance:
    """Greedily those that leave the least posterior variance, averaged over the test inputs.

    Over ``SOME_POINTS`` of them, which are in random order, where the model needs the covariance of
    each with every candidate.

    Source: qNIPV over a pool, as in the WISKI paper's malaria study. A function of model and picks:
    what the selector keeps between choices saves time only.
    """

    def __init__(self, survey: Survey, model: StreamingGP) -> None:
        """The model is the one that goes on learning."""
        points = survey.test_X if lives_in_features(model) else survey.test_X[:SOME_POINTS]
        self._selector = PoolSelector(model, survey.pool_X, points)

    def choose(self, q: int, picks: Sequence[int]) -> list[int]:
        """See :class:`bo_stream.acquisition.PoolSelector`."""
        chosen: list[int] = self._selector.select(q, exclude=torch.tensor(picks)).tolist()
        return chosen


class InRandomOrder:
    """The next ones of the pool, whose order is random."""

    def choose(self, q: int, picks: Sequence[int]) -> list[int]:
        """The first q positions after the picks."""
        return list(range(len(picks), len(picks) + q))


def choice_rule(strategy: Strategy, survey: Survey, model: StreamingGP) -> ChoiceRule:
    """The rule of this name."""
    return InRandomOrder() if strategy == "random" else LeastIntegratedVariance(survey, model)
