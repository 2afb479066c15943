"""The WISKI paper's ablations and a curve: figures A.1 to A.5, and RMSE along powerplant's stream.

- A.1: O-SVGP on a noisy sine in batches, by the number of steps on a batch. ``OSVGP`` steps along
  the natural gradient, of which one at rate 1 is exact here; at the rate ``SLOW`` it is not.
- A.2, A.3, A.4: rows of skillcraft and powerplant one at a time, behind a linear stem to 2-D
  learned from the first rows: O-SVGP by steps on a row (skillcraft alone, it takes long), by β, and
  by inducing points m; WISKI by nodes m, pretrained on each grid, its stem and kernel stepped.
- A.5: banana in order of its first input, by ``DirichletWISKI`` with one gradient step a row, or
  with refits when the rows have doubled and at the end. In random order for comparison.
- Figure 2, right, which is figure 3's RMSE: rows of powerplant by WISKI, its stem learned anew as
  rows double or stepped, and by O-SVGP, O-SGPR and local GPs.

One split, of whose training rows the first ``COUNTS`` and ``ABLATED`` are streamed, for time. All
but WISKI start from the stem, kernel, mean and noise that WISKI on 16 x 16 nodes learned from the
first rows; the stem stays. Inducing points are fixed where a grid has its nodes. Errors are those
on all test rows. Each finished result is written to a file, so that an interrupted benchmark goes
on where it was; the file is removed at the end.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise, product
from typing import Any

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

from benchmarks.accuracy import classification, uci
from benchmarks.accuracy.exchange_rates import ascent, errors
from benchmarks.accuracy.stream_peers import LEARNING_RATE, Projected
from benchmarks.common.harness import Options, start
from benchmarks.common.report import Claim, at_least, at_most, finish, stated
from benchmarks.common.resume import Finished
from bo_stream import OSGPR, OSVGP, WISKI, DirichletWISKI, LinearStem, OnlineLearner, pretrain
from bo_stream.models.base import StreamingGP
from bo_stream.models.local import LocalGP
from bo_stream.models.wiski.resolution import GridResolutionWarning

COUNTS = (150, 300, 750, 1_500, 2_250, 3_000)
"""Rows after which a curve is measured: 5, 10, 25, 50, 75, 100 %. The first are a batch."""
ABLATED = (150, 300)  # likewise where something is ablated
STEPS = (1, 5, 10, 20)
BETAS = (1e-3, 1e-2, 1e-1, 1.0)
ENDS = (1e-3, 1.0)  # the paper's β and Bui's
SIDES = (8, 12, 16, 20)  # nodes or inducing points along a side; m is their square
SIDE, FEW = 16, 8  # where m is not ablated, and where steps are
SINE_COUNTS, BATCH, SINE_POINTS, SINE_NOISE, SINE_RATE = (500, 2_500, 10_000), 500, 32, 0.3, 0.05
SLOW = 0.1  # rate of natural steps
BANANA_COUNTS = (20, 100, 200, 300, 400)
NO_WORSE, PAPERS_ACCURACY = 1.03, 88.0


@dataclass(frozen=True)
class Curve:
    """Errors on the test rows along a stream.

    Attributes:
        counts: Numbers of rows observed.
        values: RMSE after each; of labels accuracy, in points of a hundred.
        nll: Mean negative log density or probability after each.
    """

    counts: list[int]
    values: list[float]
    nll: list[float]

    def __str__(self) -> str:
        each = zip(self.counts, self.values, self.nll, strict=True)
        return "; ".join(f"{n}: {value:.4f}, NLL {nll:.3f}" for n, value, nll in each)


Counts = tuple[int, ...]
Step = Callable[[Tensor, Tensor], object]  # observes some rows, and learns from them
ModelAndStep = tuple[StreamingGP, Step]
Score = Callable[[], tuple[float, float]]  # RMSE or accuracy, and negative log density


def followed(step: Step, score: Score, X: Tensor, Y: Tensor, counts: Counts, q: int = 1) -> Curve:
    """Observe rows, q at a time, from the first count on; measure at each count."""
    found = [score()]
    for before, count in pairwise(counts):
        for i in range(before, count, q):
            step(X[i : i + q], Y[i : i + q])
        found.append(score())
    return Curve(list(counts), [value for value, _ in found], [nll for _, nll in found])


def score_of(model: StreamingGP, X: Tensor, Y: Tensor) -> tuple[float, float]:
    """Compute RMSE and mean negative log density of rows, noise included."""
    squares, logs = errors(model, X, Y)
    return float(squares.mean().sqrt()), float(logs.mean())


# --- streams of real sets ------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A stream of a set's rows.

    Attributes:
        name: Of the set.
        counts: Numbers of rows after which errors are measured; the first are learned in batch.
        smoke: Whether all is small, and simulated.
    """

    name: str
    counts: Counts
    smoke: bool

    @cached_property
    def split(self) -> uci.Split:
        """The rows."""
        return uci.simulated(0) if self.smoke else uci.split_of(self.name, 0)

    def pretrained(self, side: int) -> WISKI:
        """Learn WISKI on a grid, with its stem, from the first rows."""
        torch.manual_seed(0)
        head = (self.split.X[: self.counts[0]], self.split.Y[: self.counts[0]])
        model = WISKI(
            *head,
            stem=LinearStem(self.split.X.shape[-1], 2),
            grid_size=side,
            covar_module=ScaleKernel(RBFKernel(ard_num_dims=2)),
            outcome_transform=None,
        )
        pretrain(model, *head, maxiter=uci.maxiter_of(self.smoke))
        return model

    @cached_property
    def projected(self) -> Projected:
        """What the other models start from."""
        split, learned = self.split, self.pretrained(SIDE)
        return Projected.of(learned, split.X, split.Y, split.test_X, self.counts[0])

    def grid(self, relearns: bool = False, side: int = SIDE) -> Curve:
        """Stream through WISKI, whose stem is stepped, or learned anew as the rows double."""
        model, first, split = self.pretrained(side), self.counts[0], self.split
        keep = uci.KEEP if relearns else 0
        learner = OnlineLearner(model, stem_learning_rate=0.0 if relearns else 0.0005, keep=keep)
        learner.offer(split.X[:first], split.Y[:first])
        due = {min(first * 2**power, keep) for power in range(1, 12)}

        def step(x: Tensor, y: Tensor) -> None:
            learner.step(x, y)
            if round(float(model.num_observations)) in due:
                learner.relearn(uci.maxiter_of(self.smoke))

        score = partial(score_of, model, split.test_X, split.test_Y)
        return followed(step, score, split.X, split.Y, self.counts)

    def peer(self, made: Callable[[Projected], ModelAndStep]) -> Curve:
        """Stream through another model, behind the stem that WISKI learned."""
        data = self.projected
        model, step = made(data)
        score = partial(score_of, model, data.test_X, self.split.test_Y)
        return followed(step, score, data.X, data.Y, self.counts)


