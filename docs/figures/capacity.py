"""The tables and the picture of docs/scale/capacity.md, by ``python docs/figures/capacity.py``.

They follow from the measured costs in capacity.json, which
``python -m benchmarks.speed.capacity --write`` writes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bo_stream.distributed.ingestion import BYTES_A_NUMBER, default_task_rows
from docs.figures.shared import save, with_part

HERE = Path(__file__).parent
NUMBERS = HERE / "capacity.json"
PICTURE = HERE / "capacity.svg"
PAGE = HERE.parent / "scale" / "capacity.md"

ROWS = (10**6, 10**9, 10**12)
WORKERS = (1, 100, 10_000)
EVALUATIONS = (1.0, 60.0, 3_600.0)
LARGEST_TASK = 10**8
SUMS = ("36 × 36 grid", "20 × 20 × 20 grid", "512 points")
SHARE_OF_MERGING = 0.2
"""Part of the workers' time that merging may take on the driver before larger tasks are advised."""

CHOICES = (("TS", 100), ("TS", 500), ("TS", 2_000), ("qLogEI", 500))
"""Acquisition functions, and numbers of workers that points are chosen for."""

_MODEL = ("function", "family", "outcomes")

TITLES = {1: "1 worker", 100: "100 workers", 10_000: "10,000 workers"}
COLOURS = ("#777777", "#1f77b4", "#d62728")
POWERS = {10**6: "10⁶", 10**9: "10⁹", 10**12: "10¹²"}


@dataclass(frozen=True)
class Ingest:
    """What an ingest needs.

    Attributes:
        task_rows: Rows of a task.
        adding: Seconds in which the workers add the rows.
        merging: Seconds in which the driver merges the sums of the tasks.
    """

    task_rows: int
    adding: float
    merging: float

    @property
    def seconds(self) -> float:
        """Of the whole: workers add while the driver merges."""
        return max(self.adding, self.merging)


def numbers() -> dict[str, Any]:
    """Read the measured costs."""
    found: dict[str, Any] = json.loads(NUMBERS.read_text(encoding="utf-8"))
    return found


def ingest_of(costs: Mapping[str, Any], rows: int, workers: int) -> Ingest:
    """Predict an ingest, with tasks as large as the driver needs to keep up, or the default."""
    task = default_task(costs, rows, workers)
    while True:
        found = _ingest_with(costs, rows, workers, task)
        keeps_up = found.merging <= SHARE_OF_MERGING * found.adding
        if keeps_up or task >= LARGEST_TASK or task * workers >= rows:
            return found
        task *= 2


def default_task(costs: Mapping[str, Any], rows: int, workers: int) -> int:
    """Rows of a task for sums of that size, to a thousand."""
    numbers = round(costs["bytes"] / BYTES_A_NUMBER) if costs["model"].endswith("grid") else 0
    return math.ceil(default_task_rows(numbers, rows, workers) / 1_000) * 1_000


def _ingest_with(costs: Mapping[str, Any], rows: int, workers: int, task: int) -> Ingest:
    tasks = math.ceil(rows / task)
    at_work = min(workers, tasks)
    adding = rows / (costs["rows_a_second"] * at_work)
    return Ingest(task, adding, (tasks - 1) * costs["merge_seconds"])


def busy_with_driver(workers: int, evaluation: float, choice: float) -> float:
    """Predict the share of workers that one driver keeps busy.

    Args:
        workers: Number of workers.
        evaluation: Seconds of an evaluation.
        choice: Seconds of choosing a point.
    """
    return min(1.0, evaluation / (workers * choice))


def busy_with_replicas(workers: int, evaluation: float, choice: float, taken: float) -> float:
    """Predict the share of its time that a replica evaluates: it also chooses, and takes outcomes.

    Args:
        workers: Number of replicas.
        evaluation: Seconds of an evaluation.
        choice: Seconds of choosing a point, alone.
        taken: Seconds of taking an outcome of another replica.
    """
    return evaluation / (evaluation + choice + workers * taken)


# --- tables -------------------------------------------------------------------------------------


def tables() -> dict[str, str]:
    """Make each table of the page, by its name in the page's marks."""
    costs = numbers()
    return {
        "sums": _table(("sums for", "rows a second", "size", "a merge"), _sum_rows(costs)),
        "rows": _table(("rows", *TITLES.values()), _ingest_rows(costs)),
        "choices": _table(("model", *map(_heading, CHOICES)), _choice_rows(costs)),
        "workers": _table(("an evaluation takes", *TITLES.values()), _worker_rows(costs)),
    }


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def _heading(choice: tuple[str, int]) -> str:
    acquisition, workers = choice
    return f"`{acquisition}`, {workers:,} workers"


