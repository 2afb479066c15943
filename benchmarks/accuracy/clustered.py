"""Clustered data on a map of land surface temperatures, in float32 with jitter forbidden.

As the paper's figure 6 (Terenin et al., 2024): modis_lst, inputs and target standardised by the
training rows, three resolutions of a cover tree, the paper's RBF kernel and a rougher one, with a
lengthscale for each input. Hyperparameters are learned by stochastic gradients, starting at a finer
resolution where the coarser one ended, and the mean is solved for by conjugate gradients. What the
resolution itself does is judged with the hyperparameters of the finest one at all three: learning
moves the error by more. The set's test rows lie in gaps under clouds, half of them farther than the
finest resolution from any training row; ``HELD`` rows between the training rows are held out
besides. The peer is what sparse
regression factorises, the kernel's matrix at the same centres with the same hyperparameters: the
smallest jitter that it needs in float32 is stated.
"""

from __future__ import annotations

import copy
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor

from benchmarks.common.data import real_file, write_small_field
from benchmarks.common.harness import Options, start
from benchmarks.common.report import Claim, at_most, finish, stated
from bo_stream import ClusteredGP, linalg, maximise_stochastically
from bo_stream.bases.inducing import frozen, kernel_matrix

T = TypeVar("T")

RESOLUTIONS = (0.09, 0.06, 0.03)
STEPS = (30, 15, 4)
LEARNING_RATE = 0.1
TOLERANCE = 1e-3
HELD = 5_000
KERNELS: dict[str, Callable[[int], Kernel]] = {
    "RBF": lambda d: RBFKernel(ard_num_dims=d),
    "Matérn-3/2": lambda d: MaternKernel(nu=1.5, ard_num_dims=d),
}
JITTERS = (0.0, *(10.0**-i for i in range(8, -1, -1)))


@dataclass(frozen=True)
class Rows:
    """Some rows, standardised by the training rows.

    Attributes:
        X: ``n x d``.
        Y: ``n x 1``.
    """

    X: Tensor
    Y: Tensor


@dataclass(frozen=True)
class Split:
    """Rows to learn from, those in the gaps and some between the first."""

    train: Rows
    gaps: Rows
    between: Rows


@dataclass(frozen=True)
class Errors:
    """Root mean squares, in sd of the target.

    Attributes:
        gaps: In the gaps.
        between: Between the training rows.
    """

    gaps: float
    between: float


@dataclass(frozen=True)
class Result:
    """How a kernel did at a resolution.

    Attributes:
        centres: Their number.
        errors: Of the means.
        difference: Of the means by a Cholesky factor from these, root mean square.
        jitter: That the kernel's matrix needs.
        times: Seconds by task.
    """

    centres: int
    errors: Errors
    difference: float
    jitter: float
    times: dict[str, float]


def load(options: Options) -> Split:
    """The real set, or a small simulated field in a smoke run."""
    if not options.smoke:
        return split_of(real_file("modis_lst"))
    with tempfile.TemporaryDirectory() as folder:
        return split_of(write_small_field(Path(folder) / "field.npz", 600))


