"""QSGP on large regression sets and on labels, beside SVGP with 512 points at equal wall time.

Splits of 90 and 10 percent, inputs and targets standardised by the training rows, RMSE and mean
negative log probability (MNLP) of the rest. Both models begin with the hyperparameters of an exact
GP of the same 1,000 rows, whose seconds do not count. QSGP: 20,000 Fourier features, all of them in
every step, in single precision; mean field, or a chevron of ten columns. SVGP: BoTorch's
SingleTaskVariationalGP, points and hyperparameters by Adam at 0.01 on minibatches of 1,024.

With a GPU (``kin40k-paper``): the paper's schedule (appendix I.1), 100,000 features of which 10,000
are drawn, 500 rows and support points, 10⁵ steps, hyperparameters frozen for the first tenth; both
rates fall to half in 20,000 steps, of which it says only that they decay.

Labels: logistic likelihood, 2,000 Fourier features; the peer is gpytorch's SVGP with 100 points.

Finished parts are kept in the folder of results: a run that was stopped goes on from them. The
environment's QSGP_SETS (names with commas) chooses sets, QSGP_SECONDS the time of each fit.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Any

import torch
from botorch.models import SingleTaskVariationalGP
from botorch.models.model import Model
from botorch.models.utils.inducing_point_allocators import GreedyVarianceReduction
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.mlls import VariationalELBO
from torch import Tensor

from benchmarks.common.data import levy, real
from benchmarks.common.harness import Options, start
from benchmarks.common.report import Claim, at_most, finish, stated
from benchmarks.common.resume import Finished
from benchmarks.peers.svgp_peer import batch_accuracy
from bo_stream import QSGP, Chevron, FourierFeatures, LogisticLikelihood, MeanField
from bo_stream.models.stochastic.replay import Batch
from bo_stream.models.stochastic.start import learn_first_hyperparameters

PAPER = "kin40k-paper"
SECONDS = {"kin40k": 2400.0, "protein": 600.0, "keggdirected": 600.0}
LABELS = {"svmguide1": 0.5, "banana": 0.0}
"""Thresholds of the targets."""
ALLOCATED = 10_000
"""Rows among which SVGP's points are chosen: BoTorch's choice holds a matrix of all pairs."""
COVARIANCES = {"mean field": MeanField(), "chevron": Chevron(10)}


@dataclass(frozen=True)
class Split:
    """Standardised training and test rows, in random order."""

    X: Tensor
    Y: Tensor
    test_X: Tensor
    test_Y: Tensor

    def to(self, device: torch.device) -> Split:
        return Split(*(getattr(self, field.name).to(device) for field in fields(self)))


def split_of(name: str, options: Options, share: float = 0.9) -> Split:
    """Of a real set; of Levy's function in smoke runs."""
    X, y = levy(150, 4) if options.smoke else real(name)
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
    X, y = X[order], y[order]
    n = int(share * len(X))
    X = (X - X[:n].mean(0)) / X[:n].std(0)
    y = (y - y[:n].mean()) / y[:n].std()
    return Split(X[:n], y[:n], X[n:], y[n:])


# --- regression ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """What a model reached, and in how much time."""

    rmse: float
    mnlp: float
    seconds: float
    steps: int

    def __str__(self) -> str:
        return f"{self.steps:,} steps, {self.seconds:.0f} s, MNLP {self.mnlp:.3f}"


def score_of(model: Model, data: Split, seconds: float, steps: int) -> Score:
    """On the test rows."""
    squares = logs = 0.0
    with torch.no_grad():
        for X, Y in zip(data.test_X.split(500), data.test_Y.split(500), strict=True):
            posterior = model.posterior(X, observation_noise=True)
            miss, variance = (posterior.mean - Y).square(), posterior.variance
            squares += float(miss.sum())
            logs += float((0.5 * (miss / variance + (2.0 * math.pi * variance).log())).sum())
    n = len(data.test_Y)
    return Score(math.sqrt(squares / n), logs / n, seconds, steps)


