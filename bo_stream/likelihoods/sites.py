"""Gaussian approximations of likelihood terms: sites, and the softmax of scores."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bo_stream.collective import ALONE, Collective
from bo_stream.linalg import identity, safe_cholesky, scaled_prior, solve_lower
from bo_stream.tensors import broadcast_shapes, zip_tensors

ExpectedLogProb = Callable[[Tensor, Tensor], Tensor]
"""``E log p(y | f)`` of each outcome from means and variances of f, ``... x n`` all three."""

_MIN_PRECISION = 1e-10
"""Least precision of a site; smaller ones occur where a likelihood is not log-concave."""

_SLACK = 1e-9
"""Relative loss of the bound that counts as rounding."""

_TOLERANCE = 1e-8
"""A fit ends when no marginal would move by this fraction of its standard deviation."""

_EPS = torch.finfo(torch.float64).eps


def fit_sites(
    prior: SitePrior,
    expected: ExpectedLogProb,
    power: float = 1.0,
    steps: int = 20,
    rate: float = 1.0,
    start: Sites | None = None,
    begin: ExpectedLogProb | None = None,
) -> Fit:
    """Maximise ``power Σ E log p(y | f) − KL(q ‖ prior)`` over normal q by natural gradients.

    A step that lowers the bound is taken back and tried at half the rate. Exact after one step at
    rate 1 for a Gaussian likelihood. The optimum is unique where the likelihood is log-concave;
    where it is not (Student-t), sites of negative precision are set to zero, and no step lowers the
    bound of the result. It ends where the next step would move nothing, by the rate at which the
    last two steps became smaller. A step costs one :meth:`SitePrior.given`.

    Args:
        prior: Distribution of the values.
        expected: Expected log probability of their outcomes.
        power: Power of the likelihood.
        steps: Largest number of steps.
        rate: Rate of a step, in (0, 1].
        start: Initial sites; none if omitted.
        begin: Another likelihood, whose optimum is the start where none is given: for one with
            outliers a log-concave one near it, since at the prior every outcome may look like an
            outlier.
    """
    if start is None and begin is not None:
        start = fit_sites(prior, begin, power, steps, rate).sites
    fit = fit_at(prior, expected, Sites.none(prior.mean) if start is None else start, power)
    rates, before = torch.full_like(fit.bound, rate).unsqueeze(-1), 0.0
    for _ in range(steps):
        tried = fit_at(prior, expected, fit.sites.towards(fit.target, rates), power)
        better = tried.bound >= fit.bound - _SLACK * (1.0 + fit.bound.abs())
        own = 0.0  # the largest change of a mean, in deviations, or of a variance, relative to it
        if fit.mean.numel() > 0:
            with torch.no_grad():
                means = (tried.mean - fit.mean).abs() / tried.variance.sqrt()
                variances = (tried.variance - fit.variance).abs() / tried.variance
                own = float(torch.maximum(means, variances).max())
        moved = prior.collective.largest(own, prior.mean.device)
        fit = zip_tensors(partial(_where, better), tried, fit)
        rates = torch.where(better.unsqueeze(-1), (2.0 * rates).clamp_max(rate), 0.5 * rates)
        shrunk = moved / before if before > moved else 1.0
        if moved * shrunk <= _TOLERANCE:
            break
        before = moved
    return fit


def _where(better: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Take the new values, ``... x n`` or ``...``, of the batch elements that are better."""
    return torch.where(better if better.ndim == new.ndim else better.unsqueeze(-1), new, old)


def fit_at(prior: SitePrior, expected: ExpectedLogProb, sites: Sites, power: float = 1.0) -> Fit:
    """Evaluate the posterior, the bound and the natural gradient at some sites."""
    mean, variance, divergence = prior.given(sites)
    target, value = local_sites(expected, mean, variance, power)
    own = sites.shift * mean - 0.5 * sites.precision * (mean.square() + variance)
    bound = power * prior.collective.sum(value.sum(-1)) - divergence
    return Fit(sites, mean, variance, bound, power * value - own, target)


@dataclass(frozen=True)
class Fit:
    """Sites with their posterior, bound and natural gradient.

    Attributes:
        sites: ``... x n``.
        mean: Mean of the values given the sites, ``... x n``.
        variance: Variance of the values given the sites, ``... x n``.
        bound: ``power Σ E log p − KL``, a lower bound of ``log E p(y | f)^power``, ``...``.
        log_scale: ``power E log p − E log site``, ``... x n``: the sites times its exponential are
            a lower bound of the likelihood.
        target: Sites that the natural gradient points to.
    """

    sites: Sites
    mean: Tensor
    variance: Tensor
    bound: Tensor
    log_scale: Tensor
    target: Sites


