"""How outcomes depend on the process: likelihoods in the form of streaming models, and outliers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any

import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    LaplaceLikelihood,
    Likelihood,
    StudentTLikelihood,
)
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from linear_operator.operators import DiagLinearOperator
from scipy.optimize import minimize_scalar
from scipy.special import stdtr
from torch import Tensor
from torch.distributions import Bernoulli, Beta, Binomial, Distribution, Laplace, Normal, StudentT
from torch.nn.functional import logsigmoid

from bo_stream.likelihoods.sites import ExpectedLogProb

_SMALLEST_VARIANCE = 1e-9

_NEAR = 1e-4
"""Distance of mean and outcome, in deviations, below which a slope over it is rounding."""


@dataclass(frozen=True)
class OutcomeModel:
    """Likelihood of m outputs as a model uses it; tensors are ``... x m x n`` throughout.

    Attributes:
        likelihood: In float64, of the model's batch shape, with m last where m is not 1.
        outputs: Number m of outputs. Outcomes of counts are ``... x 2 x n``, positives and trials
            of one output.
    """

    likelihood: Likelihood
    outputs: int

    @classmethod
    def of(cls, likelihood: Likelihood, outputs: int) -> OutcomeModel:
        """Make the outcome model of a copy of a likelihood."""
        return cls(deepcopy(likelihood).double().eval().requires_grad_(False), outputs)

    def expected_log_prob(self, Y: Tensor) -> ExpectedLogProb:
        """Return ``E log p(y | f)`` of outcomes as a function of the marginals of f."""
        return lambda mean, variance: self._outward(
            expected_log_prob(self.likelihood, *self._at(mean, variance, Y))
        )

    def bounded_precision(
        self, Y: Tensor, mean: Tensor, variance: Tensor, slope: Tensor, value: Tensor
    ) -> Tensor:
        """Compute the precision that keeps a quadratic below what log p(y | f) can be.

        Of the quadratic in the mean that has the slope of ``E log p(y | f)`` at the present mean.
        Of a Laplace or Student-t likelihood, mixtures of normal ones, it is ``slope / (y − mean)``,
        with the outcome as its maximum: a lower bound of ``E log p`` at any other mean, for that of
        such mixtures is convex in ``(y − mean)²``. Of others it is ``slope² / (−2 value)``, which
        has the maximum 0, that of the log of a probability: for the logistic likelihood, at a mean
        of −ξ that the label contradicts, the classical bound's ``tanh(ξ / 2) / 2ξ``, nearly.
        Source: Jaakkola and Jordan (2000); Palmer, Wipf, Kreutz-Delgado and Rao (2006).

        Args:
            Y: Outcomes.
            mean: Of the present marginals.
            variance: Of these.
            slope: Derivative of the expectation in the mean, times the power of the likelihood that
                the posterior is found with.
            value: The expectation, times the same power.

        Returns:
            Precisions, at least 0; they are 0 where the mean is nearly at the maximum.
        """
        if isinstance(self.likelihood, LaplaceLikelihood | StudentTLikelihood):
            gap = Y[..., : self.outputs, :] - mean
            far = gap.abs() > _NEAR * variance.sqrt()
            precision = slope / torch.where(far, gap, 1.0)
        else:
            far = value < 0.0
            precision = slope.square() / torch.where(far, -2.0 * value, 1.0)
        return torch.where(far, precision, 0.0).clamp_min(0.0)

    def ordinary_log_prob(self, Y: Tensor) -> ExpectedLogProb | None:
        """Return ``E log p(y | f)`` of outcomes that are no outliers; None without any of these."""
        if not getattr(self.likelihood, "outliers", 0.0):
            return None
        ordinary = deepcopy(self.likelihood)
        ordinary.outliers = 0.0
        return replace(self, likelihood=ordinary).expected_log_prob(Y)

    def log_marginal(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Compute ``log E p(y | f)`` of each outcome under a normal f."""
        y, m, v = self._at(mean, variance, Y)
        if m.numel() == 0:
            return self._outward(m)  # some distributions cannot be empty
        return self._outward(log_marginal(self.likelihood, y, m, v))

    def moments(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Compute mean and variance of an outcome under a normal f."""
        m, v = self._at(mean, variance)
        if m.numel() == 0:
            return self._outward(m), self._outward(v)
        if self.likelihood.has_analytic_marginal:
            outcome = self.likelihood.marginal(independent(m, v))
            return self._outward(outcome.mean), self._outward(outcome.variance)
        average, normal = self.likelihood.quadrature, Normal(m, v.sqrt())
        first = average(lambda f: self.likelihood(f).mean, normal)
        second = average(lambda f: (d := self.likelihood(f)).variance + d.mean.square(), normal)
        return self._outward(first), self._outward(second - first.square())

    def distribution_function(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Compute the probability of an outcome of at most Y under a normal f, by quadrature.

        Raises:
            UnsupportedError: No distribution function is known, as for labels or counts.
        """
        y, m, v = self._at(mean, variance, Y)
        normal = Normal(m, v.sqrt())
        probability = self.likelihood.quadrature(
            lambda f: distribution_function(self.likelihood(f), y), normal
        )
        return self._outward(probability)

    def variance(self, values: Tensor) -> Tensor:
        """Compute the variance of an outcome given values of the process."""
        (inward,) = self._inward(values)
        return self._outward(self.likelihood(inward).variance)

    def draw(self, values: Tensor, seed: int) -> Tensor:
        """Draw outcomes given values of the process; the same noise for each batch of inputs.

        Differentiable in the values where the likelihood's draws are (Laplace, Student-t, Beta);
        labels and counts are steps.

        Args:
            values: ``samples x t x batch_shape x m x n``, for t batches of inputs.
            seed: Seed of torch's generator, whose state is restored afterwards.
        """
        devices = [values.device] if values.is_cuda else []
        drawn = []
        with torch.random.fork_rng(devices=devices):
            for batch in values.unbind(1):
                torch.manual_seed(seed)
                (inward,) = self._inward(batch)
                outcome = self.likelihood(inward)
                draw = outcome.rsample if outcome.has_rsample else outcome.sample
                drawn.append(self._outward(draw()))
        return torch.stack(drawn, 1)

    def check(self, Y: Tensor) -> None:
        """Check that the likelihood can have such outcomes.

        Raises:
            InputDataError: They are outside its support.
        """
        if Y.numel() == 0:
            return  # some distributions cannot be empty
        (y,) = self._inward(Y)
        conditional = self.likelihood(torch.zeros_like(y))
        support = conditional.support
        inside = support.check(y)
        if bool(inside.all()):
            inside = conditional.log_prob(y).isfinite()
        if not bool(inside.all()):
            labels = isinstance(self.likelihood, BernoulliLikelihood)
            remedy = " Labels are 0 and 1; from -1 and 1: (Y + 1) / 2." if labels else ""
            raise InputDataError(
                f"Expected Y that a {type(self.likelihood).__name__} can have, {support}, got "
                f"{y[~inside].unique().tolist()[:5]}.{remedy}"
            )

    def _at(self, mean: Tensor, variance: Tensor, *Y: Tensor) -> list[Tensor]:
        """Return outcomes and moments in the likelihood's shapes; counts are ``... x n x 2``."""
        columns = [column for y in Y for column in y.split(self.outputs, -2)]
        *values, m, v = self._inward(*columns, mean, variance.clamp_min(_SMALLEST_VARIANCE))
        return [torch.stack(values, -1) if len(values) > 1 else y for y in values[:1]] + [m, v]

    def _inward(self, *tensors: Tensor) -> list[Tensor]:
        """Broadcast tensors to the likelihood's shapes, without m where it is 1."""
        wide = torch.broadcast_tensors(*tensors)
        return [t.squeeze(-2) if self.outputs == 1 else t for t in wide]

    def _outward(self, value: Tensor) -> Tensor:
        """Return a value of the likelihood as ``... x m x n``."""
        return value.unsqueeze(-2) if self.outputs == 1 else value


def check_likelihood(likelihood: Likelihood, parameter_shape: torch.Size) -> None:
    """Check that a likelihood is of one function value an outcome, and fits the model's shape.

    The shape is ``batch_shape``, with m last where m is not 1.

    Raises:
        UnsupportedError: It is not, or does not.
    """
    name = type(likelihood).__name__
    if not isinstance(likelihood, GaussianLikelihood | _OneDimensionalLikelihood):
        raise UnsupportedError(
            "Expected likelihood to be one of gpytorch's of one function value an outcome, such as "
            "BernoulliLikelihood, LaplaceLikelihood, StudentTLikelihood, PoissonLikelihood or "
            f"GaussianLikelihood, got {name}. For known noise variances use OSGPR with "
            "train_Yvar; for more than two classes DirichletWISKI."
        )
    shapes = [parameter.shape[:-1] for parameter in likelihood.parameters()]
    pairs = [zip(reversed(s), reversed(parameter_shape), strict=False) for s in shapes]
    widths = all(len(shape) <= len(parameter_shape) for shape in shapes)
    if not widths or not all(a in (1, b) for each in pairs for a, b in each):
        raise UnsupportedError(
            f"Expected {name} of batch shape {tuple(parameter_shape)} (batch_shape x m, without m "
            f"if that is 1) or none, got {[tuple(shape) for shape in shapes]}."
        )


class LogisticLikelihood(_OneDimensionalLikelihood):
    """Likelihood ``p(y = 1 | f) = 1 / (1 + exp(−f))`` of labels 0 and 1. Log-concave.

    gpytorch's ``BernoulliLikelihood`` has a probit link. Expectations under a normal f are by
    Gauss-Hermite quadrature.
    """

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Bernoulli:
        """Return the distribution of labels given values of the process."""
        return Bernoulli(logits=function_samples)


@singledispatch
def expected_log_prob(likelihood: Likelihood, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Compute ``E log p(y | f)`` for ``f ~ N(mean, variance)``, smooth in both moments.

    By the likelihood's own ``expected_log_prob``, Gauss-Hermite quadrature, where there is no rule
    below. The likelihood has the dtype of the outcomes; all tensors are ``... x n``.
    """
    return likelihood.expected_log_prob(Y, independent(mean, variance))


@expected_log_prob.register
def _gaussian(likelihood: GaussianLikelihood, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Compute in closed form: gpytorch's own does not broadcast the noise of a batch of outputs."""
    noise = likelihood.noise
    return -0.5 * (((Y - mean).square() + variance) / noise + (2.0 * math.pi * noise).log())


@expected_log_prob.register
def _laplace(likelihood: LaplaceLikelihood, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Compute in closed form: quadrature of the kink of ``|y − f|`` has steps for a slope.

    ``E|t| = s √(2/π) exp(−m²/2s²) + m erf(m / s√2)`` for ``t ~ N(m, s²)``, the folded normal.
    """
    scale, gap, deviation = likelihood.noise.sqrt(), Y - mean, variance.sqrt()
    ratio = gap / deviation
    folded = deviation * math.sqrt(2.0 / math.pi) * (-0.5 * ratio.square()).exp()
    folded = folded + gap * torch.erf(ratio / math.sqrt(2.0))
    return -folded / scale - (2.0 * scale).log()


@expected_log_prob.register(BernoulliLikelihood)
@expected_log_prob.register(LogisticLikelihood)
def _labels(likelihood: Likelihood, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Integrate torch's log cdf: the second derivative of gpytorch's normal one is wrong."""
    signs, normal = 2.0 * Y - 1.0, Normal(mean, variance.sqrt())
    logistic = isinstance(likelihood, LogisticLikelihood)
    log_cdf = logsigmoid if logistic else torch.special.log_ndtr
    return likelihood.quadrature(lambda f: log_cdf(signs * f), normal)


def distribution_function(conditional: Distribution, Y: Tensor) -> Tensor:
    """Compute the probability of an outcome of at most Y given the process.

    Raises:
        UnsupportedError: The distribution is neither a Laplace nor a Student-t distribution.
    """
    if isinstance(conditional, Laplace):
        return conditional.cdf(Y)
    if isinstance(conditional, StudentT):
        ratio = (Y - conditional.loc) / conditional.scale
        degrees, ratio = torch.broadcast_tensors(conditional.df, ratio)
        probability = stdtr(degrees.cpu().numpy(), ratio.cpu().numpy())
        return torch.as_tensor(probability, dtype=Y.dtype, device=Y.device)
    name = type(conditional).__name__
    raise UnsupportedError(
        f"Expected outcomes of a Laplace or Student-t distribution, got {name}: no probability "
        "integral transform is known of others."
    )


@singledispatch
def log_marginal(likelihood: Likelihood, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Compute ``log E p(y | f)`` for ``f ~ N(mean, variance)``.

    By the likelihood's own ``log_marginal``, but for the rule below. gpytorch's Gauss-Hermite
    quadrature is summed in logarithms, and is finite where all probabilities underflow. Values of f
    beyond the last of its 20 nodes, 7.6 deviations from the mean, do not count. Arguments as for
    :func:`expected_log_prob`.
    """
    if type(likelihood).log_marginal is not _OneDimensionalLikelihood.log_marginal:
        return likelihood.log_marginal(Y, independent(mean, variance))
    rule, leading = likelihood.quadrature, (-1, *[1] * mean.dim())
    nodes = mean + (2.0 * variance).sqrt() * rule.locations.view(leading)
    log_weights = rule.weights.log().view(leading) - 0.5 * math.log(math.pi)
    return (likelihood(nodes).log_prob(Y) + log_weights).logsumexp(0)


@log_marginal.register
def _laplace_marginal(
    likelihood: LaplaceLikelihood, Y: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    """Compute in closed form: quadrature of 20 nodes errs by percents, for the density has a kink.

    ``E exp(−|y − f| / b) / 2b`` for ``f ~ N(m, s²)`` is ``exp(s² / 2b²) / 2b`` times the sum of
    ``exp(±g / b) Φ(∓g / s − s / b)``, where ``g = y − m``.
    """
    scale, deviation = likelihood.noise.sqrt(), variance.sqrt()
    gap, ratio = Y - mean, deviation / scale
    above, below = (
        sign * gap / scale + torch.special.log_ndtr(-sign * gap / deviation - ratio)
        for sign in (1.0, -1.0)
    )
    return torch.logaddexp(above, below) + 0.5 * ratio.square() - (2.0 * scale).log()


def independent(mean: Tensor, variance: Tensor) -> MultivariateNormal:
    """Make the distribution of uncorrelated normals that gpytorch's likelihoods take."""
    return MultivariateNormal(mean, DiagLinearOperator(variance))


# --- outliers: counts that do not depend on the logit of prevalence ------------------------------


_LEAST_SUM, _LARGEST_SUM = 0.3, 400.0
"""Bounds of the sum of the parameters of a Beta distribution that is learned from counts."""


@dataclass(frozen=True)
class Outliers:
    """A share of rows whose prevalence is drawn from a Beta distribution, independent of the map.

    A count of an outlier is beta-binomial: with ``a = b = 1``, a uniform prevalence, each of the
    numbers from 0 to the trials is as likely.

    Attributes:
        share: Share of the outliers, in [0, 1).
        a: First parameter of the Beta distribution, positive.
        b: Second parameter, positive; the mean prevalence is ``a / (a + b)``.
    """

    share: float = 0.0
    a: float = 1.0
    b: float = 1.0

    def __post_init__(self) -> None:
        """Check the parameters; ValueError."""
        if not 0.0 <= self.share < 1.0:
            raise ValueError(f"Expected outliers as a share in [0, 1), got {self.share}.")
        if not (0.0 < self.a < math.inf and 0.0 < self.b < math.inf):
            raise ValueError(
                "Expected outlier_beta to be two positive parameters of a Beta distribution, got "
                f"({self.a}, {self.b}). The mean prevalence is a / (a + b)."
            )

    @classmethod
    def like(cls, positives: Tensor, trials: Tensor, share: float) -> Outliers:
        """Make outliers whose prevalences are distributed as in all counts together.

        The mean is the pooled prevalence; the sum ``a + b`` maximises the likelihood of the counts,
        between 0.3 and 400. Uniform without any count.

        Args:
            positives: Whole numbers from 0 to the trials, ``n``.
            trials: Whole numbers from 1, ``n``.
            share: Share of the outliers.
        """
        if len(positives) == 0:
            return cls(share)
        mean = float((positives.sum() + 0.5) / (trials.sum() + 1.0))

        def of(log_sum: float) -> Outliers:
            return cls(share, math.exp(log_sum) * mean, math.exp(log_sum) * (1.0 - mean))

        result = minimize_scalar(
            lambda log_sum: -float(of(log_sum).log_prob(positives, trials).sum()),
            bounds=(math.log(_LEAST_SUM), math.log(_LARGEST_SUM)),
            method="bounded",
        )
        return of(float(result.x))

    def log_prob(self, positives: Tensor, trials: Tensor) -> Tensor:
        """Compute the log probability of counts of outliers, elementwise."""
        negatives = trials - positives
        choices = -_log_beta(positives + 1.0, negatives + 1.0) - (trials + 1.0).log()
        a, b = torch.as_tensor(self.a).to(trials), torch.as_tensor(self.b).to(trials)
        return choices + _log_beta(positives + a, negatives + b) - _log_beta(a, b)

    def mixed(self, log_ordinary: Tensor, positives: Tensor, trials: Tensor) -> Tensor:
        """Return ``log((1 − share) p + share p_outlier)`` from ``log_ordinary = log p``."""
        if self.share == 0.0:
            return log_ordinary
        alike = math.log(self.share) + self.log_prob(positives, trials)
        return torch.logaddexp(math.log1p(-self.share) + log_ordinary, alike)

    def mean(self, ordinary: Tensor, trials: Tensor) -> Tensor:
        """Return the mean of counts from the mean of the others, ``ordinary``."""
        return torch.lerp(ordinary, trials * (self.a / (self.a + self.b)), self.share)

    def variance(self, mean: Tensor, variance: Tensor, trials: Tensor) -> Tensor:
        """Return the variance of counts, from the mean and the variance of the others.

        Outliers of n trials have the variance ``n q (1 − q) (a + b + n) / (a + b + 1)`` with
        ``q = a / (a + b)``.
        """
        total = self.a + self.b
        q = self.a / total
        own = trials * (q * (1.0 - q) / (total + 1.0)) * (total + trials)
        between = self.share * (1.0 - self.share) * (mean - trials * q).square()
        return torch.lerp(variance, own, self.share) + between


class WithOutliers(Distribution):
    """Counts, some of which are of outliers.

    Args:
        ordinary: Distribution of the others.
        trials: Number of trials of each count.
        outliers: Share and distribution of the outliers.
    """

    def __init__(self, ordinary: Distribution, trials: Tensor, outliers: Outliers) -> None:
        self.ordinary, self.trials, self.outliers = ordinary, trials, outliers
        super().__init__(ordinary.batch_shape, validate_args=False)

    @property
    def mean(self) -> Tensor:
        """Mean of the counts."""
        return self.outliers.mean(self.ordinary.mean, self.trials)

    @property
    def variance(self) -> Tensor:
        """Variance of the counts."""
        return self.outliers.variance(self.ordinary.mean, self.ordinary.variance, self.trials)

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw which are outliers, then counts."""
        counts = self.ordinary.sample(torch.Size(sample_shape))
        trials, outliers = self.trials.expand_as(counts), self.outliers
        prevalence = Beta(trials.new_tensor(outliers.a), trials.new_tensor(outliers.b))
        chance = prevalence.sample(trials.shape)
        others = Binomial(trials, chance, validate_args=False).sample()
        return torch.where(torch.rand_like(counts) < self.outliers.share, others, counts)


def _log_beta(a: Tensor, b: Tensor) -> Tensor:
    """Compute the logarithm of the Beta function."""
    return a.lgamma() + b.lgamma() - (a + b).lgamma()
