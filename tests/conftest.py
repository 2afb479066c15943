"""Fixtures for all tests: seeds, devices, dtypes, and the real data beside the project."""

from __future__ import annotations

import gc
import os
from pathlib import Path

os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch loads; see test_waiting
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a worker for each processor instead

import pytest
import torch
from botorch.acquisition.multi_objective import logei

from bo_stream.models.wiski import memory as row_memory

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # filterwarnings have loaded it before

pytest_plugins = ["tests.support.selection"]

logei._load_attempted = True  # half a minute of compiling otherwise, for the same numbers

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed",
        type=int,
        default=0,
        help="the seed of torch's generator before each test: other draws must pass too",
    )


def pytest_collection_finish() -> None:
    """Set apart what was imported: collections of garbage, which are rarer, pass it over."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


_manual_seed = (torch if torch.cuda.is_available() else torch.default_generator).manual_seed
"""Without a GPU the former records a stack trace for each kind of device that is not there."""


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed torch's generator before each test by ``--seed`` (0 by default); return the seed."""
    fixed = request.node.get_closest_marker("fixed_seed") is not None
    chosen: int = 0 if fixed else request.config.getoption("--seed")
    _manual_seed(chosen)
    return chosen


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def in_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grid models that are built in the test hold no rows: they solve in features at once."""
    monkeypatch.setattr(row_memory, "MOST_ROWS", 0)


@pytest.fixture(params=[row_memory.MOST_ROWS, 0], ids=["rows", "features"])
def both_spaces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grid models that are built in the test hold few observations as rows, or none."""
    monkeypatch.setattr(row_memory, "MOST_ROWS", request.param)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets beside the project."""
    if not SHARED_DATA.is_dir():
        pytest.skip("needs the real data sets in ../shared/data beside the project")
    return SHARED_DATA
