"""WISKI at its default grid against the exact GP of the same hyperparameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from gpytorch.kernels import Kernel, RBFKernel
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

from benchmarks.common.harness import start
from benchmarks.common.report import Claim, at_most, finish, stated
from bo_stream import WISKI, ProductMatern

NOISE = 0.05
CASES = ((2, 0.2), (2, 0.3), (2, 0.5), (3, 0.3), (3, 0.5))
"""Dimension and lengthscale, in units of the box."""
TARGETS = {2: (2e-3, 1e-3), 3: (1e-2, 5e-3)}
"""Largest error of the mean in prior sd and of the variance in prior variance, by dimension."""
SMOOTH = ("RBF", "Matern-5/2")


def _matern_52(r: Tensor) -> Tensor:
    return (1.0 + 5**0.5 * r + 5.0 / 3.0 * r.square()) * torch.exp(-(5**0.5) * r)


CORRELATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "RBF": lambda r: torch.exp(-0.5 * r.square()),
    "Matern-5/2": _matern_52,
    "Matern-3/2": lambda r: (1.0 + 3**0.5 * r) * torch.exp(-(3**0.5) * r),
    "Matern-1/2": lambda r: torch.exp(-r),
}
NU = {"Matern-5/2": 2.5, "Matern-3/2": 1.5, "Matern-1/2": 0.5}


def covariance(name: str, lengthscale: float, X: Tensor, X2: Tensor) -> Tensor:
    """The product kernel written out, ``n x n2``, for ``n x d`` and ``n2 x d``."""
    distances = (X[:, None, :] - X2[None, :, :]).abs() / lengthscale
    return CORRELATIONS[name](distances).prod(-1)


@dataclass(frozen=True)
class Problem:
    """Data drawn from the exact prior, and test points."""

    kernel: str
    lengthscale: float
    X: Tensor
    Y: Tensor
    test_X: Tensor

    def exact(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of the exact posterior at the test points."""
        K = covariance(self.kernel, self.lengthscale, self.X, self.X)
        cross = covariance(self.kernel, self.lengthscale, self.X, self.test_X)
        L = torch.linalg.cholesky(K + NOISE * torch.eye(len(K)))
        V = torch.linalg.solve_triangular(L, cross, upper=False)
        z = torch.linalg.solve_triangular(L, self.Y, upper=False)
        return (V.mT @ z).squeeze(-1), 1.0 - V.square().sum(0)


def draw(kernel: str, d: int, lengthscale: float, n: int, test: int, seed: int) -> Problem:
    """n uniform points of the unit box with values from the exact prior and noise."""
    generator = torch.Generator().manual_seed(seed)
    X, test_X = (torch.rand(k, d, generator=generator) for k in (n, test))
    K = covariance(kernel, lengthscale, X, X) + 1e-10 * torch.eye(n)
    f, noise = torch.randn(n, 2, generator=generator).split(1, -1)
    Y = torch.linalg.cholesky(K) @ f + NOISE**0.5 * noise
    return Problem(kernel, lengthscale, X, Y, test_X)


def gpytorch_kernel(name: str, lengthscale: float, d: int) -> Kernel:
    """The kernel to give to WISKI."""
    kernel = RBFKernel(ard_num_dims=d) if name == "RBF" else ProductMatern(NU[name], ard_num_dims=d)
    kernel.lengthscale = lengthscale
    return kernel


def wiski(problem: Problem) -> WISKI:
    """WISKI of the same hyperparameters, with its default grid."""
    d = problem.X.shape[-1]
    likelihood = GaussianLikelihood()
    likelihood.noise = NOISE
    return WISKI(
        problem.X,
        problem.Y,
        likelihood=likelihood,
        covar_module=gpytorch_kernel(problem.kernel, problem.lengthscale, d),
        outcome_transform=None,
        bounds=torch.tensor([[0.0] * d, [1.0] * d]),
    ).eval()


def errors(problem: Problem, model: WISKI) -> tuple[float, float]:
    """Largest error over the test points, of the mean and of the variance."""
    mean, variance = problem.exact()
    with torch.no_grad():
        posterior = model.posterior(problem.test_X)
        mean_error = (posterior.mean.squeeze(-1) - mean).abs().max()
        variance_error = (posterior.variance.squeeze(-1) - variance).abs().max()
    return float(mean_error), float(variance_error)


def accuracy(kernel: str, d: int, lengthscale: float, sizes: dict[str, int]) -> list[Claim]:
    """The largest errors over all seeds, claimed for smooth kernels and stated for rough ones."""
    found = []
    for seed in range(sizes["seeds"]):
        problem = draw(kernel, d, lengthscale, sizes["n"], sizes["test"], seed)
        model = wiski(problem)
        found.append(errors(problem, model))
    worst = [max(values) for values in zip(*found, strict=True)]
    probe = model.interpolation_error()
    detail = f"grid {model.grid_size}, rank {model.rank}, interpolation error {probe:.1e}"
    claims = []
    for what, value, target in zip(("mean", "variance"), worst, TARGETS[d], strict=True):
        name = f"{d}-D, {kernel}, lengthscale {lengthscale}: {what}"
        smooth = kernel in SMOOTH
        claims.append(
            at_most(name, value, target, "", detail) if smooth else stated(name, value, "", detail)
        )
    return claims


def main() -> None:
    """Run it."""
    options = start(__doc__)
    full, tiny = {"n": 500, "test": 200, "seeds": 5}, {"n": 30, "test": 5, "seeds": 1}
    sizes = options.pick(full, tiny)
    claims = [
        claim
        for d, lengthscale in options.pick(CASES, ((2, 0.3), (3, 0.5)))
        for kernel in CORRELATIONS
        for claim in accuracy(kernel, d, lengthscale, sizes)
    ]
    finish("accuracy", claims, options, sizes)


if __name__ == "__main__":
    main()
