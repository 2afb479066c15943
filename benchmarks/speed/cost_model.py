"""The table of costs of ``bo_stream.recommend``: measured, fitted, checked.

Each family's update, refit, posterior and fantasy is measured at a grid of sizes. A sum of terms of
the known orders (n³, M² q and so on) is fitted to them by nonnegative least squares of
logarithms. Probes of the machine's speed are timed beside every measurement, so that a machine that
others use, too, is as good as a slower one. Then settings that were not in the fit are predicted:
other n, d and q, and hyperparameters that a fit finds on other functions.

``--write`` ships the table, ``--fit`` fits the last run's measurements again, ``--check`` measures
the check alone, against the table that is shipped; with ``--second`` other settings. With
``OMP_NUM_THREADS=2`` wall clock is measured instead of processor time: another machine than the
table's, as far as one can have it. ``--processor`` measures processor time there, too, for a
machine that others use; with ``OMP_WAIT_POLICY=PASSIVE`` it has no share of threads that wait. Yet
another machine, one without vector instructions, is
``ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE``.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls

import bo_stream
from benchmarks.common.harness import THREADS, Options, start
from benchmarks.common.report import Claim, at_most, finish, stated
from benchmarks.speed.cost_measurements import (
    COUNTS,
    Measured,
    Setting,
    built,
    kernel_of,
    measured,
    sizes_of,
)
from bo_stream.costs import OPERATIONS, CostTable, Problem, problem_of
from bo_stream.models.clustered.clustered import MAX_CENTRES
from bo_stream.models.inducing.inference import MAX_POINTS
from bo_stream.models.inducing.osgpr import WINDOW
from bo_stream.models.outcomes.likelihood import WINDOW as COUNTS_WINDOW
from bo_stream.models.wiski.cache import LEARNING_RANK
from bo_stream.models.wiski.memory import MOST_ROWS

Array = NDArray[np.float64]
TABLE = Path(bo_stream.__file__).parent / "costs.json"
ROUNDS = 3
"""Times that the check measures all settings, one after the other."""

LENGTHSCALES = (0.05, 0.15, 0.3, 0.6)
LIMITS = {
    "rows": MOST_ROWS,
    "points": MAX_POINTS,
    "window": WINDOW,
    "counts": COUNTS_WINDOW,
    "centres": MAX_CENTRES,
    "local": 100,
    "batch": 1024,
    "learning": LEARNING_RANK,
    "WISKI rank": 1024,
    "DirichletWISKI rank": 512,
}
"""Defaults of the models that costs depend on."""

_EXACT = {
    "update": ("", "m", "n", "n n", "n n n"),
    "refit": ("", "m", "n n", "n n d", "n n n"),
    "posterior": ("", "m", "n q", "n n q"),
    "fantasy": ("", "m", "n n", "n n q", "n n n"),
    "bytes": ("", "n d", "n n", "k"),
}
_GRID = {
    "update": ("", "m", "c", "r r", "r r q", "r r r"),
    "refit": ("", "m", "p", "p c", "f f", "f f f", "p f"),
    "posterior": ("", "m", "c q", "r q", "r r q", "c r q"),
    "fantasy": ("", "m", "c q", "r q", "r r q", "c r q"),
    "bytes": ("", "p", "p c", "r r", "k"),
}
_POINTS = {
    "update": ("", "m", "a", "M a", "M M", "M M q", "M M M", "w M"),
    "refit": ("", "m", "M M", "w w", "w w d", "M M M", "w w w", "M w w"),
    "posterior": ("", "m", "M q", "M M q", "d q"),
    "fantasy": ("", "m", "M q", "M M q", "M M"),
    "bytes": ("", "M M", "w M", "w d"),
}
_STEPS = {
    "update": ("", "m", "b", "b d"),
    "refit": ("", "m", "b", "b d"),
    "posterior": ("", "m", "q", "q d"),
    "fantasy": ("", "m", "q", "q d"),
    "bytes": ("", "m", "n", "n d"),
}


def _without(symbol: str, terms: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    return {name: tuple(t for t in some if symbol not in t.split()) for name, some in terms.items()}


def _with(symbol: str, terms: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    return {name: (*some, symbol) for name, some in terms.items()}


_OF_WINDOW = ("w w", "w r", "w w r", "w r r", "w w w")


def _of_counts(terms: dict[str, tuple[str, ...]], *more: str) -> dict[str, tuple[str, ...]]:
    """Add the terms of an update that looks at a window of w rows anew."""
    return {**terms, "update": (*terms["update"], *more)}


CANDIDATES: dict[str, dict[str, tuple[str, ...]]] = {
    "exact": _without("k", _EXACT),
    "WISKI, rows": _EXACT,
    "WISKI, sum, rows": _with("g", _EXACT),
    "WISKI": _GRID,
    "WISKI, sum": _with("g", _GRID),
    "DirichletWISKI, rows": _EXACT,
    "DirichletWISKI": _GRID,
    "OSGPR, rows": _POINTS,
    "OSGPR": _POINTS,
    "OSVGP": _without("w", _POINTS),
    "exact, counts": _without("k", _EXACT),
    "WISKI, counts, rows": _EXACT,
    "WISKI, sum, counts, rows": _with("g", _EXACT),
    "WISKI, counts": _of_counts(_GRID, *_OF_WINDOW),
    "WISKI, sum, counts": _of_counts(_with("g", _GRID), *_OF_WINDOW),
    "OSVGP, counts": _of_counts(_POINTS, "w w", "w w M", "M M w", "w w w"),
    "ClusteredGP": {
        **_without("w", _POINTS),
        "update": ("", "m", "a", "a d", "M a", "M a d", "M M", "M M M"),
    },
    "LocalGP": {
        "update": ("", "m", "C", "s s", "s s s"),
        "refit": ("", "m", "C", "C s s", "C s s s"),
        "posterior": ("", "m", "C q", "s s q", "C s s"),
        "fantasy": ("", "m", "C q", "s s q", "C s s"),
        "bytes": ("", "C", "C s s"),
    },
    "DecoupledGP": _STEPS,
    "QSGP": _STEPS,
}
"""The terms that may enter each cost."""

_OF_ROWS = dict.fromkeys(("refit", "posterior", "fantasy"), "gradients")
_OF_GRIDS = dict.fromkeys(("refit", "fantasy"), "gradients")
SMALL_WORK: dict[str, dict[str, str]] = {
    "exact": {"refit": "gradients"},
    "WISKI, rows": _OF_ROWS,
    "WISKI, sum, rows": _OF_ROWS,
    "WISKI": _OF_GRIDS,
    "WISKI, sum": _OF_GRIDS,
    "DirichletWISKI, rows": {**_OF_ROWS, "refit": "factors"},
    "DirichletWISKI": {"refit": "gradients", "fantasy": "factors"},
}
"""Kinds of the terms that do not grow with the data, where they are not ``calls``. Measurements on
one thread cannot tell them apart; these are the ones that slow down likewise on two.
"""

SHARED: dict[str, dict[str, tuple[str, ...]]] = {
    "DecoupledGP": {"bytes": ("n d",)},
    "QSGP": {"bytes": ("n d",)},
}
"""Terms that outputs do not multiply, besides the constant: inputs are stored once."""


# --- what is measured ---------------------------------------------------------------------------


def grid() -> list[Setting]:
    """List the settings of the fit."""
    some = [Setting("exact", n, d) for d in (2, 6) for n in (20, 60, 150, 300, 600, 1000)]
    some += [Setting("exact", 100, 2, q=4), Setting("exact", 400, 2, q=4)]
    some += [Setting("exact", 200, 2, m=2)]
    for d in (1, 2, 3, 4):
        some += [Setting("WISKI", n, d) for n in (20, 80, 150, 300)]
        held = LENGTHSCALES[max(0, d - 2) :]  # of shorter ones the features leave out too much
        some += [Setting("WISKI", 1000, d, lengthscale=value) for value in held]
        some += [Setting("WISKI", 1000, d, q=4), Setting("WISKI", 4000, d)]
    some += [Setting("WISKI", 2000, 2, lengthscale=v) for v in (0.07, 0.1)]
    some += [Setting("WISKI", 2000, 3, lengthscale=0.2)]
    some += [Setting("WISKI", 100, 2, q=4)]
    some += [Setting("WISKI", 1000, d, m=2) for d in (2, 3)]
    some += [Setting("WISKI", 1000, d, rough=True) for d in (2, 3)]
    some += [Setting("WISKI", 1000, d, q=20) for d in (2, 3)]
    for d in (3, 6, 10):
        some += [Setting("WISKI, sum", 1000, d, lengthscale=value) for value in (0.1, 0.3)]
        some += [Setting("WISKI, sum", 100, d)]
    some += [Setting("WISKI, sum", 1000, 6, q=4), Setting("WISKI, sum", 100, 6, group=2)]
    some += [Setting("WISKI, sum", 1000, d, group=2) for d in (4, 8)]
    some += [Setting("OSGPR", n, d) for d in (1, 2, 3, 6, 10) for n in (50, 200, 450, 1000)]
    some += [Setting("OSGPR", 1000, d, lengthscale=v) for d in (2, 3, 6) for v in (0.15, 0.6)]
    some += [Setting("OSGPR", 1000, 6, q=4), Setting("OSGPR", 1000, 2, q=20)]
    some += [Setting("OSGPR", 1000, d, m=2) for d in (2, 6)]
    some += [Setting("OSGPR", 3000, d) for d in (2, 6)]
    some += [Setting("OSVGP", n, d) for d in (1, 2, 3, 6) for n in (50, 200, 450, 1000)]
    some += [Setting("OSVGP", 1000, d, q=4) for d in (2, 6)]
    some += [Setting("OSVGP", 1000, 2, lengthscale=0.15)]
    some += [Setting("exact, counts", n, d) for d in (2, 6) for n in (20, 60, 150, 300, 500)]
    some += [Setting("exact, counts", 100, 2, q=4)]
    some += [Setting("WISKI, counts", n, d) for d in (1, 2, 3, 4) for n in (20, 80, 150, 230, 1000)]
    some += [Setting("WISKI, counts", 1000, d, lengthscale=v) for d in (2, 3) for v in (0.15, 0.6)]
    some += [Setting("WISKI, counts", n, 2, q=4) for n in (100, 1000)]
    for d in (3, 6, 10):
        some += [Setting("WISKI, sum, counts", 1000, d, lengthscale=v) for v in (0.1, 0.3)]
        some += [Setting("WISKI, sum, counts", n, d) for n in (60, 200)]
    some += [Setting("OSVGP, counts", n, d) for d in (1, 2, 3, 6) for n in (50, 200, 450, 1000)]
    some += [Setting("OSVGP, counts", 1000, d, q=4) for d in (2, 6)]
    some += [Setting("OSVGP, counts", 1000, 2, lengthscale=0.15)]
    some += [Setting("DirichletWISKI", n, d, m=2) for d in (1, 2, 3) for n in (60, 250, 1000)]
    some += [Setting("DirichletWISKI", 1000, d, m=4) for d in (2, 3)]
    some += [Setting("DirichletWISKI", 1000, 2, m=2, q=4), Setting("DirichletWISKI", 1000, 4, m=2)]
    some += [Setting("DirichletWISKI", 1000, 2, m=2, lengthscale=0.15)]
    some += [Setting("ClusteredGP", n, d) for d in (2, 3) for n in (50, 200, 500, 1000, 3000)]
    some += [Setting("ClusteredGP", 500, 6), Setting("ClusteredGP", 500, 2, q=4)]
    some += [Setting("ClusteredGP", 500, 2, m=2)]
    some += [Setting("LocalGP", n, d) for d in (1, 2, 4, 6) for n in (50, 300, 2000)]
    some += [Setting("LocalGP", 2000, d, lengthscale=0.15) for d in (2, 6)]
    some += [Setting("LocalGP", 2000, 2, q=4), Setting("LocalGP", 2000, 2, m=2)]
    for family in ("DecoupledGP", "QSGP"):
        some += [Setting(family, n, d) for d in (2, 8) for n in (300, 1500, 5000)]
        some += [Setting(family, 5000, 2, q=4)]
        some += [Setting(family, 5000, d, m=3) for d in (2, 8)]
        some += [Setting(family, 60_000, 8, m=m) for m in (1, 4)]
    return some


def fresh() -> list[Setting]:
    """List settings of the check: none is in the fit, and hyperparameters are those of a fit."""
    some = [Setting("exact", n, d) for n, d in ((40, 3), (100, 4), (220, 8), (450, 3), (800, 5))]
    some += [Setting("WISKI", n, d) for n, d in ((50, 3), (250, 2), (600, 2), (10_000, 3))]
    some += [Setting("WISKI", 2_000, 1), Setting("WISKI", 700, 4, q=2)]
    some += [Setting("WISKI", 2_000, 3, q=3, lengthscale=0.4)]
    some += [Setting("WISKI, sum", n, d) for n, d in ((120, 5), (3_000, 8))]
    some += [Setting("OSGPR", n, d) for n, d in ((120, 4), (700, 5), (5_000, 8), (2_000, 2))]
    some += [Setting("OSVGP", n, d) for n, d in ((120, 4), (700, 5), (2_000, 2))]
    some += [Setting("exact, counts", n, d) for n, d in ((40, 3), (220, 4), (400, 2))]
    some += [Setting("WISKI, counts", n, d) for n, d in ((50, 3), (250, 2), (2_000, 2), (700, 3))]
    some += [Setting("WISKI, sum, counts", 2_000, 5)]
    some += [Setting("OSVGP, counts", n, d) for n, d in ((120, 4), (700, 5), (2_000, 2))]
    some += [Setting("DirichletWISKI", n, 2, m=3) for n in (120, 2_000)]
    some += [Setting("ClusteredGP", n, d) for n, d in ((120, 4), (700, 5))]
    some += [Setting("LocalGP", n, d) for n, d in ((80, 3), (1_000, 3), (1_500, 5))]
    some += [Setting(family, n, 5) for family in ("DecoupledGP", "QSGP") for n in (700, 8_000)]
    return some + learned()


def second() -> list[Setting]:
    """List settings of a second check, which the kinds of small work were not chosen by either."""
    some = [Setting("exact", n, d) for n, d in ((30, 2), (70, 5), (180, 3), (350, 7), (700, 2))]
    some += [Setting("WISKI", n, 1) for n in (60, 280, 3_000)]
    some += [Setting("WISKI", n, d) for n, d in ((120, 2), (200, 3), (500, 3), (5_000, 2))]
    some += [Setting("WISKI", 1_500, 4, q=2), Setting("WISKI", 1_500, 2, q=5, lengthscale=0.4)]
    some += [Setting("WISKI, sum", n, d) for n, d in ((200, 4), (1_500, 7))]
    some += [Setting("OSGPR", n, d) for n, d in ((80, 2), (300, 8), (1_500, 4), (4_000, 3))]
    some += [Setting("OSVGP", n, d) for n, d in ((80, 2), (400, 3), (1_500, 5))]
    some += [Setting("exact, counts", n, d) for n, d in ((30, 2), (100, 5), (350, 3))]
    some += [
        Setting("WISKI, counts", n, d) for n, d in ((120, 2), (200, 3), (3_000, 1), (1_500, 2))
    ]
    some += [Setting("OSVGP, counts", n, d) for n, d in ((80, 2), (400, 3), (1_500, 5))]
    some += [Setting("DirichletWISKI", n, d, m=2) for n, d in ((90, 1), (180, 3))]
    some += [Setting("DirichletWISKI", n, d, m=m) for n, d, m in ((150, 2, 4), (1_500, 1, 3))]
    some += [Setting("ClusteredGP", n, d) for n, d in ((80, 2), (900, 3))]
    some += [Setting("LocalGP", n, d) for n, d in ((150, 2), (900, 5))]
    some += [Setting(family, n, 4) for family in ("DecoupledGP", "QSGP") for n in (500, 3_000)]
    some += [Setting("WISKI", 1_500, d, lengthscale=None) for d in (1, 2)]
    some += [Setting("OSGPR", 900, 3, lengthscale=None, function="valley")]
    return [*some, Setting("exact", 120, 3, lengthscale=None, function="funnel")]


def learned() -> list[Setting]:
    """List settings whose hyperparameters a fit finds, on functions that were not in the fit."""
    some = [Setting("exact", n, d, lengthscale=None, function="valley") for n, d in ((80, 4),)]
    some += [
        Setting("WISKI", 2_000, d, lengthscale=None, function=name)
        for d, name in ((1, "valley"), (2, "valley"), (3, "funnel"))
    ]
    return some + [
        Setting("OSGPR", n, d, lengthscale=None, function=name)
        for n, d, name in ((1_500, 2, "funnel"), (800, 4, "valley"), (1_000, 8, "funnel"))
    ]


def tiny() -> list[Setting]:
    """List what a smoke run measures."""
    return [Setting("exact", n, 2) for n in (20, 30, 40)] + [
        Setting("OSGPR", n, 2) for n in (20, 30, 40)
    ]


def measure(settings: Iterable[Setting], processor: bool) -> list[Measured]:
    """Measure settings, telling on standard error how far it is."""
    found, clock = [], time.process_time if processor else time.perf_counter
    for setting in settings:
        found.append(measured(setting, clock))
        print(found[-1], file=sys.stderr)
    return found


def problem(setting: Setting) -> Problem:
    """Describe a setting to the library, its kernel included."""
    kernel = kernel_of(setting)
    likelihood = {"OSVGP": "bernoulli", "DirichletWISKI": "classes"}.get(setting.family)
    likelihood = "binomial" if setting.family in COUNTS else likelihood
    n, d, m, q = setting.n, setting.d, setting.m, setting.q
    return problem_of(n, d, m, q, None, likelihood, False, True, None, kernel)


# --- sizes --------------------------------------------------------------------------------------


def sizes(smoke: bool) -> dict[str, Any]:
    """Find how many features, points, local models and centres there are, and a grid's error."""
    found: dict[str, Any] = {"lengthscales": LENGTHSCALES}
    few, many = (1, 2, 3, 4), (1, 2, 3, 4, 6, 10)
    rows = {"WISKI": 60, "error": 60, "DirichletWISKI": 60, "OSGPR": 1_000, "LocalGP": 2_000}
    for kind, rough in (("smooth", False), ("rough", True)):
        for name, n in rows.items():
            curves = found.setdefault(name, {}).setdefault(kind, {})
            for d in (2,) if smoke else many if n > 60 else few:
                one = Setting(name, 60 if smoke else n, d, rough=rough)
                curves[str(d)] = [_size(replace(one, lengthscale=v)) for v in LENGTHSCALES]
    counts = (100,) if smoke else (1_025, 1_500, 3_000, 6_000)
    found["centres"] = {"n": counts}
    for d in (2,) if smoke else (1, 2, 3, 6):
        settings = [Setting("ClusteredGP", n, d) for n in counts]
        found["centres"][str(d)] = [sizes_of(built(setting))["M"] for setting in settings]
    return found


