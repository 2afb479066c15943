"""Estimates of QSGP's bound: unbiased, less noisy by a control variate, cheap for 10⁷ features.

Unbiased: 300 rows of kin40k, 60 functions of which 12 are drawn, 30 data a draw. The mean of all
draws of the bound, and of each entry of its gradient, in standard errors from the full-batch value.

Control variate: kin40k, 10,000 Fourier features of which 500 are drawn, 500 data a draw, weights
drawn from the prior (Evans and Nair, 2020, figure 1, but for the gradient of the whole bound, not
of its quadratic term alone). The variance is the mean over all weights.

Cost: seconds of a step with 5,000 functions and 500 data drawn, Fourier features, mean field.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

from benchmarks.common.data import levy, real
from benchmarks.common.harness import Options, peak_growth, start
from benchmarks.common.report import Claim, at_least, at_most, finish, stated
from bo_stream import QSGP, Chevron, FourierFeatures, InducingAtData

LENGTHSCALES = (3.48, 2.88, 1.74, 1.85, 1.65, 1.46, 1.35, 1.79)
"""Of an exact GP of 1,000 points of kin40k, standardised; so are the other two numbers."""
OUTPUT_SCALE, NOISE = 1.67, 0.0143
GIB = 2.0**30


@dataclass(frozen=True)
class Rows:
    """Standardised inputs and outcomes."""

    X: Tensor
    Y: Tensor


def rows_of(options: Options, count: int) -> Rows:
    """Of kin40k, in random order; of Levy's function in smoke runs."""
    X, y = levy(min(count, 400), 8) if options.smoke else real("kin40k")
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))[:count]
    X, y = X[order], y[order]
    return Rows((X - X.mean(0)) / X.std(0), (y - y.mean()) / y.std())


def model_of(rows: Rows, **options: Any) -> QSGP:
    """With the kernel of the exact GP, which stays, and no steps taken."""
    kernel = ScaleKernel(RBFKernel(ard_num_dims=rows.X.shape[-1]))
    lengthscales = torch.tensor(LENGTHSCALES[: rows.X.shape[-1]])
    kernel.base_kernel.lengthscale, kernel.outputscale = lengthscales, OUTPUT_SCALE
    likelihood = GaussianLikelihood()
    likelihood.noise = NOISE
    fixed: dict[str, Any] = {
        "likelihood": likelihood,
        "covar_module": kernel,
        "outcome_transform": None,
        "empirical_bayes": False,
        "update_steps": 0,
    }
    return QSGP(rows.X, rows.Y, **{**fixed, **options})


def with_prior_weights(model: QSGP, seed: int) -> QSGP:
    """Its mean weights drawn from their prior."""
    coefficients = model._memory.progress.coefficients
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(coefficients.shape[:2], generator=generator, dtype=torch.float64)
    coefficients[..., 0] = (OUTPUT_SCALE**0.5 * drawn).to(coefficients)
    return model


def place_support(model: QSGP) -> None:
    """Let its control variate begin at the weights as they are."""
    model._set_memory(model._inference.supported(model._memory, model.prior))


def gradient(model: QSGP, seed: int) -> tuple[Tensor, Tensor]:
    """One draw of the bound and of its gradient in all coefficients, zeros where none was drawn."""
    value, sampled = model.elbo_gradient_estimate(torch.Generator().manual_seed(seed))
    whole = torch.zeros_like(model._memory.progress.coefficients)
    whole[:, sampled.index] = sampled.coefficients
    return value, whole


# --- unbiased -----------------------------------------------------------------------------------


def errors_of(rows: Rows, draws: int, **options: Any) -> tuple[float, float]:
    """Of the mean of draws, in standard errors: of the bound, and the largest of the gradient."""
    covariance = Chevron(2)
    full = model_of(rows, covariance=covariance, batch_size=len(rows.X), **options)
    part = model_of(rows, covariance=covariance, batch_size=30, functions=12, **options)
    for model in (full, part):
        with_prior_weights(model, 0)
        place_support(model)
    expected = torch.cat([t.flatten() for t in gradient(full, 0)])
    total = squares = torch.zeros_like(expected)
    for seed in range(draws):
        one = torch.cat([t.flatten() for t in gradient(part, seed)]) - expected
        total, squares = total + one / draws, squares + one.square() / draws
    deviation = ((squares - total.square()) / draws).sqrt()
    scores = (total / deviation).abs()[deviation > 1e-9 * total.abs().max()]
    return float(scores[0]), float(scores[1:].max())


