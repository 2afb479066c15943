"""What the first fit of a decoupled model begins with: hyperparameters of an exact process."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import ModelFittingError
from botorch.exceptions.warnings import BotorchWarning
from botorch.models.transforms.outcome import Standardize
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor
from torch.utils.data import TensorDataset

from bo_stream import DecoupledGP
from bo_stream.models.decoupled import inference as decoupled_inference
from bo_stream.testing.streams import assert_untouched, fingerprint
from tests.oracles.kernels import dense_kernel
from tests.support.problems.likelihoods import LIKELIHOODS, OTHERS, outcomes

D, NOISE = 2, 0.01


def data(n: int = 40, outputs: int = 1) -> tuple[Tensor, Tensor]:
    X = torch.rand(n, D, dtype=torch.float64)
    phase = 9.0 * X[:, :1] + torch.arange(outputs)
    return X, phase.sin() + X[:, 1:] ** 2 + NOISE**0.5 * torch.randn(n, outputs).double()


def small(X: Tensor, Y: Tensor, **options: Any) -> DecoupledGP:
    return DecoupledGP(X, Y, **{"num_mean": 80, "num_covar": 30, "num_added": 40, **options})


def values(model: DecoupledGP) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name in before if torch.equal(before[name], after[name])}


def exact_likelihood(model: DecoupledGP, X: Tensor, Y: Tensor) -> float:
    """Of an exact process with the model's hyperparameters, by dense formulas."""
    noise = float(model.likelihood.noise.detach())
    K = dense_kernel(model.covar_module, X, X) + noise * torch.eye(len(X)).double()
    constant = torch.full((len(X),), float(model.mean_module.constant.detach())).double()
    normal = torch.distributions.MultivariateNormal(constant, K.detach())
    return float(normal.log_prob(Y[:, 0]))


def test_outcomes_that_vary_less_than_the_least_noise_are_warned_of() -> None:
    X, Y = data()
    with pytest.warns(NumericalWarning, match=r"outcome_transform=Standardize\(1\)"):
        small(X, 1e-3 * Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NumericalWarning)
        small(X, Y)
        small(X, 0.0 * Y)
        small(X, 1e-3 * Y, outcome_transform=Standardize(1))


def test_the_exact_process_is_more_likely_than_by_the_median_trick() -> None:
    X, Y = data(200)
    model = small(X, Y)
    before = exact_likelihood(model, X, Y)
    assert model.fit(0, progress=False).steps == 0
    assert exact_likelihood(model, X, Y) > before + 50.0
    assert 0.5 * NOISE < float(model.likelihood.noise.detach()) < 3.0 * NOISE
    short, long = model.covar_module.base_kernel.lengthscale[0].tolist()
    assert short < 0.6 * long


def test_the_functions_stay_and_nothing_is_known_of_them() -> None:
    X, Y = data()
    for parametrization in ("spectral", "hybrid", "direct"):
        model = small(X, Y, parametrization=parametrization)
        points = model._memory.posterior.alpha.points
        assert len(points[0]) > 0
        model.fit(0, progress=False)
        posterior = model._memory.posterior
        assert torch.equal(posterior.alpha.points, points)
        assert not posterior.coefficients.any()
        model.fit(3, progress=False)
        assert float(model.elbo()) > -1e4


@pytest.mark.integration
def test_a_good_start_is_worth_many_steps() -> None:
    X, Y = data(400)
    with_start, without = small(X, Y), small(X, Y, initial_points=0)
    for model in (with_start, without):
        model.fit(40, progress=False)
    assert float(with_start.elbo()) > float(without.elbo()) + 20.0


def test_only_the_first_call_begins_anew() -> None:
    X, Y = data()
    model = small(X, Y)
    model.fit(3, progress=False)
    found = values(model)
    model.fit(0, progress=False)
    assert same(found, values(model)) == set(found)
    assert model._memory.posterior.coefficients.any()


def test_what_a_stream_has_taught_is_kept() -> None:
    X, Y = data(30)
    model = small(X, Y, num_mean=10, num_covar=5, update_steps=100)
    before = values(model)
    model.fit(0, progress=False)
    assert same(before, values(model)) == set(before)


@pytest.mark.parametrize(
    "options",
    [{"initial_points": 0}, {"learning_rate": 0.0}, {"lengthscale_factors": True}],
    ids=str,
)
def test_there_is_none_where_it_is_not_asked_for(options: dict[str, Any]) -> None:
    X, Y = data()
    if "lengthscale_factors" in options:
        options = {**options, "learn_mean_points": True}
    model = small(X, Y, **options)
    before = values(model)
    model.fit(0, progress=False)
    assert same(before, values(model)) == set(before)


