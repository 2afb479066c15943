"""The exact Gaussian process behind a stem, both learned from a batch."""

from __future__ import annotations

import copy
import warnings

import gpytorch
import torch
from botorch.exceptions.warnings import OptimizationWarning
from botorch.optim.fit import fit_gpytorch_mll_scipy
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from bo_stream.models.stems import Stem

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
        self.train()
        mll = ExactMarginalLogLikelihood(self.likelihood, self)
        parameters = {name: p for name, p in mll.named_parameters() if p.requires_grad}

        def loss_and_gradients() -> tuple[Tensor, list[Tensor | None]]:
            self.zero_grad()
            loss = -mll(self(*self.train_inputs), self.train_targets)
            loss.backward()
            return loss, [parameter.grad for parameter in parameters.values()]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OptimizationWarning)
            fit_gpytorch_mll_scipy(
                mll,
                parameters=parameters,
                closure=loss_and_gradients,
                options={"maxiter": maxiter},
            )
        with torch.no_grad():
            self(*self.train_inputs)  # calibrates the learned stem

    def predict(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of outcomes, ``n x 1`` each."""
        self.eval()
        with torch.no_grad():
            parts = [self.likelihood(self(chunk)) for chunk in X.split(_CHUNK)]
        mean = torch.cat([part.mean for part in parts])
        return mean.unsqueeze(-1), torch.cat([part.variance for part in parts]).unsqueeze(-1)
