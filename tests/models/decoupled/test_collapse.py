"""Hyperparameters of a decoupled model by the collapsed bound, against dense formulas."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError, ModelFittingError, UnsupportedError
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood
from rich.console import Console
from torch import Tensor
from torch.utils.data import TensorDataset

from bo_stream import DecoupledGP
from bo_stream.models.decoupled import collapse as decoupled_collapse
from bo_stream.models.decoupled.collapse import CollapsedBound, Valued
from bo_stream.models.inference import Hyperparameters
from bo_stream.models.stochastic import training
from bo_stream.testing.streams import assert_untouched, fingerprint
from tests.oracles.inducing import two_basis_bound
from tests.oracles.kernels import dense_kernel

D, N, RANK = 2, 150, 9


def data(n: int = N, outputs: int = 1) -> tuple[Tensor, Tensor]:
    X = torch.rand(n, D, dtype=torch.float64)
    phase = 9.0 * X[:, :1] + torch.arange(outputs)
    return X, phase.sin() + X[:, 1:] ** 2 + 0.1 * torch.randn(n, outputs).double()


def kernel_of(smooth: bool = True) -> ScaleKernel:
    """Without priors."""
    base = RBFKernel(ard_num_dims=D) if smooth else MaternKernel(nu=2.5, ard_num_dims=D)
    kernel = ScaleKernel(base).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = 1.5, 0.3
    return kernel


def small(X: Tensor, Y: Tensor, **options: Any) -> DecoupledGP:
    defaults = {"num_mean": 40, "num_covar": RANK, "num_span": 20, "initial_points": 0}
    return DecoupledGP(X, Y, **{**defaults, **options})


def dense(model: DecoupledGP, X: Tensor, Y: Tensor) -> Tensor:
    """The collapsed bound of a spectral model, differentiable in its hyperparameters."""
    kernel, Z = model.covar_module, model._memory.posterior.alpha.points[0]
    K, cross, inner = (kernel(*p).to_dense() for p in ((X, X), (X, Z), (Z, Z)))
    y, noise = Y[:, 0] - model.mean_module.constant, model.likelihood.noise.squeeze()
    return two_basis_bound(K, cross, inner, y, noise, model._inference.growth.covariance)


def hyper_prior(model: DecoupledGP) -> Tensor:
    own = Hyperparameters.shared(model.covar_module, model.mean_module, model.likelihood)
    return own.log_prior()


def collapsed(model: DecoupledGP) -> tuple[Valued, Hyperparameters]:
    """Its value at the model's own hyperparameters."""
    hyper = model.prior.copied()
    memory, rank = model._memory, model._inference.growth.covariance
    bound = CollapsedBound(memory.posterior, memory.replay, model.prior, rank)
    return bound.at(hyper, hyper.learned([])), hyper


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("rank", [RANK, 40])
def test_value_and_gradient_are_those_of_dense_formulas(smooth: bool, rank: int) -> None:
    X, Y = data()
    model = small(X, Y, covar_module=kernel_of(smooth), num_covar=rank, num_span=40)
    model.fit(3, progress=False)
    found, hyper = collapsed(model)
    expected = dense(model, X, Y)
    no_prior = found.bound - hyper.log_prior().detach() / N
    torch.testing.assert_close(no_prior, expected.detach() / N, rtol=0, atol=3e-5)
    objective = (expected + hyper_prior(model)) / N
    slopes = torch.autograd.grad(objective, list(model.parameters()))
    for mine, theirs in zip(found.gradient, slopes, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("parametrization", ["spectral", "hybrid", "direct"])
@pytest.mark.parametrize("preconditioner", ["block", "jacobi"])
def test_the_gradient_is_that_of_the_value(parametrization: str, preconditioner: str) -> None:
    """By differences, of the values at posteriors that are each the best."""
    X, Y = data()
    options: dict[str, Any] = {"parametrization": parametrization, "preconditioner": preconditioner}
    model = small(X, Y, covar_module=kernel_of(), **options)
    model.fit(3, progress=False)
    found, _ = collapsed(model)
    for parameter, gradient in zip(model.parameters(), found.gradient, strict=True):
        before, place = parameter.detach().clone(), (0,) * parameter.dim()
        values = []
        for step in (-1e-4, 1e-4):
            with torch.no_grad():
                parameter[place] = before[place] + step
            values.append(float(collapsed(model)[0].bound))
        with torch.no_grad():
            parameter.copy_(before)
        slope = (values[1] - values[0]) / 2e-4
        assert float(gradient[place]) == pytest.approx(slope, rel=1e-2, abs=1e-5)


def test_few_terms_at_a_time_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bo_stream.models.stochastic.replay.ROWS", 20)
    X, Y = data()
    model = small(X, Y)
    whole, _ = collapsed(model)
    for terms in (1, 100):
        monkeypatch.setattr(decoupled_collapse, "_TERMS", terms)
        found, _ = collapsed(model)
        torch.testing.assert_close(found.bound, whole.bound)
        torch.testing.assert_close(found.gradient, whole.gradient)


def test_it_reaches_a_maximum() -> None:
    X, Y = data()
    model = small(X, Y)
    first = float(collapsed(model)[0].bound)
    done = model.fit_collapsed(80, progress=False)
    last, _ = collapsed(model)
    assert float(last.bound) > first + 0.5
    assert done.trace[0][1] / N == pytest.approx(first)
    assert max(bound for _, bound in done.trace) / N == pytest.approx(float(last.bound))
    noise = model.likelihood.noise.item()
    assert 0.005 < noise < 0.02
    raw = [
        gradient * p.detach() for p, gradient in zip(model.parameters(), last.gradient, strict=True)
    ]
    assert max(float(g.abs().max()) for g in raw) < 1e-3


def test_the_posterior_is_the_best_one_there() -> None:
    """Of a rough kernel, whose factors need no nugget."""
    X, Y = data()
    model = small(X, Y, covar_module=kernel_of(smooth=False))
    model.fit_collapsed(10, progress=False)
    torch.testing.assert_close(model.elbo(), dense(model, X, Y).detach(), rtol=0, atol=1e-3)
    before = model.posterior(X[:5]).mean
    torch.testing.assert_close(model.optimize_posterior().posterior(X[:5]).mean, before)


def test_it_is_better_than_as_many_passes_of_steps() -> None:
    X, Y = data()
    by_steps, model = small(X, Y), small(X, Y)
    by_steps.fit(20, progress=False)
    model.fit_collapsed(10, progress=False)
    assert float(model.elbo()) > float(by_steps.optimize_posterior().elbo()) + 5.0


def test_functions_grow_to_the_caps_and_it_begins_with_an_exact_process() -> None:
    X, Y = data()
    for parametrization in ("spectral", "hybrid"):
        options: dict[str, Any] = {"num_added": 8, "initial_points": 40}
        model = small(X, Y, parametrization=parametrization, **options)
        assert len(model._memory.posterior.alpha) < 20
        lengthscale = model.covar_module.base_kernel.lengthscale.detach().clone()
        model.fit_collapsed(1, progress=False)
        assert len(model._memory.posterior.alpha) == 40
        assert len(model._memory.posterior.beta) == (40 if parametrization == "spectral" else RANK)
        assert model._memory.begun
        assert not torch.allclose(model.covar_module.base_kernel.lengthscale, lengthscale)


def test_inputs_that_repeat_cannot_fill_the_caps() -> None:
    X, Y = data()
    model = small(X[:10].repeat(15, 1), Y, num_added=8)
    model.fit_collapsed(2, progress=False)
    assert len(model._memory.posterior.alpha) == 10
    assert model.elbo().isfinite()


def test_one_evaluation_is_the_best_posterior() -> None:
    X, Y = data()
    model, other = small(X, Y), small(X, Y)
    for each in (model, other):
        each.fit(5, progress=False)
    done = model.fit_collapsed(evaluations=1, progress=False)
    assert done.steps == 1
    assert done.seconds > 0.0
    other.optimize_posterior()
    torch.testing.assert_close(model.posterior(X[:5]).mean, other.posterior(X[:5]).mean)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_no_more_evaluations_than_asked_for() -> None:
    X, Y = data()
    done = small(X, Y).fit_collapsed(7, progress=False)
    assert done.steps == 7
    assert [step for step, _ in done.trace] == list(range(1, 8))


def test_hyperparameters_that_stay_do_so() -> None:
    X, Y = data()
    model = small(X, Y, covar_module=kernel_of().requires_grad_(False))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.fit_collapsed(5, progress=False)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"mean_module.raw_constant", "likelihood.noise_covar.raw_noise"}
    model.requires_grad_(False)
    assert model.fit_collapsed(5, progress=False).steps == 1


