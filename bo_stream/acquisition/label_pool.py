"""Greedy choice of the next labels to ask for, from a pool of candidates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from bo_stream.acquisition.joint_labels import MAX_CONFIGURATIONS, Hypotheses
from bo_stream.acquisition.labels import check_configurations, check_label_model
from bo_stream.acquisition.measures import listed_inputs
from bo_stream.acquisition.paths import SamplePaths, sample_paths
from bo_stream.acquisition.pool import available_candidates
from bo_stream.models.label_posterior import LabelPosterior
from bo_stream.models.softmax import STEP, SoftmaxMoments, entropy, softmax_moments

CHUNK = 512
"""Candidates that are looked at together."""

COARSE = 2.0
"""Step of the first look at all candidates, in steps of the full accuracy."""

Criterion = Literal["BALD", "entropy"]


@torch.no_grad()
def select_labels_from_pool(
    model: LabelPosterior,
    pool: Tensor,
    q: int,
    criterion: Criterion = "BALD",
    exclude: Tensor | None = None,
    num_samples: int = 256,
    max_configurations: int = MAX_CONFIGURATIONS,
    seed: int = 0,
) -> Tensor:
    """Choose q of N candidates whose labels teach most together, one after the other.

    The first has the largest value of :class:`~bo_stream.qBALD` or
    :class:`~bo_stream.PredictiveEntropy`, by quadrature at O(N m r²). Each further one has the
    largest value given the labels before it, in expectation over them, from joint draws of the
    scores. That is never more than its value alone, so candidates are looked at in the order of
    these, and no further than could change the choice: exact, at a cost that is mostly the first
    pick's.

    Args:
        model: A model of labels; it may suppose one set of labels.
        pool: Candidates, ``N x d``.
        q: How many to choose; all different.
        criterion: ``"BALD"`` or ``"entropy"``.
        exclude: Candidates not to choose, such as those already asked: a boolean mask, ``N``, or
            indices, ``n``.
        num_samples: Joint draws of the scores.
        max_configurations: Joint labels of the earlier picks that are enumerated; beyond, drawn.
        seed: Of the draws.

    Returns:
        Indices into ``pool``, in the order of picking, ``q``.

    Raises:
        BotorchTensorDimensionError: Shapes do not fit together.
        InputDataError: Values that are not finite, indices out of range, inputs too far outside the
            model's bounds.
        UnsupportedError: Another kind of model.
        ValueError: q is less than one, or more than the candidates that are left; another
            criterion; ``max_configurations`` or ``num_samples`` less than one.
    """
    check_label_model(model)
    check_configurations(max_configurations)
    if criterion not in ("BALD", "entropy"):
        raise ValueError(f"Expected criterion to be 'BALD' or 'entropy', got {criterion!r}.")
    if num_samples < 1:
        raise ValueError(f"Expected num_samples of at least 1, got {num_samples}.")
    listed_inputs(model, "pool", pool)
    available = available_candidates(exclude, pool, q)
    pool = pool.to(model.train_targets)
    alone = _values_alone(model, pool, criterion).masked_fill(~available, -torch.inf)
    picks = [int(alone.argmax())]
    if q > 1:
        candidates = _Candidates(sample_paths(model, num_samples, seed), pool, alone, criterion)
        generator = torch.Generator(pool.device).manual_seed(seed)
        hypotheses = Hypotheses.none(num_samples, alone)
        for _ in range(q - 1):
            chosen = candidates.probabilities(torch.tensor(picks[-1:])).squeeze(1)
            hypotheses = hypotheses.after(chosen, max_configurations, generator)
            picks.append(candidates.best(hypotheses, picks))
    return torch.tensor(picks, device=pool.device)


def _values_alone(model: LabelPosterior, pool: Tensor, criterion: Criterion) -> Tensor:
    """Value of each candidate alone, ``N``: coarsely, then to full accuracy where it is large."""
    mean, variance = model.marginals(pool)
    alone = _value(softmax_moments(mean, variance, COARSE * STEP), criterion)
    best = alone.topk(min(CHUNK, len(alone))).indices
    alone[best] = _value(softmax_moments(mean[best], variance[best]), criterion)
    return alone


def _value(moments: SoftmaxMoments, criterion: Criterion) -> Tensor:
    return moments.information if criterion == "BALD" else moments.entropy


@dataclass
class _Candidates:
    """A pool in the order of its candidates' values alone, with draws as far as they were needed.

    Attributes:
        paths: Joint draws of the scores.
        pool: ``N x d``.
        alone: Value of each candidate alone, ``N``.
        criterion: What is computed.
    """

    paths: SamplePaths
    pool: Tensor
    alone: Tensor
    criterion: Criterion
    _drawn: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._order = self.alone.argsort(descending=True, stable=True).split(CHUNK)

    def probabilities(self, index: Tensor) -> Tensor:
        """Drawn class probabilities, ``S x n x m``."""
        return self.paths(self.pool[index]).double().softmax(-1)

    def best(self, hypotheses: Hypotheses, taken: list[int]) -> int:
        """The candidate of the largest value given the labels picked."""
        pick, most = -1, -torch.inf
        barred = self.alone == -torch.inf
        barred[taken] = True
        for i, index in enumerate(self._order):
            if most >= float(self.alone[index[0]]):
                break
            worth = self._worth(hypotheses, i).masked_fill(barred[index], -torch.inf)
            if float(worth.max()) > most:
                pick, most = int(index[worth.argmax()]), float(worth.max())
        return pick

    def _worth(self, hypotheses: Hypotheses, chunk: int) -> Tensor:
        if chunk == len(self._drawn):
            self._drawn.append(self.probabilities(self._order[chunk]))
        drawn = self._drawn[chunk]
        worth = hypotheses.conditional_entropy(drawn)
        return worth - entropy(drawn).mean(0) if self.criterion == "BALD" else worth
