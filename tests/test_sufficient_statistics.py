"""Statistics against sums written out."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
import torch
from torch import Tensor

from bo_stream.testing.streams import assert_close
from bo_stream.weights import (
    MatrixMap,
    Regrouping,
    SufficientStatistics,
    grouped_statistics,
    weighted_statistics,
)

NAMES = [field.name for field in fields(SufficientStatistics)]


@dataclass
class Data:
    """Features ``m x n x p``, targets, relative noise and weights ``m x n``."""

    features: Tensor
    targets: Tensor
    noise: Tensor
    weight: Tensor

    def statistics(self, rows: slice = slice(None)) -> SufficientStatistics[Tensor]:
        return weighted_statistics(
            self.features[:, rows],
            self.targets[:, rows],
            self.noise[:, rows],
            self.weight[:, rows],
        )


@pytest.fixture
def data() -> Data:
    n, p, m = 9, 4, 2
    return Data(
        torch.randn(m, n, p, dtype=torch.float64),
        torch.randn(m, n, dtype=torch.float64),
        0.5 + torch.rand(m, n, dtype=torch.float64),
        torch.ones(m, n, dtype=torch.float64),
    )


def assert_same(a: SufficientStatistics[Tensor], b: SufficientStatistics[Tensor]) -> None:
    for name in NAMES:
        assert_close(getattr(a, name), getattr(b, name))


def test_are_the_sums_they_are_named_after(data: Data) -> None:
    data.weight[:, ::2] = 0.0
    statistics = data.statistics()
    for output in range(2):
        gram, moment, energy, totals, log_noise, noise_sum = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        for i in range(1, 9, 2):
            phi = data.features[output, i].unsqueeze(-1)
            column = torch.stack((data.targets[output, i], torch.ones(()))).unsqueeze(-1)
            noise = data.noise[output, i]
            gram = gram + phi @ phi.mT / noise
            moment = moment + phi @ column.mT / noise
            energy = energy + column @ column.mT / noise
            totals = totals + column @ column.mT
            log_noise = log_noise + noise.log()
            noise_sum = noise_sum + noise
        for name, expected in zip(
            NAMES, (gram, moment, energy, totals, log_noise, noise_sum), strict=True
        ):
            assert_close(getattr(statistics, name)[output], expected)
    assert_close(statistics.count, torch.tensor([4.0, 4.0]))


def test_add_over_batches(data: Data) -> None:
    whole, first, second = (data.statistics(s) for s in (slice(9), slice(5), slice(5, 9)))
    assert_same(first + second, whole)


def test_scaling_is_weighting_every_observation(data: Data) -> None:
    scaled = data.statistics().scale(0.3)
    data.weight *= 0.3
    assert_same(scaled, data.statistics())


def test_a_weight_of_minus_one_takes_out(data: Data) -> None:
    added = data.statistics()
    data.weight.neg_()
    zero = added + data.statistics()
    assert_same(zero, added.scale(0.0))


def test_an_affine_change_of_targets_is_exact_without_the_data(data: Data) -> None:
    slope, shift = torch.tensor([2.0, -3.0]), torch.tensor([0.7, 11.0])
    matrix = torch.zeros(2, 2, 2, dtype=torch.float64)
    matrix[:, 0, 0], matrix[:, 1, 0], matrix[:, 1, 1] = slope, shift, 1.0
    mapped = data.statistics().map_targets(matrix)
    data.targets = data.targets * slope.unsqueeze(-1) + shift.unsqueeze(-1)
    assert_same(mapped, data.statistics())


def test_pulling_back_is_mapping_the_features(data: Data) -> None:
    T = torch.randn(4, 3, dtype=torch.float64)
    pulled = data.statistics().pull_back(MatrixMap(T))
    data.features = data.features @ T
    assert_same(pulled, data.statistics())


def test_what_is_pulled_back_shares_nothing(data: Data) -> None:
    statistics = data.statistics()
    pulled = statistics.pull_back(MatrixMap(torch.eye(4, dtype=torch.float64)))
    for name in NAMES:
        getattr(statistics, name).zero_()
    assert_same(pulled, data.statistics())


def assert_same_but_gram(
    one: SufficientStatistics[Tensor], other: SufficientStatistics[Tensor]
) -> None:
    for name in NAMES[1:]:
        assert_close(getattr(one, name), getattr(other, name))


def test_groups_are_indicator_features(data: Data) -> None:
    groups = torch.randint(0, 3, data.targets.shape[-1:])
    grouped = grouped_statistics(groups, 4, data.targets, data.noise, data.weight)
    indicators = torch.nn.functional.one_hot(groups, 4).double()
    dense = weighted_statistics(indicators, data.targets, data.noise, data.weight)
    assert_close(torch.diag_embed(grouped.gram.squeeze(-1)), dense.gram)
    assert_same_but_gram(grouped, dense)


def test_regrouping_is_its_matrix(data: Data) -> None:
    groups, index = torch.randint(0, 4, data.targets.shape[-1:]), torch.tensor([2, 0, 2, 4])
    grouped = grouped_statistics(groups, 4, data.targets, data.noise, data.weight)
    moved = grouped.pull_back(Regrouping(index, 5))
    T = torch.nn.functional.one_hot(index, 5).double()
    dense = weighted_statistics(
        torch.nn.functional.one_hot(groups, 4).double(), data.targets, data.noise, data.weight
    ).pull_back(MatrixMap(T))
    assert_close(torch.diag_embed(moved.gram.squeeze(-1)), dense.gram)
    assert_same_but_gram(moved, dense)
