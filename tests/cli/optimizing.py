"""The command ``bo-stream optimize`` with functions of one's own, in a folder of the test."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from bo_stream.cli import app

QUICK = ["--initial", "4", "--steps", "3", "--grid", "12", "-q", "2"]
MODULE = """
import os
import sys
import time
import warnings
from pathlib import Path

from bo_stream.executors import WaitingWarning

def cost(x):
    if x[0] < 0.2:
        raise ValueError("too little")
    return (x[0] - 0.6) ** 2

def slow(x):
    Path("calls").open("a").write(".")
    time.sleep(0.5)
    return (x[0] - 0.6) ** 2

def never(x):
    return float("nan")

def die(x):
    if x[0] < 0.5:
        os._exit(7)
    return (x[0] - 0.6) ** 2

def wait(x):
    Path("calls").open("a").write(".")
    while not Path("go").exists():
        time.sleep(0.05)
    return (x[0] - 0.6) ** 2

def logged(x):
    with Path("calls").open("a") as calls:
        calls.write(f"{x[0]!r}\\n")
    time.sleep(0.2)
    return (x[0] - 0.6) ** 2

def lonely(x):
    warnings.warn("nobody is there", WaitingWarning)
    warnings.warn("that is odd", UserWarning)
    print("evaluated", file=sys.stderr)
    return (x[0] - 0.6) ** 2

answer = 42
"""


def in_a_folder_with_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_costs", raising=False)
    Path("my_costs.py").write_text(MODULE)


def optimize(*args: str) -> Result:
    return CliRunner().invoke(app, ["optimize", *args])


def own(function: str, *args: str) -> list[str]:
    """Arguments; in the command's own process unless they say otherwise: a worker takes seconds."""
    return [f"my_costs:{function}", "--bounds", "0,1", "--workers", "0", *QUICK, *args]


def table(folder: str) -> pd.DataFrame:
    return pd.read_csv(Path(folder, "history.csv")).drop(columns="seconds")


def installed(*args: str) -> subprocess.Popen[str]:
    program = shutil.which("bo-stream", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("needs bo-stream installed beside this Python")
    return subprocess.Popen(
        [program, "optimize", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