@dataclass(frozen=True)
class Modules:
    """Kernel, mean and likelihood of an exact GP of 1,000 rows."""

    kernel: ScaleKernel
    mean: ConstantMean
    likelihood: GaussianLikelihood

    @classmethod
    def of(cls, data: Split) -> Modules:
        kernel = ScaleKernel(RBFKernel(ard_num_dims=data.X.shape[-1]))
        found = cls(kernel, ConstantMean(), GaussianLikelihood())
        rows = Batch(data.X[:1000], data.Y[:1000])
        learn_first_hyperparameters(found.kernel, found.mean, found.likelihood, rows)
        return found

    def options(self) -> dict[str, Any]:
        """For a constructor; copies."""
        modules = {
            "covar_module": self.kernel,
            "mean_module": self.mean,
            "likelihood": self.likelihood,
        }
        return deepcopy(modules)


def begun(data: Split, **chosen: Any) -> QSGP:
    """Before its first step, in single precision, with hyperparameters that are given."""
    return QSGP(
        data.X,
        data.Y,
        outcome_transform=None,
        update_steps=0,
        initial_points=0,
        arithmetic=torch.float32,
        **chosen,
    )


def qsgp_score(
    data: Split, modules: Modules, covariance: MeanField | Chevron, budget: float, options: Options
) -> Score:
    """Learned from all rows."""
    model = begun(
        data,
        basis=FourierFeatures(options.pick(20_000, 100)),
        covariance=covariance,
        freeze_steps=options.pick(500, 2),
        **modules.options(),
    )
    training = model.fit(seconds=budget)
    return score_of(model, data, training.seconds, training.steps)


def paper_score(options: Options) -> Score:
    """By the paper's schedule, or its first QSGP_SECONDS, on a GPU where there is one."""
    data = split_of("kin40k", options)
    modules = Modules.of(data).options()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = data.to(device)
    model = begun(
        data,
        basis=FourierFeatures(options.pick(100_000, 100)),
        functions=options.pick(10_000, 40),
        batch_size=options.pick(500, 50),
        control_points=options.pick(500, 20),
        hyper_rate=1e-5,
        freeze_steps=options.pick(10_000, 2),
        half_life=20_000.0,
        **{name: module.to(device) for name, module in modules.items()},
    )
    longest = os.environ.get("QSGP_SECONDS")
    training = model.fit(
        steps=options.pick(100_000, 5), seconds=None if longest is None else float(longest)
    )
    return score_of(model, data, training.seconds, training.steps)


def paper_claim(done: Finished, options: Options) -> Claim:
    """Of the paper's schedule."""
    score = done.part(PAPER, Score, lambda: paper_score(options))
    return at_most("kin40k, the paper's schedule: RMSE", score.rmse, 0.18, "", str(score))


def svgp_score(data: Split, modules: Modules, budget: float, options: Options) -> Score:
    """The same for as long."""
    begin, steps = time.perf_counter(), 0
    kept = modules.options()
    points = GreedyVarianceReduction().allocate_inducing_points(
        data.X[:ALLOCATED], kept["covar_module"], options.pick(512, 10), torch.Size()
    )
    model = SingleTaskVariationalGP(
        data.X, likelihood=kept.pop("likelihood"), inducing_points=points, **kept
    )
    objective = VariationalELBO(model.likelihood, model.model, len(data.X))
    optimiser = torch.optim.Adam(model.train().parameters(), lr=0.01)
    while time.perf_counter() - begin < budget:
        rows = torch.randint(len(data.X), (min(1024, len(data.X)),))
        optimiser.zero_grad()
        (-objective(model(data.X[rows]), data.Y[rows, 0])).backward()
        optimiser.step()
        steps += 1
    elapsed = time.perf_counter() - begin
    return score_of(model.eval(), data, elapsed, steps)