def _size(setting: Setting) -> float:
    """Find the one size of a setting, or the error of WISKI's grid in parts of the variance."""
    wanted = setting.family
    family = "WISKI" if wanted == "error" else wanted
    model = built(replace(setting, family=family, m=2 if wanted == "DirichletWISKI" else 1))
    with torch.no_grad():
        _ = model.posterior(torch.rand(1, setting.d)).variance
    if wanted == "error":
        return max(float(model.interpolation_error() + model.dropped), 1e-12)
    return next(iter(sizes_of(model).values()))


# --- the fit ------------------------------------------------------------------------------------


def fitted(found: list[Measured], sizes: dict[str, Any]) -> dict[str, Any]:
    """Fit the table: every cost of every stage by nonnegative least squares."""
    speeds = {
        kind: statistics.median(one.speeds[kind] for one in found) for kind in found[0].speeds
    }
    table: dict[str, Any] = {"speeds": speeds, "limits": LIMITS, "sizes": sizes, "terms": {}}
    reader, stages = CostTable(table), defaultdict(list)
    for one in found:
        stages[reader.stage(*_named(one.setting))].append(one)
    for stage, members in stages.items():
        costs = {name: _fit_terms(stage, name, members, reader) for name in (*OPERATIONS, "bytes")}
        table["terms"][stage] = costs
    return table