def started(kind: type[StreamingGP], data: Projected, side: int = SIDE, **options: Any) -> Any:
    """Build a model of the first rows with what was learned; its points on a grid over the cube."""
    if kind is not LocalGP:
        line = torch.linspace(0.0, 1.0, side)
        options["inducing_points"] = torch.cartesian_prod(line, line)
    for name in ("likelihood", "covar_module", "mean_module"):
        options.setdefault(name, deepcopy(getattr(data.learned, name)))
    return kind(data.X[: data.first], data.Y[: data.first], **options)


def o_svgp(data: Projected, beta: float = 1.0, side: int = SIDE, steps: int = 1) -> ModelAndStep:
    """Build O-SVGP; its noise has no prior."""
    noise = GaussianLikelihood().to(data.X)
    noise.noise = data.learned.likelihood.noise.detach()
    many = {"natural_steps": steps, "hyper_steps": steps, "learning_rate": LEARNING_RATE}
    model = started(OSVGP, data, side, likelihood=noise, beta=beta, **many)
    return model, model.update


def o_sgpr(data: Projected) -> ModelAndStep:
    """Build O-SGPR, with a step of Adam up its bound for each row."""
    model = started(OSGPR, data, outcome_transform=None, window=0)
    up = ascent(model, LEARNING_RATE)
    return model, lambda x, y: (model.update(x, y), up())


