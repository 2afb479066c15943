"""The tables and the picture of docs/scale/capacity.md are what the measured costs say."""

from __future__ import annotations

import pytest

from bo_stream.distributed.ingestion import TASK_ROWS
from docs.figures import capacity
from docs.figures.shared import is_of

COSTS = {"rows_a_second": 1e6, "merge_seconds": 0.01, "bytes": 1e6, "model": "a grid"}


def test_the_page_has_the_tables_that_the_script_makes() -> None:
    text = capacity.PAGE.read_text(encoding="utf-8")
    assert capacity.with_tables(text) == text, "run python docs/figures/capacity.py"
    assert all(len(table.splitlines()) > 3 for table in capacity.tables().values())


def test_the_picture_is_of_the_present_costs() -> None:
    assert is_of(capacity.PICTURE, capacity.NUMBERS), "run python docs/figures/capacity.py"


def test_workers_share_the_rows_while_the_driver_keeps_up() -> None:
    alone, many = (capacity.ingest_of(COSTS, 10**9, workers) for workers in (1, 10))
    assert alone.seconds == pytest.approx(1000.0)
    assert many.seconds == pytest.approx(100.0)
    assert many.task_rows >= alone.task_rows == TASK_ROWS


def test_tasks_are_larger_until_merging_is_a_small_part() -> None:
    found = capacity.ingest_of(COSTS, 10**12, 1_000)
    assert found.task_rows > TASK_ROWS
    assert found.merging <= capacity.SHARE_OF_MERGING * found.adding
    smaller = capacity._ingest_with(COSTS, 10**12, 1_000, found.task_rows // 2)
    assert smaller.merging > capacity.SHARE_OF_MERGING * smaller.adding


def test_large_sums_have_large_tasks() -> None:
    of_many = {"rows": 10**9, "workers": 10}
    assert capacity.default_task({**COSTS, "bytes": 16e6}, **of_many) == 1_000_000
    assert capacity.default_task(COSTS, **of_many) == TASK_ROWS
    assert (
        capacity.default_task({**COSTS, "bytes": 16e6, "model": "points"}, **of_many) == TASK_ROWS
    )


def test_no_more_workers_are_at_work_than_there_are_tasks() -> None:
    found = capacity.ingest_of(COSTS, 10**6, 10_000)
    assert found.task_rows == 80_000  # √(10⁶ · 125,000 / 20), to a thousand
    assert found.adding == pytest.approx(10**6 / (13 * COSTS["rows_a_second"]))
    assert found.merging < 2.0 * found.adding


def test_a_driver_is_the_limit_where_evaluations_are_short() -> None:
    assert capacity.busy_with_driver(100, evaluation=60.0, choice=0.01) == 1.0
    assert capacity.busy_with_driver(1_000, evaluation=5.0, choice=0.01) == pytest.approx(0.5)


def test_a_replica_takes_in_the_outcomes_of_all() -> None:
    share = capacity.busy_with_replicas(1_000, evaluation=1.0, choice=0.5, taken=0.0005)
    assert share == pytest.approx(0.5)