def regression_claims(name: str, done: Finished, options: Options) -> list[Claim]:
    """Of one set."""
    data, budget = split_of(name, options), seconds_of(name, options)
    modules = Modules.of(data)
    parts: dict[str, Callable[[], Score]] = {
        "SVGP": lambda: svgp_score(data, modules, budget, options)
    }
    covariances = {"mean field": MeanField()} if name == "kin40k" else COVARIANCES
    for kind, covariance in covariances.items():
        parts[kind] = lambda c=covariance: qsgp_score(data, modules, c, budget, options)
    scores = {kind: done.part(f"{name}, {kind}", Score, task) for kind, task in parts.items()}
    peer, claims = scores.pop("SVGP"), []
    for kind, score in scores.items():
        claims.append(_error_claim(name, kind, score))
        claims.append(stated(f"{name}, {kind}: MNLP", score.mnlp, "", f"SVGP {peer.mnlp:.3f}"))
    ratio, detail = scores["mean field"].rmse / peer.rmse, f"SVGP {peer.rmse:.4f}, {peer}"
    title = f"{name}: RMSE over SVGP's"
    claims.append(
        at_most(title, ratio, 1.0, "", detail)
        if name == "kin40k"
        else stated(title, ratio, "", detail)
    )
    return claims


def _error_claim(name: str, kind: str, score: Score) -> Claim:
    title = f"{name}, {kind}: RMSE"
    if name == "kin40k":
        return at_most(title, score.rmse, 0.22, "", str(score))
    return stated(title, score.rmse, "", str(score))


def seconds_of(name: str, options: Options) -> float:
    """Of a fit."""
    return options.pick(float(os.environ.get("QSGP_SECONDS", SECONDS.get(name, 60.0))), 0.3)


# --- labels -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Accuracy:
    """Percent of test labels that are right."""

    ours: float
    peer: float


def accuracy_of(name: str, options: Options) -> Accuracy:
    """Of both models, on half of the rows."""
    data = split_of(name, options, share=0.5)
    threshold = float(torch.cat((data.Y, data.test_Y)).mean())
    labels, test_labels = (threshold < data.Y).double(), (data.test_Y > threshold).double()
    model = QSGP(
        data.X,
        labels,
        LogisticLikelihood(),
        basis=FourierFeatures(options.pick(2000, 40)),
        freeze_steps=100,
        hyper_rate=0.01,
        initial_points=options.pick(500, 20),
        update_steps=0,
    )
    model.fit(steps=options.pick(1500, 5))
    with torch.no_grad():
        right = (model.predictive(data.test_X).mean > 0.5) == (test_labels > 0.5)
    points, steps = options.pick((100, 1000), (10, 5))
    peer = batch_accuracy(data.X, labels, data.test_X, test_labels, points, steps)
    return Accuracy(100.0 * float(right.double().mean()), peer)


def label_claim(name: str, done: Finished, options: Options) -> Claim:
    """Of one set."""
    found = done.part(name, Accuracy, lambda: accuracy_of(name, options))
    detail = f"{found.ours:.2f} and {found.peer:.2f} percent"
    return at_most(f"{name}: accuracy below SVGP's", found.peer - found.ours, 1.0, "points", detail)


def main() -> None:
    """All sets that are asked for."""
    options = start(__doc__)
    default = [*LABELS, *SECONDS]
    if options.smoke or torch.cuda.is_available():
        default.append(PAPER)
    asked = os.environ.get("QSGP_SETS", ",".join(default)).split(",")
    settings = {name: seconds_of(name, options) for name in asked}
    name = f"qsgp{options.pick('', '.smoke')}.parts.json"
    done = Finished(options.out / name, settings)
    claims: list[Claim] = []
    for one in asked:
        if one in LABELS:
            claims.append(label_claim(one, done, options))
        elif one == PAPER:
            claims.append(paper_claim(done, options))
        else:
            claims.extend(regression_claims(one, done, options))
    done.remove()
    finish("qsgp", claims, options, settings)


if __name__ == "__main__":
    main()
