"""``bo-stream optimize`` on noisy Levy in 3-D, 1,500 steps of 3: to its end in both dtypes.

Every setting is the command's default: qLogEI, a Matern-5/2 kernel, and a refit whenever the
outcomes are 1.3 times those at the last.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.command import Run, bo_stream
from benchmarks.common.harness import start
from benchmarks.common.report import Claim, at_least, at_most, finish, stated

BATCH = 3
LIMIT_SECONDS = 25.0 * 60.0
DTYPES = ("float64", "float32")


def optimize(steps: int, dtype: str, more: list[str], out: Path) -> Run:
    """Run it with some more options."""
    options = {"--dim": 3, "--noise": 10, "--steps": steps, "--batch": BATCH, "--dtype": dtype}
    spelled = [text for name, value in options.items() for text in (name, str(value))]
    return bo_stream(["optimize", "Levy", *spelled, *more], out)


def record_of(run: Run) -> dict[str, Any]:
    """What it wrote of itself."""
    record: dict[str, Any] = json.loads((run.out / "run.json").read_text())
    return record


def claims_of(run: Run, dtype: str, steps: int) -> list[Claim]:
    """Its time, its end, its warnings and what it found."""
    record = record_of(run)
    told, every = record["counts"]["told"], [step["model_seconds"] for step in record["steps"]]
    size = min(100, steps // 2)
    third = len(every) // 3
    medians = [statistics.median(part) for part in (every[third : third + size], every[-size:])]
    best = record["best"]
    return [
        at_most(f"{steps:,} steps of {BATCH}, {dtype}", run.seconds, LIMIT_SECONDS, "s"),
        at_least(
            f"outcomes told at its end, {dtype}",
            told,
            record["settings"]["initial"] + steps * BATCH,
            "",
            f"finished: {record['finished']}; refits at {record['refits_at']}",
        ),
        stated(f"warnings, {dtype}", len(record["warnings"]), "", "; ".join(record["warnings"])),
        at_most(
            f"median step of the last {size} over those from a third on, {dtype}",
            medians[1] / medians[0],
            1.25,
            "",
            f"{medians[0]:.2f} s and {medians[1]:.2f} s; mean of all {statistics.fmean(every):.2f}",
        ),
        stated(
            f"regret at the best posterior mean, {dtype}",
            best["noiseless"] - record["optimum"],
            "",
            f"mean there {best['posterior_mean']:.3g}, outcome {best['Y']:.3g}",
        ),
        stated(f"resident memory, {dtype}", run.gib, "GiB"),
    ]


def main() -> None:
    """Run it."""
    options = start(__doc__)
    steps = options.pick(1_500, 2)
    more: list[str] = options.pick([], ["--grid", "6"])
    with tempfile.TemporaryDirectory() as name:
        runs = {dtype: optimize(steps, dtype, more, Path(name) / dtype) for dtype in DTYPES}
        claims = [claim for dtype, run in runs.items() for claim in claims_of(run, dtype, steps)]
    finish("optimize_command", claims, options, {"steps": steps, "batch": BATCH})


if __name__ == "__main__":
    main()