def test_steps_go_on_after_it_with_their_own_span() -> None:
    X, Y = data()
    model = small(X, Y, learning_rate=0.01)
    model.fit_collapsed(20, progress=False)
    best, mean = float(model.elbo()), model.posterior(X[:5]).mean
    assert len(model._memory.posterior.beta) == 40
    assert model.fit(1, progress=False).steps == 1
    assert len(model._memory.posterior.beta) == 20
    torch.testing.assert_close(model.posterior(X[:5]).mean, mean, rtol=0, atol=0.1)
    assert float(model.elbo()) > best - 30.0
    model.update(X[:3] + 0.01, Y[:3])
    assert model.posterior(X[:5]).variance.isfinite().all()


def test_a_sample_stands_for_all_that_came() -> None:
    X, Y = data()
    model = small(X, Y, max_rows=60)
    model.fit_collapsed(1, progress=False)
    whole = small(X, Y, max_rows=60)
    whole.fit(0, progress=False)
    held = model._memory.replay.at(torch.arange(60))
    assert model._memory.replay.count == N
    kernel, Z = model.covar_module, model._memory.posterior.alpha.points[0]
    K, cross, inner = (dense_kernel(kernel, *p) for p in ((held.X, held.X), (held.X, Z), (Z, Z)))
    noise, y = model.likelihood.noise.squeeze() * 60 / N, held.Y[:, 0] - model.mean_module.constant
    scaled = two_basis_bound(K, cross, inner, y, noise, RANK)
    # A datum that counts n / held times has so much less noise, but as many log densities.
    spare = -0.5 * (N - 60) * (2.0 * torch.pi * model.likelihood.noise.squeeze()).log()
    spare = spare - 0.5 * 60 * torch.log(torch.tensor(N / 60.0))
    torch.testing.assert_close(model.elbo(), (scaled + spare).detach(), rtol=1e-4, atol=1e-2)


