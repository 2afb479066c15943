"""The search of a region: it follows a ledger, goes on after a stop, and ends nowhere."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.quasirandom import SobolEngine

from bo_stream.acquisition import SamplePaths, sample_paths
from bo_stream.errors import UsageError
from bo_stream.loops.optimization import (
    OptimizationSettings,
    Optimizer,
    Trial,
    load_optimizer,
    local_model,
    save_optimizer,
)
from bo_stream.loops.optimization import region as parts
from bo_stream.loops.optimization import region_search as region_module
from bo_stream.loops.optimization.local_model import LocalFit, TrialRows
from bo_stream.loops.optimization.optimizer import Surrogate, parsed_optimizer
from bo_stream.loops.optimization.region import SHORTEST
from bo_stream.loops.optimization.region_search import RegionSurrogate, region_state
from bo_stream.loops.optimization.trials import FIRST_IN_BOX, MOST_IN_BOTH, MOST_IN_BOX, Ledger
from bo_stream.loops.run import OPTIMIZATION, predict
from bo_stream.models.base import StreamingGP
from tests.loops.functions import bowl
from tests.loops.optimization.test_chaos import EVENTS, FEW_EVENTS, ON_GRID, check
from tests.loops.optimizing import REGION, points, started, tell_all

MANY = OptimizationSettings(bounds=((-2.0, 3.0),) * 12, q=8)


def surrogate_of(optimizer: Optimizer) -> RegionSurrogate:
    surrogate = optimizer.surrogate
    assert isinstance(surrogate, RegionSurrogate)
    return surrogate


def local_of(optimizer: Optimizer) -> LocalFit:
    """Return the local model of all that was told."""
    search = surrogate_of(optimizer)
    search.follow(optimizer.ledger)
    assert search.local is not None
    return search.local


def collapse(optimizer: Optimizer) -> None:
    """Let the region collapse at the next batch that is no better."""
    optimizer.best()
    region = surrogate_of(optimizer).state.region
    region.length, region.failures = SHORTEST, region.patience - 1


def tell_high(optimizer: Optimizer, trials: Iterable[Trial]) -> None:
    """Be told outcomes that are worse than all."""
    for trial in trials:
        optimizer.tell(trial.key, 10.0 + bowl(list(trial.X)))


def tell_worse(optimizer: Optimizer) -> None:
    """Ask for a batch, and be told such outcomes."""
    tell_high(optimizer, optimizer.ask())


# --- which search --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dim", "search", "initial"),
    [
        (MOST_IN_BOX, "box", 10),
        (MOST_IN_BOX + 1, "both", 10),
        (MOST_IN_BOTH, "both", 10),
        (MOST_IN_BOTH + 1, "region", 2 * (MOST_IN_BOTH + 1)),
    ],
)
def test_the_number_of_inputs_says_where_points_are_looked_for(
    dim: int, search: str, initial: int
) -> None:
    settings = OptimizationSettings(bounds=((0.0, 1.0),) * dim)
    assert (settings.search, settings.initial) == (search, initial)


def test_a_search_of_both_begins_in_the_box_and_goes_on_in_a_region(tmp_path: Path) -> None:
    settings = OptimizationSettings(bounds=((0.0, 1.0),) * 4, q=3, search="both", raw_samples=16)
    optimizer = Optimizer(settings)
    for x in SobolEngine(4, seed=0).draw(FIRST_IN_BOX - 1, dtype=torch.float64).tolist():
        optimizer.tell(optimizer.register(x).key, sum((value - 0.3) ** 2 for value in x))
    (trial,) = optimizer.ask(1)
    assert isinstance(optimizer.surrogate, Surrogate)
    optimizer.tell(trial.key, sum((value - 0.3) ** 2 for value in trial.X))
    save_optimizer(tmp_path, optimizer)
    again, _ = load_optimizer(tmp_path)
    asked = [trial.X for trial in optimizer.ask()]
    assert isinstance(optimizer.surrogate, RegionSurrogate)
    assert [trial.origin for trial in optimizer.pending] == ["model"] * 3  # no Sobol points again
    assert [trial.X for trial in again.ask()] == asked
    for trial in optimizer.pending:
        optimizer.tell(trial.key, 5.0)
    optimizer.withdraw(0)  # fewer outcomes do not lead back
    optimizer.ask(1)
    assert isinstance(optimizer.surrogate, RegionSurrogate)
    assert optimizer.best().trial.Y is not None


@pytest.mark.parametrize(
    "named", [{"acquisition": "TS"}, {"model": "osgpr"}, {"model_options": {"max_points": 64}}]
)
def test_what_is_named_for_the_box_searches_the_box(named: dict[str, Any]) -> None:
    settings = OptimizationSettings(bounds=((0.0, 1.0),) * 20, **named)
    assert (settings.search, settings.initial) == ("box", 10)
    with pytest.raises(UsageError, match=f"leave out {next(iter(named))}, or search the box"):
        replace(settings, search="region")


def test_the_usual_acquisition_searches_the_box_where_it_is_named() -> None:
    unnamed = OptimizationSettings(bounds=((0.0, 1.0),) * 20)
    named = replace(unnamed, search="", initial=0, acquisition="qLogEI")
    assert (named.search, named.initial, named.acquisition) == ("box", 10, unnamed.acquisition)
    assert OptimizationSettings(**asdict(unnamed)).search == "region"  # as settings are stored
    assert replace(unnamed, search="both").search == "both"


def test_an_unknown_search_is_named() -> None:
    with pytest.raises(UsageError, match=r"search.*box.*region.*'sphere'"):
        OptimizationSettings(bounds=((0.0, 1.0),), search="sphere")


def test_runs_before_there_were_regions_go_on_in_the_box(tmp_path: Path) -> None:
    settings = OptimizationSettings(bounds=((0.0, 1.0),) * 12, acquisition="random", initial=3)
    save_optimizer(tmp_path, Optimizer(settings))
    with OPTIMIZATION.opened(tmp_path) as content:
        del content["settings"]["search"]
        content["settings"]["acquisition"] = "qLogEI"
        loaded = parsed_optimizer(tmp_path, content, ())
    assert loaded.settings.search == "box"
    assert asdict(loaded.settings) == {**asdict(settings), "acquisition": "qLogEI"}


# --- the first points ----------------------------------------------------------------------------


def test_the_middle_stands_for_the_first_of_the_sobol_points() -> None:
    one, other = Optimizer(MANY), Optimizer(replace(MANY, search="both"))
    (first,), rest = one.ask(1), one.ask(4)
    middle, *others = points(other.ask(5))
    assert first.X == (0.5,) * 12
    assert middle != first.X
    assert points(rest) == others
    assert {trial.origin for trial in one.ledger} == {"sobol"}


# --- the search itself ---------------------------------------------------------------------------


@pytest.mark.usefixtures("whole_fits", "whole_searches")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_finds_the_minimum_of_many_inputs(dtype: str) -> None:
    optimizer = started(replace(MANY, dtype=dtype), steps=12)
    best = optimizer.best()
    assert bowl(list(best.trial.X)) < 0.05  # of 12, on average, in the box
    assert best.mean == pytest.approx(best.trial.Y, abs=0.1)


def test_torch_s_random_state_is_neither_used_nor_changed() -> None:
    first = started(REGION, steps=2)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    second = started(REGION, steps=2)
    assert torch.equal(state, torch.get_rng_state())
    assert points(first.ledger) == points(second.ledger)


def test_outcomes_may_come_in_any_order() -> None:
    optimizers = [started(REGION) for _ in range(2)]
    for step in range(3):
        asked = [optimizer.ask() for optimizer in optimizers]
        assert points(asked[0]) == points(asked[1])
        tell_all(optimizers[0], asked[0])
        tell_all(optimizers[1], random.Random(step).sample(asked[1], len(asked[1])))


@pytest.mark.parametrize("q", [1, 3, 70])
def test_any_number_of_points_within_the_bounds(q: int) -> None:
    asked = started(REGION).ask(q)
    assert len(set(points(asked))) == q
    assert all(-2.0 <= x <= 3.0 for trial in asked for x in trial.X)
    assert all(trial.origin == "model" for trial in asked)


def test_a_step_costs_the_same_however_many_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_module, "ROWS", 20)
    monkeypatch.setattr(region_module, "TREND_ROWS", 30)
    optimizer = started(REGION, steps=12)
    tell_all(optimizer, asked := optimizer.ask())
    search = surrogate_of(optimizer)
    model = search.follow(optimizer.ledger)
    assert model is not None
    assert float(model.num_observations) == 20.0
    assert search.local is not None
    assert {trial.key for trial in asked} <= set(search.local.keys)  # the newest are in
    X, _ = search._trend_data()
    assert len(X) <= 30


def test_nothing_is_fitted_again_until_the_ledger_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = started(REGION)
    fits: list[int] = []
    fit = LocalFit.of
    monkeypatch.setattr(LocalFit, "of", lambda *data: fits.append(len(data[4])) or fit(*data))
    optimizer.best()
    asked = optimizer.ask()
    optimizer.best()
    assert fits == [10]
    optimizer.tell(asked[0].key, 1.0)
    optimizer.best()
    optimizer.best()
    assert fits == [10, 11]
    optimizer.amend(asked[0].key, 2.0)
    optimizer.best()
    assert fits == [10, 11, 11]


def test_the_model_is_of_the_nearest_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_module, "ROWS", 10)
    optimizer = Optimizer(replace(REGION, bounds=((0.0, 1.0),) * 2, q=1, initial=2))
    for i in range(40):
        trial = optimizer.register((i / 39, 0.5))
        optimizer.tell(trial.key, abs(i - 30.0))
    optimizer.best()  # all are new
    trial = optimizer.register((0.5, 0.5))
    optimizer.tell(trial.key, 20.0)
    assert optimizer.best().trial.key == 30
    search = surrogate_of(optimizer)
    assert search.local is not None
    assert search.local.keys == [*range(26, 35), 40]


def test_of_many_outcomes_at_once_the_best_is_found_in_any_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(region_module, "ROWS", 20)
    draws = 5.0 * SobolEngine(3, seed=0).draw(60, dtype=torch.float64) - 2.0
    rows = sorted([*draws.tolist(), [0.7, 0.7, 0.7]], key=bowl)
    found = []
    for order in (rows, rows[::-1]):
        optimizer = Optimizer(REGION)
        tell_all(optimizer, [optimizer.register(x) for x in order])
        assert tuple(rows[0]) == optimizer.best().trial.X
        state, ledger = surrogate_of(optimizer).state, optimizer.ledger
        assert state.centre is not None
        found.append((ledger[state.centre].X, sorted(ledger[key].X for key in state.rows)))
        tell_all(optimizer, [optimizer.register(x) for x in rows[:0:-1]])  # again, and all worse
        assert tuple(rows[0]) == optimizer.best().trial.X
        optimizer.tell(optimizer.register((3.0, 3.0, 3.0)).key, -5.0)
        tell_all(optimizer, [optimizer.register(x) for x in rows[1:30]])
        assert optimizer.best().trial.Y == -5.0  # the first of many
    assert found[0] == found[1]
    assert found[0][0] == tuple(rows[0])


# --- stops, and what happens to trials -----------------------------------------------------------


def test_goes_on_to_the_same_points_after_a_stop(tmp_path: Path) -> None:
    """Also where a region has collapsed, and where the next begins elsewhere."""
    optimizer = started(REGION)
    for step in range(7):
        tell = tell_all
        if step in (2, 3):
            collapse(optimizer)
            tell = tell_high
        asked = optimizer.ask()
        tell(optimizer, asked[: step % 3])  # stopped amid a batch, and between two
        save_optimizer(tmp_path, optimizer)
        loaded, _ = load_optimizer(tmp_path)
        assert surrogate_of(loaded).state == surrogate_of(optimizer).state
        for each in (optimizer, loaded):
            tell(each, [trial for trial in each.pending if trial.key <= asked[-1].key])
        best, again = optimizer.best(), loaded.best()
        assert (best.trial, best.mean) == (again.trial, again.mean)
        assert points(loaded.ask()) == points(optimizer.ask())
        optimizer = loaded
        tell(optimizer, optimizer.pending)
    assert len(surrogate_of(optimizer).state.found) == 1
    assert asked[-1].origin == "model"


def test_the_state_is_plain_values() -> None:
    state = surrogate_of(started(REGION, steps=3)).state
    assert region_state(json.loads(json.dumps(asdict(state)))) == state


def test_amended_and_withdrawn_outcomes_leave_the_model() -> None:
    optimizer = started(REGION, steps=2)
    optimizer.withdraw(optimizer.best().trial.key)
    X = torch.tensor([trial.X for trial in optimizer.ledger])
    alone = torch.cdist(X, X).fill_diagonal_(torch.inf).min(-1).values  # no neighbour contradicts
    former = optimizer.ledger[int(alone.argmax())]
    assert optimizer.best().trial.key != former.key
    optimizer.amend(former.key, -5.0)
    best = optimizer.best()
    assert best.trial.key == former.key
    assert float(surrogate_of(optimizer).trials.Y[former.key]) == 5.0  # large is good
    tell_all(optimizer, optimizer.ask())


def test_known_noise_is_that_of_the_model() -> None:
    optimizer = started(REGION)
    optimizer.fail(optimizer.ask(1)[0].key, "no power")
    trials = optimizer.ledger.with_status("told")
    for trial in trials[1:]:
        optimizer.amend(trial.key, float(trial.Y or 0.0), Yvar=0.3 + trial.key)
    search = surrogate_of(optimizer)
    model = search.follow(optimizer.ledger)
    local = search.local
    assert model is not None
    assert local is not None
    assert local.Yvar is not None
    assert local.keys == [trial.key for trial in trials]
    assert bool(local.Yvar[0].isnan())  # of which nothing is known
    step = 1e-6
    for row, trial in list(enumerate(trials))[1:]:
        Y = torch.tensor([-float(trial.Y or 0.0)], dtype=torch.float64)  # small is good
        low, high = (local.scale.to_scale(Y + change) for change in (-step, 0.0))
        wanted = (0.3 + trial.key) * float((high - low) / step) ** 2  # nothing is above the best
        assert float(local.Yvar[row]) == pytest.approx(wanted, rel=1e-4)
    assert torch.equal(local.noise()[1:], local.Yvar[1:, 0])
    learned = local.model.likelihood.noise.detach()
    assert float(local.noise()[0]) == pytest.approx(float(learned))


def test_noise_beyond_all_others_tells_nothing_of_its_outcome() -> None:
    optimizer = started(replace(REGION, dtype="float32"), steps=2)
    lucky, settings = optimizer.ask(1)[0], optimizer.settings
    optimizer.tell(lucky.key, -5.0, Yvar=1e140)
    search = surrogate_of(optimizer)
    model = search.follow(optimizer.ledger)
    assert model is not None
    assert optimizer.best().trial.key != lucky.key
    mean, _ = predict(model, settings.to_unit_cube([lucky.X]))
    assert search.local is not None
    assert search.local.scale.to_outcome(float(mean)) < 4.0  # where the outcome was 5
    tell_all(optimizer, optimizer.ask())


def test_a_trial_that_is_tried_again_is_a_new_outcome() -> None:
    optimizer = started(REGION)
    first = optimizer.ask(1)[0]
    optimizer.fail(first.key, "no power")
    search = surrogate_of(optimizer)
    search.follow(optimizer.ledger)
    optimizer.retry(first.key)
    search.follow(optimizer.ledger)
    assert search.state.waiting == [first.key]
    optimizer.tell(first.key, 3.0)
    search.follow(optimizer.ledger)
    assert search.state.waiting == []
    assert first.key in search.state.rows


def test_rows_are_those_of_the_ledger_however_it_changes() -> None:
    settings, chance = replace(REGION, maximize=False), random.Random(3)
    rows, ledger = TrialRows(settings), Ledger()
    seen: list[tuple[float | None, float | None]] = []
    changes = 0
    for step in range(301):
        if step % 3 == 0:
            ledger.add([chance.uniform(*pair) for pair in settings.bounds], "hand")
        key = chance.randrange(len(ledger))
        change = chance.choice(("amend", "withdraw", "known"))
        if change == "withdraw":
            ledger.withdraw(key)
        else:
            ledger.amend(key, float(step), 0.5 if change == "known" else None)
        if step % 2:
            continue
        keys, changes = ledger.changed_since(changes), ledger.changes
        assert key in keys
        values = [(trial.Y, trial.Yvar) for trial in ledger]
        former = seen + [(None, None)] * (len(values) - len(seen))
        differ = [key for key in range(len(values)) if values[key] != former[key]]
        assert rows.read(ledger, keys) == differ
        seen = values
        expected = TrialRows(settings)
        expected.read(ledger, range(len(ledger)))
        for name in ("X", "Y", "Yvar"):
            got, wanted = getattr(rows, name), getattr(expected, name)
            torch.testing.assert_close(got, wanted, rtol=0.0, atol=0.0, equal_nan=True)
        told = [trial.key for trial in ledger if trial.status == "told"]
        assert rows.with_outcome(5).tolist() == [key for key in told if key >= 5]
        assert rows.Y[told].tolist() == [-float(ledger[key].Y or 0.0) for key in told]
    assert not rows.read(ledger, [])
    assert not rows.read(ledger, range(len(ledger)))


def test_an_interrupted_fit_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    one, other = started(REGION, steps=2), started(REGION, steps=2)
    for optimizer in (one, other):
        for trial in optimizer.ask():
            optimizer.tell(trial.key, bowl(list(trial.X)))
    with monkeypatch.context() as patch:
        patch.setattr(LocalFit, "of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.best()
    assert one.best() == other.best()
    assert points(one.ask()) == points(other.ask())


def test_all_outcomes_withdrawn_is_a_fresh_start() -> None:
    optimizer = started(REGION, steps=1)
    for trial in optimizer.ledger:
        optimizer.withdraw(trial.key)
    assert {trial.origin for trial in optimizer.ask(3)} == {"sobol"}
    with pytest.raises(UsageError, match="no best point yet"):
        optimizer.best()


def test_failures_lower_what_is_predicted_there_and_the_search_goes_on() -> None:
    optimizer = started(REGION)
    without = local_of(optimizer).model
    length = surrogate_of(optimizer).state.region.length
    failed = []
    for _ in range(4):
        for trial in optimizer.ask():
            optimizer.fail(trial.key, "no power")
            failed.append(trial.X)
    search = surrogate_of(optimizer)
    model = search.follow(optimizer.ledger)
    assert model is not None
    assert search.state.region.length < length  # batches that failed are no successes
    assert len(search.trials.with_outcome()) == 6 + REGION.q
    X = REGION.to_unit_cube(failed)
    assert bool((predict(model, X)[0] < predict(without, X)[0]).all())
    tell_all(optimizer, optimizer.ask())
    assert optimizer.best().trial.Y is not None


def test_one_failure_at_the_best_point_is_passed_over_and_many_are_not() -> None:
    optimizer = started(REGION, steps=4)
    before = local_of(optimizer)
    X = optimizer.ledger[before.best].X
    spread = float(before.means.std())
    least = []
    for times in (1, 7):
        for _ in range(times):
            optimizer.fail(optimizer.register(X).key, "no power")
        after = local_of(optimizer)
        least.append(float(before.means.max() - after.means[after.keys.index(before.best)]))
    assert least[0] < 0.25 * spread  # the lowest outcome is several deviations below
    assert least[1] > 2.0 * least[0]


@pytest.mark.parametrize("known", [False, True])
def test_an_outlier_below_all_is_doubtful_unless_its_noise_is_known(known: bool) -> None:
    optimizer = started(REGION, steps=4)
    before = local_of(optimizer)
    assert not bool(before.doubtful.any())
    assert before.Yvar is None
    bad = optimizer.register(optimizer.ledger[before.best].X)
    optimizer.tell(bad.key, 1e9, Yvar=1e-4 if known else None)  # small is good
    local = local_of(optimizer)
    row = local.keys.index(bad.key)
    assert local.doubtful.nonzero().tolist() == ([] if known else [[row]])
    assert local.Yvar is not None
    if not known:
        assert float(local.Yvar[row]) == local_model.DOUBT
        learned = local.model.likelihood.noise.detach().flatten()
        assert bool((local.noise() == learned).all())  # an outlier says nothing of the noise
        change = before.means.max() - local.means[local.keys.index(before.best)]
        assert float(change) < 0.5 * float(before.means.std())


def test_equal_outcomes_do_not_end_the_search() -> None:
    optimizer = Optimizer(REGION)
    for _ in range(6):
        for trial in optimizer.ask():
            optimizer.tell(trial.key, 3.0)
    assert optimizer.best().mean == pytest.approx(3.0)


@pytest.mark.parametrize("factor", [2.0**-40, 2.0**70])
def test_outcomes_may_have_any_unit(factor: float) -> None:
    unscaled, scaled = started(REGION, steps=0), Optimizer(REGION)
    for trial in scaled.ask(REGION.initial):
        scaled.tell(trial.key, factor * bowl(list(trial.X)))
    for first, second in zip(unscaled.ask(), scaled.ask(), strict=True):
        assert list(first.X) == pytest.approx(list(second.X), abs=1e-6)


def test_a_region_that_collapsed_begins_again_about_the_best_point_then_elsewhere() -> None:
    optimizer = started(REGION, steps=3)
    collapse(optimizer)
    tell_worse(optimizer)
    optimizer.best()
    state = surrogate_of(optimizer).state
    assert state.region.length == region_module.TrustRegion(3, 4).length
    assert state.burst == state.hopeful == state.asked + region_module.HOPE * REGION.q
    assert state.begun == 0  # all of its outcomes stay
    # worse outcomes may raise what the model says of the best point, and that would be hope again
    surrogate_of(optimizer).state = replace(state, reached=math.inf)
    collapse(optimizer)
    tell_worse(optimizer)
    asked = optimizer.ask(8)  # twice the number of inputs, and two by the model of none
    state = surrogate_of(optimizer).state
    assert [trial.origin for trial in asked] == ["sobol"] * 8
    assert state.begun == asked[0].key
    ((best, _, _),) = state.found
    assert best < asked[0].key - 2 * REGION.q  # none of the worse ones
    assert optimizer.best().trial.key == best
    tell_all(optimizer, asked)
    assert {trial.origin for trial in optimizer.ask()} == {"model"}
    X = optimizer.ledger[best].X
    optimizer.amend(asked[0].key, -1.0)
    assert optimizer.best().trial.key == asked[0].key
    optimizer.withdraw(asked[0].key)
    assert optimizer.best().trial.X == X


def tell_of_the_last_batch(optimizer: Optimizer, better: float = -10.0) -> None:
    """Ask for the last batch of a region that promises nothing, and be told outcomes of it."""
    trials, surrogate = optimizer.ask(), surrogate_of(optimizer)
    surrogate.state = replace(surrogate.state, unpromising=region_module.UNPROMISING)
    for trial in trials:
        optimizer.tell(trial.key, bowl(list(trial.X)) - better)


def on_an_excursion() -> tuple[Optimizer, int]:
    """A search that has left a region for one elsewhere, with a model there; the best key."""
    optimizer = started(REGION, steps=3)
    tell_of_the_last_batch(optimizer)
    best = optimizer.best().trial.key
    tell_high(optimizer, optimizer.ask(6))  # of Sobol's sequence
    assert surrogate_of(optimizer).follow(optimizer.ledger) is not None
    return optimizer, best


def test_a_region_that_promises_nothing_waits_while_one_elsewhere_is_searched(
    tmp_path: Path,
) -> None:
    optimizer, best = on_an_excursion()
    surrogate, left = surrogate_of(optimizer), surrogate_of(optimizer).state.begun
    excursion = surrogate.state.excursion
    assert excursion is not None
    assert (excursion.begun, excursion.until, excursion.is_over) == (0, left + max(left, 12), False)
    assert [trial.origin for trial in list(optimizer.ledger)[left:]] == ["sobol"] * 6
    assert surrogate.local is not None
    assert min(surrogate.local.keys) == left  # a model of its own
    assert optimizer.best().trial.key == best
    save_optimizer(tmp_path, optimizer)
    again = load_optimizer(tmp_path)[0]
    while len(optimizer.ledger) < excursion.until:
        assert points(again.ask()) == points(optimizer.ask())
        for each in (optimizer, again):
            tell_high(each, list(each.pending))
    optimizer.best()
    state, local = surrogate_of(optimizer).state, surrogate_of(optimizer).local
    assert state.begun == 0
    assert state.excursion == replace(excursion, is_over=True)
    assert state.region.length == excursion.length
    assert local is not None
    assert local.best == best  # of all outcomes
    assert local.keys == list(range(len(optimizer.ledger)))
    assert state.found == []
    assert points(again.ask()) == points(optimizer.ask())
    assert {trial.origin for trial in optimizer.pending} == {"model"}


def test_the_better_region_goes_on_after_an_excursion_and_there_is_no_other() -> None:
    optimizer, former = on_an_excursion()
    left = surrogate_of(optimizer).state.begun
    assert in_the_better_region(optimizer, -5.0) == left
    assert optimizer.best().trial.key >= left
    assert [key for key, _, _ in surrogate_of(optimizer).state.found] == [former]
    tell_of_the_last_batch(optimizer)
    optimizer.best()
    assert surrogate_of(optimizer).state.begun == left


def test_a_region_waits_only_if_its_model_is_of_all_its_outcomes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = started(REGION, steps=3)
    monkeypatch.setattr(region_module, "ROWS", len(optimizer.ledger))
    tell_of_the_last_batch(optimizer)
    optimizer.best()
    assert surrogate_of(optimizer).state.excursion is None


def test_a_success_is_a_promise() -> None:
    optimizer = started(REGION, steps=3)
    tell_of_the_last_batch(optimizer, better=5.0)
    optimizer.best()
    assert surrogate_of(optimizer).state.unpromising == 0
    assert surrogate_of(optimizer).state.excursion is None


@pytest.mark.parametrize(("promises", "count"), [(False, 5), (True, 0)])
def test_points_whose_functions_promise_nothing_are_counted(
    promises: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = started(REGION, steps=3)
    optimizer.best()
    surrogate_of(optimizer).state.unpromising = 2
    improves = Mock(return_value=promises)
    monkeypatch.setattr(region_module, "improves", improves)
    optimizer.ask(3)
    ((heights, _, by),) = (call.args for call in improves.call_args_list)
    assert (heights.shape, by) == ((3,), region_module.PROMISE)
    assert surrogate_of(optimizer).state.unpromising == count


def in_the_better_region(optimizer: Optimizer, value: float) -> int:
    """End an excursion whose best outcome is a value; the first key of the region that goes on."""
    for trial in optimizer.ask():
        optimizer.tell(trial.key, value + bowl(list(trial.X)))
    tell_of_the_last_batch(optimizer)
    optimizer.best()
    state = surrogate_of(optimizer).state
    assert state.excursion is not None
    assert state.excursion.is_over
    return state.begun


def test_a_region_that_waits_counts_by_what_its_outcomes_are_by_then() -> None:
    """One of them is amended, some are withdrawn, or one comes late."""
    optimizer, best = on_an_excursion()
    optimizer.amend(best, -20.0)
    assert in_the_better_region(optimizer, -10.0) == 0
    assert optimizer.best().trial.key == best

    optimizer, _ = on_an_excursion()
    left = surrogate_of(optimizer).state.begun
    for trial in list(optimizer.ledger)[:left]:
        if trial.Y is not None and trial.Y < 5.0:
            optimizer.withdraw(trial.key)
    assert in_the_better_region(optimizer, 3.0) == left

    optimizer = started(REGION, steps=3)
    (late,) = optimizer.ask(1)
    tell_of_the_last_batch(optimizer)
    optimizer.best()
    tell_high(optimizer, optimizer.ask(6))
    optimizer.tell(late.key, -1000.0)
    assert in_the_better_region(optimizer, -10.0) == 0
    assert surrogate_of(optimizer).state.late == []  # it is of this region again
    assert optimizer.best().trial.key == late.key


def test_an_excursion_ends_in_time_where_all_fails() -> None:
    optimizer = started(REGION, steps=3)
    tell_of_the_last_batch(optimizer)
    optimizer.best()
    excursion = surrogate_of(optimizer).state.excursion
    assert excursion is not None
    while len(optimizer.ledger) < excursion.until:
        for trial in optimizer.ask(1):
            assert trial.origin == "sobol"
            optimizer.fail(trial.key, "boom")
    assert {trial.origin for trial in optimizer.ask()} == {"model"}
    state = surrogate_of(optimizer).state
    assert (state.begun, state.newest) == (0, [])


def test_a_region_that_collapses_on_an_excursion_ends_it() -> None:
    optimizer = started(REGION, steps=3)
    surrogate_of(optimizer).state.reached = 0.5  # it has collapsed once
    tell_of_the_last_batch(optimizer)
    optimizer.best()
    tell_high(optimizer, optimizer.ask(6))
    assert surrogate_of(optimizer).state.reached is None
    collapse(optimizer)
    for trial in optimizer.ask():
        optimizer.tell(trial.key, 100.0)
    optimizer.best()
    state = surrogate_of(optimizer).state
    assert (state.begun, state.reached) == (0, 0.5)


def test_points_elsewhere_are_of_sobol_s_sequence_though_initial_ones_are_missing_too() -> None:
    optimizer = started(REGION, steps=3)
    tell_of_the_last_batch(optimizer)
    optimizer.best()
    assert surrogate_of(optimizer).model is None
    for key in range(len(optimizer.ledger) - REGION.initial + 1):
        optimizer.withdraw(key)
    assert [trial.origin for trial in optimizer.ask()] == ["sobol"] * 4


def test_points_are_of_sobol_s_sequence_where_the_region_ends_while_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread tells of its last batch, and looks at the best point."""
    optimizer = started(REGION, steps=3)
    first, *late = optimizer.ask(5)
    optimizer.tell(first.key, 50.0)
    surrogate = surrogate_of(optimizer)
    surrogate.state = replace(surrogate.state, unpromising=region_module.UNPROMISING)
    sobol_due = RegionSurrogate.sobol_due

    def interrupted(search: RegionSurrogate, ledger: Ledger) -> float:
        due = sobol_due(search, ledger)
        tell_high(optimizer, [each for each in late if ledger[each.key].Y is None])
        optimizer.best()
        return due

    monkeypatch.setattr(RegionSurrogate, "sobol_due", interrupted)
    assert [trial.origin for trial in optimizer.ask()] == ["sobol"] * 4