class SitePrior(ABC):
    """Joint normal distribution of n values before their outcomes.

    Attributes:
        mean: ``... x n``.
        collective: Processes that each have some of the values.
    """

    mean: Tensor
    collective: Collective

    @abstractmethod
    def given(self, sites: Sites) -> tuple[Tensor, Tensor, Tensor]:
        """Compute mean and variance given sites, ``... x n``, and the KL divergence, ``...``."""


@dataclass(frozen=True)
class RootPrior(SitePrior):
    """Joint normal distribution by a root, of few weights u: ``f = mean + root u + rest``.

    Attributes:
        mean: ``... x n``.
        root: Factor of u ~ N(0, I), ``... x n x k``.
        rest: Variances of a part independent of u and between values, ``... x n``.
        collective: Processes that each have some of the values, of one u.
    """

    mean: Tensor
    root: Tensor
    rest: Tensor
    collective: Collective = ALONE

    def given(self, sites: Sites) -> tuple[Tensor, Tensor, Tensor]:
        """Condition u on the sites; see :class:`SitePrior`. Cost O(n k² + k³)."""
        weighted = self.root * sites.precision.unsqueeze(-1)
        collective = self.collective
        inner = collective.sum(weighted.mT @ self.root)
        factor = safe_cholesky(identity(inner) + inner)
        pull = sites.shift - sites.precision * self.mean
        half = solve_lower(factor, self.root.mT)
        coordinates = solve_lower(factor, collective.sum(self.root.mT @ pull.unsqueeze(-1)))
        u = torch.linalg.solve_triangular(factor.mT, coordinates, upper=True)
        variance = half.square().sum(-2)
        log_precision = 2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        traced = collective.sum((sites.precision * variance).sum(-1))
        divergence = 0.5 * (u.square().sum((-2, -1)) - traced + log_precision)
        mean = self.mean + (half.mT @ coordinates).squeeze(-1)
        return mean, variance + self.rest, divergence


@dataclass(frozen=True)
class JointPrior(SitePrior):
    """Joint normal distribution by the covariance, of few values.

    Attributes:
        mean: ``... x n``.
        covariance: Covariance of the values without the rest, ``... x n x n``.
        rest: Variances of a part that is independent between values, ``... x n``.
        collective: Always one process.
    """

    mean: Tensor
    covariance: Tensor
    rest: Tensor
    collective: Collective = ALONE

    @classmethod
    def of(cls, mean: Tensor, covariance: Tensor, shape: torch.Size) -> JointPrior:
        """Make N(mean, covariance), for outcomes whose ``shape`` broadcasts against the mean's."""
        mean = mean.expand(broadcast_shapes(mean.shape, shape))
        return cls(mean, covariance.expand(*mean.shape, -1), torch.zeros_like(mean))

    def given(self, sites: Sites) -> tuple[Tensor, Tensor, Tensor]:
        """Condition the values on the sites; see :class:`SitePrior`. Cost O(n³).

        With K the covariance, S² the precisions and ``B = I + S K S``. Source: Rasmussen and
        Williams (2006), algorithms 3.1 and 3.2.
        """
        scaled, scale = scaled_prior(self.covariance, sites.precision)
        factor = safe_cholesky(identity(scaled) + scaled)
        variance = self._variance(factor, scale, sites.precision)
        pull = sites.shift / torch.where(scale > 0.0, scale, 1.0) - scale * self.mean
        gain = solve_lower(factor, pull.unsqueeze(-1))
        gain = torch.linalg.solve_triangular(factor.mT, gain, upper=True)
        gain = scale.unsqueeze(-1) * gain
        moved = self.covariance @ gain
        log_precision = 2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        traced = (sites.precision * variance).sum(-1)
        divergence = 0.5 * ((gain * moved).sum((-2, -1)) - traced + log_precision)
        return self.mean + moved.squeeze(-1), variance + self.rest, divergence

    def _variance(self, factor: Tensor, scale: Tensor, precision: Tensor) -> Tensor:
        """Compute the diagonal of ``K − K S B⁻¹ S K``, from the Cholesky factor of B and S.

        It equals the diagonal of ``(1 − B⁻¹) / S²``. The first form loses digits where a value is
        observed precisely, the second where it is hardly observed.
        """
        before = self.covariance.diagonal(dim1=-2, dim2=-1)
        well = precision * before > 1.0
        cross = scale.unsqueeze(-1) * self.covariance
        columns = torch.where(well.unsqueeze(-2), identity(cross), cross)
        explained = solve_lower(factor, columns).square().sum(-2)
        of_well = (1.0 - explained) / torch.where(well, precision, 1.0)
        return torch.where(well, of_well, before - explained).clamp_min(_EPS * before)


