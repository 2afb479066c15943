"""Clustered data on a map of land surface temperatures, in float32 with jitter forbidden.

As the paper's figure 6 (Terenin et al., 2024): modis_lst, inputs and target standardised by the
training rows, three resolutions of a cover tree, an RBF kernel with a lengthscale for each input.
Hyperparameters are learned by stochastic gradients, starting at a finer resolution where the
coarser one ended, and the mean is solved for by conjugate gradients. The peer is what sparse
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
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch import Tensor

from benchmarks.data import real_file, write_small_field
from benchmarks.harness import Options, start
from benchmarks.report import Claim, at_most, finish, stated
from bo_stream import ClusteredGP, linalg, maximise_stochastically
from bo_stream.bases.inducing import frozen, kernel_matrix

T = TypeVar("T")

RESOLUTIONS = (0.09, 0.06, 0.03)
STEPS = (150, 30, 8)
JITTERS = (0.0, *(10.0**-i for i in range(8, -1, -1)))


@dataclass(frozen=True)
class Split:
    """Standardised by the training rows.

    Attributes:
        X: ``n x d``.
        Y: ``n x 1``.
        test_X: ``t x d``.
        test_Y: ``t x 1``.
    """

    X: Tensor
    Y: Tensor
    test_X: Tensor
    test_Y: Tensor


@dataclass(frozen=True)
class Result:
    """How a resolution did.

    Attributes:
        centres: Their number.
        rmse: On the test rows, in sd of the target.
        difference: Of the means by a Cholesky factor from these, root mean square.
        jitter: That the kernel's matrix needs.
        times: Seconds by task.
    """

    centres: int
    rmse: float
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
    return Split(X[~test], Y[~test], X[test], Y[test])


def timed(times: dict[str, float], name: str, task: Callable[[], T]) -> T:
    """What a task returns; its seconds go into ``times``."""
    begin = time.perf_counter()
    result = task()
    times[name] = time.perf_counter() - begin
    return result


def empty_model(split: Split, resolution: float) -> ClusteredGP:
    """The paper's kernel at the paper's starting point, lengthscales and noise variance."""
    kernel = ScaleKernel(RBFKernel(ard_num_dims=split.X.shape[-1]))
    kernel.base_kernel.lengthscale = 1.0
    model = ClusteredGP(
        split.X[:0],
        split.Y[:0],
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
    timed(times, "ingest", lambda: model.update(split.X, split.Y))
    timed(times, "learn", lambda: maximise_stochastically(model, steps))
    mean = timed(times, "predict", lambda: model.process().mean(split.test_X)).mT
    one = split.test_X[:1], split.test_Y[:1]
    timed(times, "one more", lambda: model.update(*one).process().mean(one[0]))
    some = split.test_X[:1000]
    direct = timed(times, "by Cholesky", lambda: solved_directly(model).process().mean(some)).mT
    return Result(
        len(model.centres),
        rms(mean - split.test_Y),
        rms(direct - model.process().mean(some).mT),
        needed_jitter(model),
        times,
    )


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


def claims_of(resolution: float, result: Result, steps: int) -> list[Claim]:
    """What is stated of one resolution."""
    name = f"resolution {resolution:g}, {result.centres:,} centres"
    detail = ", ".join(f"{task} {took:.1f} s" for task, took in result.times.items())
    return [
        stated(f"{name}: test RMSE", result.rmse, "sd", f"{detail} ({steps} steps of learning)"),
        stated(f"{name}: difference of means by a Cholesky factor", result.difference, "sd"),
        stated(f"{name}: relative jitter that sparse regression needs", result.jitter),
    ]


def run(options: Options) -> list[Claim]:
    """All resolutions, coarse to fine."""
    split = load(options)
    claims, results, state = [], [], None
    plans = options.pick(tuple(zip(RESOLUTIONS, STEPS, strict=True)), ((0.5, 3), (0.2, 2)))
    for resolution, steps in plans:
        model = empty_model(split, resolution)
        if state is not None:
            model.load_state_dict(state)
        results.append(measured(split, model, steps))
        claims += claims_of(resolution, results[-1], steps)
        print(claims[-3], claims[-1].measured, flush=True)
        state = model.state_dict()
    rises = [fine.rmse / coarse.rmse for coarse, fine in pairwise(results)]
    finite = [r for r in results if math.isfinite(r.rmse + r.difference)]
    return [
        *claims,
        at_most("resolutions that failed without jitter", len(results) - len(finite), 0),
        at_most("RMSE over that of the next coarser resolution, the largest", max(rises), 1.0),
    ]


def main() -> None:
    """Run it."""
    options = start(__doc__)
    linalg.JITTERS = (0.0,)
    settings = {"resolutions": RESOLUTIONS, "steps": STEPS}
    finish("clustered", run(options), options, settings)


if __name__ == "__main__":
    main()
