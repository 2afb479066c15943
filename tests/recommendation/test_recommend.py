"""The order of families in clear cases, what they cost, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.kernels import AdditiveKernel, LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood, StudentTLikelihood

import bo_stream
from benchmarks.common.harness import tensor_bytes
from bo_stream import BinomialLikelihood, ProductMatern
from bo_stream.costs import KINDS, LENGTHSCALE, OPERATIONS, CostTable, Problem, problem_of, speeds
from bo_stream.recommendation import (
    DOUBTS,
    MERITS,
    Recommendations,
    exact_until,
    ordered,
    recommend,
)

TABLE = CostTable.shipped()
DEFAULTS = (None, None, False, True, None, None)  # noise to kernel, of problem_of


def order(n: int, d: int, **options: Any) -> list[str]:
    return [each.family for each in recommend(n, d, calibrate=False, **options)]


def sum_of_kernels(d: int) -> ScaleKernel:
    parts = [ScaleKernel(RBFKernel(active_dims=(i,))) for i in range(d - 2)]
    return ScaleKernel(AdditiveKernel(*parts, ProductMatern(active_dims=(d - 2, d - 1))))


@pytest.mark.parametrize(
    ("n", "d", "options", "first"),
    [
        (50, 3, {}, "exact"),
        (100_000, 2, {}, "WISKI"),
        (100_000, 2, {"bounds": False}, "OSGPR"),
        (100_000, 3, {"noise": 1e-4}, "OSGPR"),
        (100_000, 8, {}, "OSGPR"),
        (100_000, 8, {"covar_module": sum_of_kernels(8)}, "WISKI"),
        (100_000, 2, {"covar_module": LinearKernel()}, "OSGPR"),
        (100_000, 2, {"covar_module": MaternKernel()}, "OSGPR"),
        (100_000, 2, {"covar_module": ScaleKernel(ProductMatern())}, "WISKI"),
        (100_000, 1, {"covar_module": ScaleKernel(MaternKernel())}, "WISKI"),
        (1_000, 6, {"likelihood": "poisson"}, "OSVGP"),
        (1_000, 2, {"likelihood": BernoulliLikelihood}, "OSVGP"),
        (1_000, 2, {"likelihood": StudentTLikelihood()}, "OSVGP"),
        (50, 2, {"likelihood": GaussianLikelihood()}, "exact"),
        (1_000, 2, {"likelihood": "classes", "m": 3}, "DirichletWISKI"),
        (100_000, 5, {"rough": True}, "DecoupledGP"),
        (100_000, 5, {"rough": True, "likelihood": "bernoulli"}, "DecoupledGP"),
        (300, 5, {"rough": True}, "exact"),
        (5_000, 2, {"likelihood": BinomialLikelihood(overdispersion=True)}, "WISKI"),
        (5_000, 6, {"likelihood": "binomial"}, "OSVGP"),
    ],
)
def test_first_in_clear_cases(n: int, d: int, options: dict[str, Any], first: str) -> None:
    assert order(n, d, **options)[0] == first


def test_all_that_take_the_problem_are_listed() -> None:
    assert set(order(500, 2)) == set(DOUBTS) - {"DirichletWISKI"}
    assert set(order(500, 2, likelihood="student-t")) == {"OSVGP", "DecoupledGP"}
    of_counts = {"exact", "WISKI", "OSVGP", "DecoupledGP"}
    assert set(order(500, 2, likelihood="binomial")) == of_counts
    assert "WISKI" not in order(500, 5)
    assert "QSGP" not in order(500, 3, covar_module=sum_of_kernels(3))
    assert set(MERITS) == set(DOUBTS)


def test_those_that_suffice_come_first_and_by_cost() -> None:
    for found in (recommend(3_000, 3, calibrate=False), recommend(10**5, 8, calibrate=False)):
        suffices = [each.suffices for each in found]
        assert suffices == sorted(suffices, reverse=True)
        approximate = [e.step_seconds for e in found if e.suffices and e.family != "exact"]
        assert approximate == sorted(approximate)
        assert all(each.reason for each in found)


@pytest.mark.parametrize("d", [2, 4, 9])
def test_costs_grow_with_what_is_held(d: int) -> None:
    """But an update's: it is cheaper once no more inducing points enter."""
    for family in DOUBTS:
        if d > 4 and "WISKI" in family:
            continue
        least = dict.fromkeys((*OPERATIONS, "bytes"), 1e-4)
        for n in (10, 100, 300):
            problem = problem_of(n, d, 1, 1, *DEFAULTS)
            found = {**TABLE.seconds(family, problem), "bytes": TABLE.bytes(family, problem)}
            for name in found.keys() - {"update"}:
                assert found[name] >= least[name], (family, n, name)
            assert found["update"] > 1e-4
            least = found


