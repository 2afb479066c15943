"""A learnable input transform is a part of the kernel: memories follow it, and fits learn it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms.input import (
    ChainedInputTransform,
    InputPerturbation,
    Normalize,
    Round,
    Warp,
)
from botorch.optim.utils import sample_all_priors
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.priors import LogNormalPrior
from torch import Tensor

from bo_stream import (
    OSGPR,
    OSVGP,
    QSGP,
    QSRVM,
    WISKI,
    ClusteredGP,
    DecoupledGP,
    HeteroscedasticWISKI,
    LocalGP,
    learn_points,
)
from bo_stream.models.base import StreamingGP
from bo_stream.testing.streams import assert_close, assert_gradient, joint_covariance, moments

UNIT = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)


def warp(**options: Any) -> Warp:
    prior = LogNormalPrior(0.0, 0.75**0.5)
    return Warp(
        2, [0, 1], concentration1_prior=prior, concentration0_prior=prior, bounds=UNIT, **options
    )


def scaled_warp() -> ChainedInputTransform:
    return ChainedInputTransform(
        scale=Normalize(2, bounds=torch.tensor([[-1.0, 0.0], [1.0, 2.0]]).double()), warp=warp()
    )


TRANSFORMS = {"warp": warp, "scaled": scaled_warp}


def some(n: int, outputs: int = 1) -> tuple[Tensor, Tensor]:
    X = 0.05 + 0.9 * torch.rand(n, 2, dtype=torch.float64)
    Y = (8.0 * X[:, :1].square()).sin() + X[:, 1:].sqrt()
    return X, torch.cat([Y + 0.05 * torch.randn_like(Y) for _ in range(outputs)], -1)


def warp_of(model: Any) -> Warp:
    kernel = model.covar_module
    transform = kernel.input_transform if isinstance(model, StreamingGP) else model.input_transform
    return transform if isinstance(transform, Warp) else transform["warp"]


@torch.no_grad()
def set_warp(model: Any, first: list[float], second: list[float]) -> None:
    part = warp_of(model)
    part.concentration0.copy_(torch.tensor(first, dtype=torch.float64))
    part.concentration1.copy_(torch.tensor(second, dtype=torch.float64))


@torch.no_grad()
def follow(model: Any, exact: SingleTaskGP) -> None:
    """The same hyperparameters."""
    set_warp(model, warp_of(exact).concentration0.tolist(), warp_of(exact).concentration1.tolist())
    model.covar_module.base_kernel.load_state_dict(exact.covar_module.state_dict())
    model.mean_module.load_state_dict(exact.mean_module.state_dict())
    model.likelihood.load_state_dict(exact.likelihood.state_dict())


def exact_gp(X: Tensor, Y: Tensor, transform: Callable[[], Any] = warp) -> SingleTaskGP:
    exact = SingleTaskGP(X, Y, input_transform=transform())
    with torch.no_grad():
        exact.covar_module.lengthscale = torch.full_like(exact.covar_module.lengthscale, 0.4)
        exact.likelihood.noise = 0.03
        exact.mean_module.constant.fill_(0.2)
    set_warp(exact, [1.4, 0.8], [0.7, 1.6])
    return exact


EXACT: dict[str, Callable[..., Any]] = {
    "OSGPR": lambda X, Y, **o: OSGPR(X, Y, inducing_points=X, **o),
    "OSGPR, no window": lambda X, Y, **o: OSGPR(X, Y, inducing_points=X, window=0, **o),
    "OSGPR, a window": lambda X, Y, **o: OSGPR(X, Y, inducing_points=X, window=5, **o),
    "ClusteredGP": lambda X, Y, **o: ClusteredGP(X, Y, resolution=1e-6, **o),
    "LocalGP": lambda X, Y, **o: LocalGP(X, Y, w_gen=1e-12, **o),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_the_memory_follows_a_transform_that_moved(name: str, transform: Callable[[], Any]) -> None:
    """Observations entered at the first warp; the posterior is the exact one of another."""
    X, Y = some(16)
    exact, T, S = exact_gp(X, Y, transform), torch.rand(5, 2).double(), torch.rand(2, 2).double()
    model = EXACT[name](X, Y, input_transform=transform())
    follow(model, exact)
    for own, theirs in (
        (model, exact),
        (model.condition_on_observations(S, S[:, :1]), None),
    ):
        if theirs is None:
            exact.posterior(T)
            theirs = exact.condition_on_observations(S, S[:, :1])
        a, b = own.posterior(T), theirs.posterior(T)
        assert_close(a.mean, b.mean, factor=1e4)
        assert_close(joint_covariance(a), joint_covariance(b), factor=1e4)


@pytest.mark.parametrize("name", EXACT)
def test_the_objective_is_the_exact_one(name: str) -> None:
    """With the priors of the warp's parameters, which BoTorch's loss has too."""
    X, Y = some(16)
    exact = exact_gp(X, Y)
    model = EXACT[name](X, Y, input_transform=warp())
    follow(model, exact)
    exact.train()
    theirs = ExactMarginalLogLikelihood(exact.likelihood, exact)
    expected = -theirs(exact(*exact.train_inputs), exact.train_targets)
    own = model.compute_custom_loss(ExactMarginalLogLikelihood(model.likelihood, model))
    assert_close(own, expected, factor=1e5)
    for field in ("concentration0", "concentration1"):
        (slope,) = torch.autograd.grad(own, getattr(warp_of(model), field), retain_graph=True)
        (their,) = torch.autograd.grad(expected, getattr(warp_of(exact), field), retain_graph=True)
        assert_close(slope, their, factor=1e6)


SPARSE: dict[str, Callable[..., Any]] = {
    "OSGPR": lambda X, Y, **o: OSGPR(X, Y, inducing_points=X[:7], window=6, **o),
    "OSVGP": lambda X, Y, **o: OSVGP(X, Y, inducing_points=X[:7], **o),
    "ClusteredGP": lambda X, Y, **o: ClusteredGP(X, Y, resolution=0.2, **o),
    "LocalGP": lambda X, Y, **o: LocalGP(X, Y, w_gen=0.8, max_size=8, **o),
}


@pytest.mark.parametrize("name", SPARSE)
def test_gradients_of_the_objective_are_those_of_differences(name: str) -> None:
    X, Y = some(20)
    model = SPARSE[name](X, Y, input_transform=scaled_warp())
    values = torch.tensor([[1.3, 0.8], [0.9, 1.5]], dtype=torch.float64)

    def objective(shift: Tensor) -> Tensor:
        set_warp(model, *(values + shift).tolist())
        return model.inference.objective(model.memory, None, model.prior)[0].sum()

    part, step = warp_of(model), 1e-5
    slopes = torch.autograd.grad(
        objective(0.0 * values), (part.concentration0, part.concentration1)
    )
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        shift = torch.zeros_like(values)
        shift[i, j] = step
        with torch.no_grad():
            difference = (objective(shift) - objective(-shift)) / (2.0 * step)
        torch.testing.assert_close(slopes[i][j], difference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SPARSE)
def test_a_fit_learns_the_transform(name: str) -> None:
    X, Y = some(20)
    model = SPARSE[name](X, Y, input_transform=warp())
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    with torch.no_grad():
        before = float(model.compute_custom_loss(mll))
    fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": 8}})
    part = warp_of(model)
    assert not part.training
    assert bool((part.concentration0 - 1.0).abs().max() > 1e-3)
    assert bool((part.concentration0 > 0.0).all() & (part.concentration1 > 0.0).all())
    with torch.no_grad():
        assert float(model.compute_custom_loss(mll)) < before


@pytest.mark.integration
def test_a_fit_finds_what_the_exact_model_s_finds() -> None:
    X, Y = some(24)
    models = [OSGPR(X, Y, inducing_points=X, input_transform=warp()), exact_gp(X, Y)]
    follow(*models)
    losses = []
    for model in models:
        mll = ExactMarginalLogLikelihood(model.likelihood, model)
        fit_gpytorch_mll(mll)
    own, exact = models
    other = OSGPR(X, Y, inducing_points=X, input_transform=warp())
    follow(other, exact)
    for model in (own, other):
        mll = ExactMarginalLogLikelihood(model.likelihood, model)
        with torch.no_grad():
            losses.append(float(model.compute_custom_loss(mll)))
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)


@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_all_outputs_share_a_transform_and_its_prior(batch: tuple[int, ...]) -> None:
    """As they share a lengthscale, whose prior counts for each of them."""
    X, Y = (t.expand(*batch, *t.shape) for t in some(12, outputs=3))
    model = OSGPR(X, Y, inducing_points=X.reshape(-1, 12, 2)[0], input_transform=warp())
    set_warp(model, [1.4, 0.8], [0.7, 1.6])
    part, mll = warp_of(model), ExactMarginalLogLikelihood(model.likelihood, model)
    loss = model.compute_custom_loss(mll)
    assert loss.shape == (*batch, 3)
    prior = LogNormalPrior(0.0, 0.75**0.5)
    own = sum(prior.log_prob(p).sum() for p in (part.concentration0, part.concentration1))
    part._priors.clear()
    assert_close(model.compute_custom_loss(mll) - loss, (own / 12).expand(*batch, 3), factor=1e2)


def test_a_prior_s_sample_may_be_taken() -> None:
    """As BoTorch's fit does before it tries again."""
    model = OSGPR(*some(12), input_transform=warp())
    sample_all_priors(model)
    assert bool((warp_of(model).concentration0 != 1.0).all())