def test_outputs_batches_single_precision_and_data_sets() -> None:
    X, Y = data(80, outputs=2)
    wide = small(X.expand(3, *X.shape), torch.stack((Y, -Y, 2.0 * Y)))
    assert wide.fit_collapsed(4, progress=False).steps == 4
    assert wide.elbo().shape == (3, 2)
    torch.testing.assert_close(wide.elbo()[0], wide.elbo()[1], rtol=1e-2, atol=1.0)
    single = small(X.float(), Y[:, :1].float())
    single.fit_collapsed(6, progress=False)
    assert single.covar_module.outputscale.dtype == torch.float32
    exact = dense(single, X.float().double(), Y[:, :1].float().double()).detach()
    torch.testing.assert_close(single.elbo().double(), exact.double(), rtol=1e-3, atol=0.5)
    options = {"num_mean": 40, "num_covar": RANK, "initial_points": 0}
    read = DecoupledGP.from_dataset(TensorDataset(X, Y[:, :1]), **options)
    before = float(read.elbo())
    read.fit_collapsed(4, progress=False)
    assert float(read.elbo()) > before


@pytest.mark.parametrize("parametrization", ["spectral", "hybrid", "direct"])
def test_on_each_device(device: torch.device, parametrization: str) -> None:
    X, Y = (tensor.to(device) for tensor in data())
    initial = 50 if parametrization == "spectral" else 0
    model = small(X, Y, parametrization=parametrization, initial_points=initial)
    model.fit(2, progress=False)
    before = float(model.optimize_posterior(progress=False).elbo())
    model.fit_collapsed(5, progress=False)
    assert float(model.elbo()) > before
    assert model.posterior(X[:5]).mean.device.type == torch.device(device).type


