"""The laws of the contract for models whose every input is an inducing point.

They are not in the registry, for their memory grows until there are ``max_points``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ZeroMean

from bo_stream import OSGPR, OSVGP
from bo_stream.models.base import StreamingGP
from bo_stream.testing.memory import (
    a_stream_is_its_batch,
    merging_shards_is_one_stream,
    order_does_not_matter,
    retracting_undoes_updating,
    updating_in_pieces_is_updating_once,
)
from tests.laws.registry import Case, Law, Setting, Stream
from tests.support.problems import Observations

BUILDERS: dict[str, Callable[[Observations], StreamingGP]] = {
    "OSGPR": lambda data: OSGPR(*data.astuple()),
    "OSGPR, few rows held": lambda data: OSGPR(*data.astuple(), window=4),
    "OSVGP": lambda data: OSVGP(data.X, data.Y, GaussianLikelihood().to(data.X)),
}


@pytest.mark.matrix
@pytest.mark.parametrize(
    "law",
    [
        updating_in_pieces_is_updating_once,
        a_stream_is_its_batch,
        order_does_not_matter,
        merging_shards_is_one_stream,
        retracting_undoes_updating,
    ],
    ids=lambda law: law.__name__,
)
@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("setting", [Setting(), Setting(torch.float32)], ids=str)
def test_law(name: str, law: Law, setting: Setting) -> None:
    law(Stream(Case(name, BUILDERS[name], residual=True), setting))


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_stream_of_batches_and_outputs_of_partly_known_noise_is_its_batch(outputs: int) -> None:
    setting = Setting(batch_shape=(2,), outputs=outputs)
    case = Case(
        "OSGPR", lambda data: OSGPR(*data.astuple(), likelihood=_noise(data)), noise="mixed"
    )
    a_stream_is_its_batch(Stream(case, setting))


@pytest.mark.parametrize("rows", [1, 10])
def test_a_stream_through_space_of_a_smooth_kernel_ends_at_the_exact_process(rows: int) -> None:
    """Where new inputs lie beyond all points, which determine each other but for rounding."""
    random = torch.Generator().manual_seed(0)
    X = torch.rand(120, 2, dtype=torch.float64, generator=random)
    X = X[X[:, 0].argsort()]
    Y = torch.sin(6.0 * X.sum(-1, keepdim=True)) + 0.1 * torch.randn(
        120, 1, dtype=torch.float64, generator=random
    )
    kernel = RBFKernel().double()
    kernel.lengthscale = 0.4
    likelihood = GaussianLikelihood().double()
    likelihood.noise = 0.01
    options = {"outcome_transform": None, "mean_module": ZeroMean(), "window": 0}
    model = OSGPR(X[:0], Y[:0], likelihood=likelihood, covar_module=kernel, **options)
    for some in torch.arange(120).split(rows):
        model.update(X[some], Y[some])
    with torch.no_grad():
        K = kernel(X).to_dense()
        gain = torch.linalg.solve(K + 0.01 * torch.eye(120), K).mT
        mean, variance = gain @ Y, (K - gain @ K).diagonal()
        gap = (model.posterior(X).mean - mean).squeeze(-1).abs() / variance.sqrt()
    assert float(gap.max()) < 0.02


def _noise(data: Observations) -> GaussianLikelihood:
    outputs = data.Y.shape[-1:] if data.Y.shape[-1] > 1 else torch.Size()
    return GaussianLikelihood(batch_shape=data.Y.shape[:-2] + outputs).to(data.Y)
