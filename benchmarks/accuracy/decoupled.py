"""DecoupledGP against gpytorch's coupled SVGP, at equal wall time.

kin40k, protein and elevators, standardised, a tenth held out. Ours has 2,048 functions for the mean
and 128 for the covariance: hyperparameters of an exact GP of 1,000 observations, 2,000 steps of
1,024, and then 10 evaluations of the collapsed bound of all data (``fit_collapsed``). SVGP has 256
inducing points and takes steps of 1,024 by Adam for as many seconds, twice: from the median trick,
and from the hyperparameters that ours begins its steps with, for whose finding it is not charged.
Compared are the normalised held-out error and the bound per observation, with the better of its
two. What ours has by its steps alone is told beside.

Unbiasedness: 20,000 draws of the bound and of its gradient in the hyperparameters from minibatches
of 50 observations and 8 of 64 columns, against the exact ones, in standard errors.

Finished parts are kept in the folder of results: a run that was stopped goes on from them. The
environment's DECOUPLED_PARTS (names with commas) chooses among the parametrizations and the sets.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import gpytorch
import torch
from torch import Tensor

from benchmarks.common.data import real
from benchmarks.common.harness import Options, start
from benchmarks.common.report import Claim, at_least, at_most, finish
from benchmarks.common.resume import Finished
from benchmarks.peers.svgp_peer import BatchSVGP
from bo_stream import DecoupledGP

SETS = ("kin40k", "protein", "elevators")
PARAMETRIZATIONS = ("spectral", "hybrid", "direct")
BATCH = 1024
PEER_POINTS = 256
PEER_RATE = 0.01
EVALUATIONS = 10
DRAWS = 20_000
ROWS = 500


@dataclass(frozen=True)
class Split:
    """Standardised inputs and outcomes, ``n x d`` and ``n x 1``."""

    X: Tensor
    Y: Tensor
    test_X: Tensor
    test_Y: Tensor


@dataclass(frozen=True)
class Result:
    """What a model has reached.

    Attributes:
        error: Normalised mean squared error of the held-out outcomes.
        bound: Per observation, in nats.
        seconds: Of training so far.
        steps: Likewise.
    """

    error: float
    bound: float
    seconds: float
    steps: int

    def __str__(self) -> str:
        trained = f"{self.steps:,} steps, {self.seconds:.0f} s"
        return f"nMSE {self.error:.4f}, bound {self.bound:.4f}, {trained}"


def standardized(X: Tensor) -> Tensor:
    return (X - X.mean(0)) / X.std(0).clamp_min(1e-9)


def split_of(X: Tensor, Y: Tensor) -> Split:
    """A tenth held out, by a seed."""
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
    X, Y = standardized(X)[order], standardized(Y)[order]
    held = len(X) // 10
    return Split(X[held:], Y[held:], X[:held], Y[:held])


def simulated(n: int) -> tuple[Tensor, Tensor]:
    """A rough function of two inputs, for smoke runs."""
    X = torch.rand(n, 2)
    Y = (12.0 * X[:, :1]).sin() * (9.0 * X[:, 1:]).cos() + 0.1 * torch.randn(n, 1)
    return X, Y


def error_of(split: Split, mean: Tensor) -> float:
    return float((split.test_Y - mean).square().mean() / split.test_Y.var())


@dataclass(frozen=True)
class Start:
    """Hyperparameters that steps begin with."""

    lengthscales: list[float]
    scale: float
    noise: float
    constant: float


@dataclass(frozen=True)
class Ours:
    """What ours has reached by its steps, and by the collapsed bound after them."""

    start: dict[str, Any]
    by_steps: dict[str, Any]
    whole: dict[str, Any]


def start_of(model: DecoupledGP) -> Start:
    kernel = model.covar_module
    return Start(
        kernel.base_kernel.lengthscale.flatten().tolist(),
        kernel.outputscale.item(),
        model.likelihood.noise.item(),
        model.mean_module.constant.item(),
    )


def reached(model: DecoupledGP, split: Split, seconds: float) -> Result:
    with torch.no_grad():
        means = [model.posterior(X).mean for X in split.test_X.split(ROWS)]
    bound = float(model.elbo()) / len(split.X)
    return Result(error_of(split, torch.cat(means)), bound, seconds, model.num_steps)


def ours(split: Split, options: Options) -> Ours:
    sizes = options.pick((2048, 128), (40, 10))
    model = DecoupledGP(
        split.X,
        split.Y,
        num_mean=sizes[0],
        num_covar=sizes[1],
        batch_size=min(BATCH, len(split.X)),
    )
    begin = time.monotonic()
    model.fit(0)
    begun = start_of(model)
    model.fit(options.pick(2000, 20))
    seconds = time.monotonic() - begin
    by_steps = reached(model, split, seconds)
    begin = time.monotonic()
    model.fit_collapsed(options.pick(EVALUATIONS, 3))
    whole = reached(model, split, seconds + time.monotonic() - begin)
    return Ours(asdict(begun), asdict(by_steps), asdict(whole))


def peer(split: Split, seconds: float, points: int, begun: Start | None) -> Result:
    """gpytorch's SVGP for as long, from some hyperparameters or the median trick's."""
    n = len(split.X)
    model = BatchSVGP(split.X[:points].clone()).to(split.X)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(split.X)
    kernel = model.covar_module
    if begun is None:
        kernel.base_kernel.lengthscale = torch.pdist(split.X[:1000]).median()
        kernel.outputscale = likelihood.noise = 1.0
    else:
        kernel.base_kernel.lengthscale = torch.tensor(begun.lengthscales).to(split.X)
        kernel.outputscale, likelihood.noise = begun.scale, begun.noise
        model.mean_module.constant = begun.constant
    objective = gpytorch.mlls.VariationalELBO(likelihood, model.train(), n)
    optimiser = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=PEER_RATE)
    begin, steps = time.monotonic(), 0
    while time.monotonic() - begin < seconds:
        rows = torch.randint(n, (min(BATCH, n),))
        optimiser.zero_grad()
        (-objective(model(split.X[rows]), split.Y[rows, 0])).backward()
        optimiser.step()
        steps += 1
    taken = time.monotonic() - begin
    with torch.no_grad():
        terms = [
            len(X) * objective(model(X), Y[:, 0])
            for X, Y in zip(split.X.split(BATCH), split.Y.split(BATCH), strict=True)
        ]
        means = [model.eval()(X).mean for X in split.test_X.split(ROWS)]
    error = error_of(split, torch.cat(means).unsqueeze(-1))
    return Result(error, float(sum(terms)) / n, taken, steps)


def claims_of(name: str, done: Finished, options: Options) -> list[Claim]:
    """Of a data set."""
    X, Y = simulated(300) if options.smoke else real(name)
    split, points = split_of(X, Y), options.pick(PEER_POINTS, 20)
    mine = done.part(f"{name}, decoupled", Ours, lambda: ours(split, options))
    by_steps, whole, begun = Result(**mine.by_steps), Result(**mine.whole), Start(**mine.start)
    print(f"{name}, decoupled: {by_steps}; collapsed: {whole}", flush=True)
    peers = []
    for start_name, known in (("the median trick", None), ("our start", begun)):
        part = f"{name}, SVGP from {start_name}"
        rule = partial(peer, split, whole.seconds, points, known)
        peers.append(done.part(part, Result, rule))
        print(f"{part}: {peers[-1]}", flush=True)
    error, bound = min(p.error for p in peers), max(p.bound for p in peers)
    detail = f"{whole}; by steps alone {by_steps}; SVGP {peers[0]}; from our start {peers[1]}"
    return [
        at_most(f"{name}: held-out nMSE", whole.error, error, detail=detail),
        at_least(f"{name}: bound per observation", whole.bound, bound, "nats", detail),
    ]


def with_gradient(model: DecoupledGP, value: Tensor) -> Tensor:
    gradients = torch.autograd.grad(value, list(model.parameters()))
    return torch.cat([value.detach().reshape(1), *(g.flatten() for g in gradients)])


@dataclass(frozen=True)
class Bias:
    """Largest distance of a mean of draws from what is exact.

    Attributes:
        errors: In standard errors.
        numbers: Whose means were taken.
    """

    errors: float
    numbers: int


def unbiasedness(parametrization: str, draws: int, steps: int, n: int) -> Bias:
    """Of the bound and its gradient, after so many steps on n observations."""
    X, Y = simulated(n)
    model = DecoupledGP(
        X,
        Y,
        num_mean=64,
        num_covar=16,
        batch_size=50,
        num_columns=8,
        parametrization=parametrization,  # type: ignore[arg-type]
    )
    model.fit(steps)
    exact = with_gradient(model, model.log_marginal_likelihood())
    generator = torch.Generator().manual_seed(1)
    total, squares = torch.zeros_like(exact), torch.zeros_like(exact)
    for _ in range(draws):
        gap = with_gradient(model, model.elbo_estimate(generator)) - exact
        total, squares = total + gap, squares + gap.square()
    mean = total / draws
    error = ((squares / draws - mean.square()) / draws).sqrt()
    return Bias(float((mean.abs() / error).max()), len(exact))


def bias_claim(parametrization: str, done: Finished, options: Options) -> Claim:
    """Of a parametrization."""
    draws, steps, n = options.pick((DRAWS, 200, 600), (100, 10, 200))
    rule = partial(unbiasedness, parametrization, draws, steps, n)
    found = done.part(parametrization, Bias, rule)
    return at_most(
        f"{parametrization}: bias of the bound and its gradient",
        found.errors,
        4.0,
        "standard errors",
        f"{draws:,} draws of {found.numbers} numbers",
    )


def main() -> None:
    """All parts that are asked for."""
    options = start(__doc__)
    default = (*PARAMETRIZATIONS, *options.pick(SETS, ("simulated",)))
    asked = os.environ.get("DECOUPLED_PARTS", ",".join(default)).split(",")
    settings = {"peer_rate": PEER_RATE, "batch": BATCH}
    name = f"decoupled{options.pick('', '.smoke')}.parts.json"
    done, claims = Finished(options.out / name, settings), list[Claim]()
    for part in asked:
        if part in PARAMETRIZATIONS:
            claims.append(bias_claim(part, done, options))
        else:
            claims += claims_of(part, done, options)
    done.remove()
    finish("decoupled", claims, options, settings)


if __name__ == "__main__":
    main()