def _named(setting: Setting) -> tuple[str, Problem]:
    """The family as the library names it, and the problem."""
    return setting.family.partition(",")[0], problem(setting)


def _fit_terms(
    stage: str, name: str, members: list[Measured], reader: CostTable
) -> list[list[Any]]:
    """Fit one cost; outputs multiply every term but the constant and those that they share."""
    alone = ("", "m", *SHARED.get(stage, {}).get(name, ()))
    symbols = [one if one in alone else f"{one} m" for one in CANDIDATES[stage][name]]
    small = SMALL_WORK.get(stage, {}).get(name, "calls")
    terms = [("" if name == "bytes" else _kind(one, small), one) for one in symbols]
    rows, targets = [], []
    for one in members:
        found = {**reader.sizes(*_named(one.setting)), **one.sizes}
        factors = {kind: one.speeds[kind] / reader.speeds[kind] for kind in reader.speeds}
        products = [math.prod(found[symbol] for symbol in text.split()) for _, text in terms]
        rows.append([factors.get(k, 1.0) * x for (k, _), x in zip(terms, products, strict=True)])
        targets.append(one.bytes if name == "bytes" else one.seconds[name])
    solution = least_log_errors(np.array(rows) / np.array(targets)[:, None])
    return [
        [kind, text, float(f"{value:.4g}")]
        for (kind, text), value in zip(terms, solution, strict=True)
        if value > 0.0
    ]


