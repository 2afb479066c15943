"""An update of 3 points and the next posterior: faster than exact conditioning, and flat in n.

Beside a peer that takes half a second, a turn of ours is a stream of updates, as in use. The first
of them, for which nothing is left in the processor's caches, is stated apart.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from botorch.models.model import Model
from torch import Tensor

from benchmarks.common.data import levy, levy_stream
from benchmarks.common.harness import (
    Options,
    best_peer,
    peak_growth,
    start,
    tensor_bytes,
    timings,
)
from benchmarks.common.report import Claim, at_least, at_most, finish, stated, times
from benchmarks.peers.peers import KERNELS, PEERS, exact, product_kernel
from bo_stream import WISKI

Q = 3
D = 3
FASTER = 50.0
FLAT = 1.1
STREAM = 20
"""Updates in a turn."""
FITTED_LENGTHSCALE = 0.15
"""About the shortest that a fit to 3,000 points of this function finds: the harder case."""


@dataclass(frozen=True)
class Sizes:
    """Of one run: points before the update, of the small and the large stream, and repeats."""

    n: int
    small: int
    large: int
    test: int
    repeats: int
    flat_repeats: int


def predict(model: Model, X: Tensor) -> None:
    """Mean and variance at X."""
    with torch.no_grad():
        posterior = model.posterior(X)
        _ = posterior.mean, posterior.variance


def conditioned(model: Model, X: Tensor, Y: Tensor, test_X: Tensor) -> None:
    """Exact conditioning and the next posterior."""
    with torch.no_grad():
        predict(model.condition_on_observations(X, Y), test_X)


def exact_tasks(
    kernel: str, lengthscale: float | None, n: int, tests: Sequence[Tensor]
) -> dict[str, Callable[[], None]]:
    """Conditioning one exact model, its caches warm, stock and repaired, for each set of points."""
    X, Y = levy(n, D)
    new_X, new_Y = levy(Q, D, seed=1)
    model = exact(kernel, X, Y, own=True)
    if lengthscale is not None:
        model.covar_module.lengthscale = torch.full((D,), lengthscale)
    predict(model.eval(), tests[0])  # as a loop does before it conditions

    def task(name: str, test_X: Tensor) -> Callable[[], None]:
        def run() -> None:
            with PEERS[name]():
                conditioned(model, new_X, new_Y, test_X)

        return run

    return {label(name, X): task(name, X) for name in PEERS for X in tests}


def label(name: str, test_X: Tensor) -> str:
    """Name of a task that predicts at these points."""
    return f"{name} at {len(test_X)}"


def streamed(kernel: str, n: int, lengthscale: float | None = None) -> WISKI:
    """WISKI in the unit cube after n points of the stream."""
    covar_module = product_kernel(kernel, D)
    if lengthscale is not None:
        covar_module.lengthscale = torch.full((D,), lengthscale)
    stream = levy_stream(n, 10_000, D)
    first_X, first_Y = next(stream)
    bounds = torch.tensor([[0.0] * D, [1.0] * D])
    model = WISKI(first_X, first_Y, covar_module=covar_module, bounds=bounds)
    for X, Y in stream:
        model.update(X, Y)
    return model.eval()


def updater(model: WISKI, test_X: Tensor) -> Callable[[], None]:
    """A task that updates the model with 3 points and predicts."""
    X, Y = levy(Q, D, seed=1)
    return lambda: predict(model.update(X, Y), test_X)


def compare(kernel: str, lengthscale: float | None, sizes: Sizes) -> list[Claim]:
    """WISKI's update beside exact conditioning at the same n."""
    tests = [torch.rand(points, D) for points in (Q, sizes.test)]
    model = streamed(kernel, sizes.n, lengthscale)
    tasks = exact_tasks(kernel, lengthscale, sizes.n, tests)
    tasks |= {label("WISKI", X): updater(model, X) for X in tests}
    calls = {label("WISKI", X): STREAM for X in tests}
    found = timings(tasks, sizes.repeats, calls=calls)
    medians = {name: statistics.median(times) for name, times in found.items()}
    width = "default lengthscale" if lengthscale is None else f"lengthscale {lengthscale}"
    where = f"{kernel}, {width}, n = {sizes.n:,}"
    made_of = f"grid {model.grid_size}, rank {model.rank}"
    return [
        claim
        for X in tests
        for claim in (
            *faster(where, medians, X, made_of),
            stated(
                f"the first update after other work, at {len(X)} points, {where}",
                1e3 * statistics.median(found[label("WISKI", X)][::STREAM]),
                "ms",
                f"in a stream {1e3 * medians[label('WISKI', X)]:.1f} ms",
            ),
        )
    ]


