"""Streams of 40 daily exchange rates, after figure 1 of the WISKI paper, by three models.

Ten rows are learned from in batch. Then one row at a time is observed, with one step of Adam on the
hyperparameters for each, in time order and in random orders. Kernels are spectral mixtures of three
components. The paper states neither learning rates nor sizes for its figure; two ways are measured:

- ``plain``: gpytorch's start, in which the three components are equal and so remain; 200 steps of
  Adam at 0.05 on the first rows, then steps of 0.005, as the paper's table C.1 has them for other
  sets.
- ``bounded``: components that begin at three frequencies, whose widths stay above ``WIDTH``;
  L-BFGS-B on the first rows, then steps of 0.05.

Every model begins with the kernel, mean and noise that ``WISKI`` with the finer of two grids
learned from the first rows. The coarser grid has as many nodes as the other models have inducing
points; it is too coarse for some of the kernels that are learned, and warns of it. The bound and
the rate of ``bounded`` were chosen on the time order and on the random orders 0 to 2, with 12 and
20 inducing points; the random orders measured here are others.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.model import Model
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import SpectralMixtureKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from benchmarks.common.data import real
from benchmarks.common.harness import start
from benchmarks.common.report import Claim, at_most, finish, stated
from bo_stream import OSGPR, OSVGP, WISKI
from bo_stream.learning import OnlineLearner
from bo_stream.models.base import StreamingGP
from bo_stream.models.stochastic.budget import ConstrainedAdam
from bo_stream.models.wiski.resolution import GridResolutionWarning

ROWS, FIRST = 40, 10
POINTS = 24
"""Inducing points, and nodes of the coarser grid."""
NODES = 64
"""Nodes of the finer grid."""
WISKI_FINE, WISKI_COARSE = f"WISKI, {NODES} nodes", f"WISKI, {POINTS} nodes"
FREQUENCIES = (0.05, 0.5, 1.5)
"""First means of the components, in cycles over half the span."""
WIDTH = 1.0
"""Least deviation of a component's frequencies: correlations end after a twelfth of the span."""
ORDERS = tuple(range(3, 13))
"""Seeds of the random orders."""
BETAS = (1e-3, 1.0)
"""Weights of O-SVGP's divergences: the paper's, and Bui's."""


@dataclass(frozen=True)
class Way:
    """How hyperparameters are learned.

    Attributes:
        name: Of the way.
        bounded: Whether components begin apart, and their widths are bounded below.
        rate: Adam's rate along the stream.
        steps: Steps of Adam on the first rows; 0: L-BFGS-B instead.
    """

    name: str
    bounded: bool
    rate: float
    steps: int


PLAIN = Way("plain", bounded=False, rate=0.005, steps=200)
BOUNDED = Way("bounded", bounded=True, rate=0.05, steps=0)


@dataclass(frozen=True)
class Series:
    """Outcomes at distinct times, in the order in which they are observed.

    Attributes:
        X: Times scaled to [-1, 1], ``n x 1``.
        Y: Standardized outcomes, ``n x 1``.
    """

    X: Tensor
    Y: Tensor

    @classmethod
    def of(cls, X: Tensor, Y: Tensor, seed: int | None) -> Series:
        """Scale rows and order them: at random by a seed, or as they are."""
        X = 2.0 * (X - X.min()) / (X.max() - X.min()) - 1.0
        Y = (Y - Y.mean()) / Y.std()
        if seed is None:
            return cls(X, Y)
        order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))
        return cls(X[order], Y[order])


Step = Callable[[Tensor, Tensor], object]
"""Observe a row, and learn from it."""
StreamAndStep = tuple[StreamingGP, Step]
"""A model, and what it does with a row."""
Counts = tuple[int, ...]
"""Numbers of rows after which errors are measured."""


@dataclass(frozen=True)
class Scores:
    """Errors of a model along a stream.

    Attributes:
        all: RMSE on all rows after each number of rows.
        unobserved: RMSE on the rows not observed yet, likewise.
        nll: Mean negative log density of all rows, likewise.
        ahead: Mean negative log density of each row before it was observed.
        seconds: Of the stream, posteriors not counted.
    """

    all: dict[int, float]
    unobserved: dict[int, float]
    nll: dict[int, float]
    ahead: float
    seconds: float


# --- models --------------------------------------------------------------------------------------


def kernel_of(way: Way) -> SpectralMixtureKernel:
    """Make a spectral mixture at its start."""
    kernel = SpectralMixtureKernel(num_mixtures=len(FREQUENCIES)).double()
    if way.bounded:
        kernel.register_constraint("raw_mixture_scales", GreaterThan(WIDTH))
        kernel.mixture_weights = torch.full((len(FREQUENCIES),), 1.0 / len(FREQUENCIES))
        kernel.mixture_means = torch.tensor(FREQUENCIES).reshape(-1, 1, 1)
        kernel.mixture_scales = torch.full((len(FREQUENCIES), 1, 1), 2.0 * WIDTH)
    return kernel


