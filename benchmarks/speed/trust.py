"""Time of a report at n = 10⁵; false alarms of the drift test, and how soon it finds a shift."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import count

import torch
from botorch.fit import fit_gpytorch_mll
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from benchmarks.common.data import levy
from benchmarks.common.harness import Options, interleave, processor_seconds, seconds, start
from benchmarks.common.report import Claim, at_most, finish, stated
from bo_stream import OSGPR, WISKI
from bo_stream.diagnostics import ProgressiveValidation, report
from bo_stream.models.base import StreamingGP

NOISE, LENGTHSCALE, BATCH = 0.2, 0.2, 25
STREAMS, ROWS = 200, 2_000
"""Streams of a draw from a Gaussian process in 1-D, and rows of each."""

RATE = 1e-3
"""False alarms an observation that the simulated tests keep, at most; the default is 10⁻⁵."""

SHIFT_AT, SHIFTED = 1_000, 600
"""Rows before a shift of one noise standard deviation, and rows after it."""

Noise = Callable[[int], Tensor]


def normal(n: int) -> Tensor:
    return NOISE * torch.randn(n, 1)


def heavy(n: int) -> Tensor:
    """Student-t noise of two degrees of freedom."""
    return NOISE * torch.distributions.StudentT(2.0).sample((n, 1))


def drawn_function(features: int = 300) -> Callable[[Tensor], Tensor]:
    """A draw from a process with a squared exponential kernel, by random Fourier features."""
    frequency = torch.randn(1, features) / LENGTHSCALE
    phase, weight = 2.0 * math.pi * torch.rand(features), torch.randn(features, 1)
    return lambda X: (X @ frequency + phase).cos() @ weight * math.sqrt(2.0 / features)


def true_model(X: Tensor, Y: Tensor) -> StreamingGP:
    """WISKI with the hyperparameters of the draw."""
    kernel, likelihood = ScaleKernel(RBFKernel()), GaussianLikelihood()
    kernel.outputscale, kernel.base_kernel.lengthscale = 1.0, LENGTHSCALE
    likelihood.noise = NOISE**2
    options = {"bounds": torch.tensor([[0.0], [1.0]]), "outcome_transform": None, "grid_size": 40}
    return WISKI(X, Y, covar_module=kernel, likelihood=likelihood, **options)


def learned_model(X: Tensor, Y: Tensor) -> StreamingGP:
    """OSGPR that learned its hyperparameters from the first rows."""
    model = OSGPR(X, Y, max_points=24, window=32)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def stream(
    seed: int,
    build: Callable[[Tensor, Tensor], StreamingGP],
    noise: Noise,
    rate: float,
    rows: int,
    shift_at: int | None = None,
) -> ProgressiveValidation:
    """The record of one stream after 100 first rows; outcomes are shifted from a row on."""
    torch.manual_seed(seed)
    function, X = drawn_function(), torch.rand(100, 1)
    model = build(X, function(X) + noise(100))
    record = ProgressiveValidation(false_alarms=rate)
    for begin in range(0, rows, BATCH):
        X = torch.rand(BATCH, 1)
        Y = function(X) + noise(BATCH)
        if shift_at is not None and begin >= shift_at:
            Y = Y + NOISE
            if any(row > shift_at for row, _, _ in record.drift[0].signals):
                break
        record.observe(model, X, Y)
    return record


def false_alarms(options: Options) -> list[Claim]:
    """The measured rate over the stated one, for right, learned and wrong models."""
    streams, rows = options.pick(STREAMS, 2), options.pick(ROWS, 100)
    claims = []
    for name, build, noise in (
        ("WISKI, true hyperparameters", true_model, normal),
        ("OSGPR, learned hyperparameters", learned_model, normal),
        ("WISKI, Student-t noise of 2 degrees", true_model, heavy),
    ):
        tests = [stream(seed, build, noise, RATE, rows).drift[0] for seed in range(streams)]
        found, seen = sum(test.count for test in tests), sum(test.seen for test in tests)
        off = abs(found / (seen * tests[0].rate) - 1.0)
        detail = f"{found} in {seen:,} rows of {streams} streams, stated {tests[0].rate:.3g} a row"
        make = stated if noise is heavy else partial(at_most, target=0.2)
        claims.append(make(f"false alarms off the stated rate, {name}", off, detail=detail))
    return claims


def delays(options: Options) -> list[Claim]:
    """Rows until a shift of one noise standard deviation is found, at the default rate."""
    streams = options.pick(STREAMS, 2)
    rows, before = options.pick(SHIFT_AT + SHIFTED, 260), options.pick(SHIFT_AT, 100)
    found, early = [], 0
    for seed in range(streams):
        test = stream(1000 + seed, learned_model, normal, 1e-5, rows, before).drift[0]
        after = [row - before for row, _, _ in test.signals if row > before]
        early += test.count - len(after)
        found.append(after[0] if after else rows)
    detail = f"{streams} streams, largest {max(found)}; {early} alarms before the shift"
    name = "rows until a shift of one noise sd is found, median"
    return [at_most(name, statistics.median(found), 200.0, "rows", detail)]


def times(options: Options) -> list[Claim]:
    """Seconds of a report after a long stream, and what the record adds to an update."""
    n, batch = rows_reported(options), options.pick(2_000, 100)
    bounds = torch.tensor([[0.0] * 3, [1.0] * 3])
    models = {
        "WISKI": lambda X, Y: WISKI(X, Y, bounds=bounds),
        "OSGPR": lambda X, Y: OSGPR(X, Y, max_points=options.pick(512, 64)),
    }
    claims = []
    for name, build in models.items():
        model, record = build(*levy(batch, 3)), ProgressiveValidation()
        if not options.smoke:
            fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        for begin in range(batch, n, batch):
            record.observe(model, *levy(batch, 3, seed=begin))
        with tempfile.TemporaryDirectory() as folder:
            whole, waited = both_seconds(partial(report, model, record, path=folder))
        X, Y = levy(n, 3, seed=7)
        held_out, _ = both_seconds(partial(report, model, X=X, Y=Y))
        detail = f"3-D Levy, {model.num_observations:,.0f} observations, picture and JSON written"
        claims.append(at_most(f"report, processor time, {name}", whole, 10.0, "s", detail))
        claims.append(stated(f"report, wall-clock time, {name}", waited, "s", detail))
        detail = f"{n:,} held-out rows given, of which 10,000 are predicted"
        claims.append(
            at_most(f"report on held-out rows, processor time, {name}", held_out, 10.0, "s", detail)
        )
        claims.append(overhead(name, model, record, options))
    return claims


def rows_reported(options: Options) -> int:
    """Rows of the stream before a report."""
    return options.pick(100_000, 2_000)


def both_seconds(task: Callable[[], object]) -> tuple[float, float]:
    """Seconds of processor time, which other jobs do not change, and by the clock."""
    waited: list[float] = []
    busy = processor_seconds(lambda: waited.append(seconds(task)))
    return busy, waited[0]


def overhead(
    name: str, model: StreamingGP, record: ProgressiveValidation, options: Options
) -> Claim:
    """Time of a step with the record over that of an update and a posterior of the next rows."""
    seeds = count(10**6)

    def plain() -> None:
        X, Y = levy(3, 3, seed=next(seeds))
        model.posterior(X).variance.sum()
        model.update(X, Y)

    def recorded() -> None:
        record.observe(model, *levy(3, 3, seed=next(seeds)))

    found = interleave({"plain": plain, "recorded": recorded}, options.pick(100, 5))
    detail = f"batches of 3; {1e3 * found['recorded']:.2f} ms against {1e3 * found['plain']:.2f} ms"
    return stated(
        f"step with the record over posterior and update, {name}",
        found["recorded"] / found["plain"],
        "×",
        detail,
    )


def main() -> None:
    """Run it."""
    options = start(__doc__)
    claims = [*times(options), *delays(options), *false_alarms(options)]
    settings = {
        "n": rows_reported(options),
        "streams": STREAMS,
        "rows": ROWS,
        "rate": RATE,
        "batch": BATCH,
    }
    finish("trust", claims, options, settings)


if __name__ == "__main__":
    main()
