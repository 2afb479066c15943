"""Streams in the full input dimension: inducing points in a stream against a batch SVGP.

Sets of 8 to 18 inputs, in the unit cube, targets standardised by the training rows. OSGPR with at
most 512 points begins with 500 rows and takes the others by hundreds. Points and hyperparameters
are learned together while the window holds every row; after that they stay, and the stream is
exactly batch SGPR's posterior. The peer is BoTorch's ``SingleTaskVariationalGP`` with 512 points,
by Adam on minibatches of all training rows for three times as long. Then a million simulated rows
of 6 inputs by thousands, at hyperparameters learned from the first of them, with ``OIPS(0.8)`` and
with ``OIPS(0.95)``, which reaches the cap.

Both models' time is the processor's, so that what else runs on the machine favours neither; on one
thread of a quiet machine it is that on the wall. Rows a second are by the wall.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from botorch.models import SingleTaskVariationalGP
from botorch.models.model import Model
from gpytorch.mlls import VariationalELBO

from benchmarks.accuracy.uci import Split, scores, simulated, split_of
from benchmarks.common.data import levy_stream
from benchmarks.common.harness import processor_seconds, start, tensor_bytes
from benchmarks.common.report import Claim, at_least, at_most, finish, stated
from bo_stream import OSGPR, learn_points
from bo_stream.allocation import OIPS
from bo_stream.models.fitting import relearn

SETS = ("elevators", "protein", "kin40k")
SMALL = "simulated"
POINTS = 512
DEFAULT_RHO = 0.8
"""OIPS' threshold of few points."""
RHO = 0.95
"""So close that the cap binds on all sets and in the long stream."""
ROWS = 500
"""Of the test set that are predicted together."""
NO_WORSE = 1.03
PATIENCE = 3.0
"""Of the peer, in times of the stream."""
WINDOW = 4_096
"""Rows that are held as they came."""
ITERATIONS = {2_000: 20, 4_000: 40}
"""Of learning, by the number of rows that have come."""
RATE = 0.01
LAST_RATE = 0.001
"""The peer's learning rate, and that of the last third of its time."""
MINIBATCH = 512
PER_SECOND = 10_000.0
FLAT = 1.1
TENTH = 0.1


@dataclass(frozen=True)
class Sizes:
    """Splits, rows to begin with, rows an update; rows of the long stream, and of its updates.

    ``learn``: iterations of learning by the number of rows that have come.
    """

    splits: int
    first: int
    batch: int
    long: int
    chunk: int
    learn: Mapping[int, int]


@dataclass(frozen=True)
class Result:
    """How a model did on a split.

    Attributes:
        rmse: On the test rows, in standard deviations of the target.
        nll: Mean negative log density there, noise included.
        seconds: All that it took, of the processor.
        points: Inducing points at the end.
        capped: Seconds of each update since the cap was reached.
    """

    rmse: float
    nll: float
    seconds: float
    points: int
    capped: list[float]

    def __str__(self) -> str:
        return f"RMSE {self.rmse:.4f}, NLL {self.nll:.4f}, {self.seconds:.0f} s"


def in_unit_cube(split: Split) -> Split:
    """Inputs from [-1, 1], where the priors of BoTorch's kernels expect them."""
    return Split(0.5 * (split.X + 1.0), split.Y, 0.5 * (split.test_X + 1.0), split.test_Y)


@torch.no_grad()
def scored(model: Model, split: Split) -> tuple[float, float]:
    """RMSE and negative log density on the test rows."""
    parts = [model.posterior(X, observation_noise=True) for X in split.test_X.split(ROWS)]
    mean = torch.cat([part.mean for part in parts])
    return scores(mean, torch.cat([part.variance for part in parts]), split.test_Y)


# --- the stream ---------------------------------------------------------------------------------


def streamed(split: Split, sizes: Sizes) -> Result:
    """OSGPR from the first row to the last."""
    began = time.process_time()
    head = slice(sizes.first)
    model = OSGPR(
        split.X[head], split.Y[head], allocator=OIPS(RHO), max_points=POINTS, window=WINDOW
    )
    relearn(model)
    capped = []
    for rows in torch.arange(sizes.first, len(split.Y)).split(sizes.batch):
        full = len(model.inducing_points) == POINTS
        taken = processor_seconds(partial(model.update, split.X[rows], split.Y[rows]))
        capped += [taken] if full else []
        learn_when_due(model, sizes.learn)
    elapsed = time.process_time() - began
    return Result(*scored(model, split), elapsed, len(model.inducing_points), capped)


def learn_when_due(model: OSGPR, iterations: Mapping[int, int]) -> None:
    """Points and hyperparameters, for as many iterations as the number of rows asks for."""
    count = int(model.num_observations)
    if count in iterations:
        learn_points(model, iterations[count])
    if count == max(iterations):
        model.allocator = None


# --- the peer -----------------------------------------------------------------------------------


def batch(split: Split, allowed: float) -> tuple[Result, int]:
    """The batch SVGP after so many seconds, and the steps that it did."""
    began = time.process_time()
    model = SingleTaskVariationalGP(
        split.X, split.Y, inducing_points=min(POINTS, len(split.Y)), outcome_transform=None
    )
    objective = VariationalELBO(model.likelihood, model.train().model, len(split.Y))
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    steps = 0
    while (used := time.process_time() - began) < allowed:
        optimizer.param_groups[0]["lr"] = RATE if used < allowed * 2.0 / 3.0 else LAST_RATE
        rows = torch.randint(len(split.Y), (MINIBATCH,))
        optimizer.zero_grad()
        (-objective(model(split.X[rows]), split.Y[rows, 0])).backward()
        optimizer.step()
        steps += 1
    return Result(*scored(model.eval(), split), used, POINTS, []), steps


