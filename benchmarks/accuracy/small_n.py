"""Few observations: WISKI, which holds them as rows, beside BoTorch's exact model.

The first fit to convergence, the posterior after it, and a cross-validation of 30 folds in one
batched model, in processor time. Beyond the rows held the posterior moves to features: how far it
jumps there is stated, in posterior standard deviations.
"""

from __future__ import annotations

import copy
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from botorch.cross_validation import batch_cross_validation, gen_loo_cv_folds
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.model import Model
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from benchmarks.common.data import levy
from benchmarks.common.harness import Options, processor_seconds, start, tensor_bytes
from benchmarks.common.report import Claim, at_most, finish, stated
from bo_stream import WISKI
from bo_stream.models.wiski.memory import MOST_ROWS

SLOWER = 2.0
"""How many times the exact model's time may be taken."""

FEW_NODES = 128
"""Nodes in one dimension, beyond which no more rows are held."""

Build = Callable[[Tensor, Tensor], Model]
MODELS: dict[str, Build] = {"exact": SingleTaskGP, "WISKI": WISKI}


@dataclass(frozen=True)
class Sizes:
    """Of one run: numbers of inputs and of observations, folds, test points and repeats."""

    dims: tuple[int, ...]
    rows: tuple[int, ...]
    folds: int
    test: int
    repeats: int


def fitted(model: Model) -> None:
    """Learn hyperparameters to convergence."""
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))


def predicted(model: Model, X: Tensor) -> None:
    """Mean and variance at X."""
    with torch.no_grad():
        posterior = model.posterior(X)
        _ = posterior.mean, posterior.variance


def first_fit(d: int, n: int, sizes: Sizes) -> list[Claim]:
    """The first fit and the posterior after it, the models taking turns."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in MODELS}
    for seed in range(sizes.repeats + 1):
        X, Y = levy(n, d, seed=seed)
        for name, build in MODELS.items():
            model = build(X, Y)
            fit = processor_seconds(lambda model=model: fitted(model))
            model.eval()
            ask = processor_seconds(lambda model=model: predicted(model, torch.rand(sizes.test, d)))
            times[name].append((fit, ask))
    medians = {
        name: [statistics.median(column) for column in zip(*runs[1:], strict=True)]
        for name, runs in times.items()
    }
    return [
        slower(f"{what}, d = {d}, n = {n}", {name: own[i] for name, own in medians.items()})
        for i, what in enumerate(("first fit", f"posterior at {sizes.test} points"))
    ]


def slower(name: str, medians: dict[str, float]) -> Claim:
    """How many times the exact model's time WISKI takes."""
    detail = ", ".join(f"{model} {1e3 * time:.1f} ms" for model, time in medians.items())
    return at_most(name, medians["WISKI"] / medians["exact"], SLOWER, "times", detail)


def folds(d: int, sizes: Sizes) -> Claim:
    """A cross-validation in one batched model with an element per fold."""
    times: dict[str, list[float]] = {name: [] for name in MODELS}
    for seed in range(sizes.repeats):
        left_out = gen_loo_cv_folds(*levy(sizes.folds, d, seed=seed))
        for name, build in MODELS.items():
            task = lambda build=build, left_out=left_out: batch_cross_validation(  # noqa: E731
                build, ExactMarginalLogLikelihood, left_out
            )
            times[name].append(processor_seconds(task))
    medians = {name: statistics.median(own) for name, own in times.items()}
    return slower(f"cross-validation of {sizes.folds} folds, d = {d}", medians)


def moving(d: int) -> list[Claim]:
    """What the posterior jumps by where rows become statistics, and what a model holds before."""
    n = MOST_ROWS if d > 1 else FEW_NODES
    X, Y = levy(n, d)
    held = WISKI(X, Y)
    T = torch.rand(100, d)
    moved = copy.deepcopy(held)
    moved._set_memory(held._memory.on_grid())  # as the next update would
    with torch.no_grad():
        before, after = held.posterior(T), moved.posterior(T)
        jump = float(((after.mean - before.mean).abs() / before.variance.sqrt()).max())
    size = tensor_bytes(held) / 1e6
    return [
        stated(f"jump of the mean beyond {n} rows, d = {d}", jump, "sd"),
        stated(f"memory of {n} rows, d = {d}", size, "MB"),
    ]


def sizes_of(options: Options) -> Sizes:
    """Full or tiny."""
    if options.smoke:
        return Sizes(dims=(1, 2), rows=(10,), folds=3, test=5, repeats=1)
    return Sizes(dims=(1, 2, 3, 4), rows=(30, 100, 300), folds=30, test=100, repeats=3)


def main() -> None:
    """Run it."""
    options = start(__doc__)
    warnings.simplefilter("ignore")
    sizes = sizes_of(options)
    claims: list[Claim] = []
    for d in sizes.dims:
        for n in sizes.rows:
            claims += first_fit(d, n, sizes)
        claims += [folds(d, sizes), *moving(d)]
    finish("small_n", claims, options, vars(sizes))


if __name__ == "__main__":
    main()
