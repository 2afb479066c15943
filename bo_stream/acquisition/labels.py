"""Active learning of labels: acquisition functions, and greedy choices from a pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.exceptions.errors import UnsupportedError
from botorch.sampling.base import MCSampler
from botorch.sampling.normal import SobolQMCNormalSampler
from botorch.utils.transforms import concatenate_pending_points, t_batch_mode_transform
from torch import Tensor

from bo_stream.acquisition.feature_nipv import listed_inputs
from bo_stream.acquisition.paths import SamplePaths, sample_paths
from bo_stream.acquisition.pool import available_candidates, check_no_batch
from bo_stream.errors import check_whole
from bo_stream.likelihoods.sites import STEP, SoftmaxMoments, entropy, softmax_moments
from bo_stream.models.wiski.dirichlet import DirichletWISKI

_MAX_CONFIGURATIONS = 1024
"""Up to this many joint values of q labels are enumerated, beyond it as many are drawn."""

_NUM_SAMPLES = 128

CHUNK = 512
"""Candidates that are valued together."""

_COARSE = 2.0
"""Step of the quadrature that first values all candidates, in steps of the full accuracy."""

LabelCriterion = Literal["BALD", "entropy"]


class LabelAcquisition(AcquisitionFunction):
    """An entropy of the labels at q points.

    One point: deterministic, by quadrature, O(m r²) and O(m T H). More, pending points counted:
    from joint draws of the scores, all joint labels enumerated while there are at most
    ``max_configurations`` of them, else as many drawn.
    """

    model: DirichletWISKI
    criterion: ClassVar[LabelCriterion]

    def __init__(
        self,
        model: DirichletWISKI,
        sampler: MCSampler | None = None,
        X_pending: Tensor | None = None,
        max_configurations: int = _MAX_CONFIGURATIONS,
    ) -> None:
        """Check and store the arguments.

        Args:
            model: A model of labels, such as ``DirichletWISKI``, that has the scores of all
                classes; it may be conditioned on hypothetical labels.
            sampler: Normal samples, for more than one point. Default: 128 of a Sobol sequence.
            X_pending: Points whose labels were requested, ``p x d``.
            max_configurations: Joint labels that are enumerated.

        Raises:
            UnsupportedError: Another model.
            ValueError: ``max_configurations`` less than one.
        """
        _check(model, max_configurations)
        super().__init__(model=model)
        self.sampler = sampler or SobolQMCNormalSampler(torch.Size([_NUM_SAMPLES]), seed=0)
        self.max_configurations = max_configurations
        self.set_X_pending(X_pending)

    @concatenate_pending_points
    @t_batch_mode_transform()  # type: ignore[arg-type]
    def forward(self, X: Tensor) -> Tensor:
        """Return the value of the labels at q points, ``... x q x d -> ...``, in nats."""
        if X.shape[-2] == 1:
            return _value(self.model.label_moments(X), self.criterion).squeeze(-1).to(X)
        draws = self.sampler(self.model.posterior(X)).double().softmax(-1)
        generator = torch.Generator().manual_seed(self.sampler.seed)
        joint, expected = joint_entropies(draws, self.max_configurations, generator)
        return (joint - expected if self.criterion == "BALD" else joint).to(X)


class qBALD(LabelAcquisition):
    """The mutual information of q labels with the latent scores: Bayesian active learning.

    Asks where the model is unsure for want of labels, not where the classes overlap. Never
    negative, and at most the labels' entropy. Source: Houlsby et al. (2011); for q > 1 Kirsch, van
    Amersfoort and Gal (2019).

    Example:
        >>> X, value = optimize_acqf(qBALD(model), bounds, q=3, num_restarts=4, raw_samples=64)
    """

    criterion = "BALD"


class PredictiveEntropy(LabelAcquisition):
    """The entropy of q labels: uncertainty sampling.

    High also where the classes overlap, regardless of how much is known there.
    """

    criterion = "entropy"


@torch.no_grad()
def select_labels_from_pool(
    model: DirichletWISKI,
    pool: Tensor,
    q: int,
    criterion: LabelCriterion = "BALD",
    exclude: Tensor | None = None,
    num_samples: int = 256,
    max_configurations: int = _MAX_CONFIGURATIONS,
    seed: int = 0,
) -> Tensor:
    """Choose q of N candidates whose labels teach most together, one after the other.

    The first has the largest value of :class:`~bo_stream.qBALD` or
    :class:`~bo_stream.PredictiveEntropy`, by quadrature at O(N m r²). Each further one has the
    largest value given the labels before it, in expectation over them, from joint draws of the
    scores. That is never more than its value alone, so candidates are valued in the order of their
    values alone, and no further than could change the choice: exact, at a cost that is mostly the
    first pick's.

    Args:
        model: A model of labels; it may be conditioned on one set of hypothetical labels.
        pool: Candidates, ``N x d``.
        q: How many to choose; all different.
        criterion: ``"BALD"`` or ``"entropy"``.
        exclude: Candidates not to choose, such as those already requested: a boolean mask, ``N``,
            or indices, ``n``.
        num_samples: Joint draws of the scores.
        max_configurations: Joint labels of the earlier picks that are enumerated; beyond, drawn.
        seed: Seed of the draws.

    Returns:
        Indices into ``pool``, in the order of picking, ``q``.

    Raises:
        BotorchTensorDimensionError: Shapes do not fit together.
        InputDataError: Values that are not finite, indices out of range, inputs too far outside the
            model's bounds.
        UnsupportedError: Another kind of model, or one with a batch shape.
        ValueError: q is less than one, or more than the candidates that are left; another
            criterion; ``max_configurations`` or ``num_samples`` less than one.
    """
    _check(model, max_configurations)
    if criterion not in ("BALD", "entropy"):
        raise ValueError(f"Expected criterion to be 'BALD' or 'entropy', got {criterion!r}.")
    check_whole("num_samples", num_samples)
    check_no_batch(model.batch_shape)
    listed_inputs(model, "pool", pool)
    available = available_candidates(exclude, pool, q)
    pool = pool.to(model.train_targets)
    # each candidate alone: coarsely, then to full accuracy where the value is large
    mean, variance = model.marginals(pool)
    alone = _value(softmax_moments(mean, variance, _COARSE * STEP), criterion)
    best = alone.topk(min(CHUNK, len(alone))).indices
    alone[best] = _value(softmax_moments(mean[best], variance[best]), criterion)
    alone = alone.masked_fill(~available, -torch.inf)
    picks = [int(alone.argmax())]
    if q > 1:
        candidates = _SortedPool(sample_paths(model, num_samples, seed), pool, alone, criterion)
        generator = torch.Generator(pool.device).manual_seed(seed)
        equal = alone.new_full((1, num_samples), 1.0 / num_samples)
        hypotheses = Hypotheses(alone.new_ones(1), equal)
        for _ in range(q - 1):
            chosen = candidates.probabilities(torch.tensor(picks[-1:])).squeeze(1)
            hypotheses = hypotheses.after(chosen, max_configurations, generator)
            picks.append(candidates.best(hypotheses, picks))
    return torch.tensor(picks, device=pool.device)


def _check(model: DirichletWISKI, max_configurations: int) -> None:
    if not isinstance(model, DirichletWISKI):
        raise UnsupportedError(
            f"Expected model to be one of labels, such as DirichletWISKI, got "
            f"{type(model).__name__}."
        )
    outcomes: Any = model.outcomes
    outcomes.check_whole("An acquisition function of labels")
    check_whole("max_configurations", max_configurations)


def _value(moments: SoftmaxMoments, criterion: LabelCriterion) -> Tensor:
    return moments.information if criterion == "BALD" else moments.entropy


class _SortedPool:
    """A pool sorted by the candidates' values alone, with draws as far as needed so far."""

    def __init__(
        self, paths: SamplePaths, pool: Tensor, alone: Tensor, criterion: LabelCriterion
    ) -> None:
        self._paths, self._pool, self._alone, self._criterion = paths, pool, alone, criterion
        self._order = alone.argsort(descending=True, stable=True).split(CHUNK)
        self._drawn: list[Tensor] = []

    def probabilities(self, index: Tensor) -> Tensor:
        """Draw class probabilities, ``S x n x m``."""
        return self._paths(self._pool[index]).double().softmax(-1)

    def best(self, hypotheses: Hypotheses, taken: list[int]) -> int:
        """Return the candidate of the largest value given the labels picked."""
        pick, most = -1, -torch.inf
        barred = self._alone == -torch.inf
        barred[taken] = True
        for i, index in enumerate(self._order):
            if most >= float(self._alone[index[0]]):
                break
            if i == len(self._drawn):
                self._drawn.append(self.probabilities(index))
            worth = hypotheses.conditional_entropy(self._drawn[i])
            if self._criterion == "BALD":
                worth = worth - entropy(self._drawn[i]).mean(0)
            worth = worth.masked_fill(barred[index], -torch.inf)
            if float(worth.max()) > most:
                pick, most = int(index[worth.argmax()]), float(worth.max())
        return pick


