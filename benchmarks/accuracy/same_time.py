"""All models on the same splits, each for the same seconds of one thread: which predicts best?

Six sets of 4 to 20 inputs, and modis_lst: 105,569 rows of two. Inputs in the unit cube and targets
standardised by the training rows; a tenth held out, of modis_lst what clouds hide. Every model has
all training rows from the beginning and the same seconds by the clock, all of its learning
included: run it on a quiet machine, with OMP_NUM_THREADS=1. What a user would call is called, with
``seconds`` where a model takes that; predictions do not count. RMSE and negative log density are of
the held-out rows.

- exact: BoTorch's SingleTaskGP of as many random rows as the time allows (1,000, 2,000 and 4,000
  for 1, 5 and 20 minutes), which is what there is where no approximation is wanted.
- SVGP: BoTorch's SingleTaskVariationalGP with 512 points, at its best start: hyperparameters of an
  exact GP of 1,000 rows, found in a fifth of the time, points by greedy variance reduction among
  10,000; Adam on minibatches, for the last third of the time at a tenth of the rate.
- OSGPR: 512 points learned with the hyperparameters from the first 4,096 rows for most of the
  time, then the others in a stream.
- BayesianLastLayer: two tanh layers of 64 units, all rows stored.
- DecoupledGP: 2,048 and 128 functions; half of the time steps, half the collapsed bound.
- QSGP: 20,000 Fourier features, single precision.
- WISKI: a grid over all inputs up to three of them, else a sum of one kernel for each input;
  learned by its evidence, for as long as that takes.

Finished fits are kept in the folder of results: a run that was stopped goes on from them, and one
with more minutes or splits adds to them.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from botorch.exceptions.warnings import BotorchWarning
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP, SingleTaskVariationalGP
from botorch.models.model import Model
from botorch.models.utils.inducing_point_allocators import GreedyVarianceReduction
from gpytorch.kernels import AdditiveKernel, Kernel, RBFKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood, VariationalELBO

from benchmarks.accuracy.streaming_points import LAST_RATE, RATE, in_unit_cube, scored
from benchmarks.accuracy.uci import Split, simulated, split_of
from benchmarks.common.harness import start, tensor_bytes
from benchmarks.common.report import Claim, finish, stated
from benchmarks.common.resume import Finished
from bo_stream import (
    OSGPR,
    QSGP,
    WISKI,
    BayesianLastLayer,
    DecoupledGP,
    FourierFeatures,
    learn_points,
)
from bo_stream.allocation import OIPS
from bo_stream.models.base import StreamingGP
from bo_stream.models.fitting import relearn

SETS = (
    "skillcraft",
    "powerplant",
    "elevators",
    "kin40k",
    "protein",
    "keggdirected",
    "modis_lst",
)
SPLITS = {"modis_lst": 1}
"""Splits of sets that come with their own."""
SMALL = "simulated"
POINTS, WINDOW = 512, 4_096
EXACT_ROWS = {1.0: 1_000, 5.0: 2_000, 20.0: 4_000}
"""By minutes."""
LEARNING = 0.8
"""Part of its time in which OSGPR learns, the rest is for the stream; and the exact GP."""
START = 0.2
"""Most of its time that SVGP takes to find where to begin."""
CHUNK = 10_000
ON_ONE_GRID = 3
"""Most inputs of a grid."""


@dataclass(frozen=True)
class Sizes:
    """Of models, in a full or in a smoke run."""

    points: int
    window: int
    functions: int
    features: int
    start_rows: int


class Clock:
    """Seconds since it was made, and how many of those that are allowed are left."""

    def __init__(self, allowed: float) -> None:
        self._began, self._allowed = time.monotonic(), allowed

    def __call__(self) -> float:
        return time.monotonic() - self._began

    def left(self, share: float = 1.0) -> float:
        """Seconds until a share of the time is over, at least 0."""
        return max(0.0, share * self._allowed - self())


@dataclass(frozen=True)
class Fit:
    """What a model reached.

    Attributes:
        rmse: On the held-out rows, in standard deviations of the target.
        nll: Mean negative log density there, noise included.
        seconds: Of learning, by the clock.
        megabytes: Of the model's tensors.
    """

    rmse: float
    nll: float
    seconds: float
    megabytes: float

    def __str__(self) -> str:
        return f"RMSE {self.rmse:.3f}, NLL {self.nll:.3f}, {self.seconds:.0f} s"


# --- the models -----------------------------------------------------------------------------------


def stream(model: StreamingGP, split: Split, first: int) -> None:
    """Put all rows but the first ones into a model."""
    for rows in zip(split.X[first:].split(CHUNK), split.Y[first:].split(CHUNK), strict=True):
        model.update(*rows)


def exact_gp(split: Split, rows: int, seconds: float) -> SingleTaskGP:
    """BoTorch's exact GP of some of the rows, fitted for at most so many seconds."""
    model = SingleTaskGP(split.X[:rows], split.Y[:rows], outcome_transform=None)
    objective = ExactMarginalLogLikelihood(model.likelihood, model)
    fit_gpytorch_mll(objective, optimizer_kwargs={"timeout_sec": seconds}, max_attempts=1)
    return model


