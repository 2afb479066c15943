"""Greedy choices from a pool against trying every candidate on a dense process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from botorch.acquisition.active_learning import qNegIntegratedPosteriorVariance
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.models.transforms.input import Normalize
from botorch.models.transforms.outcome import Log
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bo_stream import WISKI, AutoGP
from bo_stream.acquisition import FeatureNIPV, PoolSelector, select_from_pool
from bo_stream.acquisition.gains import Gains
from bo_stream.acquisition.pool import thinned
from bo_stream.bases.kernels import LinearStem
from bo_stream.learning import pretrain
from bo_stream.testing.streams import assert_close
from tests.acquisition.examples import dense, greedy_choice, small_model, some
from tests.support.problems import Observations

POOL = 60


def rand(n: int, dim: int = 2) -> Tensor:
    return torch.rand(n, dim, dtype=torch.float64)


def naive(
    model: WISKI,
    data: Observations,
    pool: Tensor,
    points: Tensor,
    q: int,
    excluded: tuple[int, ...] = (),
    costs: Tensor | None = None,
) -> list[int]:
    noise, allowed = model.noise_level().detach(), set(range(len(pool))) - set(excluded)
    return greedy_choice(dense(model, data), pool, points, q, noise, allowed, costs)


class TestEqualsTryingAll:
    @pytest.mark.parametrize("dim", [1, 2, 3])
    def test_plain(self, dim: int) -> None:
        data = some(dim=dim)
        model, pool, points = small_model(data, grid_size=9), rand(POOL, dim), rand(40, dim)
        picks = select_from_pool(model, pool, 8, points)
        assert picks.dtype == torch.long
        assert picks.tolist() == naive(model, data, pool, points, 8)

    def test_until_none_are_left(self) -> None:
        data, pool, points = some(), rand(12), rand(40)
        model = small_model(data)
        picks = select_from_pool(model, pool, 12, points).tolist()
        assert picks == naive(model, data, pool, points, 12)
        assert sorted(picks) == list(range(12))

    def test_with_exclusions(self) -> None:
        data, pool, points = some(), rand(POOL), rand(40)
        model = small_model(data)
        unwanted = naive(model, data, pool, points, 5)
        expected = naive(model, data, pool, points, 6, tuple(unwanted))
        mask = torch.zeros(POOL, dtype=torch.bool)
        mask[unwanted] = True
        for exclude in (mask, torch.tensor(unwanted * 2), torch.tensor(unwanted).int()):
            kept = exclude.clone()
            assert select_from_pool(model, pool, 6, points, exclude=exclude).tolist() == expected
            assert torch.equal(exclude, kept)
        empty = select_from_pool(model, pool, 5, points, exclude=torch.tensor([]))
        assert empty.tolist() == unwanted

    def test_with_pending_ones(self) -> None:
        """As if they had been observed, whatever came out."""
        data, pool, points = some(), rand(POOL), rand(40)
        model = small_model(data, outcome_transform=None)
        waiting = naive(model, data, pool, points, 20)[10:14]
        told = Observations(torch.cat((data.X, pool[waiting])), torch.cat((data.Y, rand(4)[:, :1])))
        expected = naive(model, told, pool, points, 6, (*waiting, 3))
        assert expected != naive(model, data, pool, points, 6, (*waiting, 3))
        selector = PoolSelector(model, pool, points)
        for pending in (torch.tensor(waiting), torch.tensor(waiting * 2)):
            picks = selector.select(6, exclude=torch.tensor([3]), pending=pending)
            assert picks.tolist() == expected
        again = selector.select(6, exclude=torch.tensor([3, *waiting]), pending=pending)
        assert again.tolist() == naive(model, data, pool, points, 6, (*waiting, 3))
        with pytest.raises(InputDataError, match="from 0 to 59 in pending"):
            selector.select(6, pending=torch.tensor([60]))

    def test_with_costs(self) -> None:
        data, pool, points = some(), rand(POOL), rand(40)
        model, costs = small_model(data), 0.1 + torch.rand(POOL, dtype=torch.float64)
        expected = naive(model, data, pool, points, 6, (), costs)
        assert select_from_pool(model, pool, 6, points, costs=costs).tolist() == expected
        assert expected != naive(model, data, pool, points, 6)

    def test_with_known_noise_and_transforms(self) -> None:
        data = some().with_noise("known")
        model = small_model(
            data, input_transform=Normalize(2, bounds=torch.tensor([[0.0] * 2, [1.0] * 2]))
        )
        pool, points = rand(POOL), rand(40)
        expected = naive(model, data, pool, points, 6)
        assert select_from_pool(model, pool, 6, points).tolist() == expected

    def test_of_a_weighted_sum_of_outputs(self) -> None:
        model, pool, points = small_model(some(outputs=2)), rand(20), rand(15)
        transform = ScalarizedPosteriorTransform(torch.tensor([2.0, -0.5], dtype=torch.float64))
        picks = select_from_pool(model, pool, 3, points, posterior_transform=transform)
        chosen: list[int] = []
        for _ in range(3):
            sets = torch.stack([pool[[*chosen, i]] for i in range(20)])
            value = FeatureNIPV(model, points, posterior_transform=transform)(sets)
            value[chosen] = -torch.inf
            chosen.append(int(value.argmax()))
        assert picks.tolist() == chosen

    def test_of_a_model_conditioned_on_hypothetical_data(self) -> None:
        data, pool, points = some(), rand(POOL), rand(40)
        model = small_model(data, outcome_transform=None)
        X, Y = rand(4), rand(4)[:, :1]
        both = Observations(torch.cat((data.X, X)), torch.cat((data.Y, Y)))
        conditioned = model.condition_on_observations(X, Y)
        expected = naive(model, both, pool, points, 5)
        assert select_from_pool(conditioned, pool, 5, points).tolist() == expected

    def test_in_float32(self) -> None:
        model, pool, points = small_model(some()), rand(POOL).float(), rand(40).float()
        expected = select_from_pool(model, pool.double(), 4, points.double())
        assert torch.equal(select_from_pool(model, pool, 4, points), expected)
        single = small_model(some(dtype=torch.float32))
        assert len(set(select_from_pool(single, pool, 4, points).tolist())) == 4

    def test_of_logarithms_is_that_of_the_transformed_outcome(self) -> None:
        data, pool, points = some(), rand(POOL), rand(40)
        model = small_model(data, outcome_transform=Log())
        logs = Observations(data.X, data.Y.log())
        plain = small_model(logs, outcome_transform=None, covar_module=model.covar_module)
        plain.likelihood.noise = model.likelihood.noise.detach()
        expected = select_from_pool(plain, pool, 4, points)
        assert torch.equal(select_from_pool(model, pool, 4, points), expected)


def test_ties_go_to_the_first() -> None:
    model, pool, points = small_model(some()), rand(POOL), rand(40)
    picks = select_from_pool(model, pool, 5, points)
    repeated = torch.cat((pool, pool, pool))
    assert torch.equal(select_from_pool(model, repeated, 1, points), picks[:1])
    fresh = select_from_pool(model, pool.flip(0).repeat(2, 1), 1, points)
    assert fresh.item() == POOL - 1 - picks[0].item()


class TestSelector:
    def follow(self, model: WISKI, change: Any, count: int = 6) -> tuple[Gains, Gains]:
        """The gains of a selector that saw a change of its model, and of a new one."""
        pool, points = rand(POOL), rand(40)
        old = PoolSelector(model, pool, points)
        old.select(count)
        change(model, pool)
        chosen = old.select(count)
        new = PoolSelector(model, pool, points)
        assert torch.equal(chosen, new.select(count))
        assert old._known is not None
        assert new._known is not None
        return old._known[0], new._known[0]

    @staticmethod
    def choice_observed(model: WISKI, pool: Tensor) -> None:
        picks = select_from_pool(model, pool, 6, rand(40))
        model.update(pool[picks], rand(6)[:, :1])

    @staticmethod
    def others_observed(model: WISKI, pool: Tensor) -> None:
        model.update(rand(4), rand(4)[:, :1])

    @staticmethod
    def taken_out(model: WISKI, pool: Tensor) -> None:
        data = rand(3), rand(3)[:, :1]
        model.update(*data).retract(*data)
        model.update(rand(2), rand(2)[:, :1])

    @staticmethod
    def many_observed(model: WISKI, pool: Tensor) -> None:
        model.update(rand(100), rand(100)[:, :1])

    @staticmethod
    def refitted(model: WISKI, pool: Tensor) -> None:
        model.covar_module.lengthscale = 0.5
        model.likelihood.noise = 0.3

    @staticmethod
    def noisier(model: WISKI, pool: Tensor) -> None:
        model.likelihood.noise = 0.3

    @staticmethod
    def grown(model: WISKI, pool: Tensor) -> None:
        model.update(1.0 + 0.2 * rand(4), rand(4)[:, :1])

    @staticmethod
    def forgetful(model: WISKI, pool: Tensor) -> None:
        model.forget(0.5)

    @staticmethod
    def nothing(model: WISKI, pool: Tensor) -> None:
        pass

    @pytest.mark.parametrize(
        "change",
        [
            "choice_observed",
            "others_observed",
            "taken_out",
            "many_observed",
            "refitted",
            "noisier",
            "grown",
            "forgetful",
            "nothing",
        ],
    )
    def test_is_as_new_after(self, change: str) -> None:
        old, new = self.follow(small_model(some()), getattr(self, change))
        assert_close(old.variance, new.variance)
        assert_close(old.numerator / new.numerator.max(), new.numerator / new.numerator.max())

    def test_does_not_compute_anew_what_follows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, pool, points = small_model(some()), rand(POOL), rand(40)
        selector = PoolSelector(model, pool, points)
        picks = selector.select(6)
        monkeypatch.setattr(Gains, "of", None)
        model.update(pool[picks], rand(6)[:, :1])
        picks = selector.select(6)
        model.update(rand(3), rand(3)[:, :1])
        assert torch.equal(selector.select(6), selector.select(6))
        with pytest.raises(TypeError):
            self.noisier(model, pool) or selector.select(6)

    @pytest.mark.parametrize("family", ["WISKI", "AutoGP"])
    @pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid")
    def test_follows_a_stem_and_an_input_transform_that_have_moved(self, family: str) -> None:
        X, pool, points = rand(30), rand(200), rand(40)
        X[:, 1], points[:, 1] = 0.5, 0.5
        Y = torch.sin(5.0 * X[:, :1])
        if family == "WISKI":
            model: WISKI | AutoGP = WISKI(X, Y, stem=LinearStem(2, 1).double(), grid_size=20)
        else:
            box = torch.tensor([[0.0, 0.0], [2.0, 2.0]], dtype=torch.float64)
            model = AutoGP(X, Y, families="exact", input_transform=Normalize(2, bounds=box))
        reused = pool.clone()
        selector = PoolSelector(model, reused, points)
        reused.fill_(0.5)  # by the caller, who has the right to
        selector.select(4)
        if isinstance(model, WISKI):
            pretrain(model, X, Y, maxiter=20)
        else:
            model.input_transform._coefficient[0, 0] = 0.4
            model.clear().update(X, Y)
        chosen = selector.select(4)
        assert torch.equal(chosen, select_from_pool(model, pool, 4, points))
        assert torch.equal(selector._pool, model.process_inputs(pool))

    def test_through_a_long_run(self) -> None:
        data, pool, points = some(), rand(300), rand(100)
        model = small_model(data)
        selector, taken = PoolSelector(model, pool, points), torch.arange(0)
        for _ in range(30):
            picks = selector.select(6, exclude=taken)
            assert not set(picks.tolist()) & set(taken.tolist())
            taken = torch.cat((taken, picks))
            model.update(pool[picks], rand(6)[:, :1])
        fresh = PoolSelector(model, pool, points).select(6, exclude=taken)
        assert torch.equal(selector.select(6, exclude=taken), fresh)

    def test_leaves_the_model_as_it_is(self) -> None:
        model, T = small_model(some()), rand(4)
        before = model.posterior(T).variance
        PoolSelector(model, rand(POOL), rand(40)).select(6)
        assert torch.equal(model.posterior(T).variance, before)
        assert model.num_observations == 25


class LargestTensor(TorchFunctionMode):
    """Remembers the largest tensor that any function returned."""

    numel = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple) else (result,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.untyped_storage().nbytes() // value.itemsize)
        return result


def test_a_large_pool_needs_no_square() -> None:
    """Neither N x N nor N x M, and not even N x r, numbers."""
    model = small_model(some(), tolerance=1e-6)
    pool, points = rand(50_000), rand(20_000)
    largest = LargestTensor()
    with largest:
        picks = select_from_pool(model, pool, 4, points)
    assert len(set(picks.tolist())) == 4
    assert largest.numel <= 50_000 * 100


class TestBadInput:
    @pytest.mark.parametrize("q", [0, -1, 8, 1.5])
    def test_count(self, q: int) -> None:
        with pytest.raises(ValueError, match=f"whole number q from 1 to the 7 .* got {q}"):
            select_from_pool(small_model(some()), rand(10), q, rand(5), torch.tensor([0, 4, 9]))

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"pool": torch.rand(10, 3)}, BotorchTensorDimensionError, "pool of shape `N x 2`"),
            ({"pool": torch.rand(10)}, BotorchTensorDimensionError, "pool of shape"),
            ({"pool": torch.ones(10, 2).long()}, InputDataError, "floating point"),
            ({"pool": torch.full((10, 2), torch.nan)}, InputDataError, "finite"),
            ({"pool": torch.full((10, 2), 1e3)}, InputDataError, "outside the bounds"),
            ({"mc_points": torch.rand(5, 1)}, BotorchTensorDimensionError, "mc_points of shape"),
            ({"mc_points": torch.rand(0, 2)}, InputDataError, "at least one point"),
            ({"exclude": torch.zeros(9).bool()}, BotorchTensorDimensionError, "exclude as"),
            ({"exclude": torch.zeros(2, 2).long()}, BotorchTensorDimensionError, "exclude as"),
            ({"exclude": torch.tensor([0.5])}, InputDataError, "bools or indices"),
            ({"exclude": torch.tensor([10])}, InputDataError, "from 0 to 9"),
            ({"exclude": torch.tensor([-1])}, InputDataError, "from 0 to 9"),
            ({"costs": torch.ones(9)}, BotorchTensorDimensionError, "costs of shape `10`"),
            ({"costs": torch.zeros(10)}, InputDataError, "positive"),
            ({"costs": torch.full((10,), torch.inf)}, InputDataError, "finite"),
        ],
    )
    def test_tensors(self, arguments: Any, error: type, message: str) -> None:
        defaults = {"pool": rand(10), "q": 2, "mc_points": rand(5)}
        with pytest.raises(error, match=message):
            select_from_pool(small_model(some()), **{**defaults, **arguments})

    def test_models(self) -> None:
        with pytest.raises(UnsupportedError, match="batch shape"):
            select_from_pool(small_model(some(batch_shape=(2,))), rand(10), 2, rand(5))
        with pytest.raises(UnsupportedError, match="posterior_transform"):
            select_from_pool(small_model(some(outputs=2)), rand(10), 2, rand(5))
        conditioned = small_model(some()).condition_on_observations(
            rand(6).view(2, 3, 2), rand(3).view(2, 3, 1)
        )
        with pytest.raises(
            UnsupportedError, match=r"batch shape \(2,\).* hypothetical observations"
        ):
            select_from_pool(conditioned, rand(10), 2, rand(5))


@pytest.mark.parametrize("unit", [2.0**50, 1e-320])
def test_the_unit_of_costs_changes_no_pick(unit: float) -> None:
    model, pool, points = small_model(some()), rand(POOL), rand(40)
    excluded = torch.arange(3)
    picks = select_from_pool(model, pool, 5, points, exclude=excluded)
    costs = torch.full((POOL,), unit, dtype=torch.float64)  # gains of 1e-15 are no ties
    chosen = select_from_pool(model, pool, 5, points, exclude=excluded, costs=costs)
    assert torch.equal(chosen, picks)


@pytest.mark.parametrize("excluded", [[], [9]])
def test_one_forbidding_cost_changes_no_other_pick(excluded: list[int]) -> None:
    model, pool, points = small_model(some()), rand(10), rand(40)
    costs, without = torch.full((10,), 0.01, dtype=torch.float64), torch.tensor([9])
    expected = select_from_pool(model, pool, 4, points, exclude=without, costs=costs)
    costs[9] = 1e308
    index = torch.tensor(excluded, dtype=torch.long)
    assert torch.equal(
        select_from_pool(model, pool, 4, points, exclude=index, costs=costs), expected
    )


def test_costs_a_great_many_orders_apart_leave_out_those_excluded() -> None:
    """Gains per the least costs are infinite."""
    costs = torch.ones(10, dtype=torch.float64)
    costs[:4] = 1e-320
    excluded = torch.tensor([0, 4])
    picks = select_from_pool(
        small_model(some()), rand(10), 8, rand(40), exclude=excluded, costs=costs
    ).tolist()
    assert sorted(picks[:3]) == [1, 2, 3]
    assert sorted(picks[3:]) == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("side", [-1.0, 1.0])
def test_points_of_the_integral_beyond_the_bounds(side: float) -> None:
    data, pool = some(), rand(POOL)
    model, points = small_model(data), 0.5 + side * (0.6 + 0.2 * rand(40))
    wider = 3.0 * model.bounds - 1.0  # with all nodes of the model among its own
    roomy = small_model(data, bounds=wider, grid_size=27, covar_module=model.covar_module)
    roomy.likelihood = model.likelihood
    values = qNegIntegratedPosteriorVariance(roomy, mc_points=points)(pool.unsqueeze(-2)).detach()
    pick = select_from_pool(model, pool, 1, points)
    assert_close(values[pick[0]], values.max())


@pytest.mark.parametrize(("n", "count"), [(1000, 64), (1000, 37), (70, 64), (5, 8), (9, 1)])
def test_points_that_stand_for_all_lie_in_cells_of_as_many(n: int, count: int) -> None:
    X = torch.rand(n, 2, dtype=torch.float64)
    chosen = thinned(X, count)
    assert len(chosen) == len(set(chosen.tolist())) == min(n, count)
    assert torch.equal(chosen, chosen.sort().values)


def test_points_that_stand_for_all_have_nearly_their_mean() -> None:
    """A draw of as many is off by some twenty times as much."""
    X = torch.rand(4096, 2, dtype=torch.float64)
    chosen = X[thinned(X, 256)]
    for function in (torch.sin, torch.cos, torch.exp):
        difference = function(5.0 * X).mean(0) - function(5.0 * chosen).mean(0)
        deviation = function(5.0 * X).std(0) / 16.0
        assert float((difference.abs() / deviation).max()) < 0.25