@dataclass(frozen=True)
class Hypotheses:
    """Joint labels of the candidates picked, with the posterior of the draws of the scores.

    Attributes:
        weights: Probability of each of C joint labels, ``C``.
        draws: Posterior probability of each draw given them, ``C x S``.
    """

    weights: Tensor
    draws: Tensor

    def conditional_entropy(self, probabilities: Tensor) -> Tensor:
        """Compute the entropy of one more label given the picked ones, ``S x n x m -> n``.

        Cost O(C S n m).
        """
        draws, n, m = probabilities.shape
        given = (self.draws @ probabilities.reshape(draws, n * m)).view(-1, n, m)
        return torch.einsum("c,cn->n", self.weights, entropy(given))

    def after(
        self, probabilities: Tensor, max_configurations: int, generator: torch.Generator
    ) -> Hypotheses:
        """Return the hypotheses with one more label, of probabilities ``S x m`` in the draws."""
        given = self.draws @ probabilities
        weights = self.weights.unsqueeze(-1) * given
        draws = self.draws.unsqueeze(1) * probabilities.mT / given.unsqueeze(-1).clamp_min(1e-300)
        weights, draws = weights.flatten(), draws.flatten(0, 1)
        if len(weights) <= max_configurations:
            return Hypotheses(weights, draws)
        chosen = torch.multinomial(weights, max_configurations, True, generator=generator)
        return Hypotheses(torch.full_like(weights[chosen], 1.0 / max_configurations), draws[chosen])