def split_of(path: Path) -> Split:
    """By the set's first mask, or every fifth row."""
    with np.load(path, allow_pickle=False) as arrays:
        X, y = (torch.as_tensor(arrays[key], dtype=torch.float32) for key in ("X", "y"))
        masks = torch.as_tensor(arrays["test_mask"]) if "test_mask" in arrays else None
    test = torch.arange(len(y)) % 5 == 0 if masks is None else masks[:, 0].bool()
    X = (X - X[~test].mean(0)) / X[~test].std(0)
    Y = ((y - y[~test].mean()) / y[~test].std()).unsqueeze(-1)
    train = torch.nonzero(~test).flatten()
    order = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(0))]
    held = min(HELD, len(order) // 10)
    first, rest = order[:held], order[held:]
    return Split(*(Rows(X[rows], Y[rows]) for rows in (rest, test, first)))


def timed(times: dict[str, float], name: str, task: Callable[[], T]) -> T:
    """What a task returns; its seconds go into ``times``."""
    begin = time.perf_counter()
    result = task()
    times[name] = time.perf_counter() - begin
    return result


def empty_model(name: str, resolution: float, like: Rows) -> ClusteredGP:
    """With lengthscales of 0.3 and a noise variance of 0.1 to begin with."""
    kernel = ScaleKernel(KERNELS[name](like.X.shape[-1]))
    kernel.base_kernel.lengthscale = 0.3
    model = ClusteredGP(
        like.X[:0],
        like.Y[:0],
        covar_module=kernel,
        outcome_transform=None,
        resolution=resolution,
        solver="cg",
        arithmetic=torch.float32,
    )
    model.likelihood.noise = 0.1
    return model.eval()


def measured(split: Split, model: ClusteredGP, steps: int) -> Result:
    """A model without data, in a stream of one batch and one point more."""
    times: dict[str, float] = {}
    timed(times, "ingest", lambda: model.update(split.train.X, split.train.Y))
    timed(times, "learn", lambda: learn(model, steps))
    found = timed(times, "predict", lambda: errors_of(split, model))
    one = split.between.X[:1], split.between.Y[:1]
    timed(times, "one more", lambda: model.update(*one).process().mean(one[0]))
    some = split.gaps.X[:1000]
    direct = timed(times, "by Cholesky", lambda: solved_directly(model).process().mean(some))
    difference = rms(direct - model.process().mean(some))
    return Result(len(model.centres), found, difference, needed_jitter(model), times)


def errors_of(split: Split, model: ClusteredGP) -> Errors:
    """Of the means of a model."""
    held = (split.gaps, split.between)
    return Errors(*(rms(model.process().mean(rows.X).mT - rows.Y) for rows in held))


def learn(model: ClusteredGP, steps: int) -> ClusteredGP:
    """By stochastic gradients with the paper's ten probes."""
    return maximise_stochastically(model, steps, LEARNING_RATE, tolerance=TOLERANCE)


def solved_directly(model: ClusteredGP) -> ClusteredGP:
    """The same, to be solved by a Cholesky factor."""
    twin = copy.deepcopy(model)
    twin.solver = "cholesky"
    return twin.forget(1.0)


def rms(values: Tensor) -> float:
    """Root mean square."""
    return float(values.square().mean().sqrt())


@torch.no_grad()
def needed_jitter(model: ClusteredGP) -> float:
    """The smallest that lets the kernel's matrix at the centres be factorised in float32."""
    Z = model.centres.float()
    K = kernel_matrix(frozen(model.covar_module, torch.float32), Z, Z, 1).squeeze(0)
    scale = K.diagonal().mean()
    eye = torch.eye(len(Z), dtype=K.dtype)
    fits = (j for j in JITTERS if not torch.linalg.cholesky_ex(K + j * scale * eye).info)
    return next(fits)


def claims_of(name: str, result: Result, steps: int) -> list[Claim]:
    """What is stated of one kernel at one resolution."""
    detail = ", ".join(f"{task} {took:.1f} s" for task, took in result.times.items())
    return [
        stated(f"{name}: RMSE in the gaps", result.errors.gaps, "sd", f"{detail} ({steps} steps)"),
        stated(f"{name}: RMSE between training rows", result.errors.between, "sd"),
        stated(f"{name}: difference of means by a Cholesky factor", result.difference, "sd"),
        stated(f"{name}: relative jitter that sparse regression needs", result.jitter),
    ]


def run(name: str, split: Split, options: Options) -> list[Claim]:
    """A kernel at all resolutions, coarse to fine."""
    claims, results, state = list[Claim](), list[Result](), None
    plans = options.pick(tuple(zip(RESOLUTIONS, STEPS, strict=True)), ((0.5, 3), (0.2, 2)))
    for resolution, steps in plans:
        model = empty_model(name, resolution, split.train)
        if state is not None:
            model.load_state_dict(state)
        results.append(measured(split, model, steps))
        label = f"{name}, resolution {resolution:g}, {results[-1].centres:,} centres"
        claims += claims_of(label, results[-1], steps)
        print(*(claim.row() for claim in claims[-4:]), sep="\n", flush=True)
        state = model.state_dict()
    shared = [at_resolution(name, r, split, model.state_dict()) for r, _ in plans]
    numbers = (r.errors.gaps + r.errors.between + r.difference for r in results)
    failed = sum(not math.isfinite(number) for number in numbers)
    return [*claims, at_most(f"{name}: failures without jitter", failed, 0), *falls(name, shared)]


def at_resolution(name: str, resolution: float, split: Split, state: dict[str, Tensor]) -> Errors:
    """With given hyperparameters."""
    model = empty_model(name, resolution, split.train)
    model.load_state_dict(state)
    return errors_of(split, model.update(split.train.X, split.train.Y))


def falls(name: str, errors: list[Errors]) -> list[Claim]:
    """RMSE falls with the resolution."""
    return [
        at_most(
            f"{name}: largest RMSE over that of the next coarser resolution, {where}",
            max(fine / coarse for coarse, fine in pairwise(found)),
            1.0,
            "",
            "the finest one's hyperparameters at all: " + ", ".join(f"{e:.3f}" for e in found),
        )
        for where, found in (
            ("between training rows", [e.between for e in errors]),
            ("in the gaps", [e.gaps for e in errors]),
        )
    ]


def main() -> None:
    """Run it."""
    options = start(__doc__)
    linalg.JITTERS = (0.0,)
    split = load(options)
    claims = [claim for name in KERNELS for claim in run(name, split, options)]
    settings = {"resolutions": RESOLUTIONS, "steps": STEPS, "held": HELD}
    finish("clustered", claims, options, settings)


if __name__ == "__main__":
    main()
