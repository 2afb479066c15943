"""Streaming classification: as accurate as the exact Dirichlet GP fitted to the whole batch.

As the WISKI paper's section 5.2: banana (2 inputs) and svmguide1 (4 inputs, on a grid of 8 nodes a
side), the kernel first learned from 5 % of the training rows, the rest coming a few rows at a time.
Hyperparameters are learned anew, from the memory alone, whenever the rows have doubled and at the
end. The peer is gpytorch's exact GP with its Dirichlet likelihood, with the same kernel and mean,
learned from all training rows by the same optimiser, and scored on the same test rows. Split 0 is
the source's, the others are random ones of the same size.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch
from botorch.fit import fit_gpytorch_mll
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from benchmarks.common.data import real_file
from benchmarks.common.harness import Options, start
from benchmarks.common.report import Claim, at_most, finish, stated
from benchmarks.peers.label_peer import ExactDirichletGP
from bo_stream import DirichletWISKI

ALPHA_EPSILON = 0.01
FIRST = 0.05
POINTS = 0.5
"""Accuracy that may be lost, in points of a hundred."""
PART = 0.2
FLAT = 1.5
MAXITER = 100
SOME = 1_000
"""Rows from which the peer is learned before it is from all."""
POLISH = 10
"""Most iterations of the latter."""


@dataclass(frozen=True)
class Task:
    """A data set and how it is streamed.

    Attributes:
        name: Of the file.
        grid_size: Nodes a side; None: the default.
        rows: In an update.
    """

    name: str
    grid_size: int | None
    rows: int


TASKS = (Task("banana", None, 2), Task("svmguide1", 8, 10))


@dataclass(frozen=True)
class Split:
    """Training rows in random order and test rows, inputs scaled by the training rows."""

    X: Tensor
    labels: Tensor
    test_X: Tensor
    test_labels: Tensor


@dataclass(frozen=True)
class Result:
    """How a model did on a split.

    Attributes:
        accuracy: On the test rows, in points of a hundred.
        nll: Mean negative log probability of their labels.
        updates: Seconds of each update and the next posterior, learning not counted.
        learning: Seconds of all learning.
    """

    accuracy: float
    nll: float
    updates: list[float]
    learning: float


def split_of(name: str, number: int) -> Split:
    """Split ``number`` of a set."""
    with np.load(real_file(name), allow_pickle=False) as arrays:
        X, y = (torch.as_tensor(arrays[key], dtype=torch.float64) for key in ("X", "y"))
        test = torch.as_tensor(arrays["test_mask"])[:, 0]
    generator = torch.Generator().manual_seed(number)
    order = torch.randperm(len(y), generator=generator)
    if number == 0:
        return scaled(X, (y > 0).long(), order[~test[order]], order[test[order]])
    train = int((~test).sum())
    return scaled(X, (y > 0).long(), order[:train], order[train:])


def scaled(X: Tensor, labels: Tensor, train: Tensor, test: Tensor) -> Split:
    """Inputs brought to the unit cube by the training rows alone."""
    low, high = X[train].amin(0), X[train].amax(0)
    X = (X - low) / (high - low)
    return Split(X[train], labels[train], X[test], labels[test])


def scores(probabilities: Tensor, labels: Tensor) -> tuple[float, float]:
    """Accuracy in points and mean negative log probability."""
    hits = (probabilities.argmax(-1) == labels).double().mean()
    chosen = probabilities.gather(-1, labels.unsqueeze(-1)).clamp_min(1e-300)
    return 100.0 * float(hits), -float(chosen.log().mean())


def learn(model: DirichletWISKI, maxiter: int) -> float:
    """Seconds of a fit from the memory."""
    begin = time.perf_counter()
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": maxiter}})
    return time.perf_counter() - begin


def streamed(task: Task, split: Split, maxiter: int) -> Result:
    """A few rows at a time."""
    first = max(10, round(FIRST * len(split.labels)))
    model = DirichletWISKI(
        split.X[:first],
        split.labels[:first],
        num_classes=2,
        alpha_epsilon=ALPHA_EPSILON,
        bounds=torch.tensor([[-0.1], [1.1]]).expand(2, split.X.shape[-1]),
        grid_size=task.grid_size,
    )
    learning, due, updates = learn(model, maxiter), 2 * first, []
    probe = split.test_X[:10]
    for rows in torch.arange(first, len(split.labels)).split(task.rows):
        begin = time.perf_counter()
        model.update(split.X[rows], split.labels[rows]).posterior(probe)
        updates.append(time.perf_counter() - begin)
        if int(rows[-1]) + 1 >= due:
            learning, due = learning + learn(model, maxiter), 2 * due
            model.posterior(probe)
    learning += learn(model, maxiter)
    with torch.no_grad():
        accuracy, nll = scores(model.class_probabilities(split.test_X), split.test_labels)
    return Result(accuracy, nll, updates, learning)


def exact(split: Split, maxiter: int) -> Result:
    """The exact GP of the whole batch, learned from some rows first to save iterations."""
    begin = time.perf_counter()
    some = ExactDirichletGP(split.X[:SOME], split.labels[:SOME], ALPHA_EPSILON)
    some.learn(maxiter)
    model = ExactDirichletGP(split.X, split.labels, ALPHA_EPSILON)
    model.covar_module, model.mean_module = some.covar_module, some.mean_module
    model.learn(min(maxiter, POLISH))
    learning = time.perf_counter() - begin
    accuracy, nll = scores(model.class_probabilities(split.test_X), split.test_labels)
    return Result(accuracy, nll, [], learning)


def claims_of(task: Task, ours: list[Result], theirs: list[Result]) -> list[Claim]:
    """Medians over splits."""
    pairs = list(zip(ours, theirs, strict=True))
    lost = statistics.median(b.accuracy - a.accuracy for a, b in pairs)
    worse = statistics.median(a.nll - b.nll for a, b in pairs)
    accuracies = ", ".join(f"{a.accuracy:.2f}/{b.accuracy:.2f}" for a, b in pairs)
    densities = ", ".join(f"{a.nll:.4f}/{b.nll:.4f}" for a, b in pairs)
    updates = [second for result in ours for second in result.updates]
    learning, peer = (statistics.median(r.learning for r in side) for side in (ours, theirs))
    return [
        at_most(f"{task.name}: accuracy below the exact GP's", lost, POINTS, "points", accuracies),
        stated(f"{task.name}: NLL above the exact GP's", worse, "nats", densities),
        stated(
            f"{task.name}: an update of {task.rows} and the next posterior, median",
            1e3 * statistics.median(updates),
            "ms",
            f"all learning {learning:.1f} s; exact {peer:.1f} s",
        ),
        at_most(f"{task.name}: last fifth of the updates over the first", flatness(ours), FLAT),
    ]


def flatness(results: list[Result]) -> float:
    """Median time of the last updates over that of the first."""
    part = max(1, round(PART * len(results[0].updates)))
    return statistics.median(
        statistics.median(r.updates[-part:]) / statistics.median(r.updates[:part]) for r in results
    )


def simulated(number: int) -> Split:
    """A small set of its own, for smoke runs without the real ones."""
    X = torch.rand(120, 2, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    labels = ((6.0 * X[:, 0]).sin() > 2.0 * X[:, 1] - 1.0).long()
    return scaled(X, labels, torch.arange(80), torch.arange(80, 120))


def run(task: Task, options: Options) -> list[Claim]:
    """One set."""
    numbers = range(options.pick(3, 1))
    splits = [simulated(i) if options.smoke else split_of(task.name, i) for i in numbers]
    maxiter = options.pick(MAXITER, 3)
    ours = [streamed(task, split, maxiter) for split in splits]
    return claims_of(task, ours, [exact(split, maxiter) for split in splits])


def main() -> None:
    """Run it."""
    options = start(__doc__)
    tasks = options.pick(TASKS, (Task("simulated", 12, 5),))
    claims = [claim for task in tasks for claim in run(task, options)]
    settings = {"alpha_epsilon": ALPHA_EPSILON, "first": FIRST, "maxiter": MAXITER}
    finish("classification", claims, options, settings)


if __name__ == "__main__":
    main()
