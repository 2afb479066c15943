"""Observations a second that WISKI takes in, by chunks of 10,000."""

from __future__ import annotations

import statistics
from functools import partial

import torch

from benchmarks.common.data import levy
from benchmarks.common.harness import Options, seconds, start
from benchmarks.common.report import Claim, at_least, finish, stated
from bo_stream import WISKI

CASES = ((2, 30, 100_000.0), (3, None, 20_000.0))
"""Dimension, grid (None: the default one), and what to reach."""


def empty_model(d: int, grid_size: int | None) -> WISKI:
    """WISKI in the unit box with BoTorch's default kernel, before any data."""
    bounds = torch.tensor([[0.0] * d, [1.0] * d])
    none = torch.empty(0, d), torch.empty(0, 1)
    return WISKI(*none, bounds=bounds, grid_size=grid_size)


def rates(model: WISKI, d: int, chunk: int, chunks: int) -> float:
    """Median observations a second over chunks; the first, which allocates, does not count."""
    times = []
    for index in range(chunks + 1):
        X, Y = levy(chunk, d, seed=index)
        times.append(seconds(partial(model.update, X, Y)))
    return chunk / statistics.median(times[1:])


def ingest(d: int, grid_size: int | None, target: float, options: Options) -> list[Claim]:
    """The claim in large chunks, and the rate in small ones."""
    model = empty_model(d, grid_size)
    chunk, small, chunks = options.pick(10_000, 200), options.pick(1_000, 50), options.pick(20, 2)
    where = f"{d}-D, grid {' x '.join(map(str, model.grid_size))}"
    large = rates(model, d, chunk, chunks)
    return [
        at_least(f"ingest, {where}", large, target, "obs/s", f"chunks of {chunk:,}"),
        stated(f"ingest by {small:,}, {where}", rates(model, d, small, chunks), "obs/s"),
    ]


def main() -> None:
    """Run it."""
    options = start(__doc__)
    claims = [claim for case in CASES for claim in ingest(*case, options)]
    finish("ingest", claims, options, {"cases": CASES})


if __name__ == "__main__":
    main()