def least_log_errors(design: Array, rounds: int = 20) -> Array:
    """Find c ≥ 0 of least Σ log² (design c), by nonnegative least squares with weights in turns.

    Least squares of ``design c - 1`` alone would rather predict half of a cost than twice.
    """
    scale, weights = design.max(0), np.ones(len(design))
    scale[scale == 0.0] = 1.0
    for _ in range(rounds):
        solution = nnls(weights[:, None] * design / scale, weights)[0]
        ratio = np.maximum(design @ (solution / scale), 1e-3)
        far = np.abs(ratio - 1.0) > 1e-6
        weights = np.where(far, np.log(ratio) / np.where(far, ratio - 1.0, 1.0), 1.0)
    return solution / scale


def _kind(symbols: str, small: str) -> str:
    """Name the work of a term: cubes are linear algebra, squares array passes, else ``small``."""
    sizes = [symbol for symbol in symbols.split() if symbol not in "qmgCda"]
    return (small, "elements", "elements", "flops")[min(len(sizes), 3)]


# --- the check ----------------------------------------------------------------------------------


def ratios(found: Iterable[Measured], table: CostTable) -> Iterator[tuple[Setting, str, float]]:
    """Yield predicted over measured for every cost, on this machine's speed when measured.

    Of a setting that was measured several times it is the median.
    """
    each: dict[tuple[Setting, str], list[float]] = defaultdict(list)
    for one in found:
        family, asked = _named(one.setting)
        if one.lengthscale is not None:
            asked = replace(asked, lengthscale=one.lengthscale)
        predicted = table.seconds(family, asked, one.speeds)
        for name in OPERATIONS:
            each[one.setting, name].append(predicted[name] / one.seconds[name])
        each[one.setting, "bytes"].append(table.bytes(family, asked) / one.bytes)
    for (setting, name), some in each.items():
        yield setting, name, statistics.median(some)


