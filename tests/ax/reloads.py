"""Comparisons of a reloaded experiment with an uninterrupted one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from ax.api.client import Client

from bo_stream.ax import storage_config
from tests.ax.experiments import model_of

SEARCH_ENDS = 1e-3
"""How far from a flat maximum L-BFGS ends, where rounding differs."""


def next_candidate(client: Client) -> dict[str, Any]:
    """Return the next candidate, whatever the state of torch's own generator."""
    torch.seed()
    ((_, parameters),) = client.get_next_trials(1).items()
    return dict(parameters)


def assert_equal_posteriors(one: Client, other: Client, rounding: float) -> None:
    X = torch.rand(9, 2, dtype=torch.float64)
    ours, theirs = (model_of(client).posterior(X) for client in (one, other))
    torch.testing.assert_close(ours.mean, theirs.mean, rtol=rounding, atol=rounding)
    torch.testing.assert_close(ours.variance, theirs.variance, rtol=rounding, atol=rounding)


def from_json(client: Client, folder: Path) -> Client:
    path = str(folder / "experiment.json")
    client.save_to_json_file(path)
    return Client.load_from_json_file(path)


def from_database(path: Path) -> Client:
    """Load an experiment as another process would: without the client's seed."""
    return Client.load_from_database("small", storage_config(path))


def executed(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script of Python in a process of its own."""
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
