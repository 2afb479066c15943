"""gpytorch's sparse variational classifier, trained on a batch: the peer of a stream."""

from __future__ import annotations

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood
from gpytorch.means import ConstantMean
from gpytorch.mlls import VariationalELBO
from gpytorch.models import ApproximateGP
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy
from torch import Tensor


class BatchSVGP(ApproximateGP):
    """With inducing points that are learned from some of the data."""

    def __init__(self, Z: Tensor) -> None:
        distribution = CholeskyVariationalDistribution(len(Z))
        super().__init__(VariationalStrategy(self, Z, distribution))
        self.mean_module = ConstantMean()
        self.covar_module = ScaleKernel(RBFKernel(ard_num_dims=Z.shape[-1]))

    def forward(self, X: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(X), self.covar_module(X))


def batch_accuracy(
    X: Tensor, Y: Tensor, test_X: Tensor, test_Y: Tensor, points: int, steps: int = 600
) -> float:
    """Percent of test labels that it gets right."""
    model, likelihood = BatchSVGP(X[:points].clone()).to(X), BernoulliLikelihood().to(X)
    objective = VariationalELBO(likelihood, model.train(), len(X))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        rows = torch.randperm(len(X))[:500]
        optimiser.zero_grad()
        (-objective(model(X[rows]), Y[rows, 0])).backward()
        optimiser.step()
    with torch.no_grad():
        hits = (likelihood(model.eval()(test_X)).mean > 0.5) == (test_Y[:, 0] > 0.5)
    return 100.0 * float(hits.double().mean())