def test_exact_costs_grow_cubically_and_streaming_ones_not_at_all() -> None:
    few, many, more = (problem_of(n, 3, 1, 1, *DEFAULTS) for n in (10**4, 10**5, 10**6))
    assert TABLE.seconds("exact", many)["refit"] > 500 * TABLE.seconds("exact", few)["refit"]
    for family in ("WISKI", "OSGPR", "OSVGP", "LocalGP"):
        assert TABLE.seconds(family, many) == TABLE.seconds(family, more)
        assert TABLE.bytes(family, many) == TABLE.bytes(family, more)


def test_exact_stays_first_up_to_one_n() -> None:
    for d in (1, 2, 3, 4, 6, 10):
        problem = problem_of(1, d, 1, 1, *DEFAULTS)
        last = exact_until(problem)
        assert 100 < last < 10_000
        at, beyond = (
            ordered(replace(problem, n=n), calibrate=False)[0].family for n in (last, last + 1)
        )
        assert (at, beyond) == ("exact", "WISKI" if d <= 4 else "OSGPR")
    assert exact_until(problem, ("OSGPR",)) == 0
    assert exact_until(problem, ("exact",)) == 2**20 - 1


def test_the_table_was_fitted_to_the_models_defaults() -> None:
    from benchmarks.speed.cost_model import CANDIDATES, LIMITS

    assert TABLE.limits == LIMITS
    for family in DOUBTS:
        for n in (10, 10**5):
            for likelihood in ("gaussian", "binomial"):
                problem = Problem(n, 3, likelihood=likelihood, groups=((0, 1, 2),))
                assert TABLE.stage(family, problem) in CANDIDATES
                assert TABLE.bytes(family, problem) > 0


@pytest.mark.parametrize("family", ["DecoupledGP", "QSGP"])
def test_inputs_that_outputs_share_count_once(family: str) -> None:
    n, d, m = 20_000, 20, 4
    X = torch.rand(n, d, dtype=torch.float64)
    Y = (3.0 * X.sum(-1, keepdim=True) / d**0.5).sin().expand(n, m)
    options = {"update_steps": 1} if family == "QSGP" else {}
    model = getattr(bo_stream, family)(X, Y, **options)
    (found,) = recommend(n, d, m=m, families=[family], calibrate=False)
    assert tensor_bytes(model) / 1.5 < found.bytes < 1.5 * tensor_bytes(model)


def test_counts_have_costs_of_their_own() -> None:
    """Of an update that finds the sites of a window anew, whatever came before."""
    few, many = (replace(Problem(n, 2), groups=((0, 1),)) for n in (10**4, 10**6))
    for family in ("WISKI", "OSVGP"):
        labels, counts = (
            TABLE.seconds(family, replace(few, likelihood=name)) for name in ("other", "binomial")
        )
        assert counts["update"] > labels["update"]
        assert counts == TABLE.seconds(family, replace(many, likelihood="binomial"))


def test_a_budget_puts_those_beyond_it_last() -> None:
    costs = {each.family: each for each in recommend(2_000, 4, calibrate=False)}
    step = costs["WISKI"].step_seconds
    found = recommend(2_000, 4, budget=0.9 * step, calibrate=False)
    assert found[0].family != "WISKI"
    (grid,) = (each for each in found if each.family == "WISKI")
    assert not grid.suffices
    assert "beyond the budget" in grid.reason
    budget = {"seconds": 1e9, "bytes": costs["exact"].bytes / 2}
    found = recommend(2_000, 4, budget=budget, calibrate=False)
    assert "of memory" in next(each.reason for each in found if each.family == "exact")


def test_a_slower_machine_takes_longer_in_proportion() -> None:
    problem = problem_of(2_000, 3, 1, 1, *DEFAULTS)
    slower = {kind: 3.0 * seconds for kind, seconds in TABLE.speeds.items()}
    for family in ("exact", "WISKI", "QSGP"):
        here, there = TABLE.seconds(family, problem), TABLE.seconds(family, problem, slower)
        assert there == pytest.approx({name: 3.0 * value for name, value in here.items()})


def test_numbers_of_other_libraries_are_numbers() -> None:
    found = recommend(np.int64(2_000), torch.tensor(3), m=np.int32(2), calibrate=False)
    assert found == recommend(2_000, 3, m=2, calibrate=False)
    found = recommend(2_000, 3, budget={"seconds": 1.0, "bytes": 1e6}, calibrate=False)
    numbers: Any = {"seconds": np.int64(1), "bytes": torch.tensor(1e6)}
    assert found == recommend(2_000, 3, budget=numbers, calibrate=False)
    numbers = np.float32(1.0)
    found = recommend(2_000, 3, budget=1.0, calibrate=False)
    assert found == recommend(2_000, 3, budget=numbers, calibrate=False)


