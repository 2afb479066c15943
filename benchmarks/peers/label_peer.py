"""The exact Dirichlet Gaussian process of gpytorch, learned from a batch."""

from __future__ import annotations

import gpytorch
import torch
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import ScaleKernel
from gpytorch.likelihoods import DirichletClassificationLikelihood
from gpytorch.means import ConstantMean
from torch import Tensor

from benchmarks.peers.exact_learning import learn_exactly
from bo_stream.likelihoods.sites import softmax_moments
from bo_stream.models.wiski.dirichlet import MEAN, OUTPUTSCALE

_CHUNK = 1_000


class ExactDirichletGP(gpytorch.models.ExactGP):
    """Without any approximation of the kernel; the kernel and mean of all classes are one."""

    def __init__(self, X: Tensor, labels: Tensor, alpha_epsilon: float) -> None:
        """Take ``n x d`` inputs and ``n`` labels."""
        likelihood = DirichletClassificationLikelihood(labels, alpha_epsilon, dtype=X.dtype)
        super().__init__(X, likelihood.transformed_targets, likelihood)
        kernel = get_covar_module_with_dim_scaled_prior(X.shape[-1])
        self.covar_module, self.mean_module = ScaleKernel(kernel), ConstantMean()
        self.covar_module.outputscale, self.mean_module.constant = OUTPUTSCALE, MEAN
        self.to(X)

    def forward(self, X: Tensor) -> MultivariateNormal:
        """The prior of every class."""
        classes = self.likelihood.num_classes
        X = X if X.ndim == 2 else X[0]  # gpytorch repeats inputs for every class when it predicts
        mean, covariance = self.mean_module(X), self.covar_module(X)
        return MultivariateNormal(
            mean.expand(classes, -1), covariance.expand(classes, *covariance.shape)
        )

    def learn(self, maxiter: int) -> None:
        """All hyperparameters, by L-BFGS-B on the exact marginal likelihood."""
        with _by_cholesky():
            learn_exactly(self, maxiter)

    def class_probabilities(self, X: Tensor) -> Tensor:
        """Mean softmax of the scores, ``n x m``."""
        self.eval()
        with torch.no_grad(), _by_cholesky():
            parts = [self(chunk) for chunk in X.split(_CHUNK)]
        mean = torch.cat([part.mean.mT for part in parts])
        variance = torch.cat([part.variance.mT for part in parts])
        return softmax_moments(mean, variance).probabilities


def _by_cholesky() -> gpytorch.settings.fast_computations:
    return gpytorch.settings.fast_computations(False, False, False)
