"""Draw exchange rates in time order and in a random order, after figure 1 of the WISKI paper.

The command is ``python -m docs.figures.exchange_rates``; it takes half a minute and needs the set
``fx2007`` (see ``benchmarks/common/data.py``). The models are those of the way ``bounded`` of
``benchmarks/accuracy/exchange_rates.py``.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from botorch.models.model import Model
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.accuracy.exchange_rates import (
    BOUNDED,
    FIRST,
    ORDERS,
    ROWS,
    WISKI_COARSE,
    Series,
    along,
    exact,
    fitted,
    rates,
    streams,
)
from bo_stream import CoarsePointsWarning, GridResolutionWarning

PICTURE = Path(__file__).parent / "exchange_rates.png"
WIDTH, HEIGHT = 11.0, 7.4
OURS, EXACT, DATA = "#c8102e", "#222222", "#3b6ea5"
COUNTS = (10, 20, 30)
TITLES = {None: "time order", ORDERS[0]: "random order"}
"""Titles of the orders, by their seeds."""


@torch.no_grad()
def predicted(model: Model, X: Tensor) -> tuple[Tensor, Tensor]:
    """Predict an outcome: mean and standard deviation, ``n`` each."""
    posterior = model.posterior(X, observation_noise=True)
    return posterior.mean.squeeze(-1), posterior.variance.sqrt().squeeze(-1)


def draw(axes: Axes, model: Model, reference: Model, series: Series, count: int) -> None:
    """Draw a model after so many rows, all rows, and the exact GP of all."""
    X = torch.linspace(-1.05, 1.05, 400, dtype=torch.float64).unsqueeze(-1)
    grid, (mean, deviation) = X.squeeze(-1), predicted(model, X)
    low, high = mean - 2.0 * deviation, mean + 2.0 * deviation
    axes.fill_between(grid, low, high, color=OURS, alpha=0.18, lw=0, label="± 2 sd")
    axes.plot(grid, predicted(reference, X)[0], color=EXACT, lw=0.6, label="exact GP, all rows")
    axes.plot(grid, mean, color=OURS, lw=1.2, label="mean")
    for rows, face, name in (
        (slice(count), DATA, "observed"),
        (slice(count, None), "none", "not yet"),
    ):
        axes.scatter(
            series.X[rows].squeeze(-1),
            series.Y[rows].squeeze(-1),
            s=9,
            lw=0.6,
            facecolors=face,
            edgecolors=DATA,
            label=name,
            zorder=3,
        )
    axes.set_ylim(-3.2, 3.2)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def picture(X: Tensor, Y: Tensor, first: int, counts: tuple[int, ...]) -> Figure:
    """Draw a row of panels for each model, three columns for each order."""
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    size = len(counts)
    panels = figure.subplots(4, 2 * size, sharex=True, sharey=True)
    for i, (seed, title) in enumerate(TITLES.items()):
        series = Series.of(X, Y, seed)
        reference = exact(series)
        found = streams(fitted(series, BOUNDED, first), series, BOUNDED, first)
        found.pop(WISKI_COARSE)
        for row, (name, (model, step)) in enumerate(found.items()):
            columns = iter(range(i * size, (i + 1) * size))
            for count, _ in along(step, series, first):
                if count in counts:
                    axes = panels[row, next(columns)]
                    draw(axes, model, reference, series, count)
                    axes.set_title(f"{title}, n = {count}" if row == 0 else "", fontsize=8)
            panels[row, 0].set_ylabel(name, fontsize=8)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    return figure


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    for category in (CoarsePointsWarning, GridResolutionWarning):
        warnings.simplefilter("ignore", category)
    drawn = picture(*rates(ROWS), FIRST, COUNTS)
    drawn.savefig(PICTURE, dpi=100, pil_kwargs={"optimize": True})
    print(f"{PICTURE.name}: {PICTURE.stat().st_size:,} bytes")