def faster(where: str, medians: dict[str, float], test_X: Tensor, made_of: str) -> list[Claim]:
    """How many times faster than the faster peer, predicting at these points, and both times."""
    ours = medians[label("WISKI", test_X)]
    peer, best = best_peer(medians, [label(name, test_X) for name in PEERS])
    names = [label(name, test_X) for name in ("WISKI", *PEERS)]
    each = ", ".join(f"{name} {1e3 * medians[name]:.1f} ms" for name in names)
    name = f"update and posterior at {len(test_X)} points, {where}"
    detail = f"{each}; {peer} quoted; {made_of}"
    return [at_least(name, best / ours, FASTER, "times faster", detail), *times(name, best, ours)]


def flatness(kernel: str, sizes: Sizes) -> list[Claim]:
    """The same update after a short and after a long stream."""
    test_X = torch.rand(sizes.test, D)
    models = {n: streamed(kernel, n) for n in (sizes.small, sizes.large)}
    tasks = {f"{n}": updater(model, test_X) for n, model in models.items()}
    runs = list(timings(tasks, sizes.flat_repeats, warmup=3).values())
    medians = [statistics.median(run) for run in runs]
    means = [statistics.fmean(run) for run in runs]
    held = [float(tensor_bytes(model)) for model in models.values()]
    growth = [peak_of_updates(model, test_X) for model in models.values()]
    label = f"{kernel}, n = {sizes.large:,} over n = {sizes.small:,}"
    return [
        at_most(
            f"time of an update, {label}",
            medians[1] / medians[0],
            FLAT,
            "",
            _pair(medians, 1e3, "ms"),
        ),
        *(
            stated(f"time of an update, {kernel}, n = {n:,}", median, "s")
            for n, median in zip(models, medians, strict=True)
        ),
        at_most(
            f"memory of the model, {label}", held[1] / held[0], FLAT, "", _pair(held, 1e-6, "MB")
        ),
        stated(
            f"mean time of {sizes.flat_repeats} updates, {kernel}",
            1e3 * means[1],
            "ms",
            f"{_pair(means, 1e3, 'ms')}; solving anew now and then included",
        ),
        stated(
            f"peak growth of 20 updates, {kernel}", growth[1] / 1e6, "MB", _pair(growth, 1e-6, "MB")
        ),
    ]


def peak_of_updates(model: WISKI, test_X: Tensor) -> float:
    """Bytes by which resident memory rises over 20 updates and posteriors."""
    task = updater(model, test_X)
    return float(peak_growth(lambda: [task() for _ in range(20)]))


def _pair(values: list[float], factor: float, unit: str) -> str:
    small, large = (factor * value for value in values)
    return f"{small:.2f} {unit} and {large:.2f} {unit}"


def sizes_of(options: Options) -> Sizes:
    """Full or tiny."""
    if options.smoke:
        return Sizes(n=60, small=50, large=200, test=5, repeats=2, flat_repeats=2)
    return Sizes(n=3_000, small=1_000, large=1_000_000, test=100, repeats=7, flat_repeats=200)


def main() -> None:
    """Run it."""
    options = start(__doc__)
    sizes = sizes_of(options)
    claims: list[Claim] = []
    for kernel in KERNELS:
        for lengthscale in (None, FITTED_LENGTHSCALE):
            claims += compare(kernel, lengthscale, sizes)
        claims += flatness(kernel, sizes)
    finish("update", claims, options, vars(sizes))


if __name__ == "__main__":
    main()
