"""Posterior of a prevalence whose logit is normal."""

from __future__ import annotations

from typing import cast

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.model import Model
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.posteriors.posterior import Posterior
from torch import Tensor

from bo_stream.likelihoods.binomial import normal_nodes


class PrevalencePosterior(Posterior):
    """Distribution of prevalence ``1 / (1 + exp(−f))`` for a posterior of its logit f.

    Its moments, quantiles and exceedance probabilities are of each point alone and differentiable;
    samples are joint.

    Args:
        latent: Posterior of the logit, normal: ``... x q x 1``.
    """

    def __init__(self, latent: GPyTorchPosterior) -> None:
        self.latent = latent

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.latent.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the tensors."""
        return self.latent.dtype

    @property
    def base_sample_shape(self) -> torch.Size:
        """Shape of base samples, that of the logit's."""
        return self.latent.base_sample_shape

    @property
    def batch_range(self) -> tuple[int, int]:
        """Dimensions of base samples that are batches, those of the logit's."""
        return self.latent.batch_range

    def _extended_shape(self, sample_shape: torch.Size = torch.Size()) -> torch.Size:  # noqa: B008
        return self.latent._extended_shape(sample_shape)

    @property
    def mean(self) -> Tensor:
        """Mean of the prevalence, ``... x q x 1``, by quadrature."""
        return self._moment(1)

    @property
    def variance(self) -> Tensor:
        """Variance of the prevalence, ``... x q x 1``, by quadrature."""
        return self._moment(2) - self._moment(1).square()

    def quantile(self, value: Tensor) -> Tensor:
        """Compute the prevalence that a point is below with some probability, in closed form.

        Args:
            value: Probabilities in (0, 1), of shape ``k`` or a scalar.

        Returns:
            ``k x ... x q x 1``, without k for a scalar.
        """
        score = torch.special.ndtri(value.to(self.latent.mean))
        score = score.reshape(*value.shape, *[1] * self.latent.mean.ndim)
        return (self.latent.mean + self.latent.variance.sqrt() * score).sigmoid()

    def exceedance(self, threshold: float) -> Tensor:
        """Compute the probability of a prevalence above a threshold, ``... x q x 1``.

        Raises:
            ValueError: The threshold is outside (0, 1).
        """
        if not 0.0 < threshold < 1.0:
            raise ValueError(
                f"Expected threshold to be a prevalence in (0, 1), got {threshold}. From per cent: "
                "divide by 100."
            )
        logit = torch.logit(self.latent.mean.new_tensor(threshold))
        return torch.special.ndtr((self.latent.mean - logit) / self.latent.variance.sqrt())

    def rsample(self, sample_shape: torch.Size | None = None) -> Tensor:
        """Draw prevalences, ``sample_shape x ... x q x 1``, differentiable."""
        return self.latent.rsample(sample_shape).sigmoid()

    def rsample_from_base_samples(self, sample_shape: torch.Size, base_samples: Tensor) -> Tensor:
        """Turn standard normal base samples into prevalences, ``sample_shape x ... x q x 1``."""
        return self.latent.rsample_from_base_samples(sample_shape, base_samples).sigmoid()

    def _moment(self, power: int) -> Tensor:
        nodes, weights = normal_nodes(self.latent.mean)
        spread = self.latent.variance.sqrt().unsqueeze(-1) * nodes
        chance = (self.latent.mean.unsqueeze(-1) + spread).sigmoid()
        return (chance.pow(power) * weights).sum(-1)


def prevalence(model: Model, X: Tensor) -> PrevalencePosterior:
    """Return the posterior of prevalence of a model of its logit.

    Such as one with a :class:`~bo_stream.BinomialLikelihood`, or one of empirical logits.

    Args:
        model: Of one output.
        X: ``... x q x d``.

    Raises:
        UnsupportedError: The model has more outputs.
    """
    if model.num_outputs != 1:
        raise UnsupportedError(
            f"Expected a model of one output, the logit of prevalence, got {model.num_outputs}. "
            "Take model.subset_output([i]) of one of them."
        )
    return PrevalencePosterior(cast(GPyTorchPosterior, model.posterior(X)))