def ascent(model: StreamingGP, rate: float) -> Callable[[], None]:
    """Prepare steps of Adam up the log marginal likelihood or bound, and the log priors."""
    adam = ConstrainedAdam(model, [p for p in model.parameters() if p.requires_grad], rate)

    def step() -> None:
        value = model.log_marginal_likelihood().sum()
        for _, module, prior, closure, _ in model.named_priors():
            value = value + prior.log_prob(closure(module)).sum()
        adam.ascend(value / max(model.num_observations, 1.0))

    return step


def on_grid(series: Series, first: int, nodes: int, modules: dict[str, Any]) -> WISKI:
    """Build WISKI of the first rows."""
    return WISKI(
        series.X[:first],
        series.Y[:first],
        outcome_transform=None,
        bounds=torch.tensor([[-1.0], [1.0]]).to(series.X),
        grid_size=nodes,
        **modules,
    )


def fitted(series: Series, way: Way, first: int) -> WISKI:
    """Learn from the first rows in batch."""
    model = on_grid(series, first, NODES, {"covar_module": kernel_of(way)})
    if way.steps == 0:
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        return model
    step = ascent(model, way.rate * 10.0)
    for _ in range(way.steps):
        step()
    return model.eval()


def streams(learned: WISKI, series: Series, way: Way, first: int) -> dict[str, StreamAndStep]:
    """Build the models of the first rows, each with its step."""
    modules: dict[str, Any] = {
        "likelihood": learned.likelihood,
        "covar_module": learned.covar_module,
        "mean_module": learned.mean_module,
    }
    head = (series.X[:first], series.Y[:first])
    found: dict[str, StreamAndStep] = {}
    for name, grid in (
        (WISKI_FINE, deepcopy(learned)),
        (WISKI_COARSE, on_grid(series, first, POINTS, deepcopy(modules))),
    ):
        found[name] = grid, OnlineLearner(grid, learning_rate=way.rate).step
    collapsed = OSGPR(
        *head, outcome_transform=None, max_points=POINTS, window=0, **deepcopy(modules)
    )
    step = ascent(collapsed, way.rate)

    def collapsed_step(x: Tensor, y: Tensor) -> None:
        collapsed.update(x, y)
        step()

    found["O-SGPR"] = collapsed, collapsed_step
    points = torch.linspace(-1.0, 1.0, POINTS).to(series.X).unsqueeze(-1)
    for beta in BETAS:
        sites = OSVGP(
            *head,
            inducing_points=points,
            beta=beta,
            natural_steps=1,
            hyper_steps=1,
            learning_rate=way.rate,
            **deepcopy(modules),
        )
        found[f"O-SVGP, β = {beta:g}"] = sites, sites.update
    return found


def exact(series: Series) -> SingleTaskGP:
    """Fit the exact GP to all rows, from the bounded start."""
    kernel = kernel_of(BOUNDED)
    model = SingleTaskGP(series.X, series.Y, covar_module=kernel, outcome_transform=None)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


# --- errors --------------------------------------------------------------------------------------