def exact(split: Split, clock: Clock, sizes: Sizes, rows: int) -> Model:
    """The exact GP for most of the time, if it takes so long."""
    return exact_gp(split, rows, clock.left(LEARNING))


def svgp(split: Split, clock: Clock, sizes: Sizes, rows: int) -> Model:
    """BoTorch's sparse variational GP from the hyperparameters of an exact one."""
    begun = exact_gp(split, sizes.start_rows, clock.left(START))
    modules = {
        "likelihood": begun.likelihood,
        "covar_module": begun.covar_module,
        "mean_module": begun.mean_module,
    }
    points = GreedyVarianceReduction().allocate_inducing_points(
        split.X[:CHUNK], begun.covar_module, sizes.points, torch.Size()
    )
    model = SingleTaskVariationalGP(
        split.X, inducing_points=points, outcome_transform=None, **modules
    )
    objective = VariationalELBO(model.likelihood, model.train().model, len(split.Y))
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    while clock.left() > 0.0:
        optimizer.param_groups[0]["lr"] = RATE if clock.left(2.0 / 3.0) > 0.0 else LAST_RATE
        drawn = torch.randint(len(split.Y), (512,))
        optimizer.zero_grad()
        (-objective(model(split.X[drawn]), split.Y[drawn, 0])).backward()
        optimizer.step()
    return model.eval()


def osgpr(split: Split, clock: Clock, sizes: Sizes, rows: int) -> Model:
    """Points and hyperparameters of the first rows, then the stream."""
    head = slice(sizes.start_rows)
    model = OSGPR(
        split.X[head],
        split.Y[head],
        allocator=OIPS(0.95),
        max_points=sizes.points,
        window=sizes.window,
    )
    relearn(model)
    first = slice(sizes.start_rows, sizes.window)
    model.update(split.X[first], split.Y[first])
    while clock.left(LEARNING) > 0.0:
        learn_points(model, 5)
    model.allocator = None
    stream(model, split, sizes.window)
    return model


def last_layer(split: Split, clock: Clock, sizes: Sizes, rows: int) -> Model:
    """A network with a Bayesian last layer."""
    model = BayesianLastLayer(split.X, split.Y, window=len(split.Y))
    model.fit(seconds=clock.left(), progress=False)
    return model


