"""The logistic likelihood of labels, which gpytorch lacks: its Bernoulli one has a probit link."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from torch import Tensor

from bo_stream.likelihoods.expected_log_prob import expected_log_prob


class LogisticLikelihood(_OneDimensionalLikelihood):
    """``p(y = 1 | f) = 1 / (1 + exp(−f))`` for labels 0 and 1. Log-concave.

    Expectations under a normal f are by Gauss-Hermite quadrature.
    """

    def forward(
        self, function_samples: Tensor, *args: Any, **kwargs: Any
    ) -> torch.distributions.Bernoulli:
        """Labels given values of the process."""
        return torch.distributions.Bernoulli(logits=function_samples)


@expected_log_prob.register
def _logistic(likelihood: LogisticLikelihood, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """By its quadrature; ``log p = log sigmoid(± f)``."""
    signs = 2.0 * Y - 1.0
    normal = torch.distributions.Normal(mean, variance.sqrt())
    value: Tensor = likelihood.quadrature(
        lambda f: torch.nn.functional.logsigmoid(signs * f), normal
    )
    return value