def unbiased_claims(options: Options) -> list[Claim]:
    """Of Fourier features and of inducing points, with the control variate and without."""
    claims, draws = [], options.pick(20_000, 40)
    rows = rows_of(options, options.pick(300, 60))
    cases: dict[str, dict[str, Any]] = {
        "Fourier features": {"basis": FourierFeatures(60), "control_points": 20},
        "Fourier features, no control": {"basis": FourierFeatures(60), "control_points": 0},
        "inducing points": {"basis": InducingAtData(60), "control_points": 20},
    }
    for name, chosen in cases.items():
        bound, slope = errors_of(rows, draws, **chosen)
        detail = f"{draws:,} draws"
        claims.append(at_most(f"{name}: error of the bound", bound, 4.0, "s.e.", detail))
        claims.append(at_most(f"{name}: largest of its gradient", slope, 4.0, "s.e.", detail))
    return claims


# --- the control variate ------------------------------------------------------------------------


def variance(rows: Rows, points: int, draws: int, size: int, drawn: int) -> float:
    """Of the gradient, mean over all weights."""
    options = {"basis": FourierFeatures(size), "functions": drawn, "batch_size": drawn}
    model = with_prior_weights(model_of(rows, control_points=points, **options), 0)
    place_support(model)
    total = squares = torch.zeros(1)
    for seed in range(draws):
        _, one = gradient(model, seed)
        total, squares = total + one / draws, squares + one.square() / draws
    return float((squares - total.square()).mean())


def control_claims(options: Options) -> list[Claim]:
    """By number of support points, relative to none."""
    rows, claims = rows_of(options, options.pick(36_000, 200)), []
    draws, size, drawn = options.pick(500, 10), options.pick(10_000, 200), options.pick(500, 20)
    none = variance(rows, 0, draws, size, drawn)
    for points in options.pick((30, 100, 300, 1000), (20,)):
        ratio = none / variance(rows, points, draws, size, drawn)
        name = f"{points} support points: variance without over with"
        claims.append(at_least(name, ratio, 5.0) if points == 300 else stated(name, ratio))
    return claims


# --- cost ---------------------------------------------------------------------------------------


def steps_of(rows: Rows, size: int, drawn: int, batch: int) -> Callable[[], object]:
    """A task that takes one step."""
    options: dict[str, Any] = {"functions": drawn, "batch_size": batch, "control_points": 300}
    basis = FourierFeatures(size, seed=1)
    model = model_of(rows, basis=basis, arithmetic=torch.float32, **options)
    place_support(model)
    return model._inference.learner(model._memory, model.prior, False, False).take_step


def median_seconds(tasks: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Processor seconds of each, in turns."""
    found: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(turns + 2):
        for name, task in tasks.items():
            begin = time.process_time()
            task()
            if turn >= 2:
                found[name].append(time.process_time() - begin)
    return {name: statistics.median(times) for name, times in found.items()}


def cost_claims(options: Options) -> list[Claim]:
    """Of the dearest over the cheapest, by number of functions and by number of data."""
    claims, turns = [], options.pick(40, 2)
    drawn, batch = options.pick(5_000, 20), options.pick(500, 10)
    sizes = options.pick((10_000, 100_000, 1_000_000, 10_000_000), (100, 1000))
    counts = options.pick((1_000, 10_000, 100_000, 1_000_000), (100, 300))
    rows = Rows(*levy(counts[-1], 8))
    few = Rows(rows.X[: counts[1]], rows.Y[: counts[1]])
    by_size = {f"m = {size:,}": steps_of(few, size, drawn, batch) for size in sizes}
    by_count = {
        f"n = {n:,}": steps_of(Rows(rows.X[:n], rows.Y[:n]), sizes[0], drawn, batch) for n in counts
    }
    for what, tasks in (("functions", by_size), ("data", by_count)):
        found = median_seconds(tasks, turns)
        ratio = max(found.values()) / min(found.values())
        detail = ", ".join(f"{name}: {1e3 * s:.1f} ms" for name, s in found.items())
        claims.append(
            at_most(f"a step by number of {what}: most over least", ratio, 1.15, "", detail)
        )
    return claims


def memory_claims(options: Options) -> list[Claim]:
    """Of ten million functions."""
    size, drawn = options.pick(10_000_000, 1000), options.pick(10_000, 100)
    rows = rows_of(options, options.pick(10_000, 100))

    def learn_and_predict() -> None:
        single: dict[str, Any] = {"arithmetic": torch.float32, "functions": drawn}
        model = model_of(rows, basis=FourierFeatures(size), **single)
        model.fit(steps=options.pick(60, 3), progress=False)
        supposed = model.condition_on_observations(rows.X[:2], rows.Y[:2])
        supposed.posterior(rows.X[:8])

    growth = peak_growth(learn_and_predict) / GIB
    return [at_most(f"peak memory, {size:,} functions, a fantasy included", growth, 2.0, "GiB")]


def main() -> None:
    """All four."""
    options = start(__doc__)
    claims = [
        *unbiased_claims(options),
        *control_claims(options),
        *cost_claims(options),
        *memory_claims(options),
    ]
    finish("stochastic_estimators", claims, options, {"noise": NOISE, "scale": OUTPUT_SCALE})


if __name__ == "__main__":
    main()
