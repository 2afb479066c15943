"""The benchmark of many inputs: its functions, its searches, and that it goes on where it was."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from scipy.interpolate import BSpline
from torch import Tensor

from benchmarks.optimization import many_inputs
from benchmarks.optimization.many_input_problems import LEAST_UNKNOWN, LOW, PROBLEMS, Rover
from benchmarks.optimization.many_input_results import Run, claims_of, read_runs, regret_table
from benchmarks.optimization.many_inputs import METHODS, Asked, search_all
from benchmarks.optimization.simulators import Simulator
from benchmarks.peers import searchers
from benchmarks.peers.searchers import CmaSearch, Searcher
from benchmarks.peers.turbo import LEAST_SIDE, Turbo

Q, D = 4, 3

pytestmark = pytest.mark.filterwarnings("ignore")  # those of other packages, as in a benchmark


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """As in every benchmark."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(autouse=True)
def brief_turbo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let TuRBO have few candidates and fits of few iterations: no test is of what it finds."""
    fit = partial(fit_gpytorch_mll, optimizer_kwargs={"options": {"maxiter": 3}})
    monkeypatch.setattr("benchmarks.peers.turbo.fit_gpytorch_mll", fit)
    begin = Turbo.__init__

    def begin_with_few(self: Turbo, *given: Any) -> None:
        begin(self, *given)
        self._candidates = 100

    monkeypatch.setattr(Turbo, "__init__", begin_with_few)


def of_least(name: str) -> Tensor:
    """A known minimiser in the unit cube, ``1 x d``."""
    function = PROBLEMS[name].function
    if name.startswith("Hartmann"):
        x = torch.full((1, 20), 0.37)
        x[:, list(function.INPUTS)] = torch.tensor(function._hartmann._optimizers[0])
        return x
    if name.startswith("Ackley"):
        return torch.full((1, function.dim), -LOW / 15.0)
    return torch.full((1, function.dim), (1.0 - LOW) / 15.0)


@pytest.mark.parametrize("name", [name for name in PROBLEMS if name not in LEAST_UNKNOWN])
def test_the_least_value_is_at_the_minimiser(name: str) -> None:
    problem, x = PROBLEMS[name], of_least(name)
    assert problem.regret(x).item() == pytest.approx(0.0, abs=1e-5)
    around = x + 0.01 * torch.randn(50, x.shape[-1])
    assert (problem.regret(around.clamp(0.0, 1.0)) > 0.0).all()


def test_names_end_with_the_number_of_inputs() -> None:
    for name, problem in PROBLEMS.items():
        assert name.partition(",")[0].endswith(str(problem.function.dim))


def test_a_rovers_cost_is_that_of_its_spline_walked_step_by_step() -> None:
    rover, X = Rover(), torch.rand(3, 60)
    knots = [0.0] * 3 + [i / 27 for i in range(28)] + [1.0] * 3
    for x, cost in zip(X, rover.evaluate_true(X), strict=True):
        path = BSpline(knots, x.reshape(30, 2).numpy(), 3)(torch.linspace(0.0, 1.0, 500).numpy())
        expected = 10.0 * sum(abs(path[0] - 0.05)) + 10.0 * sum(abs(path[-1] - 0.95))
        for a, b in pairwise(path):
            far = [math.dist((a + b) / 2.0, disc) for disc in rover._centres.tolist()]
            hit = any(f < r for f, r in zip(far, rover._radii.tolist(), strict=True))
            expected += math.dist(a, b) * (21.0 if hit else 1.0)
        assert cost.item() == pytest.approx(expected)


@pytest.mark.parametrize("name", LEAST_UNKNOWN)
def test_a_simulator_is_finite_and_gives_the_same_again(name: str) -> None:
    problem = PROBLEMS[name]
    if isinstance(problem.function, Simulator) and problem.function.missing:
        pytest.skip(f"needs {problem.function.missing}")
    X = torch.rand(2, problem.function.dim)
    values = problem.value(X)
    assert values.isfinite().all()
    torch.testing.assert_close(problem.value(X), values, rtol=0.0, atol=0.0)


def test_a_simulator_without_its_package_says_what_to_install() -> None:
    lost = Simulator(lambda: lambda row: 0.0, [(0.0, 1.0)], "no_such_package", "some-package>=3")
    assert lost.missing == "some-package>=3"
    with pytest.raises(ImportError, match="pip install 'some-package>=3'"):
        lost.evaluate_true(torch.rand(1, 1))


def bowl(X: Tensor) -> Tensor:
    return (X - 0.9).square().sum(-1)


def rounds(searcher: Searcher, number: int) -> list[Tensor]:
    """Points of so many rounds, of which all but the last are told."""
    asked = []
    for _ in range(number):
        asked.append(searcher.ask())
        searcher.tell(asked[-1], bowl(asked[-1]))
    return asked


ROUNDS = {"TuRBO-1": 3, "TuRBO-5": 9, "box, TS": 3}
"""Until a model chooses; six of the other methods."""


@pytest.mark.parametrize(
    ("name", "noisy"), [*((name, False) for name in METHODS if name != "Ax"), ("TuRBO-1", True)]
)
def test_proposals_are_in_the_cube(name: str, noisy: bool) -> None:
    method = METHODS[name]
    if method.missing():
        pytest.skip(f"needs {method.missing()}")
    searcher = method.begin(D, Q, 1, noisy)
    for X in rounds(searcher, ROUNDS.get(name, 6)):
        assert X.shape[-1] == D
        assert 1 <= len(X) <= Q
        assert ((X >= 0.0) & (X <= 1.0)).all()
    best = searcher.recommended()
    assert best is None or (best.shape == (1, D) and ((best >= 0.0) & (best <= 1.0)).all())


@pytest.mark.parametrize("name", [name for name in METHODS if name != "Ax"])
def test_a_search_goes_on_from_a_history_that_it_did_not_ask_for(name: str) -> None:
    method = METHODS[name]
    if method.missing():
        pytest.skip(f"needs {method.missing()}")
    searcher = method.begin(D, Q, 1, False)
    X = torch.rand(20, D)
    searcher.take(X, bowl(X))
    (asked,) = rounds(searcher, 1)
    assert ((asked >= 0.0) & (asked <= 1.0)).all()


def test_a_search_that_the_settings_do_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searchers, "knows_searches", lambda: False)
    with pytest.raises(NotImplementedError, match="no field 'search'"):
        searchers.OurSearch(D, Q, 0, "region")
    assert searchers.OurSearch(D, Q, 0, "box").ask().shape == (Q, D)


class Scripted:
    """Changes of a region, whose outcomes are decided by the test."""

    def __init__(self, regions: int = 1, noisy: bool = False) -> None:
        self.turbo = Turbo(D, Q, 0, regions, noisy)
        self.turbo._queue = []
        for region in self.turbo._regions:
            region.X, region.Y = torch.rand(2 * D, D), torch.ones(2 * D)

    def tell(self, value: float) -> None:
        self.turbo._owners = [0] * Q
        self.turbo.tell(torch.rand(Q, D), torch.full((Q,), value))


def test_turbo_doubles_after_ten_better_batches_and_halves_after_its_tolerance() -> None:
    script = Scripted()
    for i in range(10):
        assert script.turbo._regions[0].side == 0.8
        script.tell(0.9 - 0.05 * i)
    assert script.turbo._regions[0].side == 1.6
    for _ in range(math.ceil(max(4.0 / Q, D / Q))):
        script.tell(2.0)
    assert script.turbo._regions[0].side == 0.8


def test_turbo_begins_a_region_anew_when_it_has_become_too_small() -> None:
    script = Scripted()
    script.turbo._regions[0].side = 1.5 * LEAST_SIDE
    script.tell(2.0)
    (region,) = script.turbo._regions
    assert (len(region.X), region.side) == (0, 0.8)
    assert len(script.turbo._queue) == 2 * D


def test_turbo_recommends_the_best_point_of_all_its_regions() -> None:
    """Also of one that has ended, whose rows it has no longer."""
    script = Scripted(noisy=True)
    (ended,) = script.turbo._regions
    ended.Y = 5.0 + ended.X.double().sum(-1)
    ended.X = ended.X.double()
    wanted = script.turbo.recommended()
    assert wanted is not None
    ended.side = 1.5 * LEAST_SIDE
    script.tell(20.0)
    (region,) = script.turbo._regions
    assert torch.equal(script.turbo.recommended(), wanted)
    region.X, region.Y = torch.rand(2 * D, D).double(), torch.full((2 * D,), 50.0).double()
    region.Y += torch.arange(2 * D)
    assert torch.equal(script.turbo.recommended(), wanted)


def test_cma_begins_again_with_twice_the_population_when_a_search_has_ended() -> None:
    pytest.importorskip("cma")
    searcher = CmaSearch(D, Q, 0, middle=True)
    for _ in range(400):
        X = searcher.ask()
        searcher.tell(X, bowl(X))
        if searcher._population > Q:
            break
    assert searcher._population == 2 * Q
    best = searcher.recommended()
    assert best is not None
    assert bowl(best).item() < 1e-6


def test_a_finished_search_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[object, ...]] = []
    search: Callable[..., Run] = many_inputs.searched

    def counted(*parts: Any) -> Run:
        names, _, _, *numbers = parts
        ran.append((*names, *numbers))
        return search(*parts)

    monkeypatch.setattr(many_inputs, "searched", counted)
    asked = Asked(("random",), ("Levy-20",), (0, 1), 60)
    search_all(tmp_path, asked)
    search_all(tmp_path, asked)
    search_all(tmp_path, Asked(("random",), ("Levy-20",), (1,), 30))  # the longer one serves
    assert ran == [("random", "Levy-20", seed, many_inputs.Q, 60) for seed in (0, 1)]
    search_all(tmp_path, Asked(("random",), ("Levy-20",), (1,), 200))
    assert ran[2:] == [("random", "Levy-20", 1, many_inputs.Q, 200)]
    runs = read_runs(tmp_path)
    assert len(runs) == 3
    regrets = [run.regrets for run in runs if run.seed == 1]
    assert regrets[0][:7] == regrets[1][:7]  # the same points, whatever the end
    assert "n = 200" in regret_table(runs)
    assert all(math.isfinite(claim.measured) for claim in claims_of(runs, []))


def made(method: str, function: str, seed: int, regret: float) -> Run:
    """A search whose regret falls to a number at 500 evaluations and stays; 2 ms a proposal."""
    numbers = [200, 400, 500, 600, 1_000]
    regrets = [9.0, 8.0, regret, regret, regret]
    return Run(method, function, seed, numbers, regrets, [2e-3 * n for n in numbers], {})


def test_the_region_search_is_compared_with_the_best_peer_by_medians() -> None:
    runs = [
        made(method, function, seed, regret + seed)
        for function, regrets in {"Levy-20": (1.0, 2.0), "Ackley-20": (3.0, 2.5)}.items()
        for method, regret in zip(("region", "CMA-ES"), regrets, strict=True)
        for seed in range(3)
    ]
    claims = {claim.name: claim for claim in claims_of(runs, [])}
    compared = claims["functions of the first 7 on which no peer is better, n = 500"]
    assert (compared.measured, compared.verdict) == (1, "FAIL")
    assert compared.detail == "best by median: Levy-20 region; Ackley-20 CMA-ES"
    target = claims["Ackley-20: region, median at n = 500"]
    assert (target.measured, target.target, target.verdict) == (4.0, 0.1, "FAIL")
    assert "| Levy-20 | region | 3 | 9 (9, 9) | 2 (1.5, 2.5) |" in regret_table(runs)
    assert runs[0].cost(500) == pytest.approx(2e-3)
    assert runs[0].cost(2_000) is None


def test_what_is_missing_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = many_inputs.Method(METHODS["random"].begin, lambda: "no-such-package")
    monkeypatch.setitem(METHODS, "lost", lost)
    command = ["many_inputs", "--methods", "random; lost", "--functions", "Levy-20"]
    monkeypatch.setattr("sys.argv", [*command, "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="lost needs no-such-package"):
        many_inputs.main()
    assert not list(tmp_path.iterdir())
