"""Functions of parameters that other processes evaluate."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np


def bowl(parameters: dict[str, Any]) -> float:
    return (parameters["a"] - 0.6) ** 2 + (parameters["b"] - 0.3) ** 2


def half_a_bowl(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return half of the bowl, and raise left of 0.4."""
    if parameters["a"] < 0.4:
        raise RuntimeError(f"nothing at {parameters['a']:.1f}")
    return {"loss": (bowl(parameters), 0.1), "cost": parameters["a"]}


def misbehave(parameters: dict[str, Any]) -> Any:
    """Misbehave in another way for each tenth of ``a``."""
    way = round(10.0 * parameters["a"])
    if way == 1:
        raise ValueError("no such point")
    if way == 2:
        time.sleep(600.0)
    if way == 3:
        os._exit(7)
    returned: Any = [bowl(parameters), None, None, None, float("nan"), np.ones(3), "much"]
    return {"losses": 1.0} if way == 7 else {"loss": returned[way]}


def second_time(parameters: dict[str, Any]) -> float:
    """Raise when first called; the environment names the file that tells."""
    if way := os.environ.get("TESTS_CALLED"):
        if Path(way).exists():
            return bowl(parameters)
        Path(way).touch()
    raise OSError("the machine is busy")


def kills_its_parent(parameters: dict[str, Any]) -> float:
    """Kill the parent at the fifth call; the environment names the file that counts."""
    with Path(os.environ["TESTS_CALLED"]).open("a+") as calls:
        calls.write(".")
        if calls.tell() == 5:
            time.sleep(5.0)  # by then the trial is stored
            os.kill(os.getppid(), signal.SIGKILL)
    return bowl(parameters)
