"""Stochastic gradients of clustered data against the exact gradient."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.fit import fit_gpytorch_mll
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from bo_stream import WISKI, ClusteredGP, maximise_stochastically
from bo_stream.bases.inducing import differentiable_matrix
from bo_stream.linalg import inverse_root
from bo_stream.models.clustered.inference import stochastic_objective
from bo_stream.models.clustered.solver import CholeskySolver
from bo_stream.testing.streams import assert_close, assert_untouched, fingerprint
from tests.support.problems import observations


def some_model(
    noise: str = "mixed",
    batch_shape: tuple[int, ...] = (),
    outputs: int = 1,
    resolution: float = 0.2,
) -> ClusteredGP:
    stream = observations(60, 2, outputs, batch_shape).with_noise(noise)
    shape = torch.Size((*batch_shape, *([outputs] if outputs > 1 else [])))
    kernel = MaternKernel(nu=1.5, ard_num_dims=2, batch_shape=shape)
    return ClusteredGP(
        *stream.astuple(),
        likelihood=GaussianLikelihood(batch_shape=shape).double(),
        covar_module=ScaleKernel(kernel, batch_shape=shape).double(),
        resolution=resolution,
    )


def gradient(value: Tensor, model: ClusteredGP) -> Tensor:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(value.sum(), parameters)])


@pytest.mark.parametrize(("batch_shape", "outputs"), [((), 1), ((2,), 1), ((2,), 2)])
def test_probes_of_every_centre_give_the_exact_gradient(
    batch_shape: tuple[int, ...], outputs: int
) -> None:
    """With the columns of √M I for probes, Hutchinson's estimate is the trace."""
    model = some_model("mixed", batch_shape, outputs)
    Z = model._memory.centres
    M = len(Z)
    signs = M**0.5 * torch.eye(M, dtype=torch.float64).expand(*batch_shape, outputs, M, M)

    def rows(index: Tensor) -> Tensor:
        return differentiable_matrix(model.covar_module, Z[index], Z, outputs)

    objective = stochastic_objective(
        model.prior.noise_groups(model._memory.statistics),
        model.prior.target_map(),
        rows(torch.arange(M)).detach(),
        rows,
        lambda Q: CholeskySolver(inverse_root(Q)),
        signs,
        torch.randperm(M),
    )
    exact = gradient(model.log_marginal_likelihood(), model)
    assert_close(gradient(objective, model), exact, factor=100)


@pytest.mark.integration
def test_the_mean_of_many_draws_is_the_exact_gradient() -> None:
    model = some_model(resolution=0.15)
    generator = torch.Generator().manual_seed(1)
    draws = torch.stack(
        [gradient(model.stochastic_objective(4, 6, generator), model) for _ in range(500)]
    )
    assert len(model.centres) > 12  # twice as many as are visited
    exact = gradient(model.log_marginal_likelihood(), model)
    error = draws.std(0) / len(draws) ** 0.5 + 1e-8  # that of the mean needs no probe
    assert bool(((draws.mean(0) - exact).abs() < 4.0 * error).all())
    assert bool((error < 0.5 * exact.abs().max()).all())


def test_more_probes_and_rows_vary_less() -> None:
    model = some_model("learned")
    spreads = []
    for probes, rows in ((2, 4), (40, 100)):
        generator = torch.Generator().manual_seed(2)
        found = [
            gradient(model.stochastic_objective(probes, rows, generator), model) for _ in range(30)
        ]
        spreads.append(torch.stack(found).std(0).norm())
    assert float(spreads[1]) < 0.3 * float(spreads[0])


def test_a_learner_climbs_as_high_as_a_fit() -> None:
    X = torch.rand(400, 2, dtype=torch.float64)
    Y = (6.0 * X[:, :1]).sin() + 0.1 * torch.randn(400, 1).double()
    fitted, learned = (ClusteredGP(X, Y, resolution=0.1) for _ in range(2))
    start = float(learned.log_marginal_likelihood().detach())
    fit_gpytorch_mll(ExactMarginalLogLikelihood(fitted.likelihood, fitted))
    assert maximise_stochastically(learned, steps=80, learning_rate=0.1) is learned
    assert not learned.training
    best, found = (float(m.log_marginal_likelihood().detach()) for m in (fitted, learned))
    assert found - start > 0.98 * (best - start) > 100.0


def test_the_same_seed_learns_the_same() -> None:
    start = some_model("mixed", (2,), 2)
    models = [maximise_stochastically(copy.deepcopy(start), 3, seed=seed) for seed in (5, 5, 6)]
    learned = [torch.cat([p.detach().flatten() for p in m.parameters()]) for m in models]
    assert torch.equal(learned[0], learned[1])
    assert not torch.equal(learned[0], learned[2])


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("steps", -1),
        ("steps", 1.5),
        ("learning_rate", -1.0),
        ("learning_rate", math.nan),
        ("probes", 0),
        ("batch_size", 0),
        ("tolerance", -1.0),
        ("tolerance", 1.0),
    ],
)
def test_a_number_out_of_range_is_named_and_changes_nothing(name: str, wrong: Any) -> None:
    model = some_model().eval()
    before = fingerprint(model)
    with pytest.raises(ValueError, match=rf"Expected {name}\b"):
        maximise_stochastically(model, **{name: wrong})
    assert_untouched(model, before)
    assert not model.training


def test_other_models_and_fantasies_are_refused_and_stay_as_they_are() -> None:
    first, more = observations(30, 2), observations(30, 2)
    other: Any = WISKI(first.X, first.Y, grid_size=8).eval()
    other.update(more.X, 10.0 * more.Y)
    fantasy = some_model().eval().condition_on_observations(first.X[:2], first.Y[:2])
    for model, says in ((other, "instance of ClusteredGP"), (fantasy, "original model")):
        before = fingerprint(model)
        with pytest.raises(UnsupportedError, match=says):
            maximise_stochastically(model, steps=1)
        assert_untouched(model, before)
        assert not model.training


def test_a_step_that_fails_leaves_evaluation_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    model = some_model()

    def fail(self: ClusteredGP, *args: Any) -> Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(ClusteredGP, "stochastic_objective", fail)
    with pytest.raises(KeyboardInterrupt):
        maximise_stochastically(model, steps=1)
    assert not model.training