def local_gps(data: Projected) -> ModelAndStep:
    """Build local GPs, whose hyperparameters stay."""
    model = started(LocalGP, data, outcome_transform=None, max_size=SIDE**2)
    return model, model.update


# --- a noisy sine, and banana --------------------------------------------------------------------


def sine(steps: int, rate: float, counts: Counts, batch: int) -> Curve:
    """Stream batches of a noisy sine through O-SVGP, from gpytorch's default hyperparameters."""
    generator = torch.Generator().manual_seed(0)
    X = 2.0 * torch.rand(counts[-1] + 1_000, 1, generator=generator) - 1.0
    Y = (4.0 * math.pi * X).sin() + SINE_NOISE * torch.randn(len(X), 1, generator=generator)
    many: dict[str, Any] = {"natural_steps": steps, "hyper_steps": steps, "natural_rate": rate}
    modules = (GaussianLikelihood(), ScaleKernel(RBFKernel()))
    Z = torch.linspace(-1.0, 1.0, SINE_POINTS).unsqueeze(-1)
    model = OSVGP(
        X[:batch], Y[:batch], *modules, inducing_points=Z, learning_rate=SINE_RATE, **many
    )
    score = partial(score_of, model, X[counts[-1] :], Y[counts[-1] :])
    return followed(model.update, score, X, Y, counts, batch)


def banana(refits: bool, ordered: bool, smoke: bool, counts: Counts) -> Curve:
    """Stream labels through ``DirichletWISKI`` one at a time."""
    split = classification.simulated(0) if smoke else classification.split_of("banana", 0)
    maxiter = 3 if smoke else classification.MAXITER
    order = split.X[:, 0].argsort() if ordered else torch.arange(len(split.X))
    X, labels = split.X[order], split.labels[order]
    model = DirichletWISKI(
        X[: counts[0]],
        labels[: counts[0]],
        num_classes=2,
        alpha_epsilon=classification.ALPHA_EPSILON,
        bounds=torch.tensor([[-0.1], [1.1]]).expand(2, 2),
    )
    classification.learn(model, maxiter)
    learner = OnlineLearner(model, LEARNING_RATE)
    due = {*(counts[0] * 2**power for power in range(1, 8)), counts[-1]}

    def step(x: Tensor, y: Tensor) -> None:
        if not refits:
            learner.step(x, y)
        elif round(float(model.update(x, y).num_observations)) in due:
            classification.learn(model, maxiter)

    @torch.no_grad()
    def score() -> tuple[float, float]:
        return classification.scores(model.class_probabilities(split.test_X), split.test_labels)

    return followed(step, score, X, labels.unsqueeze(-1), counts)


# --- claims --------------------------------------------------------------------------------------


Kept = Callable[[str, Callable[[], Curve]], Curve]  # by name: computed, or read if it has been


def sine_claims(kept: Kept, options: Options) -> Iterator[Claim]:
    """Measure figure A.1."""
    counts, batch = options.pick((SINE_COUNTS, BATCH), ((20, 40), 20))
    for rate, steps in product((1.0, SLOW), options.pick(STEPS, STEPS[:2])):
        label = f"figure A.1, steps of rate {rate:g}, {steps} a batch: RMSE at the end"
        curve = kept(label, partial(sine, steps, rate, counts, batch))
        yield stated(label, curve.values[-1], detail=str(curve))


def banana_claims(kept: Kept, options: Options) -> Iterator[Claim]:
    """Measure figure A.5."""
    counts = options.pick(BANANA_COUNTS, (20, 80))
    for order, way in product(("in order", "random order"), ("one step a row", "refits")):
        refits, ordered = way == "refits", order == "in order"
        label = f"figure A.5, {order}, {way}: accuracy at the end"
        curve = kept(label, partial(banana, refits, ordered, options.smoke, counts))
        claim = at_least(label, curve.values[-1], PAPERS_ACCURACY, "%", str(curve))
        yield claim if ordered and not refits else replace(claim, target=None)


