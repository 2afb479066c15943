"""Processes compile as one graph: nothing in their moments depends on values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from bo_stream import (
    QSGP,
    WISKI,
    AutoGP,
    BayesianLastLayer,
    DecoupledGP,
    FourierFeatures,
    HeteroscedasticWISKI,
)
from bo_stream.models.base import StreamingGP

TESTED = "2.13"
"""Release of torch whose graphs are counted."""

BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
MODELS: dict[str, Callable[[Tensor, Tensor], StreamingGP]] = {
    "WISKI": lambda X, Y: WISKI(X, Y, bounds=BOUNDS, grid_size=8),
    "HeteroscedasticWISKI": lambda X, Y: HeteroscedasticWISKI(X, Y, bounds=BOUNDS, grid_size=8),
    "AutoGP, exact": lambda X, Y: AutoGP(X, Y, bounds=BOUNDS),
    "QSGP": lambda X, Y: QSGP(X, Y, basis=FourierFeatures(20)),
    "DecoupledGP": lambda X, Y: DecoupledGP(X, Y, num_mean=20, num_covar=5, num_columns=10),
    "BayesianLastLayer": BayesianLastLayer,
}


@pytest.mark.skipif(
    Version(torch.__version__).release < Version(TESTED).release,
    reason=f"graphs are counted with torch {TESTED}",
)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("name", MODELS)
def test_moments_and_their_gradient_are_one_graph(name: str) -> None:
    X = torch.rand(200, 2, dtype=torch.float64)
    Y = X.sin().sum(-1, keepdim=True) + 0.1 * torch.randn(200, 1, dtype=torch.float64)
    process = MODELS[name](X, Y).process()
    points = torch.rand(4, 3, 2, dtype=torch.float64)

    def moments(T: Tensor) -> Tensor:
        return torch.stack(process.marginals(T))

    def with_gradient(rule: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        T = points.clone().requires_grad_()
        found = rule(T)
        return found.detach(), torch.autograd.grad(found.sum(), T)[0]

    expected = with_gradient(moments)  # what is cached is there then
    torch.compiler.reset()
    compiled = torch.compile(moments, fullgraph=True, backend="eager")  # raises at a graph break
    for found, wanted in zip(with_gradient(compiled), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