def test_the_machine_is_timed_once() -> None:
    assert set(speeds(7)) == set(KINDS)
    assert min(speeds(7).values()) > 0.0
    assert speeds(7) is speeds(7)
    assert set(KINDS) == set(TABLE.speeds)
    assert {each.family for each in recommend(50, 2)} == set(order(50, 2))


def test_the_kernel_is_looked_at() -> None:
    def of(d: int, kernel: Any) -> Problem:
        return problem_of(100, d, 1, 1, None, None, False, True, None, kernel)

    found = of(6, sum_of_kernels(6))
    assert found.groups == ((0,), (1,), (2,), (3,), (4, 5))
    assert (found.matern, found.gridded, found.spectral) == (4 * (False,) + (True,), True, False)
    kernel = RBFKernel(ard_num_dims=2)
    kernel.lengthscale = [[0.2, 0.8]]
    assert of(2, ScaleKernel(kernel)).lengthscale == pytest.approx(0.4)
    assert of(4, None).lengthscale == pytest.approx(2.0 * LENGTHSCALE)
    product = RBFKernel(active_dims=(0,)) * MaternKernel(active_dims=(2,))
    assert of(3, product).groups == ((0, 2),)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"n": -1}, ValueError, "n to be a whole number of at least 0, got -1"),
        ({"d": 0}, ValueError, "d to be a whole number of at least 1, got 0"),
        ({"m": 1.5}, ValueError, "m to be a whole number"),
        ({"noise": -0.1}, ValueError, "noise to be at least 0"),
        ({"lengthscale": float("nan")}, ValueError, "lengthscale to be positive and finite"),
        ({"lengthscale": 0.0}, ValueError, "lengthscale to be positive and finite, got 0.0"),
        ({"noise": "a"}, ValueError, "noise to be at least 0 and finite, got 'a'"),
        ({"noise": True}, ValueError, "noise to be at least 0 and finite, got True"),
        ({"lengthscale": "x"}, ValueError, "lengthscale to be positive and finite, got 'x'"),
        ({"covar_module": "rbf"}, TypeError, r"covar_module to be a kernel, .* got 'rbf'"),
        ({"likelihood": "normal"}, ValueError, "likelihood to be one of gaussian, "),
        ({"likelihood": 3}, TypeError, "likelihood to be a name, .* got int"),
        ({"budget": 0.0}, ValueError, "budget's seconds to be a positive number, got 0.0"),
        ({"budget": "3"}, ValueError, "budget's seconds to be a positive number, got '3'"),
        ({"budget": {"bytes": "1e6"}}, ValueError, "budget's bytes to be a positive number"),
        ({"budget": {"hours": 1}}, ValueError, r"seconds, bytes or both, got \['hours'\]"),
        ({"families": ["GP"]}, ValueError, "families among exact, .* got GP"),
        ({"families": [1]}, ValueError, "families among exact, .* got 1"),
        ({"families": "exact"}, ValueError, "families as a list .*, got 'exact'"),
        ({"families": []}, ValueError, "families among exact, .* got none"),
        ({"families": ["WISKI"], "d": 5}, UnsupportedError, "at most four inputs a grid.* has 5"),
        (
            {"families": ["WISKI"], "covar_module": LinearKernel()},
            UnsupportedError,
            "WISKI takes products of one-dimensional kernels only",
        ),
        (
            {"families": ["exact", "OSGPR"], "likelihood": "poisson"},
            UnsupportedError,
            "exact takes Gaussian noise and counts only.*OSGPR takes Gaussian noise only.*leave",
        ),
        ({"likelihood": "classes", "d": 5}, UnsupportedError, "No family takes this problem"),
    ],
)
def test_bad_arguments_are_named(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        recommend(**{"n": 100, "d": 2, "calibrate": False, **options})


def test_the_table_is_printed() -> None:
    found = recommend(1_000, 2, calibrate=False)
    assert isinstance(found, Recommendations)
    head, *rows = str(found).splitlines()
    assert head.split() == ["family", "step", "update", "refit", "posterior", "fantasy", "memory"]
    assert len(rows) == len(found)
    for place, (row, each) in enumerate(zip(rows, found, strict=True), 1):
        assert row.split()[:2] == [f"{place}.", each.family]
        assert row.endswith(each.reason)
    assert bo_stream.recommend is recommend
