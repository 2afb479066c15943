"""Fits, searches and pictures of these tests are drafts, unless a test asks for whole ones."""

import logging
from collections.abc import Iterator

import pytest

from tests.ax.experiments import QUICK, Said
from tests.support.drafts import *  # noqa: F403 (fixtures, by their names in __all__)


@pytest.fixture(autouse=True)
def brief_searches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let searches of a box end after few iterations, but in integration tests."""
    if request.node.get_closest_marker("integration") is None:
        monkeypatch.setitem(QUICK, "options", {"maxiter": 2})


@pytest.fixture
def said() -> Iterator[Said]:
    """What the models say in Ax during the test."""
    logger, handler = logging.getLogger("bo_stream.ax"), Said()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)
