"""Draw noisy sinc functions as the papers of ``DecoupledGP``, ``QSGP`` and ``QSRVM`` have them.

The command is ``python docs/figures/sinc.py``; it takes half a minute and prints the numbers that
docs/papers/decoupled.md and docs/papers/qsgp.md quote.

``sinc_decoupled.png`` shows shared and decoupled bases of 500 observations beside the exact GP.
``sinc_qsgp.png`` shows the augmented variance of functions at 20 data, and a relevance vector
machine of 500. Hyperparameters are those of an exact GP of the same data, but for the kernel of the
relevance vector machine, and stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.model import Model
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.means import ZeroMean
from gpytorch.mlls import ExactMarginalLogLikelihood
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from bo_stream import OSGPR, QSGP, QSRVM, Chevron, DecoupledGP, InducingAtData

HERE = Path(__file__).parent
DECOUPLED = HERE / "sinc_decoupled.png"
QUADRUPLY = HERE / "sinc_qsgp.png"

WIDTH = 9.0
OURS, EXACT, DATA = "#c8102e", "#222222", "#9bb7d4"
NOISE = 0.1
FEW, MANY = 10, 100
"""Functions of a small basis and of a large one."""


@dataclass(frozen=True)
class Series:
    """Noisy values of a sinc function, and the exact GP of them.

    Attributes:
        X: ``n x 1``, in random order.
        Y: ``n x 1``.
        exact: With hyperparameters by maximum marginal likelihood.
    """

    X: Tensor
    Y: Tensor
    exact: SingleTaskGP

    @classmethod
    def of(cls, n: int, span: float, seed: int = 0) -> Series:
        """Draw n inputs between -span and span."""
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand(n, 1, dtype=torch.float64, generator=generator)
        X = span * (2.0 * uniform - 1.0)
        Y = sinc(X) + NOISE * torch.randn(n, 1, dtype=torch.float64, generator=generator)
        kernel = ScaleKernel(RBFKernel()).double()
        kernel.base_kernel.lengthscale, kernel.outputscale = 2.0, 0.1
        exact = SingleTaskGP(
            X, Y, covar_module=kernel, mean_module=ZeroMean(), outcome_transform=None
        )
        exact.likelihood.noise = NOISE**2
        fit_gpytorch_mll(ExactMarginalLogLikelihood(exact.likelihood, exact))
        return cls(X, Y, exact)

    @property
    def modules(self) -> dict[str, Any]:
        """Copies of likelihood, kernel and prior mean for another model, which stay."""
        modules = {
            "likelihood": deepcopy(self.exact.likelihood),
            "covar_module": deepcopy(self.exact.covar_module),
            "mean_module": ZeroMean(),
        }
        for module in modules.values():
            module.requires_grad_(False)
        return {**modules, "outcome_transform": None}


def sinc(X: Tensor) -> Tensor:
    """Compute ``sin(x) / x``."""
    return torch.sinc(X / math.pi)


@torch.no_grad()
def predicted(model: Model, X: Tensor) -> tuple[Tensor, Tensor]:
    """Predict the function: mean and standard deviation, ``n`` each."""
    posterior = model.posterior(X)
    return posterior.mean.squeeze(-1), posterior.variance.clamp_min(0.0).sqrt().squeeze(-1)


def look(axes: Axes, title: str) -> None:
    """Give axes their title."""
    axes.set_title(title, fontsize=10)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


# --- shared and decoupled bases -----------------------------------------------------------------


def bases(series: Series) -> dict[str, Model]:
    """Build models of one basis and of two, at their best for all data."""
    models: dict[str, Model] = {}
    for size in (FEW, MANY):
        shared = {"inducing_points": series.X[:size], "allocator": None, "window": 0}
        title = f"shared basis, M = {size}"
        models[title] = OSGPR(series.X, series.Y, **shared, **series.modules)
    sizes = {"num_mean": MANY, "num_covar": FEW, "num_added": MANY, "update_steps": 0}
    for kind, functions in (("hybrid", "values at points"), ("spectral", "eigenfunctions")):
        model = DecoupledGP(
            series.X,
            series.Y,
            parametrization=kind,  # type: ignore[arg-type]
            **sizes,
            **series.modules,
        )
        title = f"decoupled, $M_α$ = {MANY}, $M_β$ = {FEW} {functions}"
        models[title] = model.optimize_posterior(progress=False)
    order = list(models)
    return {title: models[title] for title in (order[0], order[2], order[3], order[1])}


def decoupled() -> Figure:
    """Draw shared and decoupled bases, after figure 1 of Cheng and Boots (2017)."""
    series = Series.of(500, 20.0)
    X = torch.linspace(-20.0, 20.0, 801, dtype=torch.float64).unsqueeze(-1)
    truth, grid = sinc(X).squeeze(-1), X.squeeze(-1).numpy()
    mean, deviation = predicted(series.exact, X)
    print(f"exact GP: RMSE {rmse(mean, truth):.3f}")
    figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
    for axes, (title, model) in zip(
        figure.subplots(2, 2, sharex=True, sharey=True).flat, bases(series).items(), strict=True
    ):
        own, spread = predicted(model, X)
        axes.plot(series.X.squeeze(-1), series.Y.squeeze(-1), ".", ms=2.5, color=DATA)
        axes.fill_between(
            grid, own - 2.0 * spread, own + 2.0 * spread, color=OURS, alpha=0.18, lw=0
        )
        for sign in (-1.0, 1.0):
            edge = mean + sign * 2.0 * deviation
            name = "exact GP, ± 2 sd" if sign > 0.0 else None
            axes.plot(grid, edge, color=EXACT, lw=0.9, ls=":", label=name)
        axes.plot(grid, truth, color=EXACT, lw=0.9, label="sin(x) / x")
        axes.plot(grid, own, color=OURS, lw=1.5, label="mean, ± 2 sd")
        look(axes, title)
        ratio = (spread / deviation).square()
        print(
            f"{title}: RMSE {rmse(own, truth):.3f}; variance over the exact one, median "
            f"{float(ratio.median()):.1f}, least {float(ratio.min()):.2f}, "
            f"below it at {100 * float((ratio < 0.999).double().mean()):.0f} % of places"
        )
    figure.axes[0].legend(fontsize=8, frameon=False, loc="upper right")
    return figure


def rmse(mean: Tensor, truth: Tensor) -> float:
    """Compute the root mean squared error."""
    return float((mean - truth).square().mean().sqrt())


# --- functions at data --------------------------------------------------------------------------


def quadruply() -> Figure:
    """Draw an augmented variance and relevance vectors, after Evans and Nair (2020)."""
    figure = Figure(figsize=(WIDTH, 3.3), layout="constrained")
    augmented, relevance = figure.subplots(1, 2)
    draw_augmentation(augmented)
    draw_relevance_vectors(relevance)
    return figure


def draw_augmentation(axes: Axes) -> None:
    """Draw standard deviations far from data, after figure 2.

    Of the augmented model by ``QSGP``, whose diagonal is Proposition 1's from the first step on;
    without the augmentation, and with a full covariance of the weights, by dense formulas.
    """
    series = Series.of(20, 6.0)
    X = torch.linspace(-15.0, 15.0, 601, dtype=torch.float64).unsqueeze(-1)
    grid = X.squeeze(-1)
    model = QSGP(series.X, series.Y, basis=InducingAtData(), update_steps=1, **series.modules)
    _, exact = predicted(series.exact, X)
    _, ours = predicted(model, X)
    kernel, noise = series.exact.covar_module, series.exact.likelihood.noise.item()
    with torch.no_grad():
        K, cross = kernel(series.X).to_dense(), kernel(X, series.X).to_dense()
        prior = float(kernel.outputscale)
    diagonal = noise / (K.square().sum(0) + noise * K.diagonal())
    full = torch.linalg.pinv(K @ K / noise + K, hermitian=True)
    curves = {
        "exact GP": (exact, EXACT, "-"),
        "mean field, augmented: QSGP": (ours, OURS, "-"),
        "mean field, not augmented": ((cross.square() @ diagonal).sqrt(), OURS, ":"),
        "full C, not augmented": ((cross @ full * cross).sum(-1).clamp_min(0.0).sqrt(), EXACT, ":"),
    }
    inside = (grid.abs() < 5.0).nonzero().flatten()
    for name, (deviation, colour, style) in curves.items():
        axes.plot(grid, deviation, style, color=colour, lw=1.4, label=name)
        there = {x: float(deviation[(grid - x).abs().argmin()]) / prior**0.5 for x in (9.0, 15.0)}
        over = float((deviation / exact)[inside].median())
        print(
            f"{name}: sd over the exact one within |x| < 5, median {over:.2f}; over the prior's at "
            + ", ".join(f"x = {x:.0f}: {value:.2f}" for x, value in there.items())
        )
    axes.plot(series.X.squeeze(-1), torch.zeros(20), "|", color=EXACT, ms=7)
    axes.legend(fontsize=8, frameon=False, loc="upper center")
    axes.set_xlabel("x; ticks are the data", fontsize=9)
    axes.set_ylim(top=1.75 * prior**0.5)
    look(axes, "standard deviation, functions at 20 data")


def draw_relevance_vectors(axes: Axes, steps: int = 3_000) -> None:
    """Draw a relevance vector machine of 500 data, after figure 3.

    Its kernel has a lengthscale of 1: functions of longer ones are harder to tell apart, and more
    of them are left after as many steps.
    """
    series = Series.of(500, 10.0)
    X = torch.linspace(-10.0, 10.0, 401, dtype=torch.float64).unsqueeze(-1)
    kernel = RBFKernel().double()
    kernel.lengthscale = 1.0
    modules = {**series.modules, "covar_module": kernel.requires_grad_(False)}
    model = QSRVM(
        series.X,
        series.Y,
        covariance=Chevron(10),
        batch_size=500,
        learning_rate=0.03,
        initial_points=0,
        update_steps=0,
        **modules,
    )
    model.fit(steps=steps, progress=False)
    mean, deviation = predicted(model, X)
    vectors = model.relevance_vectors
    print(
        f"QSRVM: {len(vectors)} relevance vectors of 500 after {steps:,} steps, RMSE "
        f"{rmse(mean, sinc(X).squeeze(-1)):.3f}, of the exact GP "
        f"{rmse(predicted(series.exact, X)[0], sinc(X).squeeze(-1)):.3f}"
    )
    grid = X.squeeze(-1)
    axes.plot(series.X.squeeze(-1), series.Y.squeeze(-1), ".", ms=2.5, color=DATA)
    axes.fill_between(grid, mean - deviation, mean + deviation, color=OURS, alpha=0.2, lw=0)
    axes.plot(grid, mean, color=OURS, lw=1.5)
    rows = (series.X == vectors.T).any(-1)
    axes.plot(series.X[rows], series.Y[rows], "o", ms=3.5, color=EXACT, label="relevance vectors")
    axes.legend(fontsize=8, frameon=False, loc="upper right")
    look(axes, f"QSRVM: {len(vectors)} relevance vectors of 500")


# --- files --------------------------------------------------------------------------------------


def pictures() -> Iterator[Path]:
    """Draw both pictures and name their files."""
    for path, draw in ((DECOUPLED, decoupled), (QUADRUPLY, quadruply)):
        draw().savefig(path, dpi=110, pil_kwargs={"optimize": True})
        yield path


if __name__ == "__main__":
    for path in pictures():
        print(f"{path.name}: {path.stat().st_size:,} bytes")