def compare(name: str, sizes: Sizes) -> list[Claim]:
    """One set."""
    pairs = []
    for number in range(sizes.splits):
        split = in_unit_cube(simulated(number) if name == SMALL else split_of(name, number))
        ours = streamed(split, sizes)
        print(f"{name}, stream: {ours}, {ours.points} points", flush=True)
        theirs, steps = batch(split, PATIENCE * ours.seconds)
        print(f"{name}, batch: {theirs}, {steps} steps of {MINIBATCH}", flush=True)
        pairs.append((ours, theirs))
    return claims_of(name, pairs, sizes)


def claims_of(name: str, pairs: list[tuple[Result, Result]], sizes: Sizes) -> list[Claim]:
    """Medians over splits."""
    ratio = statistics.median(a.rmse / b.rmse for a, b in pairs)
    detail = "; ".join(f"{a.rmse:.4f} and {b.rmse:.4f}" for a, b in pairs)
    density = statistics.median(a.nll - b.nll for a, b in pairs)
    densities = "; ".join(f"{a.nll:.4f} and {b.nll:.4f}" for a, b in pairs)
    elapsed = statistics.median(a.seconds for a, _ in pairs)
    counts = ", ".join(str(a.points) for a, _ in pairs)
    return [
        at_most(f"{name}: RMSE over the batch SVGP's", ratio, NO_WORSE, "", detail),
        stated(f"{name}: RMSE, the stream", statistics.median(a.rmse for a, _ in pairs)),
        stated(f"{name}: RMSE, the batch SVGP", statistics.median(b.rmse for _, b in pairs)),
        stated(f"{name}: NLL above the batch SVGP's", density, "nats", densities),
        stated(f"{name}: the stream, learning included", elapsed, "s", f"{counts} points"),
        *flatness(f"{name}: update of {sizes.batch}", [a.capped for a, _ in pairs]),
    ]


def flatness(name: str, streams: list[list[float]]) -> list[Claim]:
    """Medians of the last tenth of each stream's updates at the cap over the first tenth."""
    ends = [(median_of(times, 0.0), median_of(times, 1.0 - TENTH)) for times in streams if times]
    if not ends:
        return []
    detail = "; ".join(f"{1e3 * a:.0f} and {1e3 * b:.0f} ms" for a, b in ends)
    ratio = statistics.median(late / early for early, late in ends)
    return [at_most(f"{name}, last tenth over first", ratio, FLAT, "", detail)]


def median_of(times: list[float], begin: float) -> float:
    """Median of a tenth of the times."""
    count = max(1, round(TENTH * len(times)))
    first = min(round(begin * len(times)), len(times) - count)
    return statistics.median(times[first : first + count])


# --- a million rows -----------------------------------------------------------------------------


def throughput(sizes: Sizes, rho: float) -> list[Claim]:
    """Rows a second in a long stream, with OIPS' threshold."""
    n, chunk = sizes.long, sizes.chunk
    stream = levy_stream(n, chunk, 6)
    model = OSGPR(*next(stream), allocator=OIPS(rho), max_points=POINTS)
    relearn(model)
    times, held, points, elapsed = [], [], [], 0.0
    for X, Y in stream:
        began = time.perf_counter()
        times.append(processor_seconds(partial(model.update, X, Y)))
        elapsed += time.perf_counter() - began
        points.append(float(len(model.inducing_points)))
        held.append(tensor_bytes(model) if len(times) % (n // chunk // 10) == 0 else 0)
    kept = [size for size in held if size > 0]
    where = f"{n:,} rows of 6 inputs by {chunk:,}, {len(model.inducing_points)} points"
    late = chunk / median_of(times, 1.0 - TENTH)
    grown = "{:.0f} and {:.0f} points".format(*(median_of(points, at) for at in (0.0, 1.0 - TENTH)))
    return [
        at_least(where, chunk * len(times) / elapsed, PER_SECOND, "rows/s"),
        stated(f"{where}, of the processor's", chunk * len(times) / sum(times), "rows/s"),
        stated(f"{where}, of the processor's, last tenth", late, "rows/s", "median"),
        *(replace(claim, detail=f"{claim.detail}; {grown}") for claim in flatness(where, [times])),
        at_most(f"{where}: memory of the model, last over first tenth", kept[-1] / kept[0], FLAT),
    ]


def main() -> None:
    """Run it."""
    options = start(__doc__)
    warnings.simplefilter("ignore")
    sizes = options.pick(
        Sizes(1, 500, 100, 1_000_000, 1_000, ITERATIONS), Sizes(1, 30, 10, 2_000, 200, {40: 2})
    )
    claims = throughput(sizes, DEFAULT_RHO) + throughput(sizes, RHO)
    for name in options.pick(SETS, (SMALL,)):
        claims += compare(name, sizes)
    settings = {**vars(sizes), "points": POINTS, "rho": RHO, "window": WINDOW, "rate": RATE}
    finish("streaming_points", claims, options, settings)


if __name__ == "__main__":
    main()
