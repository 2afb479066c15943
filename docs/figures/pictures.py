"""Draw the pictures of README.md, docs/choosing/commands.md and docs/choosing/surveys.md.

The command is ``python docs/figures/pictures.py``.

``growth.svg`` shows what ``python -m benchmarks.speed.growth --out docs`` has measured, in
``growth.json``. ``map.png`` shows a run of ``bo-stream sample --compare random``, ``survey.png``
surveys of a simulated country; both are done again for it (a minute, and five).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bo_stream.loops.datasets import simulated_prevalence
from bo_stream.loops.run import Score, predict
from bo_stream.loops.sampling.campaign import Campaign
from bo_stream.loops.sampling.settings import Settings
from bo_stream.loops.survey.maps import COLOURS
from bo_stream.loops.survey.settings import SurveySettings
from bo_stream.loops.survey.survey import Survey
from docs.figures.shared import save

HERE = Path(__file__).parent
MEASURED = HERE / "growth.json"
GROWTH = HERE / "growth.svg"
MAP = HERE / "map.png"
SURVEY = HERE / "survey.png"

WIDTH = 9.0
OURS, THEIRS = "#c8102e", "#777777"
LINES = {"SingleTaskGP": THEIRS, "AutoGP": OURS}
TITLES = {
    "update": "3 observations taken, and the next prediction",
    "refit": "hyperparameters learned again",
}

Curves = dict[str, dict[int, float]]
"""Seconds by number of observations, by model."""


# --- cost ---------------------------------------------------------------------------------------


def growth() -> Figure:
    """Draw the time of an update and of a refit against the number of observations."""
    figure = Figure(figsize=(WIDTH, 3.1), layout="constrained")
    settings = json.loads(MEASURED.read_text(encoding="utf-8"))["settings"]
    for axes, (task, title) in zip(figure.subplots(1, 2), TITLES.items(), strict=True):
        draw_curves(axes, settings["seconds"][task], settings["families"])
        free = "upper right" if task == "update" else "lower right"
        axes.legend(fontsize=8, frameon=False, loc=free)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("observations so far", fontsize=9)
    figure.axes[0].set_ylabel("time", fontsize=9)
    return figure


def draw_curves(axes: Axes, curves: Curves, families: dict[str, str]) -> None:
    """Draw a line for each model, named with the families that it went through."""
    for name, curve in curves.items():
        label = name if name == "SingleTaskGP" else f"{name}: {', then '.join(ordered(families))}"
        n, value = np.array([(int(n), seconds) for n, seconds in curve.items()]).T
        axes.loglog(n, value, "o-", ms=3, lw=1.8, color=LINES[name], label=label)
    ticks = {1e-3: "1 ms", 1e-2: "10 ms", 0.1: "0.1 s", 1.0: "1 s", 10.0: "10 s", 100.0: "100 s"}
    axes.set_yticks(list(ticks), list(ticks.values()), minor=False)
    axes.set_xticks([10, 100, 1e3, 1e4, 1e5, 1e6], ["10", "100", "1,000", "10⁴", "10⁵", "10⁶"])
    axes.tick_params(labelsize=8, which="both")
    axes.minorticks_off()
    low, high = axes.get_ylim()
    axes.set_ylim(low / 1.5, high * 1.5)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def ordered(families: dict[str, str]) -> list[str]:
    """List each family once."""
    return list(dict.fromkeys(families.values()))


# --- a map --------------------------------------------------------------------------------------


def sites(shown: int = 18, steps: int = 66) -> Figure:
    """Draw a simulated map, what is known of it after some choices, and the error over all.

    Args:
        shown: Choices after which the map is drawn.
        steps: All choices, each of six sites.
    """
    settings = Settings(steps=steps, score_every=2)
    campaign = Campaign.begin(None, None, None, settings, ("chosen", "random"))
    figure = Figure(figsize=(WIDTH, 3.1), layout="constrained")
    truth, known, error = figure.subplots(1, 3, width_ratios=(1.0, 1.0, 1.25))
    for _ in campaign.run():
        if all(loop.steps_done == shown for loop in campaign.loops.values()):
            draw_map(truth, known, campaign)
    draw_errors(error, [loop.curve for loop in campaign.loops.values()])
    error.axvline(campaign.main.settings.initial + 6 * shown, color="0.7", lw=1.0, ls=":")
    return figure


def draw_map(truth: Axes, known: Axes, campaign: Campaign) -> None:
    """Draw the truth, and beside it the posterior mean with the sites that were observed."""
    data, loop = campaign.data, campaign.main
    mean, _ = predict(loop.state.model, torch.from_numpy(data.unit_X).to(loop.split.pool_X))
    picks = loop.picked_rows()
    low, high = np.quantile(data.y, (0.002, 0.998))
    titles = ("the map", f"learned from {len(picks)} chosen sites")
    for axes, title, values in zip((truth, known), titles, (data.y, mean.numpy()), strict=True):
        colours = {"c": values, "vmin": low, "vmax": high, "cmap": "viridis"}
        axes.scatter(*data.X.T, s=3.2, marker="s", linewidths=0, **colours)
        axes.set_title(title, fontsize=10)
        axes.set_aspect("equal")
        axes.set_axis_off()
    known.scatter(*data.X[picks].T, s=5, c="white", edgecolors="black", linewidths=0.4)


def draw_errors(axes: Axes, curves: Sequence[Sequence[Score]]) -> None:
    """Draw the error over the number of observations, of chosen and of random sites."""
    for curve, name, style in zip(curves, ("chosen", "random"), ("-", "--"), strict=True):
        observations = [score.observations for score in curve]
        colour = OURS if name == "chosen" else THEIRS
        axes.plot(observations, [s.rmse_sd for s in curve], style, color=colour, label=name)
    label(axes, "held-out error, in sd of the map", "sites observed")


def label(axes: Axes, title: str, below: str) -> None:
    """Give curves that fall towards zero their title, axes and legend."""
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(below, fontsize=9)
    axes.set_ylim(bottom=0.0)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)


# --- a survey -----------------------------------------------------------------------------------

THRESHOLD, EXAMINED, FIRST, Q, ROUNDS, SHOWN = 0.3, 50, 50, 10, 10, 5
"""Prevalence, people a site, random sites, sites a round, rounds, and the round that is shown."""


@dataclass(frozen=True)
class Stage:
    """What a survey knows after a round: predictions of all sites, and the sites that come next."""

    predictions: pd.DataFrame
    following: pd.DataFrame

    @property
    def surveyed(self) -> pd.DataFrame:
        """Predictions of the sites with results."""
        return self.predictions[self.predictions["examined"].notna()]


def rounds(seed: int, chosen: bool) -> Iterator[Stage]:
    """Survey the simulated country: random sites first, then chosen or random ones, by rounds."""
    country, random = simulated_prevalence(), np.random.default_rng(seed)
    order, positive = random.permutation(len(country.y)), random.binomial(EXAMINED, country.y)
    degrees = (country.X - 500.0) / 111.195  # kilometres about 30 degrees east on the equator
    places = {"longitude": 30.0 + degrees[:, 0], "latitude": degrees[:, 1]}
    sites = pd.DataFrame({"id": np.arange(len(order)), **places})
    survey, following = Survey(sites, SurveySettings(threshold=THRESHOLD)), order[:FIRST]
    for number in range(ROUNDS + 1):
        told = {"id": following, "examined": EXAMINED, "positive": positive[following]}
        survey.tell(pd.DataFrame(told))
        following = order[FIRST + Q * number :][:Q]
        if chosen:
            following = survey.ask(Q)["id"].astype(int).to_numpy()
        yield Stage(survey.predictions(), sites.iloc[following])


def survey(seeds: int = 4) -> Figure:
    """Draw what a survey knows after its random sites and after some rounds, and its errors.

    Args:
        seeds: Number of surveys that the errors are averaged over; the first is shown.
    """
    runs = {how: [list(rounds(seed, how == "chosen")) for seed in range(seeds)] for how in HOW}
    figure = Figure(figsize=(WIDTH, 3.1), layout="constrained")
    first, later, wrong = figure.subplots(1, 3, width_ratios=(1.0, 1.0, 1.25))
    stages = runs["chosen"][0]
    draw_stage(first, stages[0], f"{FIRST} random sites")
    draw_stage(later, stages[SHOWN], f"and {SHOWN * Q} more, chosen")
    labels = {
        "above": f"above {100 * THRESHOLD:.0f} %, 90 % sure", "uncertain": "uncertain",
        "below": "below, 90 % sure",
    }  # fmt: skip
    handles = [
        Line2D([], [], marker="s", ls="none", color=COLOURS[name], label=text)
        for name, text in labels.items()
    ]
    look = {"marker": "o", "ls": "none", "mec": "black"}
    handles += [
        Line2D([], [], ms=4, mfc="none", label="surveyed", **look),
        Line2D([], [], ms=5, color="black", label="next", **look),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=5, fontsize=8, frameon=False)
    above = simulated_prevalence().y > THRESHOLD
    for how, style in HOW.items():
        shares = [[called_wrong(stage, above) for stage in run] for run in runs[how]]
        sites = FIRST + Q * np.arange(ROUNDS + 1)
        colour = OURS if how == "chosen" else THEIRS
        wrong.plot(sites, np.mean(shares, axis=0), style, color=colour, label=how)
    label(wrong, "share of the map called wrongly, %", "sites surveyed")
    return figure


HOW = {"chosen": "-", "random": "--"}
"""Line of each way to go on."""


def draw_stage(axes: Axes, stage: Stage, title: str) -> None:
    """Draw the class of each site, the surveyed sites and the next ones."""
    place = ["longitude", "latitude"]
    known, following = stage.predictions, stage.following
    colours = known["class"].map(COLOURS)
    axes.scatter(*known[place].to_numpy().T, s=3.2, marker="s", linewidths=0, c=colours)
    edge = {"edgecolors": "black", "linewidths": 0.6}
    axes.scatter(*stage.surveyed[place].to_numpy().T, s=7, facecolors="none", **edge)
    axes.scatter(*following[place].to_numpy().T, s=16, c="black")
    axes.set_title(title, fontsize=10)
    axes.set_aspect("equal")
    axes.set_axis_off()


def called_wrong(stage: Stage, above: np.ndarray) -> float:
    """Compute the per cent of sites whose likelier side of the threshold is the wrong one."""
    return 100.0 * float(((stage.predictions["exceedance"] > 0.5) != above).mean())


# --- files --------------------------------------------------------------------------------------


def pictures() -> Iterator[Path]:
    """Draw all pictures and name their files."""
    save(growth(), GROWTH, MEASURED)
    yield GROWTH
    sites().savefig(MAP, dpi=110, pil_kwargs={"optimize": True})
    yield MAP
    survey().savefig(SURVEY, dpi=110, pil_kwargs={"optimize": True})
    yield SURVEY


if __name__ == "__main__":
    for path in pictures():
        print(f"{path}: {path.stat().st_size:,} bytes")
