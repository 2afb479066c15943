"""How many tensor operations a verb dispatches: each takes microseconds, however small its tensors.

The numbers are those of one version of torch, and bounds for the next: who lowers one writes it
down here.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bo_stream import (
    OSGPR,
    OSVGP,
    WISKI,
    AutoGP,
    BayesianLastLayer,
    ClusteredGP,
    HeteroscedasticWISKI,
    LocalGP,
)
from bo_stream.models.base import StreamingGP
from tests.support.problems import observations

NO_LAUNCH = {"equal", "_local_scalar_dense"}
"""Comparisons with a stored state, on a device one for all tensors, and reads of a number."""


class Dispatched(TorchDispatchMode):
    """Counts operations on tensors, and those of them that a device has to be asked for.

    Attributes:
        count: Number of operations, without the comparisons of numbers.
        launches: Number of those that read or write memory, as views do not.
    """

    count = 0
    launches = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        self.launches += not (operation.is_view or operation.overloadpacket.__name__ in NO_LAUNCH)
        return operation(*args, **(kwargs or {}))


def operations(call: Callable[[], object]) -> tuple[int, int]:
    """Count the operations of a call, and those that read or write memory."""
    with torch.no_grad(), Dispatched() as dispatched:  # type: ignore[no-untyped-call]
        call()
    return dispatched.count, dispatched.launches


def wiski(X: Tensor, Y: Tensor, kernel: ScaleKernel) -> StreamingGP:
    bounds = torch.tensor([[0.0] * 3, [1.0] * 3], dtype=torch.float64)
    return WISKI(X, Y, covar_module=kernel, grid_size=10, bounds=bounds)


def osgpr(X: Tensor, Y: Tensor, kernel: ScaleKernel) -> StreamingGP:
    return OSGPR(X, Y, covar_module=kernel, inducing_points=X[:64])


def exact(X: Tensor, Y: Tensor, kernel: ScaleKernel) -> StreamingGP:
    bounds = torch.tensor([[0.0] * 3, [1.0] * 3], dtype=torch.float64)
    return AutoGP(X[:200], Y[:200], covar_module=kernel, bounds=bounds, families="exact")


Counts = tuple[int, int]

MOST: dict[Callable[..., StreamingGP], tuple[Counts, Counts, Counts]] = {
    wiski: ((108, 55), (89, 39), (209, 88)),
    osgpr: ((178, 95), (104, 46), (276, 127)),
    exact: ((146, 80), (119, 55), (274, 135)),
}
"""Most operations, and most of them that read or write memory, of an update of 3, of a posterior of
5 with its variance, and of 8 fantasies of 3 with a posterior of 50."""


@pytest.mark.skipif(torch.__version__ < "2.13", reason="counted with torch 2.13")
@pytest.mark.parametrize("build", MOST, ids=lambda build: build.__name__)
def test_operations_of_an_update_a_posterior_and_fantasies(
    build: Callable[..., StreamingGP],
) -> None:
    data = observations(530, dim=3)
    X, Y = data.X, data.Y
    kernel = ScaleKernel(RBFKernel(ard_num_dims=3)).double()
    model = build(X[:500], Y[:500], kernel)
    for first in (500, 503):  # what is computed once is
        model.update(X[first : first + 3], Y[first : first + 3])
        model.posterior(X[:5])
    known = data.X[:24].unflatten(0, (8, 3)), data.Y[:24].unflatten(0, (8, 3))

    def predict() -> tuple[Tensor, Tensor]:
        posterior: Any = model.posterior(X[:5])
        return posterior.mean, posterior.variance

    found = (
        operations(lambda: model.update(X[506:509], Y[506:509])),
        operations(predict),
        operations(lambda: model.condition_on_observations(*known).posterior(X[50:100])),
    )
    pairs = zip(chain(*found), chain(*MOST[build]), strict=True)
    assert all(count <= most for count, most in pairs), found


def osvgp(X: Tensor, Y: Tensor, kernel: ScaleKernel) -> StreamingGP:
    return OSVGP(X, (Y > 0.0).to(Y), BernoulliLikelihood(), kernel, inducing_points=X[:16])


def exact_of_labels(X: Tensor, Y: Tensor, kernel: ScaleKernel) -> StreamingGP:
    labels = (Y[:40] > 0.0).to(Y)
    return AutoGP(X[:40], labels, likelihood=BernoulliLikelihood(), covar_module=kernel)


def heteroscedastic(X: Tensor, Y: Tensor, kernel: ScaleKernel) -> StreamingGP:
    bounds = torch.tensor([[0.0] * 3, [1.0] * 3], dtype=torch.float64)
    return HeteroscedasticWISKI(X, Y, covar_module=kernel, grid_size=10, bounds=bounds)


def local(X: Tensor, Y: Tensor, kernel: ScaleKernel) -> StreamingGP:
    return LocalGP(X, Y, covar_module=kernel)


def clustered(X: Tensor, Y: Tensor, kernel: ScaleKernel) -> StreamingGP:
    return ClusteredGP(X, Y, covar_module=kernel, resolution=0.3)


def last_layer(X: Tensor, Y: Tensor, kernel: ScaleKernel) -> StreamingGP:
    return BayesianLastLayer(X, Y)


@pytest.mark.parametrize(
    "build",
    [*MOST, heteroscedastic, osvgp, exact_of_labels, local, clustered, last_layer],
    ids=lambda build: build.__name__,
)
def test_an_update_copies_no_hyperparameters(
    build: Callable[..., StreamingGP], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = observations(100, dim=3)
    X, Y = data.X, data.Y
    kernel = ScaleKernel(RBFKernel(ard_num_dims=3)).double()
    model = build(X[:90], Y[:90], kernel)
    is_labels = not hasattr(model.likelihood, "noise")
    Y = (Y > 0.0).to(Y) if is_labels else Y
    model.update(X[90:93], Y[90:93]).posterior(X[:3])  # a posterior copies them once
    versions = [parameter._version for parameter in model.parameters()]
    monkeypatch.setattr(torch.nn.Parameter, "__deepcopy__", _no_copy)
    model.update(X[93:96], Y[93:96]).posterior(X[:3])
    assert versions == [parameter._version for parameter in model.parameters()]


def _no_copy(parameter: torch.nn.Parameter, memo: object) -> None:
    raise AssertionError("a parameter was copied")