def decoupled(split: Split, clock: Clock, sizes: Sizes, rows: int) -> Model:
    """Two bases: many functions for the mean, few for the covariance."""
    many = min(sizes.functions, len(split.Y))
    model = DecoupledGP(split.X, split.Y, num_mean=many, num_covar=max(2, many // 16))
    model.fit(seconds=clock.left(0.5), progress=False)
    model.fit_collapsed(1_000, seconds=clock.left(), progress=False)
    return model


def qsgp(split: Split, clock: Clock, sizes: Sizes, rows: int) -> Model:
    """Very many functions, a few of the rows a step."""
    model = QSGP(
        split.X,
        split.Y,
        basis=FourierFeatures(sizes.features),
        update_steps=0,
        arithmetic=torch.float32,
    )
    model.fit(seconds=clock.left(), progress=False)
    return model


def wiski(split: Split, clock: Clock, sizes: Sizes, rows: int) -> Model:
    """A grid over all inputs, or one for each."""
    dim = split.X.shape[-1]
    kernel: Kernel = ScaleKernel(RBFKernel(ard_num_dims=dim))
    if dim > ON_ONE_GRID:
        kernel = AdditiveKernel(*(ScaleKernel(RBFKernel(active_dims=(i,))) for i in range(dim)))
    bounds = torch.tensor([[0.0] * dim, [1.0] * dim])
    model = WISKI(split.X[:CHUNK], split.Y[:CHUNK], covar_module=kernel, bounds=bounds)
    stream(model, split, CHUNK)
    relearn(model)
    return model


MODELS: dict[str, Callable[[Split, Clock, Sizes, int], Model]] = {
    "exact": exact,
    "SVGP": svgp,
    "OSGPR": osgpr,
    "BayesianLastLayer": last_layer,
    "DecoupledGP": decoupled,
    "QSGP": qsgp,
    "WISKI": wiski,
}


# --- the table ------------------------------------------------------------------------------------


def data_of(name: str, number: int) -> Split:
    """Split NUMBER of a set, in the unit cube; held-out rows outside it are moved to its edge."""
    split = in_unit_cube(simulated(number) if name == SMALL else split_of(name, number))
    return replace(split, test_X=split.test_X.clamp(0.0, 1.0))


def fitted(model: str, split: Split, minutes: float, sizes: Sizes) -> Fit:
    """One model on one split; one that fails is a result, too."""
    torch.manual_seed(0)
    clock = Clock(60.0 * minutes)
    try:
        learned = MODELS[model](split, clock, sizes, EXACT_ROWS.get(minutes, sizes.start_rows))
        seconds = clock()
        return Fit(*scored(learned, split), seconds, tensor_bytes(learned) / 1e6)
    except (RuntimeError, ValueError) as error:
        print(f"{model} failed: {error}", flush=True)
        return Fit(math.nan, math.nan, clock(), math.nan)


def claims_of(name: str, minutes: float, fits: Mapping[str, Sequence[Fit]]) -> list[Claim]:
    """Medians over the splits of a set, a claim for each model."""
    claims = []
    for model, runs in fits.items():
        rmse = statistics.median(run.rmse for run in runs)
        detail = "; ".join(f"{run}, {run.megabytes:.0f} MB" for run in runs)
        claims.append(stated(f"{name}, {minutes:g} minutes, {model}: RMSE", rmse, "", detail))
    return claims


def main() -> None:
    """Run what is asked for."""
    options = start(
        __doc__,
        values={
            "sets": (",".join(SETS), "names with commas"),
            "models": (",".join(MODELS), "names with commas"),
            "minutes": ("1,5,20", "of each fit, numbers with commas"),
            "splits": ("5", "how many"),
        },
    )
    warnings.simplefilter("ignore", BotorchWarning)
    sets = options.pick(options.values["sets"].split(","), [SMALL])
    models = options.values["models"].split(",")
    budgets = options.pick([float(m) for m in options.values["minutes"].split(",")], [0.005])
    splits = range(options.pick(int(options.values["splits"]), 1))
    sizes = options.pick(Sizes(POINTS, WINDOW, 2_048, 20_000, 1_000), Sizes(10, 40, 40, 40, 20))
    name = f"same_time{options.pick('', '.smoke')}.parts.json"
    done, claims = Finished(options.out / name, vars(sizes)), list[Claim]()
    found: dict[str, dict[str, float]] = {}
    for set_name in sets:
        for minutes in budgets:
            fits: dict[str, list[Fit]] = {model: [] for model in models}
            for number in splits[: SPLITS.get(set_name)]:
                split = data_of(set_name, number)
                for model in models:
                    key = f"{set_name}, {number}, {minutes:g} min, {model}"
                    fit = done.part(key, Fit, partial(fitted, model, split, minutes, sizes))
                    print(f"{key}: {fit}", flush=True)
                    fits[model].append(fit)
                    found[key] = asdict(fit)
            claims += claims_of(set_name, minutes, fits)
    finish("same_time", claims, options, {**vars(sizes), "fits": found})


if __name__ == "__main__":
    main()