@torch.no_grad()
def errors(model: Model, X: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
    """Compute squared errors and negative log densities of rows, ``n`` each."""
    posterior = model.posterior(X, observation_noise=True)
    normal = torch.distributions.Normal(posterior.mean, posterior.variance.sqrt())
    return (posterior.mean - Y).square().squeeze(-1), -normal.log_prob(Y).squeeze(-1)


def along(step: Step, series: Series, first: int) -> Iterator[tuple[int, float]]:
    """Observe the rows after the first; yield before each how many there are, and seconds so far.

    The last number is that of all rows.
    """
    spent = 0.0
    for i in range(first, len(series.X)):
        yield i, spent
        begin = time.perf_counter()
        step(series.X[i : i + 1], series.Y[i : i + 1])
        spent += time.perf_counter() - begin
    yield len(series.X), spent


def scores(stream: StreamAndStep, series: Series, first: int, counts: Counts) -> Scores:
    """Stream the rows and measure."""
    model, step = stream
    rmse: dict[int, float] = {}
    unobserved: dict[int, float] = {}
    nll: dict[int, float] = {}
    ahead, total = [], 0.0
    for count, spent in along(step, series, first):
        total = spent
        squares, logs = errors(model, series.X, series.Y)
        if count < len(series.X):
            ahead.append(float(logs[count]))
        if count in counts:
            rmse[count], nll[count] = float(squares.mean().sqrt()), float(logs.mean())
            if count < len(series.X):
                unobserved[count] = float(squares[count:].mean().sqrt())
    return Scores(rmse, unobserved, nll, statistics.fmean(ahead), total)


# --- claims --------------------------------------------------------------------------------------


def listed(results: list[Scores], of: Callable[[Scores], float]) -> str:
    """Format a value of each stream."""
    return ", ".join(f"{of(result):.2f}" for result in results)


def model_claims(label: str, results: list[Scores]) -> list[Claim]:
    """State the errors of a model: medians over orders, the last number of rows first."""
    claims = []
    for name, values in (
        ("RMSE on all rows", [result.all for result in results]),
        ("RMSE on rows not observed yet", [result.unobserved for result in results]),
        ("NLL of all rows", [result.nll for result in results]),
    ):
        medians = {n: statistics.median(value[n] for value in values) for n in values[0]}
        last = max(medians)
        detail = ", ".join(f"{medians[n]:.2f} after {n}" for n in medians if n < last)
        claims.append(stated(f"{label}: {name} after {last}", medians[last], detail=detail))
    median = statistics.median(result.ahead for result in results)
    claims.append(
        stated(f"{label}: NLL one row ahead", median, "nats", listed(results, lambda r: r.ahead))
    )
    spent = 1e3 * statistics.median(result.seconds for result in results)
    return [*claims, stated(f"{label}: the stream", spent, "ms")]


def comparison(label: str, found: dict[str, list[Scores]], counts: Counts) -> list[Claim]:
    """Compare both grids with the other models: medians of ratios and differences over orders."""
    before, last = counts[-2:]
    claims = []
    for (ours, grid), (theirs, other) in product(found.items(), found.items()):
        if ours not in (WISKI_FINE, WISKI_COARSE) or theirs in (WISKI_FINE, WISKI_COARSE):
            continue
        pairs = list(zip(grid, other, strict=True))
        everywhere = statistics.median(a.all[last] / b.all[last] for a, b in pairs)
        unseen = statistics.median(a.unobserved[before] / b.unobserved[before] for a, b in pairs)
        ahead = statistics.median(a.ahead - b.ahead for a, b in pairs)
        detail = ", ".join(f"{a.all[last]:.2f}/{b.all[last]:.2f}" for a, b in pairs)
        judged = ours == WISKI_FINE and label.startswith(BOUNDED.name)
        rmse, over = f"{label}, {ours}: RMSE", f"over that of {theirs}"
        claims += [
            replace(
                at_most(f"{rmse} on all rows after {last} {over}", everywhere, 1.0, "", detail),
                target=1.0 if judged else None,
            ),
            stated(f"{rmse} on rows not observed after {before} {over}", unseen),
            stated(f"{label}, {ours}: NLL one row ahead above that of {theirs}", ahead, "nats"),
        ]
    return claims


def rates(rows: int) -> tuple[Tensor, Tensor]:
    """Read the first rows of the exchange rates."""
    X, Y = real("fx2007")
    return X[:rows], Y[:rows]


def simulated(rows: int) -> tuple[Tensor, Tensor]:
    """Make a short series, for smoke runs without the real one."""
    X = torch.arange(rows, dtype=torch.float64).unsqueeze(-1)
    noise = torch.randn(rows, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return X, (0.7 * X).sin() + 0.1 * noise


def main() -> None:
    """Run it."""
    options = start(__doc__)
    warnings.simplefilter("ignore", GridResolutionWarning)
    rows, first = options.pick(ROWS, 14), options.pick(FIRST, 8)
    counts = options.pick((10, 20, 30, 40), (8, 11, 14))
    X, Y = options.pick(rates, simulated)(rows)
    claims = []
    for way in (BOUNDED, PLAIN):
        orders: tuple[tuple[str, tuple[int | None, ...]], ...] = (
            ("time order", (None,)),
            ("random order", options.pick(ORDERS, (0,))),
        )
        for order, seeds in orders:
            label = f"{way.name}, {order}"
            found: dict[str, list[Scores]] = {}
            for seed in seeds:
                series = Series.of(X, Y, seed)
                learned = fitted(series, way, first)
                for name, stream in streams(learned, series, way, first).items():
                    result = scores(stream, series, first, counts)
                    found.setdefault(name, []).append(result)
            claims += comparison(label, found, counts)
            for name, results in found.items():
                claims += model_claims(f"{label}, {name}", results)
    series = Series.of(X, Y, None)
    squares, logs = errors(exact(series), series.X, series.Y)
    claims += [
        stated("exact GP fitted to all rows: RMSE on them", float(squares.mean().sqrt())),
        stated("exact GP fitted to all rows: NLL of them", float(logs.mean()), "nats"),
    ]
    settings = {
        "rows": rows,
        "first": first,
        "nodes": NODES,
        "points": POINTS,
        "width": WIDTH,
        "orders": list(options.pick(ORDERS, (0,))),
    }
    finish("exchange_rates", claims, options, settings)


if __name__ == "__main__":
    main()
