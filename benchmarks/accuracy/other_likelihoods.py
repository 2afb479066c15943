"""Labels by OSVGP: in a stream as good as a batch, and asked for where they teach.

banana: the kernel is learned along with the stream, twenty labels an update, inducing points place
themselves; the peer is gpytorch's SVGP with as many points, trained on the whole batch. Each split
has 2,000 training rows and 3,300 test rows.

hotspots_civ (8 inputs): where is the prevalence above a fifth? From 20 labels on, ten at a time,
either at random or the greedy batch of largest mutual information between label and process
(Houlsby et al., 2011), each chosen label supposed to be the likelier one before the next is chosen.
The error is that of the labels of 500 other places, over the whole course and at its end.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from gpytorch.likelihoods import BernoulliLikelihood
from torch import Tensor

from benchmarks.common.data import real
from benchmarks.common.harness import Options, start
from benchmarks.common.report import Claim, at_most, finish, stated
from benchmarks.peers.svgp_peer import batch_accuracy
from bo_stream import OSVGP
from bo_stream.allocation import OIPS

POINTS = 1.0
"""Accuracy that may be lost, in points of a hundred."""
THRESHOLD = 0.2
"""Prevalence of a hotspot."""
RHO = 0.8


@dataclass(frozen=True)
class Labels:
    """Inputs in the unit cube and labels, ``n x d`` and ``n x 1``, in random order."""

    X: Tensor
    Y: Tensor

    def __getitem__(self, rows: Tensor | slice) -> Labels:
        """Some of the rows."""
        return Labels(self.X[rows], self.Y[rows])

    def error(self, model: OSVGP) -> float:
        """Percent of labels that a model gets wrong."""
        with torch.no_grad():
            wrong = (model.predictive(self.X).mean > 0.5) != (self.Y > 0.5)
        return 100.0 * float(wrong.double().mean())


def labels_of(name: str, threshold: float, seed: int) -> Labels:
    """Whether the target of a real set is above a threshold."""
    X, y = real(name)
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))
    X = (X - X.amin(0)) / (X.amax(0) - X.amin(0))
    return Labels(X[order], (y[order] > threshold).double())


def simulated(seed: int) -> Labels:
    """A small set of its own, for smoke runs without the real ones."""
    X = torch.rand(120, 2, generator=torch.Generator().manual_seed(seed))
    return Labels(X, ((6.0 * X[:, :1]).sin() > 2.0 * X[:, 1:] - 1.0).double())


def begun(data: Labels, first_steps: int, steps: int) -> OSVGP:
    """A model of the first labels, which learns along from now on."""
    model = OSVGP(
        data.X, data.Y, BernoulliLikelihood(), allocator=OIPS(RHO), hyper_steps=first_steps
    )
    model.hyper_steps = steps
    return model


# --- in a stream --------------------------------------------------------------------------------


def streamed(train: Labels, test: Labels, options: Options) -> tuple[float, float, int]:
    """Accuracy, seconds of the stream, and number of inducing points."""
    begin, first = time.perf_counter(), options.pick(200, 30)
    model = begun(train[:first], options.pick(100, 5), options.pick(2, 1))
    for rows in torch.arange(first, len(train.X)).split(20):
        model.update(train.X[rows], train.Y[rows])
    elapsed = time.perf_counter() - begin
    return 100.0 - test.error(model), elapsed, len(model.inducing_points)


def stream_claims(options: Options) -> list[Claim]:
    """Medians over splits."""
    pairs, seconds, sizes = [], [], []
    for seed in range(options.pick(3, 1)):
        data = simulated(seed) if options.smoke else labels_of("banana", 0.0, seed)
        train, test = data[: options.pick(2_000, 80)], data[options.pick(2_000, 80) :]
        accuracy, elapsed, points = streamed(train, test, options)
        steps = options.pick(600, 5)
        peer = batch_accuracy(train.X, train.Y, test.X, test.Y, points, steps)
        pairs.append((accuracy, peer))
        seconds.append(elapsed)
        sizes.append(points)
    lost = statistics.median(peer - ours for ours, peer in pairs)
    detail = ", ".join(f"{ours:.2f}/{peer:.2f}" for ours, peer in pairs)
    return [
        at_most("banana: accuracy below the batch SVGP's", lost, POINTS, "points", detail),
        stated("banana: the stream, learning included", statistics.median(seconds), "s"),
        stated("banana: inducing points", statistics.median(sizes), "", str(sizes)),
    ]


# --- asked for ----------------------------------------------------------------------------------


def information(model: OSVGP, X: Tensor) -> Tensor:
    """Mutual information of single labels with the process, ``n``, in bits. [Houlsby2011, eq. 3]"""
    posterior = model.posterior(X.unsqueeze(-2))
    mean, variance = posterior.mean.flatten(), posterior.variance.flatten()
    p = model.predictive(X).mean.flatten().clamp(1e-12, 1.0 - 1e-12)
    entropy = -(p * p.log2() + (1.0 - p) * (1.0 - p).log2())
    width = math.pi * math.log(2.0) / 2.0
    spread = variance + width
    return entropy - (width / spread).sqrt() * (-0.5 * mean.square() / spread).exp()


@torch.no_grad()
def informative(model: OSVGP, X: Tensor, number: int) -> list[int]:
    """A greedy batch."""
    chosen: list[int] = []
    supposing = model
    for _ in range(number):
        value = information(supposing, X)
        value[chosen] = -math.inf
        chosen.append(int(value.argmax()))
        likelier = (model.predictive(X[chosen]).mean > 0.5).to(X)
        supposing = model.condition_on_observations(X[chosen], likelier)
    return chosen


def course(
    data: Labels, choose: Callable[[OSVGP, Tensor, int], list[int]], options: Options
) -> list[float]:
    """Errors on the rows held out, after each batch of ten."""
    held = options.pick(500, 40)
    test, pool = data[:held], data[held:]
    model = begun(pool[:20], options.pick(60, 3), options.pick(10, 1))
    pool, errors = pool[20:], [test.error(model)]
    for _ in range(options.pick(18, 2)):
        chosen = choose(model, pool.X, 10)
        model.update(pool.X[chosen], pool.Y[chosen])
        left = torch.ones(len(pool.X), dtype=torch.bool)
        left[chosen] = False
        pool = pool[left]
        errors.append(test.error(model))
    return errors


def in_order(model: OSVGP, X: Tensor, number: int) -> list[int]:
    """The first rows, which are in random order."""
    return list(range(number))


def choice_claims(options: Options) -> list[Claim]:
    """Means over seeds."""
    ours, random = [], []
    for seed in range(options.pick(5, 1)):
        data = simulated(seed) if options.smoke else labels_of("hotspots_civ", THRESHOLD, seed)
        ours.append(course(data, informative, options))
        random.append(course(data, in_order, options))
    claims = []
    for name, of in (("over the course", statistics.mean), ("at its end", lambda c: c[-1])):
        a, b = ([of(c) for c in side] for side in (ours, random))
        detail = ", ".join(f"{x:.1f}/{y:.1f}" for x, y in zip(a, b, strict=True))
        ratio = statistics.mean(a) / max(statistics.mean(b), 1e-9)
        claims.append(
            at_most(f"hotspots_civ: error {name}, over random choice's", ratio, 1.0, "", detail)
        )
    return claims


def main() -> None:
    """Run it."""
    options = start(__doc__)
    claims = stream_claims(options) + choice_claims(options)
    finish("other_likelihoods", claims, options, {"rho": RHO, "threshold": THRESHOLD})


if __name__ == "__main__":
    main()
