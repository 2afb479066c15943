"""Noise that is learned as a function of the inputs: what it gains, how true it is, its price."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.model import Model
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from benchmarks.common.harness import Options, start, timings
from benchmarks.common.report import Claim, at_least, at_most, finish, stated
from bo_stream import WISKI, HeteroscedasticWISKI

GAIN = 0.15
GAP = 0.02
ERROR = 0.15
PRICE = 4.0
FLAT = 1.1
NOTHING_TO_LEARN = 0.01


@dataclass(frozen=True)
class Problem:
    """A function over the unit box with noise of a known standard deviation.

    Attributes:
        name: Of the claims.
        dim: Number of inputs.
        deviation: Standard deviation of the noise, ``n x d -> n x 1``.
    """

    name: str
    dim: int
    deviation: Callable[[Tensor], Tensor]

    def draw(self, n: int, seed: int) -> tuple[Tensor, Tensor]:
        """Uniform points and noisy values."""
        generator = torch.Generator().manual_seed(seed)
        X = torch.rand(n, self.dim, generator=generator)
        Y = torch.sin(5.0 * X).sum(-1, keepdim=True) + X[:, :1].square()
        return X, Y + self.deviation(X) * torch.randn(n, 1, generator=generator)

    @property
    def bounds(self) -> Tensor:
        """The unit box."""
        return torch.tensor([[0.0] * self.dim, [1.0] * self.dim])


def tenfold(X: Tensor) -> Tensor:
    """From 0.05 in one corner to 0.5 in the other."""
    return 0.05 * 10.0 ** X.mean(-1, keepdim=True)


PROBLEMS = (Problem("1-D, tenfold", 1, tenfold), Problem("2-D, tenfold", 2, tenfold))
FLAT_NOISE = Problem("2-D, the same everywhere", 2, lambda X: torch.full_like(X[:, :1], 0.2))


@dataclass(frozen=True)
class Sizes:
    """Of one run: the stream, its first batch, what follows at once, and the tests."""

    n: int
    first: int
    batch: int
    test: int
    seeds: int
    small: int
    large: int
    repeats: int


def fit(model: Model) -> None:
    """Learn all hyperparameters."""
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))


def streamed(model: WISKI | HeteroscedasticWISKI, X: Tensor, Y: Tensor, sizes: Sizes) -> Model:
    """A model of the first batch after the rest, refitted whenever the data have doubled."""
    fit(model)
    due = 2 * sizes.first
    for i in range(sizes.first, sizes.n, sizes.batch):
        model.update(X[i : i + sizes.batch], Y[i : i + sizes.batch])
        if i + sizes.batch >= due:
            fit(model)
            due *= 2
    fit(model)
    return model.eval()


@torch.no_grad()
def density(model: Model, X: Tensor, Y: Tensor, noise: Tensor | None = None) -> float:
    """Negative log predictive density of held-out outcomes, nats a point."""
    posterior = model.posterior(X.unsqueeze(-2), observation_noise=noise is None)
    variance = posterior.variance.squeeze(-1) + (0.0 if noise is None else noise)
    error = Y - posterior.mean.squeeze(-1)
    terms = error.square() / variance + variance.log() + math.log(2.0 * math.pi)
    return float(0.5 * terms.mean())


@torch.no_grad()
def deviation_error(model: HeteroscedasticWISKI, problem: Problem, X: Tensor) -> float:
    """Median relative error of the learned standard deviation."""
    scale = model.outcome_scale().unsqueeze(-1)
    found = model.noise_at(model.transform_inputs(X)).sqrt() * scale
    return float((found.squeeze(0) / problem.deviation(X).squeeze(-1) - 1.0).abs().median())


def quality(problem: Problem, sizes: Sizes) -> list[Claim]:
    """Held-out density and the learned deviation, medians over seeds."""
    gains, gaps, errors, values = [], [], [], []
    for seed in range(sizes.seeds):
        X, Y = problem.draw(sizes.n, 2 * seed)
        test_X, test_Y = problem.draw(sizes.test, 2 * seed + 1)
        start_X, start_Y = X[: sizes.first], Y[: sizes.first]
        learned = streamed(
            HeteroscedasticWISKI(start_X, start_Y, bounds=problem.bounds), X, Y, sizes
        )
        plain = streamed(WISKI(start_X, start_Y, bounds=problem.bounds), X, Y, sizes)
        exact = SingleTaskGP(X, Y, problem.deviation(X).square())
        fit(exact)
        own = density(learned, test_X, test_Y)
        other = density(plain, test_X, test_Y)
        best = density(exact, test_X, test_Y, problem.deviation(test_X).square())
        gains.append(other - own)
        gaps.append(own - best)
        errors.append(deviation_error(learned, problem, test_X))
        values.append(f"{own:.3f}, {other:.3f}, {best:.3f}")
    where = f"{problem.name}, n = {sizes.n:,}"
    made_of = "learned, one level, exact with true noise: " + "; ".join(values)
    gain, gap, error = (statistics.median(numbers) for numbers in (gains, gaps, errors))
    return [
        at_least(f"density gained on WISKI, {where}", gain, GAIN, "nats", made_of),
        at_most(f"density lost to SingleTaskGP with the true noise, {where}", gap, GAP, "nats"),
        at_most(f"median relative error of the deviation, {where}", error, ERROR),
    ]


def nothing_to_learn(sizes: Sizes) -> Claim:
    """What it costs where the noise is the same everywhere."""
    lost = []
    for seed in range(sizes.seeds):
        X, Y = FLAT_NOISE.draw(sizes.n, 2 * seed)
        test = FLAT_NOISE.draw(sizes.test, 2 * seed + 1)
        start_X, start_Y = X[: sizes.first], Y[: sizes.first]
        models = [
            streamed(kind(start_X, start_Y, bounds=FLAT_NOISE.bounds), X, Y, sizes)
            for kind in (HeteroscedasticWISKI, WISKI)
        ]
        lost.append(density(models[0], *test) - density(models[1], *test))
    where = f"{FLAT_NOISE.name}, n = {sizes.n:,}"
    worst = statistics.median(lost)
    return at_most(f"density lost to WISKI, {where}", worst, NOTHING_TO_LEARN, "nats")


def stepper(model: WISKI | HeteroscedasticWISKI, test_X: Tensor) -> Callable[[], object]:
    """A task that updates a model with 3 points and predicts."""
    X, Y = PROBLEMS[1].draw(3, seed=77)

    @torch.no_grad()
    def step() -> None:
        posterior = model.update(X, Y).posterior(test_X, observation_noise=True)
        _ = posterior.mean, posterior.variance

    return step


def prepared(kind: type[WISKI | HeteroscedasticWISKI], n: int, sizes: Sizes) -> Model:
    """A fitted model after n observations."""
    problem = PROBLEMS[1]
    X, Y = problem.draw(sizes.small, seed=0)
    model = kind(X, Y, bounds=problem.bounds)
    fit(model)
    for index, begin in enumerate(range(sizes.small, n, 1_000)):
        model.update(*problem.draw(min(1_000, n - begin), seed=100 + index))
    return model.eval()


def price(sizes: Sizes) -> list[Claim]:
    """Time of an update with the next posterior, beside WISKI's and after a longer stream."""
    test_X = torch.rand(100, 2)
    models = {
        "HeteroscedasticWISKI": prepared(HeteroscedasticWISKI, sizes.small, sizes),
        "WISKI": prepared(WISKI, sizes.small, sizes),
        "longer": prepared(HeteroscedasticWISKI, sizes.large, sizes),
    }
    tasks = {name: stepper(model, test_X) for name, model in models.items()}
    runs = timings(tasks, sizes.repeats, warmup=3)
    medians = {name: 1e3 * statistics.median(times) for name, times in runs.items()}
    means = {name: 1e3 * statistics.fmean(times) for name, times in runs.items()}
    own, plain, longer = medians.values()
    made_of = f"{own:.2f} ms, WISKI {plain:.2f} ms; rank {models['WISKI'].rank}"
    flat = f"n = {sizes.large:,} over n = {sizes.small:,}"
    return [
        at_most(
            "update of 3 and posterior at 100 points over WISKI's", own / plain, PRICE, "", made_of
        ),
        at_most(f"the same, {flat}", longer / own, FLAT, "", f"{own:.2f} ms and {longer:.2f} ms"),
        stated(
            "mean of the same over WISKI's",
            means["HeteroscedasticWISKI"] / means["WISKI"],
            detail="solving anew now and then included",
        ),
    ]


def sizes_of(options: Options) -> Sizes:
    """Full or tiny."""
    if options.smoke:
        return Sizes(80, 30, 25, test=50, seeds=1, small=60, large=200, repeats=2)
    return Sizes(2_000, 200, 10, test=4_000, seeds=3, small=1_000, large=100_000, repeats=200)


def main() -> None:
    """Run it."""
    options = start(__doc__)
    sizes = sizes_of(options)
    claims = [claim for problem in PROBLEMS for claim in quality(problem, sizes)]
    claims += [nothing_to_learn(sizes), *price(sizes)]
    finish("heteroscedastic", claims, options, asdict(sizes))


if __name__ == "__main__":
    main()