def test_hyperparameters_that_stay_do_so() -> None:
    X, Y = data()
    kernel = ScaleKernel(RBFKernel(ard_num_dims=D)).double()
    kernel.outputscale = 3.0
    kernel.raw_outputscale.requires_grad_(False)
    likelihood = GaussianLikelihood().double().requires_grad_(False)
    model = small(X, Y, covar_module=kernel, likelihood=likelihood)
    before = values(model)
    model.fit(0, progress=False)
    kept = {"covar_module.raw_outputscale", "likelihood.noise_covar.raw_noise"}
    assert same(before, values(model)) == kept


@pytest.mark.parametrize("name", OTHERS)
def test_of_other_likelihoods_lengthscales_are_learned(name: str) -> None:
    X = torch.rand(30, D, dtype=torch.float64)
    model = small(X, outcomes(name, X), likelihood=LIKELIHOODS[name]())
    before = values(model)
    model.fit(0, progress=False)
    assert "covar_module.base_kernel.raw_lengthscale" not in same(before, values(model))
    model.fit(3, progress=False)
    assert model.elbo().isfinite()


def test_outputs_and_batches() -> None:
    X, Y = data(outputs=2)
    X, Y = X.expand(3, *X.shape), torch.stack((Y, -Y, 2.0 * Y))
    model = small(X, Y)
    before = model.covar_module.base_kernel.lengthscale.detach().clone()
    model.fit(0, progress=False)
    found = model.covar_module.base_kernel.lengthscale
    assert found.shape == (3, 2, 1, D)
    assert (found != before).all()
    torch.testing.assert_close(found[0], found[1], rtol=0.05, atol=0.0)
    assert model.fit(2, progress=False).steps == 2


def test_one_kernel_for_all_outputs() -> None:
    X, Y = data(outputs=2)
    model = small(X, Y, covar_module=ScaleKernel(RBFKernel(ard_num_dims=D)).double())
    model.fit(2, progress=False)
    assert model.covar_module.outputscale.shape == ()
    assert model.elbo().isfinite().all()


def test_single_precision_and_a_data_set() -> None:
    X, Y = data(30)
    model = small(X.float(), Y.float())
    model.fit(2, progress=False)
    assert model.covar_module.outputscale.dtype == torch.float32
    read = DecoupledGP.from_dataset(TensorDataset(X, Y), num_mean=40, num_covar=10)
    before = values(read)
    read.fit(0, progress=False)
    assert "covar_module.base_kernel.raw_lengthscale" not in same(before, values(read))


def test_its_time_counts() -> None:
    X, Y = data()
    model = small(X, Y)
    begin = time.monotonic()
    done = model.fit(seconds=1e-6, progress=False)
    assert done.steps == 0
    assert 1e-3 < done.seconds <= time.monotonic() - begin


def test_a_failed_exact_process_leaves_the_median_trick(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise ModelFittingError("no attempt succeeded")

    X, Y = data()
    model = small(X, Y)
    lengthscale = model.covar_module.base_kernel.lengthscale.detach().clone()
    monkeypatch.setattr(decoupled_inference, "learn_first_hyperparameters", fails)
    with pytest.warns(BotorchWarning, match="median trick"):
        model.fit(0, progress=False)
    assert torch.equal(model.covar_module.base_kernel.lengthscale, lengthscale)
    assert model.fit(3, progress=False).steps == 3


def test_torch_s_own_random_numbers_are_left_alone() -> None:
    X, Y = data()
    model = small(X, Y)
    before = torch.random.get_rng_state()
    model.fit(2, progress=False)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_labels_of_one_class_begin() -> None:
    X, _ = data(30)
    model = small(X, torch.ones(30, 1).double(), likelihood=BernoulliLikelihood())
    model.fit(3, progress=False)
    assert model.elbo().isfinite()


def test_bad_input_changes_nothing() -> None:
    X, Y = data(50)
    with pytest.raises(ValueError, match="initial_points"):
        small(X, Y, initial_points=-1)
    for limits in ({"steps": -1}, {"seconds": -1.0}, {"steps": float("nan")}):
        model = small(X, Y)
        before = fingerprint(model)
        with pytest.raises(ValueError, match="at least 0"):
            model.fit(**limits, progress=False)
        assert_untouched(model, before)
    model = small(X, Y, batch_size=60, update_steps=0)
    before = fingerprint(model)
    with pytest.raises(ValueError, match="minibatch"):
        model.fit(2, progress=False)
    assert_untouched(model, before)
