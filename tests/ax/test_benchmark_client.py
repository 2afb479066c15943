"""What the benchmarks of Ax compare begins alike."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.optimization.ax_quality import BRANIN
from benchmarks.peers.ax_client import client_of, complete, inputs_of

FIRST = 3


def first_points(streams: bool) -> Tensor:
    client = client_of(BRANIN, streams, FIRST, seed=4)
    points = []
    for index in range(FIRST):
        client.get_next_trials(1)
        points.append(inputs_of(client._experiment.trials[index].arms[0].parameters))
        complete(client, index, BRANIN, points[-1], torch.Generator().manual_seed(0))
    return torch.cat(points)


def test_both_strategies_begin_with_the_same_points() -> None:
    torch.testing.assert_close(first_points(True), first_points(False), rtol=0.0, atol=1e-12)
