"""The main job, ``bo-stream sample`` on the Nigeria map: time, memory, and error beside its peers.

The exact peer is trained on the very points that the run picked, with a product Matérn-5/2 kernel;
its hyperparameters are fitted to all but those that the run left out as outliers. One split says
little about chosen and random sites (random choice's error alone varies by 15 % between splits), so
those claims are medians over seeds of runs with random choice beside them, which leaves its
outliers out too.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.priors import GammaPrior
from torch import Tensor

from benchmarks.common.command import Run, bo_stream
from benchmarks.common.data import real_file, write_small_field
from benchmarks.common.harness import Options, start
from benchmarks.common.report import Claim, at_most, finish, stated
from bo_stream import ProductMatern
from bo_stream.loops.datasets import read_dataset
from bo_stream.loops.run import from_record
from bo_stream.loops.sampling.campaign import PoolSplit
from bo_stream.loops.sampling.settings import Settings

EARLY = 600
LIMIT_SECONDS = 120.0
LIMIT_GIB = 2.0
UNIT = "of the target's sd"


def sample(data: Path, arguments: list[str], out: Path) -> Run:
    """Run ``bo-stream sample`` on data."""
    return bo_stream(["sample", str(data), *arguments], out)


def curves(out: Path) -> dict[str, list[tuple[int, float]]]:
    """Observations and error in units of the target's sd, by strategy."""
    found: dict[str, list[tuple[int, float]]] = {}
    with (out / "curve.csv").open() as file:
        for row in csv.DictReader(file):
            point = int(row["observations"]), float(row["rmse_sd"])
            found.setdefault(row["strategy"], []).append(point)
    return found


def error_at(curve: list[tuple[int, float]], observations: int) -> tuple[int, float]:
    """The first score at no fewer observations, else the last."""
    later = [point for point in curve if point[0] >= observations]
    return later[0] if later else curve[-1]


def product_matern(d: int) -> Kernel:
    """The command's default kernel on a grid: a product over dimensions."""
    matern = ProductMatern(2.5, ard_num_dims=d, lengthscale_prior=GammaPrior(3.0, 6.0))
    return ScaleKernel(matern, outputscale_prior=GammaPrior(2.0, 0.15))


def exact_error(data: Path, out: Path) -> tuple[float, float]:
    """Error of the exact GP on the run's picks, in units of the target's sd, and its seconds.

    Args:
        data: What the run sampled.
        out: The run's folder.
    """
    begin = time.perf_counter()
    dataset = read_dataset(data)
    split = PoolSplit.of(dataset, settings_of(out))
    positions = {row: position for position, row in enumerate(split.pool_rows.tolist())}
    picks = [positions[row] for row in picked_rows(out)]
    X, Y = split.pool_X[picks], split.pool_Y[picks]
    mean, sd = Y.mean(), Y.std()
    fitted = SingleTaskGP(
        X,
        (Y - mean) / sd,
        covar_module=product_matern(X.shape[-1]),
        outcome_transform=None,
    )
    fit_gpytorch_mll(ExactMarginalLogLikelihood(fitted.likelihood, fitted))
    error = error_of(fitted.eval(), split.test_X, (split.test_Y - mean) / sd)
    return error, time.perf_counter() - begin


def error_of(model: SingleTaskGP, X: Tensor, Y: Tensor) -> float:
    """RMSE of the mean at ``n x d`` points, in units of the sd of Y, ``n x 1``."""
    with torch.no_grad():
        mean = torch.cat([model.posterior(chunk).mean for chunk in X.split(1_000)])
    return float((mean - Y).square().mean().sqrt() / Y.std())


def settings_of(out: Path) -> Settings:
    """The settings that a run recorded."""
    return from_record(Settings, json.loads((out / "run.json").read_text())["settings"])


def picked_rows(out: Path) -> list[int]:
    """Rows of the data that the run itself picked and kept, random choice aside, in order."""
    with (out / "picks.csv").open() as file:
        kept = [row for row in csv.DictReader(file) if row["outlier"] == "0"]
    return [int(row["row"]) for row in kept if row["strategy"] == "chosen"]


def claims_on_choosing(runs: list[Run], observations: int, limit: float) -> list[Claim]:
    """Error at so many observations over random choice's, one ratio a seed.

    Args:
        runs: With random choice beside.
        observations: At least.
        limit: Of the median of the ratios.
    """
    points = [
        {name: error_at(curve, observations) for name, curve in curves(run.out).items()}
        for run in runs
    ]
    pairs = [(point["chosen"][1], point["random"][1]) for point in points]
    ratios = [ours / theirs for ours, theirs in pairs]
    each = ", ".join(f"{ours:.3f}/{theirs:.3f}" for ours, theirs in pairs)
    name = f"RMSE at {points[0]['chosen'][0]:,} over random choice's, median of {len(runs)} seeds"
    return [
        at_most(name, statistics.median(ratios), limit, detail=each),
        stated(f"the same at {points[0]['chosen'][0]:,}, largest", max(ratios)),
    ]


def final_claims(alone: Run, all_kept: Run, exact: tuple[float, float]) -> list[Claim]:
    """What the whole run took, and its last error beside the exact GP's.

    Args:
        alone: Without random choice beside it.
        all_kept: The same without outliers.
        exact: Error of the exact GP, and its seconds.
    """
    observations, final = error_at(curves(alone.out)["chosen"], sys.maxsize)
    return [
        at_most("bo-stream sample, seconds", alone.seconds, LIMIT_SECONDS, "s"),
        stated("bo-stream sample --outliers 0, seconds", all_kept.seconds, "s"),
        at_most("bo-stream sample, resident memory", alone.gib, LIMIT_GIB, "GiB"),
        at_most(
            f"RMSE at {observations:,} over the exact GP's on the same points",
            final / exact[0],
            1.05,
            detail=f"{final:.4f} and {exact[0]:.4f} {UNIT}; exact took {exact[1]:.0f} s",
        ),
    ]


def inputs(options: Options, folder: Path) -> tuple[Path, dict[str, int]]:
    """Data and options of the command."""
    if options.smoke:
        small = {"--batch": 2, "--steps": 6, "--pool": 60, "--test": 40, "--grid": 10}
        return write_small_field(folder / "small.npz", 120), small
    full = {"--batch": 6, "--steps": 500, "--pool": 12_000, "--test": 10_000}
    return real_file("nigeria_pf"), full


def spelled(arguments: dict[str, int]) -> list[str]:
    """Options as the command line has them."""
    return [text for name, value in arguments.items() for text in (name, str(value))]


def compared_run(data: Path, arguments: dict[str, int], seed: int, folder: Path) -> Run:
    """A run with random choice beside it."""
    seeded = spelled({**arguments, "--seed": seed})
    return sample(data, [*seeded, "--compare", "random"], folder / f"seed-{seed}")


def main() -> None:
    """Run it."""
    options = start(__doc__)
    seeds = options.pick(5, 2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data, arguments = inputs(options, folder)
        alone = sample(data, spelled(arguments), folder / "alone")
        all_kept = sample(data, [*spelled(arguments), "--outliers", "0"], folder / "all-kept")
        compared = [compared_run(data, arguments, seed, folder) for seed in range(seeds)]
        exact = exact_error(data, alone.out)
        claims = [
            *final_claims(alone, all_kept, exact),
            *claims_on_choosing(compared, EARLY, 0.85),
            *claims_on_choosing(compared, sys.maxsize, 1.0),
        ]
    finish("malaria", claims, options, {"arguments": arguments, "seeds": seeds})


if __name__ == "__main__":
    main()
