"""Which points of the pool to look at next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from bo_stream.acquisition import select_from_pool
from bo_stream.loops.settings import Strategy
from bo_stream.loops.survey import Survey
from bo_stream.models.wiski import WISKI


class ChoiceRule(Protocol):
    """Chooses the next points; a function of model and picks alone."""

    def choose(self, model: WISKI, q: int, picks: Sequence[int]) -> list[int]:
        """Choose q positions in the pool that are not among the picks."""


class LeastIntegratedVariance:
    """Greedily those that leave the least posterior variance, summed over the test inputs.

    Source: qNIPV, as in the WISKI paper's malaria study.
    """

    def __init__(self, survey: Survey) -> None:
        """Remember pool and test inputs."""
        self._survey = survey

    def choose(self, model: WISKI, q: int, picks: Sequence[int]) -> list[int]:
        """See :func:`bo_stream.acquisition.select_from_pool`."""
        survey = self._survey
        taken = torch.tensor(picks, device=survey.pool_X.device)
        chosen: list[int] = select_from_pool(
            model, survey.pool_X, q, survey.test_X, exclude=taken
        ).tolist()
        return chosen


class InRandomOrder:
    """The next ones of the pool, whose order is random."""

    def choose(self, model: WISKI, q: int, picks: Sequence[int]) -> list[int]:
        """The first q positions after the picks."""
        return list(range(len(picks), len(picks) + q))


def make_strategy(name: Strategy, survey: Survey) -> ChoiceRule:
    """The rule of this name for a survey."""
    return InRandomOrder() if name == "random" else LeastIntegratedVariance(survey)