def joint_entropies(
    probabilities: Tensor, max_configurations: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Compute ``H(E Π p)`` and ``E Σ H(p)`` of q labels whose probabilities p were drawn S times.

    All ``m^q`` joint values are enumerated where there are at most ``max_configurations``, at
    O(S m^q): then the difference is never negative. Else as many are drawn: an estimate whose
    gradient is the expectation's. Source: Kirsch, van Amersfoort and Gal (2019), BatchBALD,
    eq. 12 and 13.

    Args:
        probabilities: Class probabilities, ``S x ... x q x m``.
        max_configurations: Most joint values.
        generator: Source of the draws.

    Returns:
        The joint entropy of the labels, and their entropy when the scores are known, in nats,
        ``...`` each.
    """
    q, m = probabilities.shape[-2:]
    expected = entropy(probabilities).sum(-1).mean(0)
    if m**q <= max_configurations:
        joint = probabilities[..., 0, :]  # of all joint labels: S x ... x m^q in the end
        for i in range(1, q):
            joint = (joint.unsqueeze(-1) * probabilities[..., i, :].unsqueeze(-2)).flatten(-2)
        return entropy(joint.mean(0)), expected
    # draw joint labels, ... x q x max_configurations, each from a random draw of the probabilities
    which = torch.randint(probabilities.shape[0], (max_configurations,), generator=generator)
    given = probabilities.detach()
    cumulative = given.cumsum(-1)[which.to(given.device), ..., :-1]
    shape = (max_configurations, *[1] * (given.ndim - 3), q, 1)
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64).to(given)
    labels = (uniform > cumulative).sum(-1).movedim(0, -1)
    total = torch.zeros((), dtype=probabilities.dtype, device=probabilities.device)
    for i in range(q):
        chosen = labels[..., i, :].expand(*probabilities.shape[:-2], labels.shape[-1])
        total = total + probabilities[..., i, :].gather(-1, chosen).clamp_min(1e-300).log()
    likelihoods = total.exp().mean(0)  # of the drawn joint labels: ... x max_configurations
    weights, information = likelihoods / likelihoods.detach(), -likelihoods.detach().log()
    mean = information.mean(-1, keepdim=True)
    joint = mean + (weights * (information - mean)).mean(-1, keepdim=True)
    return joint.squeeze(-1), expected