def test_points_and_the_transform_are_learned_together() -> None:
    model = OSGPR(*some(30), input_transform=warp())
    learn_points(model, maxiter=3)
    assert bool((warp_of(model).concentration0 - 1.0).abs().max() > 1e-4)


def test_natural_gradients_learn_it_too() -> None:
    X, Y = some(20)
    model = OSVGP(X, Y, inducing_points=X[:7], input_transform=warp(), hyper_steps=20)
    assert bool((warp_of(model).concentration0 - 1.0).abs().max() > 1e-2)
    assert bool(model.posterior(X).variance.isfinite().all())


def test_what_is_learned_is_saved_and_moves_on(tmp_path: Path) -> None:
    X, Y = some(20, outputs=2)
    model = OSGPR(X, Y, input_transform=warp())
    set_warp(model, [1.4, 0.8], [0.7, 1.6])
    T = torch.rand(5, 2).double()
    model.save(tmp_path / "model.pt")
    loaded = OSGPR.load(tmp_path / "model.pt")
    for other in (loaded, copy.deepcopy(model)):
        assert torch.equal(other.posterior(T).mean, model.posterior(T).mean)
    one = model.subset_output([1])
    assert torch.equal(warp_of(one).concentration0, warp_of(model).concentration0)
    assert_close(one.posterior(T).mean, model.posterior(T).mean[:, 1:])
    more = some(3, outputs=2)
    loaded.update(*more)
    fantasy = loaded.fantasize(T[:2], SobolQMCNormalSampler(torch.Size([3]), seed=0))
    assert fantasy.posterior(T).mean.shape == (3, 5, 2)
    assert_gradient(lambda X: loaded.posterior(X).mean.sin().sum(), T)


