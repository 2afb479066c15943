"""A search in trust regions (TuRBO, Eriksson et al., 2019) by functions drawn from a posterior."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from botorch.acquisition.thompson_sampling import PathwiseThompsonSampling
from botorch.utils.transforms import unnormalize
from gpytorch.kernels import MaternKernel, ScaleKernel
from torch import Tensor
from torch.quasirandom import SobolEngine

from bo_stream import OSGPR, WISKI, ClusteredGP, sample_paths
from bo_stream.bases.kernels import as_product
from bo_stream.models.base import StreamingGP

DIM, FIRST, STEPS, BATCH = 3, 8, 7, 4
UNIT = torch.tensor([[0.0] * DIM, [1.0] * DIM]).double()
OPTIMUM = torch.tensor([0.31, 0.62, 0.47]).double()


def function(X: Tensor) -> Tensor:
    """A bowl with ripples, whose maximum is 0."""
    away = X - OPTIMUM
    return -(away.square() + 0.01 * (1.0 - (12.0 * away).cos())).sum(-1, keepdim=True)


def kernel() -> ScaleKernel:
    result = ScaleKernel(MaternKernel(2.5, ard_num_dims=DIM)).double()
    result.base_kernel.lengthscale = torch.tensor([0.8, 0.9, 1.0])
    return result


@dataclass
class TrustRegion:
    """A box that doubles after three successes in a row, and halves after two failures."""

    length: float = 0.8
    best: float = -torch.inf
    successes: int = 0
    failures: int = 0

    def observe(self, Y: Tensor) -> None:
        improved = float(Y.max()) > self.best + 1e-3 * abs(self.best)
        self.successes = self.successes + 1 if improved else 0
        self.failures = 0 if improved else self.failures + 1
        if self.successes == 3:
            self.length, self.successes = min(2.0 * self.length, 1.6), 0
        if self.failures == 2:
            self.length, self.failures = 0.5 * self.length, 0
        self.best = max(self.best, float(Y.max()))

    def candidates(self, model: StreamingGP, seed: int) -> Tensor:
        """Points of the box around the best of the inputs that the model knows."""
        (X,) = model.train_inputs
        centre = X[int(model.posterior(X).mean.argmax())]
        scale = model.covar_module.base_kernel.lengthscale.detach().squeeze(0)
        sides = 0.5 * self.length * scale / scale.log().mean().exp()
        box = torch.stack((centre - sides, centre + sides)).clamp(0.0, 1.0)
        return unnormalize(SobolEngine(DIM, scramble=True, seed=seed).draw(256).double(), box)


def by_paths(model: StreamingGP, X: Tensor, seed: int) -> Tensor:
    return sample_paths(model, BATCH, seed)(X).squeeze(-1)


def by_botorch(model: StreamingGP, X: Tensor, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.stack([PathwiseThompsonSampling(model)(X.unsqueeze(-2)) for _ in range(BATCH)])


MODELS: dict[str, Callable[[Tensor, Tensor], StreamingGP]] = {
    "OSGPR": lambda X, Y: OSGPR(X, Y, covar_module=kernel()),
    "WISKI": lambda X, Y: WISKI(
        X, Y, covar_module=as_product(kernel(), DIM), grid_size=10, bounds=UNIT
    ),
    "ClusteredGP": lambda X, Y: ClusteredGP(X, Y, covar_module=kernel()),
}


def search(
    build: Callable[[Tensor, Tensor], StreamingGP],
    draw: Callable[[StreamingGP, Tensor, int], Tensor],
    seed: int,
) -> float:
    """The best value of ``FIRST + STEPS * BATCH`` evaluations."""
    X = SobolEngine(DIM, scramble=True, seed=seed).draw(FIRST).double()
    model, region = build(X, function(X)).eval(), TrustRegion()
    model.likelihood.noise = 1e-4
    region.observe(function(X))
    for step in range(STEPS):
        points = region.candidates(model, 100 * seed + step)
        chosen = points[draw(model, points, step).argmax(-1).unique()].detach()
        model.update(chosen, function(chosen))
        region.observe(function(chosen))
    return region.best


def at_random() -> float:
    """The median of the best of so many random points, over 500 searches."""
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(500, FIRST + STEPS * BATCH, DIM, dtype=torch.float64, generator=generator)
    return float(function(X).amax((-2, -1)).median())


@pytest.mark.parametrize("draw", [by_paths, by_botorch])
@pytest.mark.parametrize("name", MODELS)
def test_finds_far_more_than_random_search(
    name: str, draw: Callable[[StreamingGP, Tensor, int], Tensor]
) -> None:
    """The distance from the maximum is less than a third of random search's median."""
    assert search(MODELS[name], draw, seed=1) > at_random() / 3.0
