"""The picture of a report: what a model predicts, how calibrated it is, what it costs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from bo_stream.diagnostics.alarms import AHEAD, LEAST_SENSITIVITY, Cost, Validation
from bo_stream.diagnostics.approximation import ApproximationGap
from bo_stream.models.auto.inference import HandOver

if TYPE_CHECKING:
    from bo_stream.diagnostics.trust import TrustReport

_GOOD, _BAD = "tab:green", "tab:red"


def draw_report(report: TrustReport) -> Figure:
    """Draw six panels below a line for each alarm; panels without content say why."""
    capacity = "" if report.capacity is None else f", {report.capacity}"
    if report.healthy:
        verdict = ["no alarm" if report.untested is None else report.untested]
    else:
        verdict = [str(alarm) for alarm in report.alarms]
    lines = [f"{report.model}, {report.observations:,.0f} observations{capacity}"]
    lines += [line for text in verdict for line in textwrap.wrap(text, 140)]
    figure = Figure(figsize=(11.0, 6.6 + 0.22 * len(lines)), layout="constrained")
    figure.suptitle(
        "\n".join(lines),
        fontsize=10,
        color=_GOOD if report.healthy else _BAD,
        ha="left",
        x=0.01,
    )
    (scores, calibration, coverage), (gap, inputs, cost) = figure.subplots(2, 3)
    if report.validation is None:
        for axes in (scores, calibration, coverage):
            _say(axes, "no rows were validated")
    else:
        _draw_scores(scores, report.validation)
        _draw_pit(calibration, report.validation)
        _draw_coverage(coverage, report.validation)
    _draw_gap(gap, report.gap)
    _draw_inputs(inputs, report.sensitivity)
    _draw_cost(cost, report.cost, report.hand_overs)
    return figure


def mark_hand_overs(axes: Axes, moves: Iterable[tuple[float, HandOver]]) -> None:
    """Mark where a model went over to another family, with the names of both in the legend.

    Args:
        axes: Of the picture, before its legend is drawn.
        moves: Position on the horizontal axis and hand-over.
    """
    for position, move in moves:
        label = f"{move.before} to {move.after}"
        axes.axvline(position, color="tab:red", lw=0.8, ls="-.", label=label)


def _say(axes: Axes, text: str) -> None:
    """Write in an empty panel why it is empty."""
    axes.text(0.5, 0.5, textwrap.fill(text, 34), ha="center", va="center", fontsize=9, color="0.4")
    axes.set_xticks([])
    axes.set_yticks([])


def _plain_ticks(*logarithmic: Axis) -> None:
    """Label few ticks of logarithmic axes, as plain numbers."""
    for axis in logarithmic:
        low, high = sorted(axis.get_view_interval())
        steps = (1.0,) if high > 30.0 * low else (1.0, 2.0, 5.0)
        axis.set_major_locator(LogLocator(subs=steps))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.5g}"))
        axis.set_minor_formatter(NullFormatter())


def _draw_scores(axes: Axes, validation: Validation) -> None:
    axes.set_title("error of predictions, before learning", fontsize=10)
    course = [scores for scores in validation.course if scores.count > 0]
    rows = [scores.rows for scores in course]
    for output, spread in enumerate(validation.outcome_deviation[: len(course[0].rmse)]):
        values = [scores.rmse[output] for scores in course]
        (line,) = axes.plot(rows, values, "o-", ms=3, label=f"RMSE, output {output}")
        axes.axhline(spread, color=line.get_color(), lw=0.8, ls=":")
    axes.set(xlabel="rows validated", xscale="log", yscale="log")
    _plain_ticks(axes.xaxis, axes.yaxis)
    axes.legend(fontsize=8, title="dotted: sd of outcomes", title_fontsize=7)


def _draw_pit(axes: Axes, validation: Validation) -> None:
    axes.set_title("probability integral transform", fontsize=10)
    if validation.pit is None:
        _say(axes, "labels and counts have none")
        return
    bins = len(validation.pit[0])
    edges = np.linspace(0.0, 1.0, bins + 1)
    for share in validation.pit:
        axes.stairs(np.asarray(share) * bins, edges, fill=len(validation.pit) == 1, alpha=0.7)
    spread = 2.0 * np.sqrt(bins / max(1, validation.total.count))
    axes.axhspan(1.0 - spread, 1.0 + spread, color="0.6", alpha=0.3)
    axes.axhline(1.0, color="black", lw=0.8)
    axes.set(xlabel="predicted probability of less than observed", ylabel="density", xlim=(0, 1))
    axes.set_ylim(bottom=0.0)


def _draw_coverage(axes: Axes, validation: Validation) -> None:
    axes.set_title("coverage of intervals, and drift", fontsize=10)
    course = [scores for scores in validation.course if scores.count > 0]
    if course[0].coverage_50 is None:
        _say(axes, "labels and counts have none")
        return
    rows = [scores.rows for scores in course]
    for name, share, colour in (("coverage_50", 0.5, "tab:blue"), ("coverage_95", 0.95, "tab:red")):
        values = np.asarray([getattr(scores, name) for scores in course]).mean(-1)
        axes.plot(rows, values, "o-", ms=3, color=colour, label=f"{100 * share:g} % intervals")
        axes.axhline(share, color=colour, lw=0.8, ls=":")
    for number, (_, row, began, _) in enumerate(validation.drift_signals):
        label = None if number else "drift"
        axes.axvspan(max(1, began), row, color="tab:orange", alpha=0.4, lw=0, label=label)
    axes.set(xlabel="rows validated", xscale="log", ylim=(0.0, 1.02))
    _plain_ticks(axes.xaxis)
    axes.legend(fontsize=8, loc="lower left")


def _draw_gap(axes: Axes, gap: ApproximationGap | str) -> None:
    axes.set_title("means, against an exact GP", fontsize=10)
    if isinstance(gap, str):
        _say(axes, gap)
        return
    low, high = min(gap.exact), max(gap.exact)
    axes.plot([low, high], [low, high], color="0.6", lw=0.8)
    label = f"{gap.mean:.2g} predictive sd apart"
    axes.plot(gap.exact, gap.approximate, ".", ms=3, label=label)
    axes.set(xlabel=f"exact, {gap.rows} rows", ylabel="this model on these rows")
    axes.legend(fontsize=8)


def _draw_inputs(axes: Axes, effects: list[float]) -> None:
    axes.set_title("effect of each input on the mean", fontsize=10)
    if not effects:
        _say(axes, "no rows were validated")
        return
    least = LEAST_SENSITIVITY * max(effects)
    colours = ["tab:blue" if effect > least else _BAD for effect in effects]
    axes.bar(range(len(effects)), effects, color=colours)
    axes.axhline(least, color="black", lw=0.8, ls=":")
    axes.set(xlabel="input", ylabel="change when shuffled, sd")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_cost(axes: Axes, cost: Cost | None, hand_overs: Iterable[HandOver]) -> None:
    axes.set_title("time an observation", fontsize=10)
    if cost is None:
        _say(axes, "too few steps were timed")
        return
    n, ms = [*cost.timed, AHEAD * cost.observations], 1e3
    axes.plot(cost.timed, [ms * s for s in cost.timed_seconds], "o-", ms=3, label="measured")
    axes.plot(
        [cost.observations, n[-1]],
        [ms * cost.seconds, ms * cost.seconds_ahead],
        "--",
        color="tab:orange",
        label=f"forecast, n^{cost.exponent:.2f}",
    )
    mark_hand_overs(axes, ((move.observations, move) for move in hand_overs))
    axes.set(xlabel="observations", ylabel="ms", xscale="log", yscale="log")
    _plain_ticks(axes.xaxis, axes.yaxis)
    memory = f"memory {cost.bytes / 2**20:.3g} MiB, then {cost.bytes_ahead / 2**20:.3g}"
    axes.legend(fontsize=8, title=memory, title_fontsize=8)
