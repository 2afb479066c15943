"""Inducing points that place themselves: the three toy sets of the OIPS paper, in four batches.

A: a uniform series of a noisy sine, in the order of time; B: the same with a gap; C: 3-D normal
inputs, ``sin |x| / |x|``. Kernel and noise are fixed. After each batch: the number of points and
the mean negative log density of 200 test outcomes. "k-means/opt" chooses its points in the first
batch and moves them by the gradient of the online bound in every one; "OIPS/opt" lets OIPS add
points first; the grid follows the inputs' box. As figure 2 of Galy-Fajou and Opper (2021). Besides:
how many points each threshold ρ takes on each set, and what density it loses by fewer.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from gpytorch.kernels import RBFKernel
from torch import Tensor

from benchmarks.common.harness import Options, start
from benchmarks.common.report import Claim, at_least, at_most, finish, stated, table
from bo_stream import OSGPR
from bo_stream.allocation import OIPS, Allocator, KMeans, UniformGrid

N = 200
BATCHES = 4
NOISE_SD = 0.1
SEEDS = 7
ADAPTIVE = ("k-means/opt", "OIPS/opt", "OIPS")
NEAR = 0.1
"""Nats by which densities count as equal."""
RHOS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
CLOSE = 0.01
"""Nats behind the grid that a threshold may cost."""


@dataclass(frozen=True)
class Toy:
    """A data set and what its contenders are made with.

    Attributes:
        inputs: Training and test inputs in the order in which they come, ``n x d``.
        function: Without noise, ``n x d -> n x 1``.
        lengthscale: Of the kernel.
        rho: OIPS' threshold.
        means: Of k-means.
        grid: Points per dimension.
        expected: Range of the number of points by OIPS.
    """

    inputs: Callable[[torch.Generator], Tensor]
    function: Callable[[Tensor], Tensor]
    lengthscale: float
    rho: float
    means: int
    grid: int
    expected: tuple[int, int]


def series(generator: torch.Generator) -> Tensor:
    """Uniform times, sorted."""
    return (20.0 * torch.rand(N, 1, generator=generator)).sort(0).values


def gapped(generator: torch.Generator) -> Tensor:
    """The same with nothing between a quarter and half of the way."""
    X = 15.0 * torch.rand(N, 1, generator=generator)
    return (X + 5.0 * (X > 5.0)).sort(0).values


def normal(generator: torch.Generator) -> Tensor:
    """Normal in three dimensions."""
    return torch.randn(N, 3, generator=generator)


def wave(X: Tensor) -> Tensor:
    """``sin |x| / |x|``."""
    return torch.sinc(X.norm(dim=-1, keepdim=True) / torch.pi)


TOYS = {
    "A": Toy(series, torch.sin, 1.0, 0.7, 25, 25, (15, 25)),
    "B": Toy(gapped, torch.sin, 1.0, 0.7, 25, 25, (15, 25)),
    "C": Toy(normal, wave, 3.0, 0.8, 50, 10, (7, 14)),
}


@dataclass(frozen=True)
class Moment:
    """After a batch.

    Attributes:
        points: Number of inducing points.
        density: Mean negative log density of the test outcomes.
    """

    points: int
    density: float


def model_of(toy: Toy, X: Tensor, Y: Tensor, allocator: Allocator) -> OSGPR:
    """With the toy's kernel and noise, which stay; it holds the newest batch as rows."""
    kernel = RBFKernel()
    kernel.lengthscale = toy.lengthscale
    model = OSGPR(
        X,
        Y,
        covar_module=kernel,
        outcome_transform=None,
        allocator=allocator,
        window=N // BATCHES,
        max_points=2_000,
    )
    with torch.no_grad():
        model.likelihood.noise = NOISE_SD**2
    return model


def density(model: OSGPR, X: Tensor, Y: Tensor) -> float:
    """Mean negative log density of outcomes."""
    with torch.no_grad():
        mean, variance = model.process().marginals(X)
    spread = (variance + NOISE_SD**2).sqrt()
    return -float(torch.distributions.Normal(mean, spread).log_prob(Y.mT).mean())


def streamed(
    toy: Toy, allocator: Allocator, grows: bool, moves: bool, options: Options, seed: int
) -> list[Moment]:
    """A contender's way through the batches.

    Args:
        toy: The data set.
        allocator: Places the points.
        grows: Whether it does so after the first batch too.
        moves: Whether points move by the gradient of the bound.
        options: Of the command line.
        seed: Of the data.
    """
    generator = torch.Generator().manual_seed(seed)
    X, test_X = toy.inputs(generator), toy.inputs(generator)
    Y, test_Y = (
        toy.function(x) + NOISE_SD * torch.randn(len(x), 1, generator=generator)
        for x in (X, test_X)
    )
    size = len(X) // BATCHES
    model = model_of(toy, X[:size], Y[:size], allocator)
    if not grows:
        model = fixed(model, toy, X[:size], Y[:size])
    moments = []
    for begin in range(0, options.pick(len(X), 2 * size), size):
        if begin > 0:
            model.update(X[begin : begin + size], Y[begin : begin + size])
        if moves:
            model.optimize_points(options.pick(100, 2))
        moments.append(Moment(len(model.inducing_points), density(model, test_X, test_Y)))
    return moments