def test_a_bound_that_fails_on_the_way_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    X, Y = data()
    whole = CollapsedBound.at

    def failing(failure: Any, after: int) -> Any:
        calls = []

        def at(self: CollapsedBound, *given: Any) -> Valued:
            calls.append(1)
            found = whole(self, *given)
            if len(calls) <= after:
                return found
            if isinstance(failure, Exception):
                raise failure
            return replace(found, bound=found.bound * failure)

        return at

    for failure in (torch.linalg.LinAlgError("no factor"), float("nan")):  # type: ignore[attr-defined]
        model = small(X, Y)
        monkeypatch.setattr(CollapsedBound, "at", failing(failure, 5))
        done = model.fit_collapsed(20, progress=False)
        assert done.steps in (5, 6)
        best = max(bound for _, bound in done.trace if bound == bound)
        monkeypatch.setattr(CollapsedBound, "at", whole)
        assert float(collapsed(model)[0].bound) * N == pytest.approx(best)
    model = small(X, Y)
    model.fit(2, progress=False)
    before = fingerprint(model)
    monkeypatch.setattr(CollapsedBound, "at", failing(float("nan"), 0))
    with pytest.raises(ModelFittingError, match="finite"):
        model.fit_collapsed(20, progress=False)
    assert_untouched(model, before)


def test_a_bar_is_drawn_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    X, Y = data()
    monkeypatch.setattr(
        training, "_screen", lambda wanted: (Console(force_terminal=True, width=90), wanted)
    )
    small(X, Y).fit_collapsed(3, progress=False)
    assert "step" not in capsys.readouterr().out
    small(X, Y).fit_collapsed(3)
    assert "step 3" in capsys.readouterr().out


def test_the_random_numbers_of_torch_are_left_alone() -> None:
    X, Y = data()
    model = small(X, Y)
    before = torch.random.get_rng_state()
    model.fit_collapsed(2, progress=False)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_bad_input_changes_nothing() -> None:
    X, Y = data(30)
    model, empty = small(X, Y), small(X[:0], Y[:0])
    labels = small(X, (Y > 0).double(), likelihood=BernoulliLikelihood())
    for refused, options, error, match in (
        (model, {"evaluations": 0}, ValueError, "evaluations"),
        (model, {"evaluations": 2.5}, ValueError, "evaluations"),
        (model, {"seconds": -1.0}, ValueError, "seconds"),
        (empty, {}, InputDataError, "empty stream"),
        (labels, {}, UnsupportedError, "optimize_posterior"),
        (model.condition_on_observations(X[:2], Y[:2]), {}, UnsupportedError, "fit_collapsed"),
    ):
        before = fingerprint(refused)
        with pytest.raises(error, match=match):
            refused.fit_collapsed(**options)
        assert_untouched(refused, before)


def test_bounds_of_longer_climbs_are_no_lower() -> None:
    X, Y = data()
    bounds = []
    for evaluations in (1, 5, 12):
        model = small(X, Y)
        model.fit_collapsed(evaluations, progress=False)
        bounds.append(float(collapsed(model)[0].bound))
    assert all(b >= a for a, b in pairwise(bounds))


@pytest.mark.parametrize("d", [1, 2])
def test_a_smooth_function_needs_fewer_functions_than_it_may_have(d: int) -> None:
    """The matrix of most combinations of its values is rounding but for the nugget."""
    X = torch.rand(200, d, dtype=torch.float64)
    Y = (3.0 * X).sin().sum(-1, keepdim=True) + 0.1 * torch.randn(200, 1, dtype=torch.float64)
    model = DecoupledGP(X, Y)
    model.optimize_posterior(progress=False)
    before = float(model.elbo())
    model.fit_collapsed(evaluations=3, progress=False)
    assert float(model.elbo()) > before
    error = model.posterior(X).mean - (3.0 * X).sin().sum(-1, keepdim=True)
    assert float(error.square().mean().sqrt()) < 0.05
