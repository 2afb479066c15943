"""Fixtures for all tests: seeds, devices, dtypes, and the real data beside the project."""

from __future__ import annotations

import gc
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch loads; see test_waiting
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a worker for each processor instead

import pytest
import xdist

if TYPE_CHECKING:
    import torch

pytest_plugins = ["tests.support.selection"]  # like this file, it loads no torch

TESTED_ON_PURPOSE = [
    # models of few inducing points and of coarse centres
    "ignore:.* inducing points leave:bo_stream.CoarsePointsWarning",
    "ignore:At a resolution of .* the process differs:bo_stream.CoarsePointsWarning",
    "ignore:.* features leave outcomes:bo_stream.CoarsePointsWarning",
    "ignore:Averages of neighbouring local models:bo_stream.CoarsePointsWarning",
    # short trainings
    "ignore::bo_stream.ShortTrainingWarning",
    # many functions of few data
    "ignore::bo_stream.WideVarianceWarning",
]
"""Warnings of the package; they are no part of the settings, which every process imports them for.

The process that spreads the tests over workers runs none and needs neither these nor torch.
"""

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed",
        type=int,
        default=0,
        help="the seed of torch's generator before each test: other draws must pass too",
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    if not xdist.is_xdist_controller(session):
        for line in TESTED_ON_PURPOSE:
            session.config.addinivalue_line("filterwarnings", line)


def pytest_collection_finish() -> None:
    """Set apart what was imported: collections of garbage, which are rarer, pass it over."""
    from botorch.acquisition.multi_objective import logei

    logei._load_attempted = True  # half a minute of compiling otherwise, for the same numbers
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is not None and not has_cuda():
        pytest.skip("needs a CUDA device")


@cache
def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed torch's generator before each test by ``--seed`` (0 by default); return the seed."""
    from bo_stream.testing.streams import manual_seed

    fixed = request.node.get_closest_marker("fixed_seed") is not None
    chosen: int = 0 if fixed else request.config.getoption("--seed")
    manual_seed(chosen)
    return chosen


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    import torch

    return torch.device(request.param)


@pytest.fixture(params=["float64", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    import torch

    return getattr(torch, request.param)


@pytest.fixture
def in_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grid models that are built in the test hold no rows: they solve in features at once."""
    monkeypatch.setattr("bo_stream.models.wiski.memory.MOST_ROWS", 0)


@pytest.fixture(params=["rows", "features"])
def both_spaces(request: pytest.FixtureRequest) -> None:
    """Grid models that are built in the test hold few observations as rows, or none."""
    if request.param == "features":
        request.getfixturevalue("in_features")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets beside the project."""
    if not SHARED_DATA.is_dir():
        pytest.skip("needs the real data sets in ../shared/data beside the project")
    return SHARED_DATA
