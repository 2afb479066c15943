"""A Bayesian last layer in a stream, beside inducing points and a batch SVGP, at equal time.

elevators (18 inputs), protein (9) and kin40k (8) in the unit cube, targets standardised by the
training rows. Each model has the same number of seconds of the processor, its learning included,
and one thread; predictions do not count.

- BayesianLastLayer: two tanh layers of 64 units. It begins with 4,096 rows, as many as it holds,
  takes the others by hundreds, and learns the network for an equal share of the time whenever all
  rows that are held are new, and at the end; then noise, scale and mean alone, from statistics.
- OSGPR: begins with 500 rows. At most 512 points are learned together with the hyperparameters when
  the first 4,096 rows have come, for most of the time; then they stay.
- BoTorch's SingleTaskVariationalGP: 512 points, random rows to begin with (its default choice alone
  takes longer than that), by Adam on minibatches of all rows.

The last one is no stream: it has all rows from the beginning. What an update of a row costs is
measured at the end, and beside it what the same model says without the statistics of the rows
before the window: what it was worth to carry these over to the features that were learned.
"""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskVariationalGP
from gpytorch.mlls import ExactMarginalLogLikelihood, VariationalELBO
from torch import Tensor

from benchmarks.accuracy.streaming_points import (
    LAST_RATE,
    MINIBATCH,
    NO_WORSE,
    POINTS,
    RHO,
    SETS,
    SMALL,
    Result,
    in_unit_cube,
    scored,
)
from benchmarks.accuracy.streaming_points import RATE as PEER_RATE
from benchmarks.accuracy.uci import Split, simulated, split_of
from benchmarks.common.harness import Options, processor_seconds, start
from benchmarks.common.report import Claim, at_most, finish, stated, table
from bo_stream import OSGPR, BayesianLastLayer, learn_points
from bo_stream.allocation import OIPS
from bo_stream.models.fitting import relearn

FIRST = 500
WINDOW = 4_096
BATCH = 100
SECONDS = 25.0
RATE = 3e-3
ITERATIONS = 5
"""Of OSGPR's learning between two looks at the clock."""
LEFT = 0.8
"""Part of its time in which OSGPR learns; the rest is for the stream."""


@dataclass(frozen=True)
class Sizes:
    """Rows that OSGPR begins with, rows that are held, seconds of each model, inducing points."""

    first: int
    window: int
    seconds: float
    points: int


class Clock:
    """Seconds of the processor since it was made."""

    def __init__(self) -> None:
        self._began = time.process_time()

    def __call__(self) -> float:
        return time.process_time() - self._began


def chunks(split: Split, first: int) -> list[tuple[Tensor, Tensor]]:
    """The rows after the first ones, a batch of the stream at a time."""
    rows = zip(split.X[first:].split(BATCH), split.Y[first:].split(BATCH), strict=True)
    return list(rows)


# --- the models ---------------------------------------------------------------------------------


def last_layer(split: Split, sizes: Sizes) -> tuple[Result, BayesianLastLayer]:
    """From the first row to the last."""
    clock = Clock()
    head = slice(sizes.window)
    model = BayesianLastLayer(split.X[head], split.Y[head], window=sizes.window)
    rounds, done = max(1, round(len(split.Y) / sizes.window)), 1
    learn(model, clock, sizes.seconds / rounds)
    for X, Y in chunks(split, sizes.window):
        model.update(X, Y)
        if model.num_observations >= (done + 1) * sizes.window and done < rounds - 1:
            done += 1
            learn(model, clock, sizes.seconds * done / rounds)
    learn(model, clock, sizes.seconds)
    learn_head(model)
    return Result(*scored(model, split), clock(), model.rank, []), model


def learn(model: BayesianLastLayer, clock: Clock, until: float) -> None:
    """Fit until a clock shows so many seconds."""
    model.fit(seconds=max(0.0, until - clock()), learning_rate=RATE, progress=False)


def learn_head(model: BayesianLastLayer) -> None:
    """Noise, output scale and mean, from the statistics of all rows."""
    model.network.requires_grad_(False)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    model.network.requires_grad_(True)


def inducing_points(split: Split, sizes: Sizes) -> Result:
    """Points and hyperparameters of the first rows; then the stream."""
    clock = Clock()
    head = slice(sizes.first)
    model = OSGPR(
        split.X[head],
        split.Y[head],
        allocator=OIPS(RHO),
        max_points=sizes.points,
        window=sizes.window,
    )
    relearn(model)
    for X, Y in chunks(split, sizes.first):
        model.update(X, Y)
        if model.allocator is not None and model.num_observations >= sizes.window:
            while clock() < LEFT * sizes.seconds:
                learn_points(model, ITERATIONS)
            model.allocator = None
    return Result(*scored(model, split), clock(), len(model.inducing_points), [])