def _sum_rows(costs: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for each in costs["sums"]:
        yield (
            f"{each['model']}, {each['dim']} inputs",
            f"{_two_digits(each['rows_a_second']):,.0f}",
            f"{_two_digits(each['bytes'] / 1e6):g} MB",
            f"{_two_digits(1e3 * each['merge_seconds']):g} ms",
        )


def _ingest_rows(costs: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name in SUMS:
        own = _named(costs, name)
        for rows in ROWS:
            cells = [_spelled(ingest_of(own, rows, n), default_task(own, rows, n)) for n in WORKERS]
            yield f"{POWERS[rows]}, {name}", *cells


def _spelled(found: Ingest, default: int) -> str:
    text = _time(found.seconds)
    if found.task_rows > default:
        text += f", `task_rows={found.task_rows:_}`"
    return f"{text}: merging" if found.merging > found.adding else text


def _choice_rows(costs: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    choices = costs["choices"]
    for first in (each for each in choices if _column(each) == CHOICES[0]):
        alike = [each for each in choices if all(each[key] == first[key] for key in _MODEL)]
        seconds = {_column(each): each["seconds"] for each in alike}
        family = "`AutoGP`, exact" if first["family"] == "exact" else f"`{first['family']}`"
        name = f"{family}, {first['outcomes']:,} outcomes, {first['function']}"
        yield name, *(f"{_two_digits(1e3 * seconds[column]):g} ms" for column in CHOICES)


def _column(costs: Mapping[str, Any]) -> tuple[str, int]:
    return costs["acquisition"], costs["workers"]


def _worker_rows(costs: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    taken = costs["replica_seconds"]
    for evaluation in EVALUATIONS:
        cells = []
        for workers in WORKERS:
            driver = busy_with_driver(workers, evaluation, driver_choice(costs, workers))
            alone = busy_with_replicas(workers, evaluation, driver_choice(costs, 1), taken)
            cells.append(f"{_percent(driver)}, replicas {_percent(alone)}")
        yield _time(evaluation), *cells


def driver_choice(costs: Mapping[str, Any], workers: int) -> float:
    """Return the seconds of choosing a point for some workers.

    By Thompson sampling, with ``WISKI`` of the most outcomes that was measured.
    """
    choices = costs["choices"]
    found = [each for each in choices if each["acquisition"] == "TS" and each["family"] == "WISKI"]
    most = max(each["outcomes"] for each in found)
    points = sorted((e["workers"], e["seconds"]) for e in found if e["outcomes"] == most)
    numbers, seconds = zip(*points, strict=True)
    return math.exp(float(np.interp(math.log(workers), np.log(numbers), np.log(seconds))))


def _named(costs: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(each for each in costs["sums"] if each["model"] == name)
    return found


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1g} %"


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")


def _time(seconds: float) -> str:
    for unit, size in (("days", 86_400.0), ("h", 3_600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= size:
            return f"{_two_digits(seconds / size):g} {unit}"
    return f"{_two_digits(1e3 * seconds):g} ms"


def with_tables(text: str) -> str:
    """Put the tables into the page's text."""
    for name, table in tables().items():
        text = with_part(text, name, table)
    return text


# --- the picture --------------------------------------------------------------------------------


def picture() -> Figure:
    """Draw the time of an ingest against rows, and the share of busy workers against workers."""
    figure = Figure(figsize=(9.0, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_ingest(left)
    draw_busy(right)
    for axes in (left, right):
        axes.minorticks_off()
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_ingest(axes: Axes) -> None:
    """Draw how long rows take on a grid of two inputs, by workers."""
    costs = _named(numbers(), SUMS[0])
    rows = np.unique(np.geomspace(1e5, 1e13, 60).astype(np.int64)).tolist()
    for workers, colour in zip(WORKERS, COLOURS, strict=True):
        found = [ingest_of(costs, n, workers).seconds for n in rows]
        axes.loglog(rows, found, color=colour, lw=1.8, label=TITLES[workers])
    ticks = {1.0: "1 s", 60.0: "1 min", 3_600.0: "1 h", 86_400.0: "1 day", 2.6e6: "1 month"}
    axes.set_yticks(list(ticks), list(ticks.values()), minor=False)
    axes.set_xticks([1e6, 1e9, 1e12], ["10⁶", "10⁹", "10¹²"])
    axes.set_ylim(0.1, 1e7)
    axes.set_title(f"ingest, {SUMS[0]}", fontsize=10)
    axes.set_xlabel("rows", fontsize=9)
    axes.legend(fontsize=8, frameon=False, loc="upper left")


def draw_busy(axes: Axes) -> None:
    """Draw the share of busy workers, with one driver and as replicas."""
    costs = numbers()
    taken = costs["replica_seconds"]
    workers = np.unique(np.geomspace(1, 1e5, 120).astype(int)).tolist()
    for evaluation, colour in zip(EVALUATIONS, COLOURS, strict=True):
        driver = [100 * busy_with_driver(n, evaluation, driver_choice(costs, n)) for n in workers]
        alone = [
            100 * busy_with_replicas(n, evaluation, driver_choice(costs, 1), taken) for n in workers
        ]
        label = f"evaluations of {_time(evaluation)}"
        axes.semilogx(workers, driver, color=colour, lw=1.8, label=label)
        axes.semilogx(workers, alone, color=colour, lw=1.4, ls="--")
    axes.plot([], [], color="0.3", lw=1.4, ls="--", label="replicas, no driver")
    axes.set_xticks([1, 100, 10_000], ["1", "100", "10,000"])
    axes.set_title("workers that evaluate, %", fontsize=10)
    axes.set_xlabel("workers", fontsize=9)
    axes.legend(fontsize=8, frameon=False, loc="lower left")


if __name__ == "__main__":
    save(picture(), PICTURE, NUMBERS)
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
