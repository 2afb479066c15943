"""Experiments of Ax's client on the problems of ``optimization.py``, with both strategies."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from ax.api.client import Client
from ax.api.configs import RangeParameterConfig
from ax.core.arm import Arm
from ax.core.data import Data
from torch import Tensor

from benchmarks.optimization.problems import Problem
from bo_stream.ax import generation_strategy

METRIC = "loss"

Parameters = Mapping[str, Any]


def client_of(problem: Problem, streams: bool, first: int, seed: int) -> Client:
    """An experiment over the unit cube, with a streaming strategy or with Ax's default one.

    Args:
        problem: What is to be minimised.
        streams: Whether the strategy is ours; the acquisition function is Ax's choice in both.
        first: Sobol trials.
        seed: Of everything.
    """
    space = [
        RangeParameterConfig(name=f"x{i}", bounds=(0.0, 1.0), parameter_type="float")
        for i in range(problem.function.dim)
    ]
    return client_over(space, streams, first, seed)


def client_over(space: Sequence[Any], streams: bool, first: int, seed: int) -> Client:
    """An experiment over a space of parameters' configurations; further arguments as above."""
    client = Client(random_seed=seed)
    client.configure_experiment(space)
    client.configure_optimization(f"-{METRIC}")
    if streams:
        strategy = generation_strategy(initialization=first, seed=seed)
        client.set_generation_strategy(strategy)
    else:
        client.configure_generation_strategy(
            initialization_budget=first,
            initialization_random_seed=seed,
            initialize_with_center=False,
        )
    return client


def inputs_of(parameters: Parameters) -> Tensor:
    """A trial's parameters, ``1 x d``."""
    return torch.tensor([[float(parameters[f"x{i}"]) for i in range(len(parameters))]])


def complete(client: Client, index: int, problem: Problem, X: Tensor, noise: Any) -> None:
    """Tell a trial's noisy outcome."""
    client.complete_trial(index, {METRIC: -float(problem.measure(X, noise))})


def attach(client: Client, X: Tensor, outcomes: Tensor) -> None:
    """Many completed trials at once; the client's own way takes tens of milliseconds each.

    Args:
        client: Changed in place.
        X: ``n x d``.
        outcomes: To be minimised, ``n``.
    """
    rows = [{f"x{i}": value for i, value in enumerate(row)} for row in X.tolist()]
    attach_trials(client, rows, outcomes.tolist())


def attach_trials(
    client: Client, trials: Sequence[dict[str, float]], outcomes: Sequence[float]
) -> None:
    """The same of trials with given parameters."""
    experiment = client._experiment
    for parameters in trials:
        trial = experiment.new_trial()
        trial.add_arm(Arm(parameters=parameters))
        trial.mark_running(no_runner_required=True)
        trial.mark_completed()
    frame = pd.DataFrame(
        {
            "trial_index": range(len(trials)),
            "arm_name": [f"{i}_0" for i in range(len(trials))],
            "metric_name": METRIC,
            "metric_signature": METRIC,
            "mean": list(outcomes),
            "sem": float("nan"),
        }
    )
    experiment.attach_data(Data(df=frame))


def quiet() -> None:
    """Ax tells of every trial otherwise."""
    for name in ("ax", "ax.api.client", "ax.generation_strategy"):
        logging.getLogger(name).setLevel(logging.ERROR)
