"""A pytest plugin: which tests a run takes, how it spreads them, and how long a test may take.

Without ``-m`` a run takes all tests without a marker, a share of those marked ``matrix`` and, of
those marked ``integration``, the ones also marked ``smoke``. The share covers pairs: of the tests
of one function, which differ in some factors, each two values that occur together occur together
in the share, and each value where there are two factors only. Which tests these are rotates with
the commit.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import statistics
import subprocess
import time
import timeit
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FAMILIES = tuple(
    sorted(
        {
            path.parent.name
            for package in ("bo_stream", "tests")  # a family of one file has a folder of tests
            for path in (ROOT / package / "models").glob("*/__init__.py")
            if path.parent.name not in ("outcomes", "stochastic")  # which families share
        }
    )
)
"""Markers of the families of models, and of what is tested of their models elsewhere."""

MOST_WORKERS = 8
MOST_SECONDS = 3.0
"""Processor time that a test without a marker may take."""
MARGIN = 2.0
"""How much more it may be on a machine whose caches and cores others use."""
QUICK_SECONDS = 0.04
"""Processor time of :func:`loop_seconds` on a quick machine."""

Factors = tuple[Hashable, ...]


# --- options ------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("selection")
    group.addoption("--rotation", type=int, help="repeat the selection of an earlier run")
    group.addoption(
        "--share",
        type=int,
        default=1,
        metavar="N",
        help="take one in N of the tests marked matrix; which ones rotates, too",
    )
    group.addoption("--all", action="store_true", help="leave out no test of those named")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the rotation here, so that every worker process is told the same."""
    config.stash[ORIGIN] = "as asked"
    for family in FAMILIES:
        config.addinivalue_line("markers", f"{family}: of this family of models")
    if config.option.rotation is None:
        config.option.rotation, config.stash[ORIGIN] = rotation_of_today()


ORIGIN = pytest.StashKey[str]()


def rotation_of_today() -> tuple[int, str]:
    """Return a number by the commit, or by the date where there is none, and where it is from."""
    asked = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        today = datetime.datetime.now(datetime.UTC).date()
        return today.toordinal(), f"of {today}"
    return int(commit[:7], 16), f"of commit {commit[:7]}"


def pytest_report_header(config: pytest.Config) -> str:
    share = f", one in {config.option.share} of the matrix" if config.option.share > 1 else ""
    return f"rotation: {config.option.rotation} ({config.stash[ORIGIN]}){share}"


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return a worker for each processor, and none for one file, which ends before they start."""
    if len(config.args) == 1 and names_files(config):
        return 0
    return min(MOST_WORKERS, os.cpu_count() or 1)


def names_files(config: pytest.Config) -> bool:
    """Return whether a run is of files, not of folders."""
    return all(argument.partition("::")[0].endswith(".py") for argument in config.args)


# --- selection ----------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark families, leave out what a run does not take, and run integration tests last."""
    for item in items:
        for family in FAMILIES:
            if f"/models/{family}/" in item.path.as_posix():
                item.add_marker(family)
    left_out = left_out_of(config, items)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]
    items.sort(key=lambda item: item.get_closest_marker("integration") is not None)


def left_out_of(config: pytest.Config, items: list[pytest.Item]) -> set[str]:
    """Return the ids of tests that a run does not take, of those in the files that it collects."""
    option = config.option
    explicit = option.markexpr or option.all or any("::" in argument for argument in config.args)
    integration = {item.nodeid for item in items if item.get_closest_marker("integration")}
    matrix = {item.nodeid for item in items if item.get_closest_marker("matrix")}
    left_out: set[str] = set()
    if option.share > 1:
        left_out |= {name for name in matrix if position(option.rotation, name) % option.share}
    elif not explicit:
        left_out |= matrix - share_of(items, option.rotation)
    if not explicit and not names_files(config):
        smoke = {item.nodeid for item in items if item.get_closest_marker("smoke")}
        left_out |= integration - smoke
    return left_out


def share_of(items: list[pytest.Item], rotation: int) -> set[str]:
    """Return the ids of the matrix tests of a share: a covering one of each test function's."""
    groups: dict[str, dict[str, Factors]] = defaultdict(dict)
    for item in items:
        marker = item.get_closest_marker("matrix")
        if marker is not None and item.get_closest_marker("integration") is None:
            function = item.nodeid.partition("[")[0]
            groups[function][item.nodeid] = marker.args or factors_of(item)
    return set().union(*(covering(varying(group), rotation) for group in groups.values()))


def factors_of(item: pytest.Item) -> Factors:
    """Return what distinguishes the values of each parameter of a test: the objects' identities.

    Tests of one function share the values, and hold them; pytest's own numbers of values count the
    tests instead where several lists are multiplied.
    """
    callspec = getattr(item, "callspec", None)
    return () if callspec is None else tuple(map(id, callspec.params.values()))


def varying(group: Mapping[str, Factors]) -> dict[str, Factors]:
    """Leave out factors with one value only, and those that repeat another one."""
    columns = dict.fromkeys(zip(*group.values(), strict=True))
    columns = [column for column in columns if len(set(column)) > 1]
    return {name: tuple(column[i] for column in columns) for i, name in enumerate(group)}


def covering(group: Mapping[str, Factors], rotation: int) -> set[str]:
    """Return names of a few combinations of factors, whose pairs are all pairs that there are.

    Of two factors it is their values that all occur, and of one factor one value does. The names
    are gone through in an order that depends on the rotation, those first that add most.

    Args:
        group: Combinations by name; all have equally many factors.
        rotation: Any number.
    """
    order = sorted(group, key=lambda name: position(rotation, name))
    numbers: dict[Factors, int] = {}
    parts = {
        name: [numbers.setdefault(part, len(numbers)) for part in parts_of(group[name])]
        for name in order
    }
    missing = [True] * len(numbers)
    taken: set[str] = set()
    for least in range(max(map(len, parts.values()), default=0), 0, -1):
        for name in order:
            if sum(missing[part] for part in parts[name]) >= least:
                taken.add(name)
                for part in parts[name]:
                    missing[part] = False
    return taken


def parts_of(factors: Factors) -> Iterator[Factors]:
    """Yield the pairs of factors with their places; single ones of two, nothing of one."""
    size = min(2, len(factors) - 1)
    return combinations(enumerate(factors), max(size, 0))


def position(rotation: int, name: str) -> int:
    """Return a number that is the same in every process."""
    return int.from_bytes(hashlib.sha256(f"{rotation} {name}".encode()).digest()[:8])


# --- time ---------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test without a marker that takes too long, by the processor time that it uses."""
    before = processor_seconds()
    yield
    seconds = processor_seconds() - before
    marked = any(item.get_closest_marker(name) for name in ("matrix", "integration"))
    if not marked and seconds > MARGIN * MOST_SECONDS and seconds > (most := most_seconds()):
        pytest.fail(
            f"took {seconds:.1f} s of processor time, and {most:.1f} s are allowed here: "
            "make it smaller, or mark it matrix or integration",
            pytrace=False,
        )


def processor_seconds() -> float:
    """Return the time that this process and those that it waited for have used."""
    return sum(os.times()[:4])


@cache
def most_seconds() -> float:
    """Return the processor time that a test may take on this machine: more on a slow one."""
    return MARGIN * MOST_SECONDS * max(1.0, loop_seconds() / QUICK_SECONDS)


def loop_seconds() -> float:
    """Measure the processor time of a loop of a million rounds, the median of five."""
    loop = timeit.Timer("s = i + 1; i = s % 7", "i = 1", timer=time.process_time)
    return statistics.median(loop.repeat(repeat=5, number=1_000_000))
