from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from decimal import Decimal
from fractions import Fraction
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

from bo_stream.errors import UsageError
from bo_stream.loops.optimization import trials
from bo_stream.loops.optimization.trials import (
    STATUSES,
    Ledger,
    OptimizationSettings,
    Trial,
)
from bo_stream.loops.run import from_record


@pytest.fixture
def ledger() -> Ledger:
    """Pending, told, failed, withdrawn."""
    ledger = Ledger()
    for key in range(4):
        ledger.add([key / 10, 1.0], "sobol")
    ledger.tell(1, 2.5)
    ledger.fail(2, "no power", 0.1)
    ledger.withdraw(3)
    return ledger


def test_threads_store_and_collect_trials_one_after_the_other(ledger: Ledger) -> None:
    for change in (lambda: ledger.tell(0, 1.0), lambda: ledger.with_status("told")):
        thread = Thread(target=change)
        with trials._CHANGING:
            thread.start()
            thread.join(0.2)
            assert thread.is_alive()
        thread.join()
    assert [trial.key for trial in ledger.with_status("told")] == [0, 1]


def test_trials_that_two_threads_add_have_keys_of_their_own(ledger: Ledger) -> None:
    theirs: list[Trial] = []
    thread = Thread(target=lambda: theirs.append(ledger.add([0.5, 1.0], "hand")))
    with trials._CHANGING:
        thread.start()
        thread.join(0.2)  # its key is not chosen while another thread adds
        ours = ledger.add([0.7, 1.0], "hand")
    thread.join()
    assert [ours.key, theirs[0].key] == [4, 5]
    assert list(ledger)[4:] == [ours, *theirs]


def test_of_two_threads_that_tell_different_outcomes_one_is_refused(ledger: Ledger) -> None:
    refused: list[str] = []

    def tell() -> None:
        try:
            ledger.tell(0, 1.0)
        except UsageError as error:
            refused.append(str(error))

    thread = Thread(target=tell)
    with trials._CHANGING:
        thread.start()
        thread.join(0.2)
        ledger.tell(0, 2.0)
    thread.join()
    assert len(refused) == 1
    assert "told 2 already, got 1" in refused[0]
    assert ledger[0].Y == 2.0


@pytest.mark.parametrize(
    "given", [3, np.float32(3.0), np.array([3.0]), torch.tensor([[3.0]], requires_grad=True)]
)
def test_numbers_of_other_kinds_are_outcomes(ledger: Ledger, given: Any) -> None:
    assert ledger.tell(0, given).Y == 3.0
    assert ledger.amend(1, Fraction(3, 1)).Y == ledger.amend(2, Decimal(3)).Y == 3.0  # type: ignore[arg-type]


def test_the_same_outcome_again_changes_nothing(ledger: Ledger) -> None:
    before = ledger[1]
    assert ledger.tell(1, 2.5) == before == ledger[1]
    assert before.attempts == 1


def test_a_failed_trial_may_be_told_late_and_keeps_its_error(ledger: Ledger) -> None:
    told = ledger.tell(2, 1.0)
    assert (told.status, told.Y, told.attempts, told.error) == ("told", 1.0, 2, "no power")


def test_a_failed_trial_may_be_tried_again(ledger: Ledger) -> None:
    assert ledger.retry(2).status == "pending"
    assert ledger.fail(2, "still none").attempts == 2


@pytest.mark.parametrize("key", range(4))
def test_any_trial_may_be_amended_and_withdrawn(ledger: Ledger, key: int) -> None:
    amended = ledger.amend(key, -1.0)
    assert (amended.status, amended.Y) == ("told", -1.0)
    assert ledger.tell(key, -1.0) == amended
    withdrawn = ledger.withdraw(key)
    assert (withdrawn.status, withdrawn.Y) == ("withdrawn", None)
    assert ledger.withdraw(key) == withdrawn