def batch(split: Split, sizes: Sizes) -> tuple[Result, int]:
    """The batch SVGP, from random rows as inducing points, and its steps."""
    clock = Clock()
    model = SingleTaskVariationalGP(
        split.X, split.Y, inducing_points=split.X[: sizes.points].clone(), outcome_transform=None
    )
    objective = VariationalELBO(model.likelihood, model.train().model, len(split.Y))
    optimizer, steps = torch.optim.Adam(model.parameters(), lr=PEER_RATE), 0
    while (used := clock()) < sizes.seconds:
        early = used < sizes.seconds * 2.0 / 3.0
        optimizer.param_groups[0]["lr"] = PEER_RATE if early else LAST_RATE
        rows = torch.randint(len(split.Y), (MINIBATCH,))
        optimizer.zero_grad()
        (-objective(model(split.X[rows]), split.Y[rows, 0])).backward()
        optimizer.step()
        steps += 1
    return Result(*scored(model.eval(), split), used, sizes.points, []), steps


# --- what carrying over is worth, and what an update costs --------------------------------------


def of_the_window_alone(model: BayesianLastLayer) -> BayesianLastLayer:
    """The same network and hyperparameters, with the rows that are held and no others."""
    forgetful, rows = copy.deepcopy(model), model._memory.rows
    forgetful.clear()
    X = rows.X.to(model.train_targets)
    Y = (rows.targets + model._outcomes.shift.unsqueeze(-1)).mT.to(X)
    return forgetful.update(X, Y)


def update_times(model: BayesianLastLayer, split: Split, repeats: int) -> tuple[float, float]:
    """Median seconds of an update of one row, and of one with the next prediction at one input."""
    row = split.X[:1], split.Y[:1]
    model.posterior(row[0])

    def both() -> None:
        model.update(*row).posterior(row[0])

    def median(task: Callable[[], object]) -> float:
        return statistics.median(processor_seconds(task) for _ in range(repeats))

    return median(lambda: model.update(*row)), median(both)


def claims_of(name: str, split: Split, sizes: Sizes, repeats: int) -> tuple[list[Claim], list[str]]:
    """One set: the models taking turns."""
    ours, model = last_layer(split, sizes)
    print(f"{name}, last layer: {ours}", flush=True)
    points = inducing_points(split, sizes)
    print(f"{name}, OSGPR: {points}, {points.points} points", flush=True)
    theirs, steps = batch(split, sizes)
    print(f"{name}, batch SVGP: {theirs}, {steps} steps", flush=True)
    alone = scored(of_the_window_alone(model), split)
    update, both = update_times(model, split, repeats)
    row = [
        name,
        *(f"{r.rmse:.3f}, {r.nll:.3f} ({r.seconds:.0f} s)" for r in (ours, points, theirs)),
    ]
    kept = f"{alone[0]:.4f}, {alone[1]:.4f} of the window alone"
    claims = [
        at_most(f"{name}: RMSE over OSGPR's", ours.rmse / points.rmse, NO_WORSE, "", row[2]),
        at_most(
            f"{name}: RMSE over the batch SVGP's", ours.rmse / theirs.rmse, NO_WORSE, "", row[3]
        ),
        stated(f"{name}: NLPD above OSGPR's", ours.nll - points.nll, "nats"),
        stated(f"{name}: NLPD above the batch SVGP's", ours.nll - theirs.nll, "nats"),
        stated(
            f"{name}: RMSE over that of the window's rows alone", ours.rmse / alone[0], "", kept
        ),
        stated(f"{name}: update of one row", 1e3 * update, "ms"),
        stated(f"{name}: update of one row and a prediction", 1e3 * both, "ms"),
    ]
    return claims, row


def main() -> None:
    """Run it."""
    options: Options = start(__doc__)
    warnings.simplefilter("ignore")
    sizes = options.pick(Sizes(FIRST, WINDOW, SECONDS, POINTS), Sizes(20, 40, 0.5, 20))
    claims, rows = [], []
    for name in options.pick(SETS, (SMALL,)):
        split = in_unit_cube(simulated(0) if name == SMALL else split_of(name, 0))
        found, row = claims_of(name, split, sizes, options.pick(200, 3))
        claims += found
        rows.append(row)
    print(table(["RMSE, NLPD", "last layer", "OSGPR", "batch SVGP"], rows) + "\n")
    finish("last_layer", claims, options, vars(sizes))


if __name__ == "__main__":
    main()
