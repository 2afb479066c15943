from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from bo_stream.errors import UsageError
from bo_stream.loops.run import from_record
from bo_stream.loops.sampling.settings import Settings


def test_defaults_on_a_large_map_are_the_malaria_study_s() -> None:
    settings = Settings().resolved(43_189, 2)
    assert (settings.q, settings.steps, settings.initial) == (6, 500, 10)
    assert (settings.pool, settings.test, settings.steps) == (12_000, 10_000, 500)


def test_defaults_on_a_small_map_use_all_of_it() -> None:
    settings = Settings().resolved(100, 2)
    assert (settings.test, settings.pool) == (25, 75)
    assert settings.steps == (75 - 10) // 6
    assert settings.score_every == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"q": 0}, "q to be a whole number of at least 1, got 0"),
        ({"initial": 1}, "initial to be a whole number of at least 2"),
        ({"steps": -1}, "steps to be a whole number of at least 0"),
        ({"score_every": 0}, "score_every to be a whole number of at least 1"),
        ({"test": 1}, "test to be a whole number of at least 2"),
        ({"kernel": "cubic"}, "kernel to be one of learned, rbf, matern12, .*, got 'cubic'"),
        ({"dtype": "float16"}, "dtype to be one of float64, float32"),
        ({"strategy": "greedy"}, "strategy to be one of chosen, random"),
        ({"refit": 1.0}, "refit above 1"),
        ({"refit": float("nan")}, "refit above 1"),
        ({"outliers": -1.0}, "outliers above 0"),
        ({"outliers": float("nan")}, "outliers above 0"),
        ({"outliers": 8.0, "model": "osgpr"}, "outliers 8 with model osgpr"),
        ({"goal": "best"}, "goal to be one of map, exceedance, got 'best'"),
        ({"goal": "exceedance"}, "needs the threshold"),
        ({"threshold": "half"}, "Expected threshold to be a number, got 'half'"),
        ({"q": True}, "Expected q to be a whole number of at least 1, got True"),
        ({"q": 2.0}, "Expected q to be a whole number of at least 1, got 2.0"),
        ({"threshold": float("nan")}, "finite threshold, got nan"),
        ({"device": "abacus"}, "Device 'abacus' cannot be used"),
        ({"device": "cuda:99"}, "Device 'cuda:99' cannot be used"),
        ({"device": "meta"}, "Device 'meta' cannot be used"),
    ],
)
def test_each_setting_is_checked(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Settings(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pool": 80, "test": 40}, "100 rows, too few for pool 80 and test 40"),
        ({"test": 100}, "too few"),
        ({"initial": 90}, "too few"),
        (
            {"steps": 20},
            "20 steps of 6 after 10 initial points need a pool of 130, got 75: at most 10",
        ),
        (
            {"q": 66},
            "q of at most the 65 candidates that are left of a pool of 75 after 10 initial",
        ),
        ({"grid": (8, 8, 8)}, "grid to be one number or 2"),
    ],
)
def test_settings_are_checked_against_the_data(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Settings(**wrong).resolved(100, 2)


def test_outliers_are_left_out_where_the_model_can_retract() -> None:
    assert Settings().resolved(100, 2).outliers == 8.0
    assert Settings(model="osgpr").resolved(100, 2).outliers == 0.0
    assert Settings(outliers=0.0).resolved(100, 2).outliers == 0.0
    assert Settings(outliers=0.0, model="osgpr").resolved(100, 2).outliers == 0.0
    assert Settings(refit=0.0).resolved(100, 2).outliers == 0.0


NUMPY = Settings(
    grid=tuple(np.array([9, 7])),
    q=np.int64(3),  # type: ignore[arg-type]
    threshold=np.float32(0.5),  # type: ignore[arg-type]
    refit=torch.tensor(1.5),  # type: ignore[arg-type]
)


@pytest.mark.parametrize("settings", [Settings(), Settings(grid=(9, 7), steps=3, refit=1.5), NUMPY])
def test_survive_json(settings: Settings) -> None:
    record = json.loads(json.dumps(asdict(settings)))
    assert from_record(Settings, record) == settings