@dataclass(frozen=True)
class Sites:
    """Gaussian factors ``exp(shift f − ½ precision f²)`` of function values, one an outcome.

    Attributes:
        precision: Positive, ``... x n``.
        shift: ``... x n``.
    """

    precision: Tensor
    shift: Tensor

    @classmethod
    def none(cls, like: Tensor) -> Sites:
        """Make factors without information."""
        return cls(torch.zeros_like(like), torch.zeros_like(like))

    def towards(self, other: Sites, rate: Tensor) -> Sites:
        """Take a natural-gradient step: ``(1 − rate)`` of these plus ``rate`` of other sites."""
        return Sites(
            torch.lerp(self.precision, other.precision, rate),
            torch.lerp(self.shift, other.shift, rate),
        )

    def pseudo_observations(self) -> tuple[Tensor, Tensor]:
        """Return outcomes and noise variances of Gaussian observations that are equivalent."""
        return self.shift / self.precision, self.precision.reciprocal()


def local_sites(
    expected: ExpectedLogProb, mean: Tensor, variance: Tensor, power: float = 1.0
) -> tuple[Sites, Tensor]:
    """Return the sites that natural gradients at normal marginals point to, and ``E log p`` there.

    ``precision = −2 ∂E/∂variance`` and ``shift = ∂E/∂mean + precision · mean``: for a Gaussian
    likelihood the observation itself, at any marginals. Differentiable where the marginals are.
    Source: Khan and Lin (2017), conjugate-computation variational inference.
    """
    differentiable = mean.requires_grad or variance.requires_grad
    with torch.enable_grad():
        at = [t if t.requires_grad else t.detach().requires_grad_() for t in (mean, variance)]
        value = expected(*at)
        slope, bend = torch.autograd.grad(value.sum(), at, create_graph=differentiable)
    precision = (-2.0 * power * bend).clamp_min(_MIN_PRECISION)
    sites = Sites(precision, power * slope + precision * mean)
    return sites, value if differentiable else value.detach()


# --- expectations of a softmax of independent Gaussian scores ------------------------------------
# A softmax is the distribution of the largest score after Gumbel noise: ``softmax_k(f)`` is the
# probability of ``k = argmax_j (f_j + g_j)``. With independent scores,
# ``F_j(t) = E exp(-exp(f_j - t))`` the distribution function of ``f_j + g_j`` and ``F_j'`` its
# density, all are integrals over a line:
#
#     E softmax_k                = ∫ F_k'(t) Π_{j≠k} F_j(t) dt
#     E [f_k softmax_k]          = ∫ E[f_k exp(f_k - t - exp(f_k - t))] Π_{j≠k} F_j(t) dt
#     E log Σ_j exp f_j + 0.577… = ∫ t (Π_j F_j)'(t) dt
#
# These integrals and the expectations inside are trapezoidal sums, which converge exponentially
# for such functions (Trefethen and Weideman, 2014): deterministic, and differentiable.


STEP = 0.42
"""Step of the sums, in units of Gumbel noise: an error of about ``exp(-π² / STEP)``, 6e-11."""

ROWS = 64
"""Points treated at a time, for a processor's cache."""

_NORMAL_WIDTH = 6.4
_GUMBEL_BELOW, _GUMBEL_ABOVE = 3.2, 25.0
_EULER = 0.57721566490153286


@dataclass(frozen=True)
class SoftmaxMoments:
    """Moments of ``p = softmax(f)``, f Gaussian, in nats.

    Attributes:
        probabilities: ``E p``, ``... x m``.
        expected_entropy: ``E H(p)``, ``...``.
    """

    probabilities: Tensor
    expected_entropy: Tensor

    @property
    def entropy(self) -> Tensor:
        """Entropy ``H(E p)``, ``...``."""
        return entropy(self.probabilities)

    @property
    def information(self) -> Tensor:
        """Mutual information ``H(E p) - E H(p)`` of label and scores, ``...``, never negative."""
        return (self.entropy - self.expected_entropy).clamp_min(0.0)