def claims(title: str, found: list[Measured], table: CostTable) -> list[Claim]:
    """State the worst ratio of each family, either way round."""
    worst: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for setting, name, ratio in ratios(found, table):
        factor = max(ratio, 1.0 / ratio)
        told = f"{name}, n = {setting.n}, d = {setting.d}: {ratio:.2f}"
        worst[setting.family].append((factor, told))
    every = [pair for pairs in worst.values() for pair in pairs]
    result = [
        at_most(f"{title}, {family}: worst factor", *max(pairs)[:1], 2.0, "", max(pairs)[1])
        for family, pairs in worst.items()
    ]
    within = sum(factor <= 2.0 for factor, _ in every) / len(every)
    detail = f"of {len(every)}; median factor {statistics.median(f for f, _ in every):.2f}"
    return [
        *result,
        stated(f"{title}: predictions within a factor of two", 100 * within, "%", detail),
    ]


def main() -> None:
    """Run it."""
    flags = {
        "write": "ship the fitted table",
        "fit": "fit what the last run measured",
        "check": "measure the check only, against the shipped table",
        "second": "check other settings, once",
        "processor": "measure processor time on several threads, too",
    }
    options = start(__doc__, flags=flags)
    warnings.simplefilter("ignore")
    made: list[Claim] = []
    processor = THREADS == 1 or "processor" in options.flags
    if "check" in options.flags:
        table = CostTable.shipped()
    else:
        record, found = _measured_or_read(options, processor)
        fit = fitted(found, record)
        table = CostTable(fit)
        made += claims("fit", found, table)
        if "write" in options.flags:
            TABLE.write_text(_written(fit), encoding="utf-8")
    settings = second() if "second" in options.flags else ROUNDS * fresh()
    checked = measure(options.pick(settings, tiny()), processor)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = json.dumps([asdict(one) for one in checked], indent=1)
    (options.out / "cost_check.json").write_text(rows + "\n")
    made += claims(f"check, {THREADS} threads", checked, table)
    finish("cost_model", made, options, {"threads": THREADS, "processor time": processor})


def _written(table: dict[str, Any]) -> str:
    """Write a table as JSON, its innermost lists in a line each."""
    text = json.dumps(table, indent=1) + "\n"
    return re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), text)


def _measured_or_read(options: Options, processor: bool) -> tuple[dict[str, Any], list[Measured]]:
    """Measure sizes and the grid, or read what the last run wrote."""
    file = options.out / f"cost_measurements{'.smoke' if options.smoke else ''}.json"
    if "fit" in options.flags:
        record = json.loads(file.read_text())
        rows = record["measured"]
        return record["sizes"], [Measured(Setting(**row.pop("setting")), **row) for row in rows]
    found = measure(options.pick(grid(), tiny()), processor)
    sides = json.loads(json.dumps(sizes(options.smoke)))
    options.out.mkdir(parents=True, exist_ok=True)
    record = {"sizes": sides, "measured": [asdict(one) for one in found]}
    file.write_text(json.dumps(record, indent=1) + "\n")
    return sides, found


if __name__ == "__main__":
    main()
