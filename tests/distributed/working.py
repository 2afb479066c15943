"""A process of a replica: it evaluates until it knows enough, and then does what it is told."""

from __future__ import annotations

import json
import sys
import time

import torch

from bo_stream.distributed import FolderStore, Replica
from tests.distributed.replicas import height, settings

SEARCH = settings(initial=6, refit=2.0)
GRID = torch.cartesian_prod(*[torch.linspace(0.0, 1.0, 6, dtype=torch.float64)] * 2)


def posterior_of(replica: Replica) -> dict[str, list[float]]:
    """Means and variances in units of the process."""
    scale = float(replica.model.outcome_scale())
    posterior = replica.model.posterior(GRID)
    mean, variance = posterior.mean.flatten(), posterior.variance.flatten()
    return {"mean": (mean / scale).tolist(), "variance": (variance / scale**2).tolist()}


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(folder: str, name: str, enough: int, runs: int) -> None:
    """Work beside others, whose number of runs must have been reached before anyone ends."""
    store = FolderStore(folder)
    replica = Replica(SEARCH, store, name, compact_above=8)
    has_sent = False
    while replica.observations < enough or sum(k.startswith("replica/") for k in store) < runs:
        X = replica.ask()
        replica.tell(X, [height(x) for x in X])
        replica.exchange()
        if not has_sent:
            say("sent")
            has_sent = True
        time.sleep(0.05)
    say("enough")
    for order in sys.stdin:
        if order.strip() == "exchange":
            say(json.dumps(replica.exchange().changed))
        else:
            say(json.dumps({"observations": replica.observations, **posterior_of(replica)}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
