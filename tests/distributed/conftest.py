"""Files of a stream in parts, and where its posterior is looked at.

Fits and searches of replicas are drafts, unless a test asks for whole ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.streams import SIZES, parts_of, write_files
from tests.support.drafts import *  # noqa: F403 (fixtures, by their names in __all__)
from tests.support.problems import Observations, observations


@pytest.fixture
def parts() -> list[Observations]:
    return parts_of(observations(sum(SIZES)), SIZES)


@pytest.fixture
def folder(tmp_path: Path, parts: list[Observations]) -> Path:
    return write_files(tmp_path / "data", parts)


@pytest.fixture
def X() -> torch.Tensor:
    return torch.rand(5, 2, dtype=torch.float64)