def test_bounds_are_learned_from_the_first_inputs_alone() -> None:
    X, Y = some(20)
    model = OSGPR(X, Y, input_transform=Warp(2, [0, 1]), inducing_points=X)
    model.train()
    model.update(X[:3] + 5.0, Y[:3]).eval()
    model.log_marginal_likelihood()
    assert_close(warp_of(model)._normalize.mins.squeeze(-2), X.amin(0))
    unit = Normalize(2, bounds=UNIT)
    for transform in (Warp(2, [0, 1]), ChainedInputTransform(unit=unit, warp=Warp(2, [0, 1]))):
        with pytest.raises(InputDataError, match="Warp must learn its bounds, but train_X"):
            OSGPR(X[:0], Y[:0], input_transform=transform)


def test_inputs_are_warned_of_as_the_kernel_has_them() -> None:
    X, Y = some(12)
    OSGPR(50.0 * X, Y, input_transform=Warp(2, [0, 1], bounds=50.0 * UNIT))


@pytest.mark.parametrize(
    "build",
    [
        WISKI,
        partial(HeteroscedasticWISKI, rounds=0),
        partial(DecoupledGP, num_mean=8, num_covar=3),
        QSGP,
        QSRVM,
    ],
    ids=["WISKI", "HeteroscedasticWISKI", "DecoupledGP", "QSGP", "QSRVM"],
)
def test_models_that_cannot_follow_say_which_can(build: Callable[..., Any]) -> None:
    X, Y = some(12)
    with pytest.raises(UnsupportedError, match=r"parameters to learn.*Use AutoGP, OSGPR, OSVGP"):
        build(X, Y, input_transform=warp())
    still = warp().requires_grad_(False)
    set_frozen = torch.tensor([1.4, 0.8])
    still.concentration0.copy_(set_frozen)
    model = build(X, Y, input_transform=still)
    plain = build(still.eval()(X), Y)
    for actual, expected in zip(moments(model, X), moments(plain, still(X)), strict=True):
        assert_close(actual, expected)


def test_what_cannot_be_a_part_of_the_kernel_is_refused() -> None:
    X, Y = some(12)
    shifts = torch.zeros(2, 2).double()
    after = ChainedInputTransform(warp=warp(), perturb=InputPerturbation(shifts))
    with pytest.raises(UnsupportedError, match=r"got InputPerturbation. Put it before"):
        OSGPR(X, Y, input_transform=after)
    rounded = ChainedInputTransform(warp=warp(), round=Round([0], transform_on_train=False))
    with pytest.raises(UnsupportedError, match=r"got Round. Put it before"):
        OSGPR(X, Y, input_transform=rounded)
    with pytest.raises(UnsupportedError, match=r"without batch_shape, got \(2,\)"):
        OSGPR(
            X.expand(2, 12, 2),
            Y.expand(2, 12, 1),
            input_transform=warp(batch_shape=torch.Size([2])),
        )
    before = ChainedInputTransform(perturb=InputPerturbation(shifts), warp=warp())
    assert OSGPR(X, Y, input_transform=before).posterior(X[:3]).mean.shape == (6, 1)
