"""Criteria: what is expected of them against quadrature over what observations may say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import InputDataError
from scipy.special import expit, ndtr, owens_t, xlog1py, xlogy
from scipy.stats import norm
from torch import Tensor

from bo_stream.acquisition import (
    Criterion,
    ExceedanceEntropy,
    ExpectedLoss,
    IntegratedVariance,
    Misclassification,
    TargetedVariance,
)
from bo_stream.testing.streams import assert_close
from tests.oracles import criteria as oracle

N = 300


def wrong(chance: Tensor) -> Tensor:
    """The loss of calling the more probable side."""
    return torch.minimum(chance, 1.0 - chance)


def programme(chance: Tensor) -> Tensor:
    """Missing a place costs five times as much as treating one for nothing."""
    return torch.minimum(5.0 * chance, 1.0 - chance)


def brier(chance: Tensor) -> Tensor:
    return 4.0 * chance * (1.0 - chance)


def programme_of(mean: oracle.Array, spread: oracle.Array) -> oracle.Array:
    chance = oracle.exceedance(mean, spread, 0.3)
    return np.minimum(5.0 * chance, 1.0 - chance)


def brier_of(mean: oracle.Array, spread: oracle.Array) -> oracle.Array:
    chance = oracle.exceedance(mean, spread, 0.3)
    return 4.0 * chance * (1.0 - chance)


CRITERIA: dict[str, tuple[Criterion, oracle.Uncertainty, float]] = {
    "variance": (IntegratedVariance(), oracle.variance, 1e-12),
    "variance of prevalence": (
        IntegratedVariance("prevalence"),
        oracle.prevalence_variance,
        1e-7,
    ),
    "entropy": (ExceedanceEntropy(0.3, "latent"), oracle.entropy(0.3), 1e-6),
    "misclassification": (
        Misclassification(0.3, "latent"),
        oracle.misclassification(0.3),
        1e-5,
    ),
    "misclassification, missed points cost five": (
        Misclassification(0.3, "latent", miss_cost=5.0),
        programme_of,
        1e-4,
    ),
    "a smooth loss": (ExpectedLoss(brier, 0.3, "latent"), brier_of, 1e-6),
    "the loss of best actions": (ExpectedLoss(programme, 0.3, "latent"), programme_of, 1e-4),
}


def targets() -> tuple[Tensor, Tensor, Tensor]:
    """Means, variances and removed variances: some near the threshold, some little removed."""
    random = np.random.default_rng(5)
    deviation = random.uniform(0.2, 2.5, N)
    distance = random.normal(0.0, 1.5, N) * np.where(np.arange(N) % 3 == 0, 0.02, 1.0)
    share = random.uniform(0.0, 1.0, N) ** 3
    columns = 0.3 + distance * deviation, deviation**2, share * deviation**2
    mean, variance, removed = (torch.as_tensor(column) for column in columns)
    return mean, variance, removed


@pytest.mark.parametrize("name", CRITERIA)
def test_expectations_are_those_over_all_that_observations_may_say(name: str) -> None:
    criterion, uncertainty, error = CRITERIA[name]
    points = 301 if uncertainty is oracle.prevalence_variance else 3001
    columns = [column[:100] for column in targets()]
    found = criterion.expected(*columns).numpy()
    parts = [
        oracle.expected(uncertainty, *(c[rows].numpy() for c in columns), points=points)
        for rows in (slice(50), slice(50, 100))
    ]
    assert np.abs(found - np.concatenate(parts)).max() < error


@pytest.mark.parametrize("name", CRITERIA)
def test_without_observations_they_are_what_is_uncertain_now(name: str) -> None:
    criterion, uncertainty, error = CRITERIA[name]
    mean, variance, _ = targets()
    found = criterion.current(mean, variance)
    assert np.abs(found.numpy() - uncertainty(mean.numpy(), variance.numpy())).max() < error
    assert torch.equal(found, criterion.expected(mean, variance, torch.zeros(N).double()))


@pytest.mark.parametrize("name", CRITERIA)
def test_nothing_is_left_when_all_variance_is_removed(name: str) -> None:
    criterion, _, error = CRITERIA[name]
    mean, variance, _ = targets()
    assert float(criterion.expected(mean, variance, variance).abs().max()) < error


@pytest.mark.parametrize("name", CRITERIA)
def test_the_more_is_removed_the_less_is_left(name: str) -> None:
    criterion, _, error = CRITERIA[name]
    mean, variance, _ = targets()
    shares = torch.linspace(0.0, 1.0, 40, dtype=torch.float64).unsqueeze(-1)
    left = criterion.expected(mean, variance, shares * variance)
    assert left.shape == (40, N)
    assert float(left.diff(dim=0).max()) < error


def test_misclassification_is_owens_function() -> None:
    """The whole of it, and its limits: the present one without information, none with all."""
    distance = torch.tensor([0.0, 0.4, -1.7], dtype=torch.float64)
    ones, criterion = torch.ones(3).double(), Misclassification(0.0, "latent")
    for share in (0.04, 0.5, 0.97):
        expected = 2.0 * owens_t(distance.numpy(), np.sqrt((1.0 - share) / share))
        found = criterion.expected(distance, ones, share * ones)
        assert np.abs(found.numpy() - expected).max() < 1e-5
    now = torch.as_tensor(ndtr(-distance.abs().numpy()))
    assert_close(criterion.expected(distance, ones, 1e-14 * ones), now, factor=100.0)
    assert_close(criterion.expected(distance, ones, ones), torch.zeros(3).double())


def test_misclassification_is_the_loss_of_a_wrong_call() -> None:
    mean, variance, removed = targets()
    first = Misclassification(0.3, "latent").expected(mean, variance, removed)
    second = ExpectedLoss(wrong, 0.3, "latent").expected(mean, variance, removed)
    assert float((first - second).abs().max()) < 1e-4


FAR: dict[str, tuple[Criterion, Callable[[oracle.Array], oracle.Array], float]] = {
    "misclassification": (
        Misclassification(0.0, "latent"),
        lambda P: np.minimum(P, 1.0 - P),
        1e-12,
    ),
    "misses cost two": (
        Misclassification(0.0, "latent", miss_cost=2.0),
        lambda P: np.minimum(2.0 * P, 1.0 - P),
        1e-6,
    ),
    "false alarms cost two": (
        Misclassification(0.0, "latent", miss_cost=0.5),
        lambda P: np.minimum(0.5 * P, 1.0 - P),
        1e-6,
    ),
    "entropy": (
        ExceedanceEntropy(0.0, "latent"),
        lambda P: -xlogy(P, P) - xlog1py(1.0 - P, -P),
        1e-12,
    ),
}
"""Criteria, their losses, and by which share of the present one an expected loss may exceed it."""


@pytest.mark.parametrize("name", FAR)
@pytest.mark.parametrize("distance", [-15.0, -9.0, -7.2, -6.8])
def test_far_from_the_threshold_the_share_that_is_left_is_right(name: str, distance: float) -> None:
    criterion, loss, excess = FAR[name]
    share = np.array([0.0, 0.003, 0.02, 0.2, 0.5, 0.8])
    left = np.full(6, loss(ndtr(np.array(distance))))
    for row, r in enumerate(share[1:], start=1):  # where the integrand is, far from the mean
        mean, deviation = distance / np.sqrt(1.0 - r), np.sqrt(r / (1.0 - r))
        y = distance * np.sqrt(1.0 - r) + np.sqrt(r) * np.linspace(-9.0, 9.0, 4001)
        left[row] = (loss(ndtr(y)) * norm.pdf(y, mean, deviation)).sum() * (y[1] - y[0])
    moments = torch.tensor([distance]).double(), torch.ones(1).double()
    found = criterion.expected(*moments, torch.as_tensor(share).unsqueeze(-1))[:, 0].numpy()
    assert np.abs(found / found[0] - left / left[0]).max() < 0.05
    assert found.min() > 0.0
    assert found.max() <= (1.0 + excess) * found[0]
    if not isinstance(criterion, ExceedanceEntropy):
        assert found[0] == pytest.approx(left[0], rel=1e-6)


@pytest.mark.parametrize("distance", [7.2, 9.0, 15.0])
def test_far_above_the_threshold_a_loss_is_that_of_the_mirrored_one_below(distance: float) -> None:
    share = torch.linspace(0.0, 1.0, 9).double().unsqueeze(-1)
    above, below = (torch.tensor([side * distance]).double() for side in (1.0, -1.0))
    ones = torch.ones(1).double()
    for one, other, factor in (
        (Misclassification(0.0, "latent", 2.0), Misclassification(0.0, "latent", 0.5), 2.0),
        (ExceedanceEntropy(0.0, "latent"), ExceedanceEntropy(0.0, "latent"), 1.0),
    ):
        found = one.expected(above, ones, share)
        expected = factor * other.expected(below, ones, share)
        assert float((found - expected).abs().max()) < 1e-3 * float(expected[0])


def test_a_loss_that_has_changed_is_another_one() -> None:
    mean, variance, removed = targets()
    cost = [5.0]

    @dataclass
    class Programme:  # without a hash
        cost: list[float]

        def __call__(self, chance: Tensor) -> Tensor:
            return torch.minimum(self.cost[0] * chance, 1.0 - chance)

    criterion = ExpectedLoss(Programme(cost), 0.3, "latent")
    before = criterion.expected(mean, variance, removed)
    cost[0] = 0.1
    after = criterion.expected(mean, variance, removed)
    fresh = ExpectedLoss(lambda P: torch.minimum(0.1 * P, 1.0 - P), 0.3, "latent")
    assert torch.equal(after, fresh.expected(mean, variance, removed))
    assert not torch.equal(before, after)


def test_a_loss_may_change_where_the_chance_is_zero() -> None:
    mean, variance, removed = targets()
    jump = [0.0]
    criterion = ExpectedLoss(
        lambda P: torch.minimum(P, 1.0 - P) + jump[0] * (P == 0.0), 0.3, "latent"
    )
    before = criterion.expected(mean, variance, removed)
    jump[0] = 1.0
    assert not torch.equal(before, criterion.expected(mean, variance, removed))


def test_targeted_variance_is_the_variance_weighted_at_the_threshold() -> None:
    mean, variance, removed = targets()
    for width in (0.0, 0.7):
        total = variance + width**2
        density = (-0.5 * (mean - 0.3).square() / total).exp() / (2.0 * torch.pi * total).sqrt()
        weighted = TargetedVariance(0.3, "latent", width=width)
        found = weighted.expected(mean, variance, removed)
        assert_close(found, density * (variance - removed))
    threshold = float(expit(0.3))
    found = TargetedVariance(threshold, "prevalence").expected(mean, variance, removed)
    plain = IntegratedVariance("prevalence").expected(mean, variance, removed)
    total = (2.0 * torch.pi * variance).sqrt()
    assert_close(found, plain * (-0.5 * (mean - 0.3).square() / variance).exp() / total)


@pytest.mark.parametrize(
    "criterion",
    [
        ExceedanceEntropy(0.1, "prevalence"),
        Misclassification(0.1, "prevalence"),
        ExpectedLoss(brier, 0.1, "prevalence"),
    ],
)
def test_a_threshold_may_be_a_prevalence(
    criterion: ExceedanceEntropy | Misclassification | ExpectedLoss,
) -> None:
    mean, variance, removed = targets()
    logit = criterion.latent
    assert logit == pytest.approx(np.log(1.0 / 9.0), rel=1e-14)
    latent = replace(criterion, threshold=logit, scale="latent")
    columns = mean, variance, removed
    assert torch.equal(criterion.expected(*columns), latent.expected(*columns))


def test_points_without_variance_have_no_uncertainty() -> None:
    mean, none = torch.tensor([-1.0, 0.3, 2.0]), torch.zeros(3)
    for criterion, _, _ in CRITERIA.values():
        for dtype in (torch.float32, torch.float64):
            found = criterion.current(mean.to(dtype), none.to(dtype))
            assert bool(found.isfinite().all())
            assert float(found[[0, 2]].abs().max()) < 1e-6


THRESHOLDED: list[Callable[..., Criterion]] = [
    TargetedVariance,
    ExceedanceEntropy,
    Misclassification,
    lambda threshold, scale: ExpectedLoss(brier, threshold, scale),
]


@pytest.mark.parametrize("build", THRESHOLDED)
def test_bad_thresholds(build: Callable[..., Criterion]) -> None:
    for percent in (10.0, 0.0, 1.0, float("nan")):
        with pytest.raises(ValueError, match="divide by 100"):
            build(percent, "prevalence")
    with pytest.raises(ValueError, match="finite threshold"):
        build(float("inf"), "latent")
    with pytest.raises(ValueError, match=r"latent.*logit"):
        build(0.1, "logit")


def test_other_bad_arguments() -> None:
    with pytest.raises(ValueError, match="logit"):
        IntegratedVariance("logit")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="width"):
        TargetedVariance(0.0, "latent", width=-1.0)
    mean, variance, _ = targets()
    with pytest.raises(InputDataError, match="same shape"):
        ExpectedLoss(torch.sum, 0.0, "latent").current(mean, variance)
    with pytest.raises(InputDataError, match=r"finite.* at 0"):
        ExpectedLoss(torch.log, 0.0, "latent").current(mean, variance)
