"""Data-parallel training: rows a second on two processes against one, and how equal they end.

    python -m benchmarks.workers.data_parallel

Seconds are of the processor, and of two processes those of the busier one, so that other jobs and
waiting do not count; one and two processes take turns.
"""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpytorch.likelihoods import LaplaceLikelihood

from benchmarks.common.harness import processor_seconds, start
from benchmarks.common.report import Claim, at_most, finish, stated
from bo_stream import OSVGP, QSGP, DecoupledGP, FourierFeatures
from bo_stream.distributed import data_parallel

FAMILIES = ("QSGP", "DecoupledGP", "OSVGP")
DIM = 8
SAME = 1e-6


@dataclass(frozen=True)
class Sizes:
    """Sizes of what is measured.

    Attributes:
        rows: That a stochastic model holds, of all processes together.
        batch: Of a step, likewise, and of an update of ``OSVGP``.
        functions: Of ``QSGP``.
        points: M of the others.
        steps: In a turn.
        turns: That count.
    """

    rows: int
    batch: int
    functions: int
    points: int
    steps: int
    turns: int


def rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Uniform inputs, and a smooth function of them with noise."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(count, DIM, generator=generator)
    noise = 0.1 * torch.randn(count, 1, generator=generator)
    return X, torch.sin(3.0 * X).sum(-1, keepdim=True) + noise


def built(family: str, sizes: Sizes) -> Any:
    """A model of few first rows."""
    X, Y = rows(min(500, sizes.rows), 0)
    if family == "QSGP":
        return QSGP(
            X, Y, basis=FourierFeatures(sizes.functions), batch_size=sizes.batch, update_steps=0,
            initial_points=0, freeze_steps=0,
        )  # fmt: skip
    if family == "DecoupledGP":
        return DecoupledGP(
            X, Y, num_mean=sizes.points, num_covar=sizes.points // 8, batch_size=sizes.batch,
            update_steps=0, initial_points=0,
        )  # fmt: skip
    points = X[: sizes.points]
    return OSVGP(X[:50], Y[:50], LaplaceLikelihood(), inducing_points=points, hyper_steps=2)


def worker(rank: int, family: str, sizes: Sizes, port: int, folder: str) -> None:
    """Measure one and two processes in turns; the second one waits while the first is alone."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    together, alone = built(family, sizes), built(family, sizes)
    stochastic = family != "OSVGP"
    if stochastic:
        alone.update(*rows(sizes.rows, 1))
    found: dict[str, list[float]] = {"one": [], "two": []}
    with data_parallel(together) as processes:
        if stochastic:
            X, Y = rows(sizes.rows, 1)
            half = slice(0, sizes.rows // 2) if rank == 0 else slice(sizes.rows // 2, None)
            processes.update(X[half], Y[half])
        for turn in range(1 + sizes.turns):
            X, Y = rows(sizes.batch, 2 + turn)
            half = slice(0, sizes.batch // 2) if rank == 0 else slice(sizes.batch // 2, None)
            tasks: dict[str, Callable[[], object]] = {
                "two": partial(processes.update, X[half], Y[half]),
                "one": partial(alone.update, X, Y),
            }
            if stochastic:
                tasks = {
                    "two": partial(processes.fit, sizes.steps, progress=False),
                    "one": partial(alone.fit, sizes.steps, progress=False),
                }
            both = torch.zeros(2)
            both[rank] = processor_seconds(tasks["two"])
            torch.distributed.all_reduce(both)
            single = processor_seconds(tasks["one"]) if rank == 0 else 0.0
            torch.distributed.barrier()
            if turn > 0:
                found["two"].append(float(both.max()))
                found["one"].append(single)
    if rank == 0:
        X = rows(200, 99)[0]
        difference = (together.posterior(X).mean - alone.posterior(X).mean).abs().max()
        torch.save({**found, "difference": float(difference)}, Path(folder) / "found.pt")
    torch.distributed.destroy_process_group()


def claims(family: str, sizes: Sizes) -> list[Claim]:
    """Rates on one and on two processes, and the difference of their posteriors."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = family, sizes, free_port(), folder
        torch.multiprocessing.spawn(worker, arguments, nprocs=2)
        found = torch.load(Path(folder) / "found.pt")
    one, two = (statistics.median(found[name]) for name in ("one", "two"))
    count = sizes.batch * (1 if family == "OSVGP" else sizes.steps)
    what = f"{sizes.batch:,} rows a {'batch' if family == 'OSVGP' else 'step'}"
    return [
        stated(f"{family}, one process", count / one, "rows/s", what),
        stated(f"{family}, two processes", count / two, "rows/s", what),
        stated(f"{family}, two over one", one / two, "times", "medians of turns"),
        at_most(f"{family}, difference", found["difference"], SAME, "", "posterior means"),
    ]


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main() -> None:
    """Run it."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = start(__doc__)
    full, smoke = Sizes(40_000, 2_000, 20_000, 512, 3, 5), Sizes(300, 40, 60, 16, 3, 2)
    sizes = options.pick(full, smoke)
    found = [claim for family in FAMILIES for claim in claims(family, sizes)]
    finish("data_parallel", found, options, {"sizes": vars(sizes)})


if __name__ == "__main__":
    main()