def softmax_moments(mean: Tensor, variance: Tensor, step: float = STEP) -> SoftmaxMoments:
    """Compute the moments for independent scores.

    Cost O(m T H), T and H growing with the largest deviation.

    Args:
        mean: ``... x m``, float64.
        variance: ``... x m``.
        step: Step of the sums: twice the step is four times as fast, at the root of the accuracy.
    """
    shape = mean.shape
    rows = (moment.reshape(-1, shape[-1]).split(ROWS) for moment in (mean, variance))
    probabilities, entropies = [], []
    for m, v in zip(*rows, strict=True):
        m = m - m.detach().amax(-1, keepdim=True)  # changes nothing but rounding errors
        deviation = v.clamp_min(0.0).add(1e-18).sqrt()
        with torch.no_grad():  # nodes where the largest perturbed score may lie, `... x 1 x T`
            reach = _NORMAL_WIDTH * deviation
            low = (m - reach).amax(-1) - _GUMBEL_BELOW
            high = (m + reach).amax(-1) + _GUMBEL_ABOVE
            count = int(((high - low) / step).amax().ceil()) + 1 if m.numel() else 1
            steps = torch.arange(count, dtype=m.dtype, device=m.device)
            nodes = (low.unsqueeze(-1) + step * steps).unsqueeze(-2)
        distribution, density, weighted = _perturbed(m, deviation, nodes, step)
        # for each k the product of F_j over all j ≠ k, `... x m x T`, without a division
        ones = torch.ones_like(distribution[..., :1, :])
        before = torch.cat((ones, distribution[..., :-1, :]), -2).cumprod(-2)
        after = torch.cat((ones, distribution[..., 1:, :].flip(-2)), -2).cumprod(-2).flip(-2)
        others = before * after
        parts = step * torch.stack((density * others, weighted * others)).sum(-1)
        log_sum = step * (nodes.squeeze(-2) * (density * others).sum(-2)).sum(-1) - _EULER
        total = parts[0].sum(-1)
        expected_entropy = log_sum / total - parts[1].sum(-1) / total
        probabilities.append(parts[0] / total.unsqueeze(-1))
        entropies.append(expected_entropy.clamp_min(0.0))
    return SoftmaxMoments(
        torch.cat(probabilities).view(shape), torch.cat(entropies).view(shape[:-1])
    )


def entropy(probabilities: Tensor) -> Tensor:
    """Compute ``-Σ p log p`` over the last dimension, in nats, with finite gradients at zero."""
    return -torch.xlogy(probabilities, probabilities.clamp_min(1e-300)).sum(-1)


def _perturbed(
    mean: Tensor, deviation: Tensor, nodes: Tensor, step: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``F_j``, ``F_j'`` and density times score, at the nodes, ``... x m x T`` each.

    Relative to each score's mean, ``exp(f - t)`` is an outer product, hence one exponential a pair.
    """
    with torch.no_grad():  # nodes and weights of a normal expectation, fine against unit noise
        largest = float(deviation.amax()) if deviation.numel() else 0.0
        spacing = step * min(2.0, 1.0 / max(largest, 1e-9))
        count = math.ceil(_NORMAL_WIDTH / spacing)
        normal = spacing * torch.arange(-count, count + 1).to(deviation)
        weights = (-0.5 * normal.square()).exp()
        weights = weights / weights.sum()
    spread = deviation.unsqueeze(-1) * normal
    rise, fall = spread.exp(), (mean.unsqueeze(-1) - nodes).exp()
    below = (-fall.unsqueeze(-1) * rise.unsqueeze(-2)).exp()
    at = weights * rise
    columns = torch.stack((weights.expand_as(at), at, at * spread), -1)
    distribution, density, moved = (below @ columns).unbind(-1)
    return distribution, fall * density, fall * (moved + mean.unsqueeze(-1) * density)


def sampled_softmax(mean: Tensor, variance: Tensor, num_samples: int, seed: int | None) -> Tensor:
    """Average the softmax of drawn independent scores, ``... x m``. Cost O(m num_samples).

    The draws are common to all points, from a generator of their own if there is a seed.
    """
    generator = None if seed is None else torch.Generator(mean.device).manual_seed(seed)
    shape = (num_samples, mean.shape[-1])
    noise = torch.randn(shape, generator=generator, dtype=mean.dtype, device=mean.device)
    deviation, total = variance.clamp_min(0.0).sqrt(), torch.zeros_like(mean)
    for draw in noise:
        total = total + (mean + deviation * draw).softmax(-1)
    return total / num_samples