@pytest.mark.parametrize(
    ("verb", "args", "message"),
    [
        ("tell", (4, 1.0), "No trial has key 4: 4 were asked for"),
        ("tell", (-1, 1.0), "No trial has key -1"),
        ("tell", ("1", 1.0), "No trial has key '1'"),
        ("tell", (1, 2.6), "told 2.5 already, got 2.6. To correct it, amend it"),
        ("tell", (3, 1.0), "was withdrawn. To bring it back, amend it"),
        ("tell", (0, float("nan")), "finite outcome of trial 0, .* got nan"),
        ("tell", (0, float("inf")), "finite outcome"),
        ("tell", (0, -1e300), r"of at most 1e\+75 in size, got -1e\+300. If its evaluation failed"),
        ("tell", (0, 10**400), "finite outcome of trial 0, .* got inf"),
        ("tell", (0, -(10**400)), "finite outcome of trial 0, .* got -inf"),
        ("tell", (0, np.array([np.timedelta64(3, "ns")], dtype=object)), "one number as the"),
        ("tell", (0, "high"), "one number as the outcome of trial 0, got 'high'"),
        ("tell", (0, "12"), "one number as the outcome of trial 0, got '12'"),
        ("tell", (0, b"3"), "one number as the outcome of trial 0, got b'3'"),
        ("tell", (0, True), "one number as the outcome of trial 0, got True"),
        ("tell", (0, np.bool_(True)), "one number as the outcome of trial 0"),
        ("tell", (0, np.timedelta64(3, "ns")), "one number as the outcome of trial 0"),
        ("tell", (0, np.ma.masked), "one number as the outcome of trial 0"),
        ("amend", (1, "12"), "one number as the outcome of trial 1, got '12'"),
        ("tell", (0, [1.0, 2.0]), "one number"),
        ("amend", (9, 1.0), "No trial has key 9"),
        ("amend", (1, float("nan")), "finite outcome"),
        ("withdraw", (9,), "No trial has key 9"),
        ("tell", (0, 1.0, "3"), "Expected the seconds of trial 0 as a finite .* got '3'"),
        ("tell", (0, 1.0, "soon"), "Expected the seconds of trial 0 as a finite .* got 'soon'"),
        ("tell", (0, 1.0, float("nan")), "seconds of trial 0 as a finite number of at least 0"),
        ("tell", (0, 1.0, float("inf")), "seconds of trial 0 .* got inf. Leave out what is not"),
        ("fail", (0, "no power", -1.0), "seconds of trial 0 .* got -1.0"),
        ("tell", (True, 1.0), "No trial has key True"),
        ("fail", (0, 7), "Expected the error of trial 0 as a text or an exception, got 7"),
        ("fail", (1, "no"), "Trial 1 is told: it cannot fail"),
        ("fail", (3, "no"), "Trial 3 is withdrawn"),
        ("retry", (0,), "Only a failed trial can be retried; trial 0 is pending"),
    ],
)
def test_what_cannot_be_is_said_and_changes_nothing(
    ledger: Ledger, verb: str, args: tuple[Any, ...], message: str
) -> None:
    before = list(ledger)
    with pytest.raises(UsageError, match=message):
        getattr(ledger, verb)(*args)
    assert list(ledger) == before


def test_counts_and_changes_are_kept_with_the_trials(ledger: Ledger) -> None:
    ledger.add([0.5, 1.0], "model")
    before = ledger.changes
    ledger.retry(2)
    ledger.tell(2, 1.0)
    ledger.put(Trial(0, (0.3, 1.0), "hand", "told", 4.0))
    assert ledger.changed_since(before) == [0, 2]
    assert ledger.changed_since(0) == [0, 1, 2, 3, 4]
    assert ledger.changed_since(ledger.changes) == []
    for status in STATUSES:
        of_status = [trial for trial in ledger if trial.status == status]
        assert ledger.with_status(status) == of_status
        assert ledger.count(status) == len(of_status)
    assert [trial.key for trial in ledger.with_status("told", "pending")] == [0, 1, 2, 4]
    assert [ledger.count_from(origin) for origin in ("sobol", "model", "hand")] == [3, 1, 1]


def test_keys_seconds_and_errors_of_other_kinds_are_stored_as_python_s(ledger: Ledger) -> None:
    ledger.tell(np.int64(0), np.float32(1.0), seconds=np.float32(2.0))  # type: ignore[arg-type]
    ledger.fail(torch.tensor(2), ValueError("no fuel"), 1)  # type: ignore[arg-type]
    assert (ledger[0].seconds, ledger[2].error) == (2.0, "ValueError: no fuel")
    test_trials_survive_json(ledger)


def settings(**given: Any) -> OptimizationSettings:
    return OptimizationSettings(**{"bounds": [(0, 1), (2, 5)], **given})


@pytest.mark.parametrize("kind", [np.array, torch.tensor, list])
def test_bounds_and_settings_of_other_kinds_are_stored_as_python_s(
    kind: Callable[[Any], Any],
) -> None:
    bounds = kind([[0.0, 1.0], [2.0, 5.0]])
    given = settings(bounds=bounds, beta=np.float32(2), maximize=np.bool_(True), q=np.int64(1))
    assert given == settings(maximize=True)
    assert from_record(OptimizationSettings, json.loads(json.dumps(asdict(given)))) == given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bounds": (0, 1)}, "Expected bounds of input 0 to be finite, low < high, .* got 0. Give"),
        ({"bounds": "0,1"}, "a pair .low, high. for each, got '0,1'"),
        ({"bounds": np.zeros((0, 2))}, "Expected bounds of at least one input"),
        ({"bounds": 3}, "Expected bounds of at least one input, a pair .*, got 3"),
        ({"bounds": ["01"]}, "Expected bounds of input 0 to be finite, low < high, .* got '01'"),
        ({"bounds": [(0, 1), (-1e308, 1e308)]}, "bounds of input 1 .* no farther apart than"),
        ({"bounds": [(0, 1, 2)]}, r"got \(0, 1, 2\)"),
        ({"bounds": [(1, 1)]}, "low < high"),
        ({"beta": "2"}, "Expected beta to be a number, got '2'"),
        ({"maximize": "yes"}, "Expected maximize to be one of True, False, got 'yes'"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        settings(**given)


def test_trials_survive_json(ledger: Ledger) -> None:
    records = json.loads(json.dumps([asdict(trial) for trial in ledger]))
    assert [from_record(Trial, record) for record in records] == list(ledger)
