"""Small pools and experiments on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from ax.api.client import Client
from ax.api.configs import ChoiceParameterConfig, RangeParameterConfig
from torch import Tensor

from bo_stream.ax import Pool
from bo_stream.ax import pool as pools
from bo_stream.ax.acquisition import PoolAcquisition
from bo_stream.ax.pool import Table
from tests.ax.experiments import acquisition_of, adapter_of

MIXED: list[Any] = [
    RangeParameterConfig("rate", (1e-4, 1.0), parameter_type="float", scaling="log"),
    RangeParameterConfig("layers", (1, 40), parameter_type="int"),
    RangeParameterConfig("width", (1, 64), parameter_type="int", scaling="log"),
    ChoiceParameterConfig("kind", ["p", "q", "r"], parameter_type="str", is_ordered=False),
    ChoiceParameterConfig("size", [8, 16, 32], parameter_type="int", is_ordered=True),
    ChoiceParameterConfig("wide", [True, False], parameter_type="bool", is_ordered=False),
    ChoiceParameterConfig("fixed", [0.5], parameter_type="float"),
]


USUAL = ("qUCB", "FeatureNIPV")
"""Acquisition functions of quick tests."""


def rarely(*values: Any) -> list[Any]:
    """Return parameters of slow tests."""
    return [pytest.param(*each, marks=pytest.mark.integration) for each in values]


def sites(count: int = 40, name: str | None = None) -> Pool:
    """Return candidates uniform over the box of the experiments."""
    rng = np.random.default_rng(count)
    columns = {"a": rng.uniform(0.0, 2.0, count), "b": rng.uniform(-1.0, 1.0, count)}
    return Pool.of(pd.DataFrame(columns, index=[f"site {i}" for i in range(count)]), name)


def mixed_frame(count: int = 30) -> pd.DataFrame:
    """Return candidates with parameters of all kinds."""
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "rate": 10.0 ** rng.uniform(-4.0, 0.0, count),
            "layers": rng.integers(1, 41, count),
            "width": rng.integers(1, 65, count),
            "kind": rng.choice(["p", "q", "r"], count),
            "size": rng.choice([8, 16, 32], count),
            "wide": rng.choice([True, False], count),
        }
    )


def mixed_loss(parameters: Any) -> float:
    """Return the loss of a candidate with parameters of all kinds."""
    kind = {"p": 0.0, "q": 1.0, "r": 2.0}[parameters["kind"]]
    return float(np.log10(parameters["rate"]) ** 2 + kind + parameters["layers"] / 40)


def parameters_of(client: Client) -> list[dict[str, Any]]:
    """Return the parameters of each trial, in order."""
    return [dict(trial.arms[0].parameters) for trial in client._experiment.trials.values()]


def names_of(client: Client, pool: Pool) -> list[Any]:
    """Return the candidate of each trial, in order."""
    return [pool.name_of(parameters) for parameters in parameters_of(client)]


def table_of(client: Client, pool: Pool) -> Table:
    """Return a pool as the model takes it."""
    acquisition = acquisition_of(client)
    assert isinstance(acquisition, PoolAcquisition)
    return adapter_of(client)._table(pools.pool_named(pool.name))


def points_of(client: Client) -> Any:
    """Return the integration points as the model takes its inputs."""
    return acquisition_of(client).options.get("mc_points")


def integrated_variances(model: Any, X: Tensor, points: Tensor, pending: Tensor) -> Tensor:
    """Compute mean variances after each candidate and the pending ones, by one covariance."""
    everything = torch.cat((X, points, pending))
    covariance = model.posterior(everything).mvn.covariance_matrix
    noise = model.likelihood.noise.item() * model.outcome_scale().item() ** 2
    n, m = len(X), len(points)
    targets = torch.arange(n, n + m)
    others = torch.arange(n + m, len(everything))
    left = []
    for candidate in range(n):
        seen = torch.cat((others, torch.tensor([candidate])))
        inner = covariance[seen][:, seen] + noise * torch.eye(len(seen), dtype=X.dtype)
        cross = covariance[targets][:, seen]
        explained = (cross @ torch.linalg.inv(inner) * cross).sum(-1)
        left.append((covariance.diagonal()[targets] - explained).mean())
    return torch.stack(left)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> dict[str, Pool]:
    """Empty the registry, as in a new process."""
    known: dict[str, Pool] = {}
    monkeypatch.setattr(pools, "_KNOWN", known)
    return known
