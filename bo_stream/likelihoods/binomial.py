"""Binomial and beta-binomial likelihoods, of any number examined."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from gpytorch.constraints import Positive
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from numpy.polynomial.hermite_e import hermegauss
from numpy.typing import NDArray
from scipy.special import betainc, betaincc, expit, log_expit, ndtr
from torch import Tensor
from torch.distributions import Beta, Binomial, Distribution
from torch.nn.functional import logsigmoid

from bo_stream.likelihoods.outcome_model import Outliers, WithOutliers

MOST_EXAMINED = 10_000_000
"""Largest number of people examined at one site, more than in any survey: up to it rounding of log
probabilities is below 1e-7, and counts are whole numbers in single precision, too."""

NODES = 32
"""Number of nodes of Gauss-Hermite quadrature."""

_HERMITE, _HERMITE_WEIGHTS = hermegauss(NODES)
"""Nodes and weights of Gauss-Hermite quadrature."""

_FIRST_CONCENTRATION = 50.0
"""Concentration of the beta-binomial before any data: trials of a row correlate by 0.02."""

_LEAST_INFORMATION = 1e-10
"""Least information of a survey about a logit."""

_NODES_OF_SUPPORT = 64
"""Nodes of the trapezoidal rule over the support of an integrand."""

_NEGLIGIBLE = 1e-14
"""Value of an integrand relative to its largest, below which it is left out."""

_WIDEST = 12.0
"""Distance of the ends of a support from the mode, at most, in standard deviations."""

_BISECTIONS = 30

_LOG_HUGE = math.log(1e9)


class BinomialLikelihood(_OneDimensionalLikelihood):
    """Likelihood of counts with a logit link: positives of a number of trials of each row.

    A row of outcomes is ``[positives, trials]``, of one latent output, the logit f of prevalence.
    With overdispersion the counts are beta-binomial: the prevalence of a row is drawn from a Beta
    distribution of mean ``p = 1 / (1 + exp(−f))`` and concentration s, so that two trials of a row
    have the correlation ``1 / (1 + s)``. Source: Williams (1975).

    With ``outliers``, this share of the rows has a prevalence of its own, independent of f: a row
    far from its neighbours then moves them little. It is uniform on (0, 1), or has the Beta
    distribution ``outlier_beta``: where all prevalences are low, an outlier is hardly one of 0.9. f
    is the logit of prevalence of all other rows.

    Log-concave in f without overdispersion and outliers.

    Args:
        trials: Number examined by a hypothetical survey. Default: the rounded mean number observed.
        overdispersion: Whether counts are beta-binomial, with a concentration that models learn;
            of counts that vary no more than binomial ones it grows without bound.
        batch_shape: Batch shape of the concentration.
        outliers: Share of rows whose count has nothing to do with f, in [0, 1).
        outlier_beta: Parameters a and b of the Beta distribution of an outlier's prevalence.

    Raises:
        ValueError: ``trials`` is no whole number up to ``MOST_EXAMINED``, ``outliers`` is out of
            range, or a parameter of ``outlier_beta`` is not positive.
    """

    raw_concentration: Tensor
    raw_concentration_constraint: Positive

    def __init__(
        self,
        trials: int | None = None,
        overdispersion: bool = False,
        batch_shape: torch.Size | None = None,
        outliers: float = 0.0,
        outlier_beta: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        super().__init__()
        if trials is not None and not (1 <= trials <= MOST_EXAMINED and trials == int(trials)):
            raise ValueError(
                f"Expected trials to be a whole number from 1 to {MOST_EXAMINED:,}, or None, got "
                f"{trials}."
            )
        self.trials = trials
        self.overdispersion = overdispersion
        self.outliers, self.outlier_beta = float(outliers), outlier_beta
        _ = self.others  # checks them
        if overdispersion:
            start = torch.full((*(batch_shape or ()), 1), _FIRST_CONCENTRATION)
            constraint = Positive(torch.exp, torch.log)  # a step of a learner is relative
            raw = torch.nn.Parameter(constraint.inverse_transform(start))
            self.register_parameter("raw_concentration", raw)
            self.register_constraint("raw_concentration", constraint)

    @property
    def concentration(self) -> Tensor | None:
        """Concentration s of the beta-binomial, ``batch_shape x 1``; None of the binomial."""
        if not self.overdispersion:
            return None
        return self.raw_concentration_constraint.transform(self.raw_concentration)

    @property
    def others(self) -> Outliers:
        """Share and distribution of rows whose count has nothing to do with f."""
        return Outliers(self.outliers, *self.outlier_beta)

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Distribution:
        """Return the distribution of positives in ``trials`` given the logit.

        Raises:
            UnsupportedError: ``trials`` is None.
        """
        if self.trials is None:
            raise UnsupportedError(
                "Expected a number of trials to predict counts for, got none and no observation "
                "to take it from. Build BinomialLikelihood(trials=100)."
            )
        counts: Distribution
        chance, concentration = function_samples.sigmoid(), self.concentration
        trials = torch.full_like(chance, self.trials)
        if concentration is None:
            counts = Binomial(trials, logits=function_samples, validate_args=False)
        else:
            counts = BetaBinomial(trials, chance, concentration)
        return WithOutliers(counts, trials, self.others) if self.outliers else counts

    def expected_log_prob(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Compute ``E log p(y | f)`` of rows ``... x n x 2``, ``... x n``; see the function.

        With outliers a lower bound of it, ``log((1 − ε) exp E log p₀(y | f) + ε p₁(y))`` with ε
        their share, p₁ the probability for outliers and p₀ for all other rows. It is the largest
        bound in which being an outlier is independent of f. Its curvature in f is the curvature of
        p₀ times the probability of being no outlier, hence it gives a Gaussian site of positive
        precision.
        """
        positives, trials = observations.unbind(-1)
        given = function_dist.mean, function_dist.variance, self.concentration
        ordinary = expected_log_prob(positives, trials, *given)
        return self.others.mixed(ordinary, positives, trials)

    def log_marginal(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Compute ``log E p(y | f)`` of rows ``... x n x 2``, ``... x n``; see the function."""
        positives, trials = observations.unbind(-1)
        given = function_dist.mean, function_dist.variance, self.concentration
        ordinary = log_marginal(positives, trials, *given)
        return self.others.mixed(ordinary, positives, trials)


class BetaBinomial(Distribution):
    """Counts whose probability is drawn from a Beta distribution.

    Args:
        trials: Number of trials of each count.
        chance: Mean of the probability, of the same shape.
        concentration: Sum of the parameters of the Beta distribution; broadcasts.
    """

    def __init__(self, trials: Tensor, chance: Tensor, concentration: Tensor) -> None:
        self.trials, self.chance = trials, chance
        self.concentration = concentration.expand_as(chance)
        super().__init__(chance.shape, validate_args=False)

    @property
    def mean(self) -> Tensor:
        """Mean of the counts."""
        return self.trials * self.chance

    @property
    def variance(self) -> Tensor:
        """Variance of the counts: the binomial one times ``1 + (trials − 1) / (1 + s)``."""
        inflation = 1.0 + (self.trials - 1.0) / (1.0 + self.concentration)
        return self.mean * (1.0 - self.chance) * inflation

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw probabilities, then counts."""
        inside = self.chance.clamp(1e-12, 1.0 - 1e-12)
        first, second = self.concentration * inside, self.concentration * (1.0 - inside)
        drawn = Beta(first, second).sample(torch.Size(sample_shape))
        return Binomial(self.trials.expand_as(drawn), drawn, validate_args=False).sample()


def empirical_logits(positives: Tensor, examined: Tensor) -> tuple[Tensor, Tensor]:
    """Compute empirical logits ``log((y + 1/2) / (n - y + 1/2))`` and their variances.

    The variances are ``1 / (y + 1/2) + 1 / (n - y + 1/2)``.

    At low prevalence the variances depend so strongly on the outcomes that a model which is given
    them is biased upwards: leave them out there, or use a model with a binomial likelihood.

    Args:
        positives: y, any shape.
        examined: n, of the same shape.
    """
    own, others = positives + 0.5, examined - positives + 0.5
    return torch.log(own / others), 1.0 / own + 1.0 / others


def log_prob(
    positives: Tensor, trials: Tensor, logit: Tensor, concentration: Tensor | None = None
) -> Tensor:
    """Compute the log probability of counts, finite for none and for all positive.

    Args:
        positives: Whole numbers from 0 to the trials, ``...``.
        trials: Whole numbers from 1, ``...``.
        logit: Logit of the probability of one positive, ``...``.
        concentration: Concentration of the beta-binomial; None: binomial.
    """
    log_chance, log_rest = logsigmoid(logit), logsigmoid(-logit)
    negatives, choices = trials - positives, _log_choices(positives, trials)
    if concentration is None:
        return choices + positives * log_chance + negatives * log_rest
    log_s = concentration.log()
    rises = _log_rise(positives, log_s + log_chance) + _log_rise(negatives, log_s + log_rest)
    return choices + rises - _log_rise(trials, log_s)


def _log_rise(count: Tensor, log_start: Tensor) -> Tensor:
    """Compute ``log Γ(a + count) / Γ(a)`` for ``log a``, linear in it where a is tiny.

    Where a is huge the two would cancel: there it is expanded in ``1 / a``.
    """
    start, huge = log_start.clamp_max(_LOG_HUGE).exp(), log_start > _LOG_HUGE
    rise = (start + count.clamp_min(1.0)).lgamma() - (start + 1.0).lgamma() + log_start
    expanded = count * log_start + 0.5 * count * (count - 1.0) * (-log_start).exp()
    return torch.where(count > 0.0, torch.where(huge, expanded, rise), 0.0)


def _log_choices(positives: Tensor, trials: Tensor) -> Tensor:
    """Compute the log of the binomial coefficient of trials over positives."""
    return (trials + 1).lgamma() - (positives + 1).lgamma() - (trials - positives + 1).lgamma()


def expected_log_prob(
    positives: Tensor,
    trials: Tensor,
    mean: Tensor,
    variance: Tensor,
    concentration: Tensor | None = None,
) -> Tensor:
    """Compute ``E log p(positives | f)`` for a logit ``f ~ N(mean, variance)``.

    By quadrature; for the binomial only of ``log(1 + exp(f))``, since the rest is linear in f.
    Differentiable in both moments and in the concentration; all tensors broadcast.
    """
    logits, weights = normal_nodes(mean, variance)
    if concentration is None:
        softplus = -(logsigmoid(-logits) * weights).sum(-1)
        return _log_choices(positives, trials) + positives * mean - trials * softplus
    counts = positives.unsqueeze(-1), trials.unsqueeze(-1)
    return (log_prob(*counts, logits, concentration.unsqueeze(-1)) * weights).sum(-1)


def log_marginal(
    positives: Tensor,
    trials: Tensor,
    mean: Tensor,
    variance: Tensor,
    concentration: Tensor | None = None,
) -> Tensor:
    """Compute ``log E p(positives | f)`` for a logit ``f ~ N(mean, variance)``.

    By the trapezoidal rule over the logits where likelihood times normal is not negligible: to 1e-7
    up to a variance of 25, to 1e-4 at 100, to 2e-3 at 400. The nodes are constants under
    differentiation, since the integral does not depend on them. All tensors broadcast.
    """
    positives, trials, mean, variance = torch.broadcast_tensors(positives, trials, mean, variance)
    if concentration is not None:
        concentration = concentration.expand_as(mean)
    low, high = _support(positives, trials, mean, variance, concentration)
    steps = torch.linspace(0.0, 1.0, _NODES_OF_SUPPORT, dtype=mean.dtype, device=mean.device)
    logits = low.unsqueeze(-1) + (high - low).unsqueeze(-1) * steps
    weight = (high - low) / (_NODES_OF_SUPPORT - 1)
    y, n, m, v = (t.unsqueeze(-1) for t in (positives, trials, mean, variance))
    s = None if concentration is None else concentration.unsqueeze(-1)
    total = _log_joint(logits, y, n, m, v, s).logsumexp(-1)
    return total + (weight / (2.0 * math.pi * variance).sqrt()).log()


def logit_noise(
    trials: Tensor, mean: Tensor, variance: Tensor, concentration: Tensor | None = None
) -> Tensor:
    """Compute the noise variance of an observation of a logit that is worth as much as a count.

    The inverse of the expected information ``E n p (1 − p)`` in n trials about a logit
    ``f ~ N(mean, variance)``, of a beta-binomial count divided by its overdispersion
    ``1 + (n − 1) / (1 + s)``. By quadrature with 32 nodes, to a thousandth up to a variance of 10
    and to 3 % at 25; beyond they are too far apart: it is up to 1.6 times too large at 100. All
    tensors broadcast. Finite, at most 1e10, where a prevalence is 0 or 1 in floating point.

    Args:
        trials: n, from 1.
        mean: Mean of the logit.
        variance: Variance of the logit.
        concentration: Concentration s of the beta-binomial; None: binomial.
    """
    logits, weights = normal_nodes(mean, variance)
    chance = logits.sigmoid()
    share: Tensor | float = 1.0
    if concentration is not None:  # a beta-binomial count is worth a share of its trials
        s = concentration.detach()
        share = (1.0 + s) / (trials + s)
    information = trials * share * (chance * (1.0 - chance) * weights).sum(-1)
    return information.clamp_min(_LEAST_INFORMATION).reciprocal()


def _log_joint(
    logit: Tensor,
    positives: Tensor,
    trials: Tensor,
    mean: Tensor,
    variance: Tensor,
    concentration: Tensor | None,
) -> Tensor:
    """Compute the log of likelihood times normal, without the normal's constant."""
    likelihood = log_prob(positives, trials, logit, concentration)
    return likelihood - 0.5 * (logit - mean).square() / variance


@torch.no_grad()
def _support(
    positives: Tensor,
    trials: Tensor,
    mean: Tensor,
    variance: Tensor,
    concentration: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Find the logits between which likelihood times normal is more than ``_NEGLIGIBLE``.

    Relative to its largest value, which lies between the normal's mean plus its variance times the
    number of positives, and minus its variance times the number of negatives.
    """
    given = positives, trials, mean, variance, concentration
    low, high = mean - variance * (trials - positives), mean + variance * positives
    of_counts = positives, trials, concentration
    mode = _bisected(lambda f: _slope(f, *of_counts) > (f - mean) / variance, low, high)
    least = _log_joint(mode, *given) + math.log(_NEGLIGIBLE)
    reach = _WIDEST * variance.sqrt()
    return (
        _bisected(lambda f: _log_joint(f, *given) < least, mode - reach, mode),
        _bisected(lambda f: _log_joint(f, *given) > least, mode, mode + reach),
    )


def _bisected(is_low: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """Halve intervals at whose lower ends a condition holds, and at whose upper ends it does not.

    Until their width is ``2⁻³⁰`` of the first, or rounding.
    """
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        below = is_low(middle)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return 0.5 * (low + high)


def _slope(
    logit: Tensor, positives: Tensor, trials: Tensor, concentration: Tensor | None
) -> Tensor:
    """Compute the derivative of :func:`log_prob` by the logit."""
    chance, rest, negatives = logit.sigmoid(), (-logit).sigmoid(), trials - positives
    if concentration is None:
        return positives - trials * chance
    rises = _slope_of_rise(positives, concentration * chance)
    falls = _slope_of_rise(negatives, concentration * rest)
    return rest * rises - chance * falls


def _slope_of_rise(count: Tensor, start: Tensor) -> Tensor:
    """Compute the derivative of ``log Γ(a + count) / Γ(a)`` by ``log a``."""
    rise = start * ((start + count.clamp_min(1.0)).digamma() - (start + 1.0).digamma()) + 1.0
    return torch.where(count > 0.0, rise, 0.0)


def normal_nodes(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return nodes, ``... x NODES``, and weights, ``NODES``, of expectations under normals."""
    nodes = mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * mean.new_tensor(_HERMITE)
    return nodes, mean.new_tensor(_HERMITE_WEIGHTS / math.sqrt(2.0 * math.pi))


_FAULTS: tuple[tuple[int, Callable[[Tensor, Tensor], Tensor], str], ...] = (
    (1, lambda y, n: n != n.round(), "a whole number of examined"),
    (1, lambda y, n: ~(n >= 1.0), "1 or more examined; leave out rows where nobody was"),
    (
        1,
        lambda y, n: ~(n <= MOST_EXAMINED),
        f"at most {MOST_EXAMINED:,} examined, more than any survey examines at one site",
    ),
    (
        0,
        lambda y, n: y != y.round(),
        "a whole number of positives, not a prevalence (round(prevalence * examined))",
    ),
    (0, lambda y, n: ~(y >= 0.0), "0 or more positives"),
    (
        0,
        lambda y, n: ~(y <= n),
        "at most as many positives as examined (column 0: positives, column 1: examined; a "
        "prevalence in per cent is prevalence / 100 * examined positives)",
    ),
)
"""Columns, conditions under which a value is wrong, and descriptions of the expected value."""


def check_counts(Y: Tensor) -> None:
    """Check rows ``[positives, examined]``, ``... x n x 2``.

    Raises:
        InputDataError: One has more positives than examined, none examined, more examined than
            ``MOST_EXAMINED``, or no whole numbers; names the first such row and column, from 0.
    """
    for column, fault, expected in _FAULTS:
        bad = fault(Y[..., 0], Y[..., 1])
        if bool(bad.any()):
            *batch, row = (int(i) for i in bad.nonzero()[0])
            got = [f"{value:g}" for value in Y[(*batch, row)].tolist()]
            index = ", ".join(str(i) for i in (*batch, row, column))
            raise InputDataError(
                f"Expected {expected}; got Y[{index}] = {got[column]}, row {row}, column {column}: "
                f"{got[0]} positives of {got[1]} examined."
            )


# --- distribution functions of counts of many trials ---------------------------------------------
# Of n trials of one probability p at most y are positive where p is below the (y + 1)-th smallest
# of n uniform numbers, U, which is distributed as Beta(y + 1, n − y) [David and Nagaraja, Order
# Statistics, 2003, section 2.1]. So ``P(Y ≤ y) = P(p < U)`` is one integral, for any distribution
# of p: of p's distribution function over U, if U is the narrower of the two, else the other way
# round.


Array = NDArray[np.float64]

REACH = 9.0
"""Standard deviations on both sides that are integrated over."""

_TAIL = 37.0
"""Distance in units of an exponential tail's decay beyond which a density is left out."""

LARGE_COUNTS_NODES = 192
"""Nodes of the trapezoidal rule over the logit."""

NODES_OF_LATENT, _INNER_NODES = 64, 96
"""Nodes over the latent logit, and of the integral at each, of beta-binomial counts."""

NARROW, FAR = 400.0, 400.0
"""Trials in units of concentration, and positives as well as negatives, from which two nodes of
that integral are enough: U is so narrow that they miss less than ``(1 / 400)² / 12``."""


def chance_up_to(
    positives: Array, trials: Array, mean: Array, variance: Array, concentration: Array | None
) -> Array:
    """Compute the probability of at most y positives, by quadrature, ``n``.

    Args:
        positives: Whole numbers y from 0 to the trials, ``n``.
        trials: ``n``.
        mean: Mean of the logit of prevalence, which is normal, ``n``.
        variance: Variance of the logit, ``n``.
        concentration: Concentration of a beta-binomial, ``n``; None: binomial.
    """
    result: Array = np.ones(len(positives))
    some = positives < trials
    y, n, m, deviation = (t[some] for t in (positives, trials, mean, np.sqrt(variance)))
    if concentration is None:
        result[some] = _normal_below(y + 1.0, n - y, m, deviation)
        return result
    # Nodes are dense where the distribution function given the logit f goes from 1 to 0: they are
    # evenly spaced in t with f = middle + width sinh(t).
    s, share = concentration[some], (y + 0.5) / (n + 1.0)
    middle = np.log(share) - np.log1p(-share)
    width = np.sqrt((1.0 / s + 1.0 / n) / (share * (1.0 - share)))
    low, high = (np.arcsinh((m + r * deviation - middle) / width) for r in (-REACH, REACH))
    narrow = (n >= NARROW * (s + 1.0)) & (y >= FAR) & (n - y >= FAR)
    total, weights = np.zeros(len(y)), np.zeros(len(y))
    for step in np.linspace(0.0, 1.0, NODES_OF_LATENT):
        t = low + (high - low) * step
        f = middle + width * np.sinh(t)
        weight = np.exp(-0.5 * ((f - m) / deviation) ** 2) * np.cosh(t)
        given, below = (y + 1.0, n - y, s * expit(f), s * expit(-f)), np.empty(len(y))
        a, b, c, d = (each[narrow] for each in given)
        below[narrow] = _below_narrow(a, b, c, d)
        a, b, c, d = (each[~narrow] for each in given)
        below[~narrow] = _beta_below(a, b, c, d, _INNER_NODES)
        total, weights = total + weight * below, weights + weight
    result[some] = total / weights
    return result


def outliers_up_to(positives: Array, trials: Array, a: float, b: float) -> Array:
    """Compute the probability of at most y positives for a prevalence from Beta(a, b), ``n``."""
    result: Array = np.ones(len(positives))
    some = positives < trials
    y, n = positives[some], trials[some]
    result[some] = _beta_below(y + 1.0, n - y, np.full(len(y), a), np.full(len(y), b))
    return result


def _normal_below(a: Array, b: Array, mean: Array, deviation: Array) -> Array:
    """Compute ``P(f < logit U)`` for a normal f and U ~ Beta(a, b)."""
    result = np.empty(len(a))
    wide = deviation > _spread(a, b)
    logits, density = _bell(a[wide], b[wide])
    below = ndtr((logits - mean[wide, None]) / deviation[wide, None])
    result[wide] = (density * below).sum(-1)
    rest = ~wide
    z = np.linspace(-REACH, REACH, LARGE_COUNTS_NODES)
    weights = np.exp(-0.5 * z**2)
    weights = weights / weights.sum()
    rates = expit(mean[rest, None] + deviation[rest, None] * z)
    result[rest] = betaincc(a[rest, None], b[rest, None], rates) @ weights
    return result


def _beta_below(a: Array, b: Array, c: Array, d: Array, nodes: int = LARGE_COUNTS_NODES) -> Array:
    """Compute ``P(p < U)`` for p ~ Beta(c, d) and U ~ Beta(a, b)."""
    result = np.empty(len(a))
    wide = _spread(c, d) > _spread(a, b)
    logits, density = _bell(a[wide], b[wide], nodes)
    below = betainc(c[wide, None], d[wide, None], expit(logits))
    result[wide] = (density * below).sum(-1)
    rest = ~wide
    logits, density = _bell(c[rest], d[rest], nodes)
    above = betaincc(a[rest, None], b[rest, None], expit(logits))
    result[rest] = (density * above).sum(-1)
    return result


def _below_narrow(a: Array, b: Array, c: Array, d: Array) -> Array:
    """Compute ``P(p < U)`` for U ~ Beta(a, b) much narrower than p ~ Beta(c, d), by two nodes.

    The Gauss rule of two nodes has the mean m, standard deviation v and skewness g of U: nodes
    ``m + v (g/2 ± r/2)`` with ``r = √(4 + g²)`` and weights ``(1 ∓ g/r) / 2``.
    """
    size = a + b
    mean, deviation = a / size, np.sqrt(a * b / (size + 1.0)) / size
    skewness = 2.0 * (b - a) * np.sqrt((size + 1.0) / (a * b)) / (size + 2.0)
    root = np.sqrt(4.0 + skewness**2)
    nodes = (mean + 0.5 * deviation * (skewness + sign * root) for sign in (1.0, -1.0))
    upper, lower = (betainc(c, d, node) for node in nodes)
    result: Array = 0.5 * (upper + lower) - 0.5 * (skewness / root) * (upper - lower)
    return result


def _spread(a: Array, b: Array) -> Array:
    """Approximate the standard deviation of the logit of a Beta variable."""
    spread: Array = np.sqrt(1.0 / a + 1.0 / b)
    return spread


def _bell(a: Array, b: Array, nodes: int = LARGE_COUNTS_NODES) -> tuple[Array, Array]:
    """Return nodes over the logit of Beta variables and their probabilities, ``n x nodes``."""
    mode, reach = np.log(a) - np.log(b), REACH * _spread(a, b)
    low, high = mode - reach - _TAIL / a, mode + reach + _TAIL / b
    steps = np.linspace(0.0, 1.0, nodes)
    logits: Array = low[:, None] + (high - low)[:, None] * steps
    x, y = a[:, None], b[:, None]
    log = x * log_expit(logits) + y * log_expit(-logits)
    density = np.exp(log - log.max(-1, keepdims=True))
    return logits, density / density.sum(-1, keepdims=True)