def along_claims(kept: Kept, task: Task) -> Iterator[Claim]:
    """Measure figure 2, right."""
    ways: dict[str, Callable[[], Curve]] = {
        "WISKI, stem learned anew": partial(task.grid, relearns=True),
        "WISKI, stem stepped": task.grid,
        "O-SGPR": partial(task.peer, o_sgpr),
        "local GPs": partial(task.peer, local_gps),
        "O-SVGP, β = 1": partial(task.peer, o_svgp),
    }
    ends = []
    for name, way in ways.items():
        label = f"figure 2, {task.name}, {name}: RMSE at the end"
        curve = kept(label, way)
        ends.append(curve.values[-1])
        yield stated(label, ends[-1], detail=str(curve))
    ours, stepped, *others = ends
    label = f"figure 2, {task.name}: RMSE over the best of the other models', stem"
    yield at_most(f"{label} learned anew", ours / min(others), 1.0)
    yield stated(f"{label} stepped", stepped / min(others))


def ablation_claims(kept: Kept, task: Task, sides: Counts, steps: Counts) -> Iterator[Claim]:
    """Measure figures A.3 and A.4 on a set; A.2, if there are any numbers of steps."""
    name = task.name

    def sites(beta: float, side: int = SIDE, k: int = 1) -> Curve:
        made = partial(o_svgp, beta=beta, side=side, steps=k)
        key = f"{name}, O-SVGP, β = {beta:g}, m = {side**2}, {k} steps"
        return kept(key, partial(task.peer, made))

    label = f"figure A.4, {name}"
    grids = {k**2: kept(f"{name}, WISKI, m = {k**2}", partial(task.grid, side=k)) for k in sides}
    rise = max(b.values[-1] / a.values[-1] for a, b in pairwise(grids.values()))
    yield swept(f"{label}, WISKI, m", grids)
    yield at_most(f"{label}, WISKI: RMSE over that with fewer nodes, most", rise, NO_WORSE)
    yield swept(f"figure A.3, {name}, β", {beta: sites(beta) for beta in BETAS})
    for beta in ENDS:
        yield swept(f"{label}, O-SVGP, β = {beta:g}, m", {k**2: sites(beta, k) for k in sides})
    for beta in ENDS if steps else ():
        by_steps = {k: sites(beta, FEW, k) for k in steps}
        yield swept(f"figure A.2, {name}, β = {beta:g}, steps", by_steps)


def swept(label: str, curves: dict[Any, Curve]) -> Claim:
    """State how much the ends of streams differ."""
    ends = [curve.values[-1] for curve in curves.values()]
    detail = "; ".join(f"{k}: {c.values[-1]:.3f}, NLL {c.nll[-1]:.3f}" for k, c in curves.items())
    return stated(f"{label}: RMSE, largest over smallest", max(ends) / min(ends), detail=detail)


def main() -> None:
    """Run it."""
    options = start(__doc__)
    warnings.simplefilter("ignore", GridResolutionWarning)  # of the coarsest grids
    settings = {"split": 0, "counts": COUNTS, "ablated": ABLATED, "sine": (*SINE_COUNTS, BATCH)}
    file = options.out / f"wiski_ablations{'.smoke' if options.smoke else ''}.runs.json"
    finished = Finished(file, settings)

    def kept(name: str, way: Callable[[], Curve]) -> Curve:
        curve = finished.part(name, Curve, way)
        print(f"{name}: {curve}", flush=True)
        return curve

    claims = [*banana_claims(kept, options), *sine_claims(kept, options)]
    claims += along_claims(kept, Task("powerplant", options.pick(COUNTS, (12, 24)), options.smoke))
    sides, steps = options.pick(SIDES, SIDES[:2]), options.pick(STEPS, STEPS[:2])
    for name, few in options.pick((("powerplant", ()), ("skillcraft", steps)), (("small", steps),)):
        task = Task(name, options.pick(ABLATED, (12, 16)), options.smoke)
        claims += ablation_claims(kept, task, sides, few)
    finished.remove()
    finish("wiski_ablations", claims, options, settings)


if __name__ == "__main__":
    main()