def test_outcomes_told_while_points_are_asked_for_cost_no_further_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = started(REGION, steps=3)
    first, *late = optimizer.ask(5)
    optimizer.tell(first.key, -1.0)
    fit, fits = LocalFit.of, list[int]()

    def fitted(*args: Any) -> LocalFit:
        fits.append(len(args))
        if len(late) > 0:
            optimizer.tell(late.pop().key, -1.0)
        return fit(*args)

    monkeypatch.setattr(LocalFit, "of", fitted)
    assert [trial.origin for trial in optimizer.ask(2)] == ["model"] * 2
    assert len(fits) == 1
    optimizer.best()
    assert len(fits) == 2


def test_the_only_outcome_of_a_region_elsewhere_counts() -> None:
    optimizer = started(REGION, steps=3)
    tell_of_the_last_batch(optimizer)
    optimizer.best()
    (trial,) = optimizer.ask(1)
    optimizer.tell(trial.key, -1.0)
    assert optimizer.best().trial.key == trial.key


@pytest.mark.parametrize("is_new", [False, True])
def test_trials_that_fail_while_outcomes_are_read_are_known_the_next_time(
    is_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = started(REGION, steps=3)
    first, other = optimizer.ask(2)
    optimizer.tell(first.key, 1.0)
    read, failed = TrialRows.read, list[int]()

    def interrupted(rows: TrialRows, ledger: Ledger, keys: list[int]) -> list[int]:
        if not failed:
            failed.append(optimizer.register((0.0,) * 3).key if is_new else other.key)
            optimizer.fail(failed[0], "boom")
        return read(rows, ledger, keys)

    monkeypatch.setattr(TrialRows, "read", interrupted)
    optimizer.best()
    assert surrogate_of(optimizer).state.failed == []
    optimizer.best()
    assert surrogate_of(optimizer).state.failed == failed


@pytest.mark.parametrize(("owner", "name"), [(LocalFit, "of"), (TrialRows, "read")])
def test_outcomes_that_come_while_others_are_taken_in_are_so_the_next_time(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread tells one: while the model learns, or when outcomes have been read."""
    optimizer = started(REGION, steps=3)
    first, late = optimizer.ask(2)
    method = getattr(owner, name)

    def interrupted(*args: Any) -> Any:
        result = method(*args)
        if optimizer.ledger[late.key].status == "pending":
            optimizer.tell(late.key, 5.0)
        return result

    optimizer.tell(first.key, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        optimizer.best()
    optimizer.best()
    surrogate = surrogate_of(optimizer)
    assert surrogate.local is not None
    assert {first.key, late.key} <= set(surrogate.local.keys)
    assert surrogate.state.waiting == []


def in_a_second_region(late: int = 0) -> tuple[Optimizer, list[Trial]]:
    """A search whose first region has ended, and trials of it that are still under way."""
    optimizer = started(REGION, steps=3)
    waiting = optimizer.ask(late) if late else []
    collapse(optimizer)
    tell_worse(optimizer)
    optimizer.best()
    surrogate_of(optimizer).state = replace(surrogate_of(optimizer).state, reached=math.inf)
    collapse(optimizer)
    tell_worse(optimizer)
    for _ in range(3):
        tell_high(optimizer, optimizer.ask(8))
    optimizer.best()
    assert len(surrogate_of(optimizer).state.found) == 1
    return optimizer, waiting


def test_a_former_region_is_known_by_what_its_outcomes_are_now() -> None:
    optimizer, _ = in_a_second_region()
    first = optimizer.best().trial
    assert first.key < surrogate_of(optimizer).state.begun
    others = sorted(trial.Y for trial in optimizer.ledger if trial.key != first.key and trial.Y)
    optimizer.amend(first.key, 100.0)
    assert others[0] == optimizer.best().trial.Y
    optimizer.withdraw(first.key)
    second = optimizer.best()
    assert (second.trial.Y, second.mean) == (others[0], others[0])


def test_outcomes_of_a_former_region_that_come_late_count_in_the_end(tmp_path: Path) -> None:
    optimizer, (one, other, failed) = in_a_second_region(late=3)
    former, region = optimizer.best(), replace(surrogate_of(optimizer).state.region)
    optimizer.tell(other.key, 50.0)
    assert optimizer.best() == former
    optimizer.fail(failed.key, "boom")
    optimizer.tell(one.key, -100.0)
    best = optimizer.best()
    assert (best.trial.key, best.mean) == (one.key, -100.0)
    assert surrogate_of(optimizer).state.region == region  # it has learned nothing of them
    save_optimizer(tmp_path, optimizer)
    assert load_optimizer(tmp_path)[0].best() == best


def test_any_former_outcome_that_is_amended_counts() -> None:
    optimizer, _ = in_a_second_region()
    begun, best = surrogate_of(optimizer).state.begun, optimizer.best().trial
    other = next(t for t in optimizer.ledger if t.key < begun and t.key != best.key and t.Y)
    optimizer.amend(other.key, -1e6)
    assert optimizer.best().trial.key == other.key


def test_a_late_outcome_hides_no_amended_one() -> None:
    optimizer, (late, *_) = in_a_second_region(late=3)
    best = optimizer.best().trial
    optimizer.tell(late.key, -50.0)
    assert optimizer.best().trial.key == late.key
    optimizer.amend(best.key, -1000.0)
    assert optimizer.best().trial.key == best.key


def test_a_former_trial_that_failed_first_counts(tmp_path: Path) -> None:
    optimizer, (late, *_) = in_a_second_region(late=3)
    optimizer.fail(late.key, "boom")
    optimizer.best()
    optimizer.tell(late.key, -1000.0)
    save_optimizer(tmp_path, optimizer)
    for each in (optimizer, load_optimizer(tmp_path)[0]):
        assert each.best().trial.key == late.key


def test_an_outcome_of_a_failed_trial_is_taken_in_at_once() -> None:
    optimizer = started(REGION, steps=3)
    trial, *others = optimizer.ask()
    tell_high(optimizer, others)
    optimizer.fail(trial.key, "boom")
    optimizer.best()
    region = replace(surrogate_of(optimizer).state.region)
    optimizer.tell(trial.key, -50.0)
    optimizer.best()
    state = surrogate_of(optimizer).state
    assert trial.key in state.rows
    assert state.newest == [trial.key]  # a success, when there is a batch
    assert state.region == region


def test_an_amended_outcome_far_away_is_taken_in_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_module, "ROWS", 12)
    optimizer = started(REGION, steps=6)
    optimizer.best()
    rows = surrogate_of(optimizer).state.rows
    away = next(trial.key for trial in optimizer.ledger if trial.key not in rows)
    optimizer.amend(away, -50.0)
    assert optimizer.best().trial.key == away


@pytest.mark.parametrize("former", [False, True])
def test_an_outcome_amended_before_or_after_a_load_is_taken_in_alike(
    former: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_module, "ROWS", 12)
    optimizer = in_a_second_region()[0] if former else started(REGION, steps=6)
    best, state = optimizer.best().trial.key, surrogate_of(optimizer).state
    away = next(
        trial.key
        for trial in optimizer.ledger
        if trial.key not in (best, *state.rows) and (trial.key < state.begun) == former
    )
    save_optimizer(tmp_path / "before", optimizer)
    loaded, _ = load_optimizer(tmp_path / "before")
    for each in (optimizer, loaded):
        each.amend(away, -50.0)
    save_optimizer(tmp_path / "after", optimizer)
    searches = [optimizer, loaded, load_optimizer(tmp_path / "after")[0]]
    assert [each.best().trial.key for each in searches] == [away] * 3
    asked, *others = [points(each.ask()) for each in searches]
    assert others == [asked, asked]


@pytest.mark.parametrize("verb", [Optimizer.retry, Optimizer.withdraw])
def test_a_saved_search_goes_on_alike_when_a_trial_is_no_longer_failed(
    verb: Any, tmp_path: Path
) -> None:
    optimizer = started(REGION, steps=3)
    trial, *others = optimizer.ask()
    tell_all(optimizer, others)
    optimizer.fail(trial.key, "boom")
    optimizer.best()
    verb(optimizer, trial.key)
    save_optimizer(tmp_path, optimizer)
    loaded, _ = load_optimizer(tmp_path)
    assert points(loaded.ask()) == points(optimizer.ask())


def test_as_many_as_come_together_are_a_batch() -> None:
    """Asked for ten at a time, a region of batches of one halves after as many evaluations."""
    optimizer = started(replace(REGION, q=1), steps=12)
    optimizer.best()
    region = surrogate_of(optimizer).state.region
    region.length, region.failures = 0.8, 0
    tell_high(optimizer, optimizer.ask(10))
    optimizer.best()
    assert surrogate_of(optimizer).state.region.length == 0.4


def test_points_repeat_none_that_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = started(REGION, steps=3)
    corner = [pair[0] for pair in REGION.bounds]
    monkeypatch.setattr(
        region_module, "maximize_paths", lambda paths, starts, *_: torch.zeros_like(starts)
    )
    asked = [list(trial.X) for _ in range(4) for trial in optimizer.ask()]
    assert asked.count(corner) == 1


def test_repeated_points_are_replaced_by_the_next_candidates() -> None:
    candidates = torch.tensor([[0.0], [1.0], [2.0]])
    values = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [1.0, 3.0, 2.0]])
    points = torch.tensor([[7.0], [7.0], [0.0]])
    known = torch.tensor([[0.0]])
    region_module.replace_repeated(points, known, candidates, values)
    assert points.tolist() == [[7.0], [1.0], [2.0]]
    points = torch.zeros(3, 1)
    region_module.replace_repeated(points, candidates, candidates, values)
    assert points.flatten().tolist() == [0.0, 0.0, 0.0]  # nothing else is left


def factors_of_draws(optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch, q: int) -> torch.Tensor:
    """Return the factors of the next q drawn functions' deviations from the posterior mean."""
    factors = []

    def draw(*args: Any, spread: torch.Tensor, **options: Any) -> SamplePaths:
        factors.append(spread)
        return sample_paths(*args, spread=spread, **options)

    monkeypatch.setattr(region_module, "sample_paths", draw)
    optimizer.ask(q)
    return factors[0]


def test_one_in_ten_is_the_top_of_the_posterior_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = started(REGION, steps=2)
    (zero,) = (factors_of_draws(optimizer, monkeypatch, 10) == 0.0).nonzero()
    assert zero == 0
    count = sum(float(factors_of_draws(optimizer, monkeypatch, 1)) == 0.0 for _ in range(60))
    assert 1 <= count <= 20  # six, on average


def test_functions_are_drawn_wider_under_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = started(REGION, steps=2)
    optimizer.best()
    local = surrogate_of(optimizer).local
    assert local is not None
    for noise in (0.01, 0.25):
        local.model.likelihood.noise = noise
        factors = torch.linspace(0.5, 1.0 + math.sqrt(noise), 9)
        torch.testing.assert_close(factors_of_draws(optimizer, monkeypatch, 10)[1:], factors)


def test_leaps_come_more_often_after_one_was_good(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[int] = []
    monkeypatch.setattr(
        region_module.AdditiveTrend,
        "leap",
        lambda self, best, bounds, generator: shares.append(1) or torch.full_like(best, 0.99),
    )
    optimizer = started(REGION, steps=0)
    search = surrogate_of(optimizer)
    search.follow(optimizer.ledger)

    def leaps_of(q: int = 200) -> int:
        shares.clear()
        search.propose(optimizer.ledger, q, 0)
        return len(shares)

    assert leaps_of() == pytest.approx(40, abs=1)
    assert leaps_of() == pytest.approx(10, abs=1)  # HOPE batches were chosen
    search.state.hopeful = search.state.asked + 1
    assert leaps_of() == pytest.approx(40, abs=1)
    search.state.burst = search.state.asked + 1
    assert leaps_of() == pytest.approx(100, abs=1)


def test_leaps_stay_in_a_domain_of_which_every_input_has_few_values() -> None:
    optimizer, dim = started(MANY, steps=0), MANY.dim
    search, ledger = surrogate_of(optimizer), optimizer.ledger
    levels = {j: torch.linspace(0.0, 1.0, 10, dtype=torch.float64) for j in range(dim)}
    A = torch.zeros(1, dim, dtype=torch.float64)
    A[0, :3] = 1.0
    search.domain = parts.Domain(levels, A, torch.tensor([0.7], dtype=torch.float64))
    search.follow(ledger)
    inside = torch.zeros(dim, dtype=torch.float64)
    for key, x in enumerate(search.domain.admit(search.trials.X, inside)):
        search.trials.X[key] = x
    search.state.burst = search.state.asked + 1_000
    for seed in range(4):
        X = search.propose(ledger, 8, seed).double()
        assert torch.equal(search.domain.snap(X), X)
        assert bool((X[:, :3].sum(-1) <= 0.7 + 1e-9).all())


def test_there_are_no_leaps_in_hundreds_of_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_module, "MOST_INPUTS", 2)
    optimizer = started(REGION, steps=0)
    optimizer.ask(50)
    assert surrogate_of(optimizer).state.leaps == []


def test_a_good_leap_gives_hope() -> None:
    optimizer = started(REGION, steps=2)
    search = surrogate_of(optimizer)
    optimizer.best()
    asked = optimizer.ask()
    search.state.leaps = [asked[-1].key]
    for trial in asked:
        optimizer.tell(trial.key, 50.0)
    optimizer.best()
    assert search.state.hopeful == 0
    asked = optimizer.ask()
    search.state.leaps = [asked[-1].key]
    tell_all(optimizer, asked[:-1])
    optimizer.tell(asked[-1].key, -50.0)
    optimizer.best()
    assert search.state.hopeful == search.state.asked + region_module.HOPE * REGION.q
    assert search.state.leaps == []


@pytest.mark.parametrize(("refit", "fits"), [(0.0, 1), (1.3, 4)])
def test_hyperparameters_are_learned_as_outcomes_grow_or_once(refit: float, fits: int) -> None:
    optimizer = started(replace(REGION, refit=refit), steps=3)
    optimizer.best()
    assert surrogate_of(optimizer).refits == [6, 10, 14, 18][:fits]


def test_a_fit_that_fails_leaves_the_hyperparameters(monkeypatch: pytest.MonkeyPatch) -> None:
    from linear_operator.utils.errors import NotPSDError

    def fails(*args: Any, **kwargs: Any) -> None:
        raise NotPSDError("no factor")

    optimizer = started(REGION, steps=0)
    monkeypatch.setattr(local_model, "fit_to_stall", fails)
    tell_all(optimizer, optimizer.ask())
    model = surrogate_of(optimizer).model
    assert model is not None
    assert [event.what for event in model.numerical_log] == ["a refit that failed"]


def built_again(optimizer: Optimizer) -> StreamingGP:
    """The local model of a search that begins from the state and the final ledger."""
    search = surrogate_of(optimizer)
    state = region_state(json.loads(json.dumps(asdict(search.state))))
    model = RegionSurrogate(optimizer.settings, state).follow(Ledger(optimizer.ledger))
    assert model is not None
    return model


@pytest.mark.parametrize(
    ("search", "seed", "events"),
    [
        ("region", 0, FEW_EVENTS),
        pytest.param("both", 0, EVENTS, marks=pytest.mark.integration),
        *(pytest.param("region", i, EVENTS, marks=pytest.mark.integration) for i in range(6)),
    ],
)
def test_whatever_happens_the_model_is_that_of_the_ledger(
    search: str, seed: int, events: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_module, "ROWS", 25 if events == FEW_EVENTS else 60)
    monkeypatch.setattr(region_module, "CANDIDATES", 40)
    monkeypatch.setattr(parts, "SHORTEST", 0.0)  # at the end there is a region with a model
    least = {"num_restarts": 1, "raw_samples": 2}
    settings = OptimizationSettings(bounds=ON_GRID.bounds, initial=4, q=2, search=search, **least)
    check(settings, seed, tmp_path, built_again, events)


@pytest.mark.cuda
@pytest.mark.integration
def test_on_cuda(tmp_path: Path) -> None:
    optimizer = started(replace(REGION, device="cuda"), steps=3)
    save_optimizer(tmp_path, optimizer)
    loaded, _ = load_optimizer(tmp_path)
    again, expected = points(loaded.ask()), points(optimizer.ask())
    torch.testing.assert_close(torch.tensor(again), torch.tensor(expected))  # sums have no order
    assert math.isfinite(optimizer.best().mean or math.nan)


def test_the_local_model_is_cross_validated_in_folds() -> None:
    optimizer = started(REGION, steps=0)
    search = surrogate_of(optimizer)
    search.follow(optimizer.ledger)
    assert search.validation.rows == 0  # too few outcomes
    for _ in range(3):
        tell_all(optimizer, optimizer.ask())
    optimizer.ledger.fail(optimizer.ask(1)[0].key, "lost")
    search.follow(optimizer.ledger)
    before, record, local = search.state, search.validation, search.local
    assert local is not None
    assert search.state is before
    assert record.rows == len(local.keys) >= 2 * region_module.FOLDS
    X, Y = search.trials.X[local.keys], local.scale.to_scale(search.trials.Y[local.keys])
    squares = 0.0
    for fold in range(region_module.FOLDS):
        out = torch.arange(len(Y)) % region_module.FOLDS == fold
        data = X[~out], Y[~out, None], None, [0] * int((~out).sum()), local.scale
        model = LocalFit.of(REGION, *data, search.state.values, 0).model
        squares += float((Y[out] - model.posterior(X[out]).mean.squeeze(-1)).square().sum())
    assert sum(part.squares[0] for part in record.intervals) == pytest.approx(squares, rel=1e-6)
