"""The likelihood of outcomes given the process, in float64: what a model asks of it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood, Likelihood
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from torch import Tensor
from torch.distributions import Distribution

from bo_stream.likelihoods.expected_log_prob import expected_log_prob, independent, log_marginal
from bo_stream.likelihoods.sites import ExpectedLogProb

_SMALLEST_VARIANCE = 1e-9


@dataclass(frozen=True)
class OutcomeModel:
    """A likelihood of m outputs; tensors are ``... x m x n`` throughout.

    Attributes:
        likelihood: In float64, of the model's batch shape, with m last where that is not 1.
        outputs: m.
    """

    likelihood: Likelihood
    outputs: int

    @classmethod
    def of(cls, likelihood: Likelihood, outputs: int) -> OutcomeModel:
        """Of a likelihood as it is now."""
        copy: Likelihood = deepcopy(likelihood).double().eval()
        return cls(copy.requires_grad_(False), outputs)

    def _inward(self, *tensors: Tensor) -> list[Tensor]:
        """As the likelihood has them, of one shape: without m if that is 1."""
        wide = torch.broadcast_tensors(*tensors)
        return [t.squeeze(-2) if self.outputs == 1 else t for t in wide]

    def _outward(self, value: Tensor) -> Tensor:
        return value.unsqueeze(-2) if self.outputs == 1 else value

    def _marginals(self, mean: Tensor, variance: Tensor) -> list[Tensor]:
        return self._inward(mean, variance.clamp_min(_SMALLEST_VARIANCE))

    def expected_log_prob(self, Y: Tensor) -> ExpectedLogProb:
        """Of some outcomes, which broadcast against the marginals."""

        def expected(mean: Tensor, variance: Tensor) -> Tensor:
            y, m, v = self._inward(Y, mean, variance.clamp_min(_SMALLEST_VARIANCE))
            return self._outward(expected_log_prob(self.likelihood, y, m, v))

        return expected

    def log_marginal(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """``log E p(y | f)`` of each outcome under a normal f."""
        y, m, v = self._inward(Y, mean, variance.clamp_min(_SMALLEST_VARIANCE))
        return self._outward(log_marginal(self.likelihood, y, m, v))

    def moments(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of an outcome under a normal f."""
        m, v = self._marginals(mean, variance)
        if self.likelihood.has_analytic_marginal:
            outcome = self.likelihood.marginal(independent(m, v))
            return self._outward(outcome.mean), self._outward(outcome.variance)
        average = self.likelihood.quadrature
        normal = torch.distributions.Normal(m, v.sqrt())
        first = average(lambda f: self.likelihood(f).mean, normal)
        second = average(lambda f: (d := self.likelihood(f)).variance + d.mean.square(), normal)
        return self._outward(first), self._outward(second - first.square())

    def variance(self, values: Tensor) -> Tensor:
        """Of an outcome at values of the process."""
        (inward,) = self._inward(values)
        return self._outward(self.likelihood(inward).variance)

    def draw(self, values: Tensor, seed: int) -> Tensor:
        """Outcomes at values of the process; the same noise for each batch of inputs.

        Differentiable in the values where the likelihood's draws are (Laplace, Student-t, Beta);
        labels and counts are steps.

        Args:
            values: ``samples x t x batch_shape x m x n``, for t batches of inputs.
            seed: Of torch's generator, whose state is put back afterwards.
        """
        devices = [values.device] if values.is_cuda else []
        drawn = []
        with torch.random.fork_rng(devices=devices):
            for batch in values.unbind(1):
                torch.manual_seed(seed)
                (inward,) = self._inward(batch)
                drawn.append(self._outward(_sample(self.likelihood(inward))))
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
            raise InputDataError(
                f"Expected Y that a {type(self.likelihood).__name__} can have, {support}, got "
                f"{y[~inside].unique().tolist()[:5]}.{_remedy(self.likelihood)}"
            )


def _sample(distribution: Distribution) -> Tensor:
    if distribution.has_rsample:
        return distribution.rsample()
    value: Tensor = distribution.sample()
    return value


def _remedy(likelihood: Likelihood) -> str:
    if isinstance(likelihood, BernoulliLikelihood):
        return " Labels are 0 and 1; from -1 and 1: (Y + 1) / 2."
    return ""


def check_likelihood(likelihood: Likelihood, parameter_shape: torch.Size) -> None:
    """Check that a likelihood is of one function value an outcome, and fits the model's shape.

    Args:
        likelihood: Any.
        parameter_shape: ``batch_shape``, with m last where that is not 1.

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
    if not all(_expands(shape, parameter_shape) for shape in shapes):
        raise UnsupportedError(
            f"Expected {name} of batch shape {tuple(parameter_shape)} (batch_shape x m, without m "
            f"if that is 1) or none, got {[tuple(shape) for shape in shapes]}."
        )


def _expands(shape: torch.Size, to: torch.Size) -> bool:
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(a in (1, b) for a, b in pairs)