def fixed(model: OSGPR, toy: Toy, X: Tensor, Y: Tensor) -> OSGPR:
    """A model with the same points, to which none are added."""
    still = OSGPR(
        X,
        Y,
        covar_module=model.covar_module,
        outcome_transform=None,
        inducing_points=model.inducing_points,
        window=N // BATCHES,
    )
    still.likelihood.load_state_dict(model.likelihood.state_dict())
    return still


def contenders(toy: Toy) -> dict[str, tuple[Allocator, bool, bool]]:
    """Allocators, whether they grow, whether points move."""
    return {
        "k-means/opt": (KMeans(toy.means), False, True),
        "OIPS/opt": (OIPS(toy.rho), True, True),
        "OIPS": (OIPS(toy.rho), True, False),
        "grid": (UniformGrid(toy.grid), True, False),
    }


Found = dict[str, list[list[Moment]]]
"""By contender: its moments for each seed."""


def claims_of(name: str, toy: Toy, found: Found) -> list[Claim]:
    """Numbers of points, and densities against those of k-means/opt: medians over seeds."""
    ends = {way: [moments[-1] for moments in runs] for way, runs in found.items()}
    low, high = toy.expected
    points = statistics.median(end.points for end in ends["OIPS"])
    pairs = list(zip(ends["k-means/opt"], ends["OIPS"], strict=True))
    gains = [theirs.density - ours.density for theirs, ours in pairs]
    detail = ", ".join(f"{gain:.2f}" for gain in gains)
    claims = [
        at_least(f"{name}: points by OIPS", points, low),
        at_most(f"{name}: points by OIPS, at most", points, high),
        *(stated(f"{name}: behind the grid, {way}, worst", worst(ends, way)) for way in ADAPTIVE),
    ]
    what = f"{name}: nats that OIPS gains on k-means/opt"
    if name == "C":  # five times fewer points
        return [*claims, stated(what, statistics.median(gains), "", detail)]
    target = 0.5 if name == "B" else -NEAR
    return [*claims, at_least(what, statistics.median(gains), target, "", detail)]


def by_threshold(name: str, toy: Toy, grid: list[Moment], options: Options) -> Claim:
    """Find the least threshold that costs at most ``CLOSE``, or 1, at which all inputs are points.

    Medians over seeds; those of all thresholds are its detail.

    Args:
        name: Of the data set.
        toy: The data set.
        grid: The last moment of the grid for each seed.
        options: Of the command line.
    """
    parts, losses = [], {}
    for rho in RHOS[:: options.pick(1, 4)]:
        ends = [
            streamed(toy, OIPS(rho), grows=True, moves=False, options=options, seed=seed)[-1]
            for seed in range(len(grid))
        ]
        points = statistics.median(end.points for end in ends)
        pairs = zip(ends, grid, strict=True)
        losses[rho] = statistics.median(end.density - other.density for end, other in pairs)
        parts.append(f"{rho:g}: {points:g} points, {losses[rho]:.3f}")
    least = min((rho for rho, loss in losses.items() if loss <= CLOSE), default=1.0)
    what = f"{name}: least ρ at most {CLOSE} nats behind the grid"
    return stated(what, least, "", "; ".join(parts))


def worst(ends: dict[str, list[Moment]], way: str) -> float:
    """Nats by which a contender is behind the grid, for the seed that suits it least."""
    pairs = zip(ends[way], ends["grid"], strict=True)
    return max(own.density - grid.density for own, grid in pairs)


def row_of(name: str, way: str, runs: list[list[Moment]]) -> list[str]:
    """Medians over seeds after each batch."""
    batches = list(zip(*runs, strict=True))
    densities = [statistics.median(m.density for m in batch) for batch in batches]
    points = [statistics.median(m.points for m in batch) for batch in batches]
    cells = [f"{d:.3f} ({p:.0f})" for d, p in zip(densities, points, strict=True)]
    return [name, way, *cells]


def main() -> None:
    """Run it."""
    options = start(__doc__)
    seeds = range(options.pick(SEEDS, 1))
    claims, rows = [], []
    for name, toy in TOYS.items():
        found = {
            way: [streamed(toy, *made, options=options, seed=seed) for seed in seeds]
            for way, made in contenders(toy).items()
        }
        rows += [row_of(name, way, runs) for way, runs in found.items()]
        claims += claims_of(name, toy, found)
        grid = [moments[-1] for moments in found["grid"]]
        claims.append(by_threshold(name, toy, grid, options))
    batches = [f"after batch {i + 1}" for i in range(len(rows[0]) - 2)]
    print(table(["set", "points by", *batches], rows) + "\n")
    settings = {"n": N, "batches": BATCHES, "noise_sd": NOISE_SD, "seeds": len(seeds)}
    finish("oips", claims, options, settings)


if __name__ == "__main__":
    main()
