"""The exact Gaussian process behind a stem, both learned from a batch."""

from __future__ import annotations

import copy

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from torch import Tensor

from benchmarks.peers.exact_learning import learn_exactly
from bo_stream.bases.kernels import Stem

_CHUNK = 1_000


class ExactStemGP(gpytorch.models.ExactGP):
    """``k(h(x), h(x'))`` with a scaled RBF kernel and no approximation."""

    def __init__(self, X: Tensor, Y: Tensor, stem: Stem) -> None:
        """Take ``n x d`` inputs and ``n x 1`` outcomes."""
        super().__init__(X, Y.squeeze(-1), GaussianLikelihood())
        self.stem = copy.deepcopy(stem).calibrate(X)
        self.mean_module = ConstantMean()
        self.covar_module = ScaleKernel(RBFKernel(ard_num_dims=stem.k))
        self.to(X)

    def forward(self, X: Tensor) -> MultivariateNormal:
        """The prior; in training the stem is calibrated on X."""
        coordinates = self.stem.calibrated_forward(X) if self.training else self.stem(X)
        return MultivariateNormal(self.mean_module(coordinates), self.covar_module(coordinates))

    def learn(self, maxiter: int) -> None:
        """Stem and hyperparameters together, by L-BFGS-B on the exact marginal likelihood."""
        learn_exactly(self, maxiter)
        with torch.no_grad():
            self(*self.train_inputs)  # calibrates the learned stem

    def predict(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of outcomes, ``n x 1`` each."""
        self.eval()
        with torch.no_grad():
            parts = [self.likelihood(self(chunk)) for chunk in X.split(_CHUNK)]
        mean = torch.cat([part.mean for part in parts])
        return mean.unsqueeze(-1), torch.cat([part.variance for part in parts]).unsqueeze(-1)
