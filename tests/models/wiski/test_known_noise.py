"""Known noise variances in regression, fantasies and predictions, against dense processes.

Observations take them in original units; what is conditioned, in transformed ones, as in BoTorch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.models import SingleTaskGP
from botorch.models.transforms.outcome import Log
from botorch.sampling import SobolQMCNormalSampler
from torch import Tensor

from bo_stream import WISKI
from bo_stream.testing.streams import assert_close, assert_gradient, joint_covariance
from tests.oracles.gaussian_process import (
    DenseGP,
    in_order,
    integrated_posterior_variance,
    standardization,
)
from tests.oracles.reference import lift, reference
from tests.support.problems import Observations, kernel, observations

SHAPES = [
    pytest.param(outputs, batch, id=f"m{outputs}-batch{list(batch)}")
    for outputs in (1, 3)
    for batch in ((), (2,))
]


def model_of(data: Observations, **options: Any) -> WISKI:
    m, batch = data.Y.shape[-1], data.X.shape[:-2]
    covar_module = kernel("RBF", 2, (*batch, *([m] if m > 1 else [])))
    defaults: dict[str, Any] = {
        "covar_module": covar_module,
        "bounds": torch.tensor([[0.0, 0.0], [1.0, 1.0]]),
        "grid_size": 9,
        "tolerance": 0.0,
    }
    return WISKI(*data.astuple(), **{**defaults, **options})


def unlike(like: Tensor) -> Tensor:
    """Variances that differ by a factor of thirty between points and between outputs."""
    return 0.01 * 30.0 ** torch.rand_like(like)


def in_units(data: Observations, Y: Tensor) -> tuple[Tensor, Tensor]:
    """Outcomes as targets of the dense process of a model of ``data``, and their scale."""
    mean, scale = standardization(data.Y)
    return in_order((Y - mean) / scale, data.Y.shape[-1]), scale


def assert_posterior(model: Any, dense: DenseGP, data: Observations, T: Tensor) -> None:
    """Mean and covariance of a model are those of the dense process, in original units."""
    m = data.Y.shape[-1]
    mean, covariance = dense.posterior(lift(T, m))
    centre, scale = standardization(data.Y)
    posterior = model.posterior(T)
    assert_close(posterior.mean, centre + scale * (mean.unsqueeze(-1) if m == 1 else mean.mT))
    covariance = covariance.unsqueeze(-3) if m == 1 else covariance
    assert_close(joint_covariance(posterior), scale.mT.unsqueeze(-1).square() * covariance)


@pytest.mark.parametrize("noise", ["learned", "known", "mixed"])
@pytest.mark.parametrize(("outputs", "batch"), SHAPES)
def test_what_is_hypothetical_has_the_noise_it_is_given(
    outputs: int, batch: tuple[int, ...], noise: str
) -> None:
    data, more = (observations(n, 2, outputs, batch).with_noise(noise) for n in (12, 4))
    model, T = model_of(data), torch.rand(*batch, 5, 2).double()
    y, scale = in_units(data, more.Y)
    given = unlike(more.Y)
    dense = reference(model, *data.astuple())
    dense = dense.condition(lift(more.X, outputs), y, in_order(given, outputs))
    assert_posterior(model.condition_on_observations(more.X, more.Y, noise=given), dense, data, T)
    original = model.transformed_noise(given * scale.square())
    assert_close(original, given)
    for rows in (slice(0, 1), slice(None)):
        noises = given[..., rows, :]
        conditioned = model.condition_on_observations(more.X, more.Y, noise=noises)
        same = model.condition_on_observations(more.X, more.Y, noise=noises.expand_as(more.Y))
        assert_close(conditioned.posterior(T).mean, same.posterior(T).mean)


@pytest.mark.parametrize(("outputs", "batch"), SHAPES)
def test_fantasies_have_the_noise_they_are_given(outputs: int, batch: tuple[int, ...]) -> None:
    data = observations(12, 2, outputs, batch).with_noise("known")
    model, T = model_of(data), torch.rand(*batch, 5, 2).double()
    X, sampler = torch.rand(*batch, 3, 2).double(), SobolQMCNormalSampler(torch.Size([2]), seed=5)
    given = unlike(X[..., :1].expand(*batch, 3, outputs))
    noisy = model.posterior(X, observation_noise=given)
    plain, scale = model.posterior(X), standardization(data.Y)[1]
    assert_close(noisy.variance, plain.variance + scale.square() * given)
    draws = sampler(noisy)
    fantasy = model.fantasize(X, sampler, observation_noise=given)
    dense = reference(model, *data.astuple())
    for i in range(2):
        y, _ = in_units(data, draws[i])
        one = dense.condition(lift(X, outputs), y, in_order(given, outputs))
        alone = model.condition_on_observations(X, draws[i], noise=given)
        assert_posterior(alone, one, data, T)
        assert_close(fantasy.posterior(T).mean[i], alone.posterior(T).mean)


def output_of(gp: DenseGP, i: int) -> DenseGP:
    """One of the processes of several outputs."""
    return DenseGP(
        lambda A, B: gp.kernel(A, B)[i], gp.mean[i], gp.X.squeeze(-3), gp.y[i], gp.noise[i]
    )


def test_candidates_of_a_batch_have_noises_of_their_own() -> None:
    data = observations(12, 2, 2).with_noise("known")
    model, T = model_of(data), torch.rand(5, 2).double()
    X = torch.rand(4, 3, 2).double()
    given = unlike(X)
    fantasy = model.fantasize(X, SobolQMCNormalSampler(torch.Size([2])), observation_noise=given)
    scale = standardization(data.Y)[1].squeeze(0)
    found = fantasy.posterior(T).variance.mean(-2) / scale.square()
    for i in range(2):
        dense = output_of(reference(model, *data.astuple()), i)
        for j in range(4):
            expected = integrated_posterior_variance(dense, X[j], given[j, :, i], T)
            assert_close(found[0, j, i], expected)


def test_gradients_flow_to_the_noise_that_is_given() -> None:
    data = observations(10, 2, 2)
    model, T = model_of(data).eval(), torch.rand(3, 2).double()
    X, Y = data.X[:2], data.Y[:2] + 1.0

    def value(noise: Tensor) -> Tensor:
        posterior = model.condition_on_observations(X, Y, noise=noise).posterior(T)
        noisy = model.posterior(X, observation_noise=noise)
        return posterior.mean.sin().sum() + posterior.variance.sum() + noisy.variance.sin().sum()

    assert_gradient(value, unlike(Y))


def test_units_are_botorchs() -> None:
    data = observations(12, 2, 2)
    data = Observations(data.X, 50.0 * data.Y)
    exact, model = SingleTaskGP(data.X, data.Y), model_of(data)
    X, noise = torch.rand(4, 2).double(), unlike(data.Y[:4])
    added = [
        each.posterior(X, observation_noise=noise).variance - each.posterior(X).variance
        for each in (model, exact)
    ]
    assert_close(added[0], added[1], factor=10)
    for chosen in ([1], [0]):
        part = model.posterior(X, chosen, observation_noise=noise)
        assert_close(part.variance - model.posterior(X, chosen).variance, added[0][:, chosen])


@pytest.mark.parametrize(
    ("noise", "error"),
    [
        (-torch.ones(3, 2).double(), InputDataError),
        (torch.full((3, 2), torch.nan).double(), InputDataError),
        (torch.ones(3, 2), InputDataError),
        (torch.ones(3, 1).double(), BotorchTensorDimensionError),
        (torch.ones(2, 2).double(), BotorchTensorDimensionError),
    ],
    ids=["negative", "NaN", "of another dtype", "of one output", "a row too few"],
)
def test_bad_noise_is_named(noise: Tensor, error: type[Exception]) -> None:
    model, X = model_of(observations(8, 2, 2)), torch.rand(3, 2).double()
    with pytest.raises(error, match=r"\bobservation_noise\b"):
        model.posterior(X, observation_noise=noise)


def test_noise_in_the_units_of_logs_depends_on_the_outcomes() -> None:
    model = model_of(observations(8), outcome_transform=Log())
    with pytest.raises(UnsupportedError, match=r"Log.*depends on the outcomes"):
        model.transformed_noise(torch.ones(2, 1).double())


@pytest.mark.parametrize("waiting", [0, 20])
@pytest.mark.parametrize("n", [3, 30, 200])
def test_a_conditioned_model_keeps_its_noise_while_the_original_goes_on(
    n: int, waiting: int
) -> None:
    X = torch.rand(700, 2, dtype=torch.float64)
    Y, V = (6.0 * X[:, :1]).sin(), torch.full((700, 1), 0.02, dtype=torch.float64)
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    model = WISKI(X[:400], Y[:400], V[:400], bounds=bounds, grid_size=14)
    rows = slice(400, 400 + waiting)
    model.update(X[rows], Y[rows], V[rows])  # these wait
    conditioned = model.condition_on_observations(X[600:603], Y[600:603])

    def known() -> tuple[Tensor, float]:
        posterior = conditioned.posterior(X[:5], observation_noise=True)
        return posterior.variance, conditioned.num_observations

    before = known()
    for _ in range(2):
        model.update(X[-n:], Y[-n:], 100.0 * V[-n:])
    after = known()
    assert torch.equal(after[0], before[0])
    assert (after[1], model.num_observations) == (before[1], 400 + waiting + 2 * n)
