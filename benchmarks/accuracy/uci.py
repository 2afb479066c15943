"""Streaming UCI sets through a linear stem: as good as the exact GP with a stem trained in batch.

As the WISKI paper's section 5.1: inputs scaled to [-1, 1] and targets standardised by the training
rows, a linear stem to two dimensions, a 16 x 16 grid, pretraining on 5 % of the training rows, then
one point at a time with a gradient step. Two ways to go on: "relearned" keeps at most ``KEEP``
observations and learns the stem anew from them whenever their number has doubled, and otherwise
moves the kernel alone; "stepped" (one split) is the paper's, a step of the stem and one of the
kernel. The peer is gpytorch's exact GP with the same kind of stem: both are learned from
``LEARN_ROWS`` training rows by the same optimiser, predict from ``EXACT_ROWS`` of them, and are
scored on the same test rows. Two more streams, O-SVGP and local GPs, start from the stem, kernel
and noise that WISKI learned from the same first rows.

Each finished result is written to a file, so that an interrupted benchmark goes on where it was;
the file is removed at the end.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch import Tensor

from benchmarks.accuracy.stream_peers import PEERS, Projected
from benchmarks.common.data import real_file
from benchmarks.common.harness import start
from benchmarks.common.report import Claim, at_most, finish, stated
from benchmarks.common.resume import Finished
from benchmarks.peers.stem_peer import ExactStemGP
from bo_stream import WISKI, LinearStem, OnlineLearner, pretrain

SETS = ("skillcraft", "powerplant", "elevators", "protein")
PRETRAIN = 0.05
LEARN_ROWS = 2_000
EXACT_ROWS = 6_000
KEEP = 2_000
NO_WORSE = 1.03
MILLISECONDS = 6.0
LATE_SHARE = 0.1


@dataclass(frozen=True)
class Split:
    """Training rows in random order and test rows, all scaled by the training rows.

    Attributes:
        X: ``n x d`` in [-1, 1].
        Y: ``n x 1``, standardised.
        test_X: ``t x d``.
        test_Y: ``t x 1``.
    """

    X: Tensor
    Y: Tensor
    test_X: Tensor
    test_Y: Tensor


@dataclass(frozen=True)
class Result:
    """How a model did on a split.

    Attributes:
        rmse: On the test rows.
        nll: Mean negative log density there, noise included.
        step: Seconds of a streaming step, median.
        mean_step: Their mean, learning anew included.
        late: Median of the last tenth of the steps over that of the first tenth.
    """

    rmse: float
    nll: float
    step: float = 0.0
    mean_step: float = 0.0
    late: float = 0.0

    @classmethod
    def of(cls, rmse: float, nll: float, steps: list[float]) -> Result:
        """Of a stream whose steps took so many seconds."""
        part = max(1, round(LATE_SHARE * len(steps)))
        late = statistics.median(steps[-part:]) / statistics.median(steps[:part])
        return cls(rmse, nll, statistics.median(steps), statistics.mean(steps), late)

    def __str__(self) -> str:
        return f"RMSE {self.rmse:.4f}, NLL {self.nll:.4f}, {1e3 * self.step:.2f} ms"


def split_of(name: str, number: int) -> Split:
    """Split ``number`` of a set, or a random tenth where the set has none."""
    with np.load(real_file(name), allow_pickle=False) as arrays:
        X, y = (torch.as_tensor(arrays[key], dtype=torch.float64) for key in ("X", "y"))
        masks = torch.as_tensor(arrays["test_mask"]) if "test_mask" in arrays else None
    generator = torch.Generator().manual_seed(number)
    test = torch.rand(len(y), generator=generator) < 0.1 if masks is None else masks[:, number]
    train = torch.nonzero(~test).flatten()
    train = train[torch.randperm(len(train), generator=generator)]
    return scaled(X[train], y[train], X[test], y[test])


def scaled(X: Tensor, y: Tensor, test_X: Tensor, test_y: Tensor) -> Split:
    """By the training rows alone."""
    low, high = X.amin(0), X.amax(0)
    width = torch.where(high > low, high - low, torch.ones_like(low))
    mean, sd = y.mean(), y.std()
    return Split(
        2.0 * (X - low) / width - 1.0,
        ((y - mean) / sd).unsqueeze(-1),
        2.0 * (test_X - low) / width - 1.0,
        ((test_y - mean) / sd).unsqueeze(-1),
    )


def scores(mean: Tensor, variance: Tensor, Y: Tensor) -> tuple[float, float]:
    """RMSE and mean negative log density."""
    density = torch.distributions.Normal(mean, variance.sqrt()).log_prob(Y)
    return float((mean - Y).square().mean().sqrt()), float(-density.mean())


def pretrained(split: Split, smoke: bool) -> tuple[WISKI, int]:
    """WISKI with a stem, learned from the first rows, and their number."""
    first = max(12, round(PRETRAIN * len(split.Y)))
    head = slice(first)
    model = WISKI(
        split.X[head],
        split.Y[head],
        stem=LinearStem(split.X.shape[-1], 2),
        grid_size=16,
        covar_module=ScaleKernel(RBFKernel(ard_num_dims=2)),
        outcome_transform=None,
    )
    pretrain(model, split.X[head], split.Y[head], maxiter=maxiter_of(smoke))
    return model, first


def maxiter_of(smoke: bool) -> int:
    """Steps of an optimiser that learns a stem."""
    return 5 if smoke else 200


def streamed(split: Split, relearns: bool, smoke: bool) -> Result:
    """WISKI with a stem, one point at a time."""
    model, first = pretrained(split, smoke)
    head = slice(first)
    learner = OnlineLearner(
        model,
        stem_learning_rate=0.0 if relearns else 0.0005,
        keep=KEEP if relearns else 0,
    )
    learner.offer(split.X[head], split.Y[head])
    steps = stream(learner, split, first, maxiter_of(smoke) if relearns else 0)
    with torch.no_grad():
        posterior = model.posterior(split.test_X, observation_noise=True)
        rmse, nll = scores(posterior.mean, posterior.variance, split.test_Y)
    return Result.of(rmse, nll, steps)


def stream(learner: OnlineLearner, split: Split, first: int, maxiter: int) -> list[float]:
    """The rows after the first ones; seconds of each step, learning anew included where it is."""
    steps, due = [], 2 * first
    for i in range(first, len(split.Y)):
        begin = time.perf_counter()
        learner.step(split.X[i : i + 1], split.Y[i : i + 1])
        if maxiter > 0 and i + 1 == min(due, KEEP):
            learner.relearn(maxiter)
            due *= 2
        steps.append(time.perf_counter() - begin)
    return steps


def exact(split: Split, smoke: bool) -> Result:
    """The exact GP with a stem, both learned from a batch."""
    model = ExactStemGP(
        split.X[:LEARN_ROWS], split.Y[:LEARN_ROWS], LinearStem(split.X.shape[-1], 2)
    )
    model.learn(maxiter=3 if smoke else 200)
    rows = slice(EXACT_ROWS)
    model.set_train_data(split.X[rows], split.Y[rows].squeeze(-1), strict=False)
    mean, variance = model.predict(split.test_X)
    return Result(*scores(mean, variance, split.test_Y))


def another(split: Split, name: str, smoke: bool) -> Result:
    """One of the other streams."""
    model, first = pretrained(split, smoke)
    data = Projected.of(model, split.X, split.Y, split.test_X, first)
    mean, variance, steps = PEERS[name](data)
    return Result.of(*scores(mean, variance, split.test_Y), steps)


def peer_claims(name: str, peer: str, ours: list[Result], theirs: list[Result]) -> list[Claim]:
    """Better than another stream: medians over splits."""
    pairs = list(zip(ours, theirs, strict=True))
    rmse = statistics.median(a.rmse / b.rmse for a, b in pairs)
    nll = statistics.median(a.nll - b.nll for a, b in pairs)
    errors = ", ".join(f"{a.rmse:.3f}/{b.rmse:.3f}" for a, b in pairs)
    densities = ", ".join(f"{a.nll:.3f}/{b.nll:.3f}" for a, b in pairs)
    typical = 1e3 * statistics.median(result.step for result in theirs)
    return [
        at_most(f"{name}: RMSE over that of {peer}", rmse, 1.0, detail=errors),
        at_most(f"{name}: NLL above that of {peer}", nll, 0.0, "nats", densities),
        stated(f"{name}: a step of {peer}, median", typical, "ms"),
    ]


def claims_of(name: str, ours: list[Result], theirs: list[Result], judged: bool) -> list[Claim]:
    """Medians over splits."""
    pairs = list(zip(ours, theirs, strict=True))
    rmse = statistics.median(a.rmse / b.rmse for a, b in pairs)
    nll = statistics.median(a.nll - b.nll for a, b in pairs)
    errors = ", ".join(f"{a.rmse:.3f}/{b.rmse:.3f}" for a, b in pairs)
    densities = ", ".join(f"{a.nll:.3f}/{b.nll:.3f}" for a, b in pairs)
    if not judged:
        return [
            stated(f"{name}: RMSE over the exact GP's", rmse, detail=errors),
            stated(f"{name}: NLL above the exact GP's", nll, "nats", densities),
        ]
    worse = (NO_WORSE - 1.0) * statistics.median(abs(b.nll) for b in theirs)
    return [
        at_most(f"{name}: RMSE over the exact GP's", rmse, NO_WORSE, detail=errors),
        at_most(f"{name}: NLL above the exact GP's", nll, worse, "nats", densities),
        *step_claims(name, ours),
    ]


def step_claims(name: str, ours: list[Result]) -> list[Claim]:
    """Time of a step, and whether it is the same at the end as at the beginning."""
    mean = 1e3 * statistics.fmean(result.mean_step for result in ours)
    return [
        at_most(
            f"{name}: a step, median",
            1e3 * statistics.median(result.step for result in ours),
            MILLISECONDS,
            "ms",
            f"mean, learning anew included, {mean:.2f} ms",
        ),
        stated(
            f"{name}: last tenth of the steps over the first",
            statistics.median(result.late for result in ours),
        ),
    ]


def simulated(number: int) -> Split:
    """A small set of its own, for smoke runs without the real ones."""
    generator = torch.Generator().manual_seed(number)
    X = torch.rand(80, 5, generator=generator, dtype=torch.float64)
    y = (3.0 * X @ torch.arange(5.0).double()).sin()
    return scaled(X[:60], y[:60], X[60:], y[60:])


@dataclass(frozen=True)
class Runner:
    """Results of a set, computed once.

    Attributes:
        name: Of the set.
        splits: Numbers of its splits.
        smoke: Whether all is small.
        finished: Where they are kept.
    """

    name: str
    splits: tuple[int, ...]
    smoke: bool
    finished: Finished

    def results(self, label: str, way: Callable[[Split], Result], splits: int) -> list[Result]:
        """Of a model on the first so many splits."""
        return [self._result(label, way, number) for number in self.splits[:splits]]

    def _result(self, label: str, way: Callable[[Split], Result], number: int) -> Result:
        key = f"{self.name}, {label}, split {number}"
        split = simulated(number) if self.smoke else split_of(self.name, number)
        result = self.finished.part(key, Result, lambda: way(split))
        print(f"{key}: {result}", flush=True)
        return result

    def claims(self) -> list[Claim]:
        """Of the set."""
        smoke, all_splits = self.smoke, len(self.splits)
        ours = self.results("relearned", lambda s: streamed(s, True, smoke), all_splits)
        others = {
            name: self.results(name, partial(another, name=name, smoke=smoke), all_splits)
            for name in PEERS
        }
        stepped = self.results("stepped", lambda s: streamed(s, False, smoke), 1)
        batch = self.results("exact", lambda s: exact(s, smoke), all_splits)
        label = f"{self.name}, relearned"
        claims = claims_of(label, ours, batch, judged=True)
        for name, results in others.items():
            claims += peer_claims(label, name, ours, results)
        return claims + claims_of(f"{self.name}, stepped", stepped, batch[:1], judged=False)


def main() -> None:
    """Run it."""
    options = start(__doc__)
    settings = {"learn_rows": LEARN_ROWS, "exact_rows": EXACT_ROWS, "keep": KEEP}
    file = options.out / f"uci{'.smoke' if options.smoke else ''}.runs.json"
    finished = Finished(file, settings)
    claims = []
    for name in options.pick(SETS, ("simulated",)):
        splits = options.pick((0, 1, 2), (0,))
        claims += Runner(name, splits, options.smoke, finished).claims()
    finished.remove()
    finish("uci", claims, options, settings)


if __name__ == "__main__":
    main()
