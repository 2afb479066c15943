"""A report on a model and its stream: can it still be trusted, and if not, what is to be done?"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from botorch.exceptions.errors import UnsupportedError
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from torch import Tensor

from bo_stream.diagnostics.alarms import (
    AHEAD,
    FEWEST,
    LEAST_SENSITIVITY,
    Alarm,
    Cost,
    Validation,
    find_alarms,
)
from bo_stream.diagnostics.approximation import (
    ApproximationGap,
    UsedCapacity,
    approximation_gap,
    capacity_of,
    sensitivities,
)
from bo_stream.diagnostics.certificate import Stability, stability
from bo_stream.diagnostics.validation import ProgressiveValidation, check_validated
from bo_stream.models.auto.inference import HandOver
from bo_stream.models.base import StreamingGP
from bo_stream.storage.archive import atomic_write

_GOOD, _BAD = "tab:green", "tab:red"

MOST_ROWS = 10_000
"""Most of the rows given to :func:`report` that are predicted; of more, a random sample."""

PICTURE, RECORD = "trust.png", "trust.json"


def report(
    model: StreamingGP,
    validation: ProgressiveValidation | None = None,
    X: Tensor | None = None,
    Y: Tensor | None = None,
    Yvar: Tensor | None = None,
    path: str | Path | None = None,
) -> TrustReport:
    """Report whether a model can be trusted, from the record of its stream or from held-out rows.

    The scores of its predictions; tests for drift, wrong noise, heavy tails and skew, repeated
    rows, and a change of units; the gap between its approximation and an exact Gaussian process on
    a sample of 500 rows; inputs without effect; the certificate of its linear system; what its
    posterior rests on; time and memory with their forecast. The cost does not depend on the length
    of the stream.

    Args:
        model: Stays as it is. Without batch shape.
        validation: Record that was fed along the stream. Alarms are of its latest 1,000 rows.
        X: Instead of a record: inputs that the model has not seen, ``n x d``.
        Y: Their outcomes, ``n x m``, or labels. At most ``MOST_ROWS`` are predicted.
        Yvar: Their known noise variances.
        path: Folder for ``trust.png`` and ``trust.json``; None: they are not written.

    Raises:
        ValueError: Both a record and rows, or only one of X and Y.
        UnsupportedError: A model that is none of this package's, has a batch shape, or is
            conditioned on hypothetical observations.
        InputDataError, BotorchTensorDimensionError: Rows that ``update`` would refuse.
        OSError: The folder cannot be written.

    Example:
        >>> result = report(model, record, path="run")
        >>> for alarm in result.alarms:
        ...     print(alarm.name, alarm.remedy)
    """
    check_validated(model)
    if (X is None) != (Y is None) or (X is not None and validation is not None):
        arguments = {"validation": validation, "X": X, "Y": Y}
        given = ", ".join(name for name, value in arguments.items() if value is not None)
        raise ValueError(
            "Expected either validation, the record of the stream, or held-out rows X and Y, got "
            f"{given}."
        )
    if X is not None and Y is not None:
        if len(X) > MOST_ROWS:  # some of them, in their order
            generator = torch.Generator().manual_seed(0)
            rows = torch.randperm(len(X), generator=generator)[:MOST_ROWS].sort().values
            rows = rows.to(X.device)
            X, Y, Yvar = X[rows], Y[rows], None if Yvar is None else Yvar[rows]
        validation = ProgressiveValidation()
        validation.add(model, X, Y, Yvar)

    record = None if validation is None or validation.rows == 0 else validation
    gap: ApproximationGap | str = "no rows were validated"
    effects: list[float] = []
    if record is not None:
        X, Y, Yvar = record.sample(model.train_targets.as_subclass(Tensor))
        gap, effects = approximation_gap(model, X, Y, Yvar), sensitivities(model, X)
    summary = None if record is None else Validation.of(record)
    innovations = [] if summary is None else summary.innovations
    moves: tuple[HandOver, ...] = getattr(model, "history", ())
    since = moves[-1].observations if moves else 0.0
    untested: str | None = None
    if record is None:
        untested = "No rows were validated: there are no scores and no alarms."
    elif record.rows < FEWEST:
        untested = f"Only {record.rows} rows were validated: alarms need {FEWEST}."
    elif not record.drift:
        untested = (
            "Outcomes are labels or counts: they have an error and a log probability, but no "
            "intervals, innovations, drift test or alarms of noise and tails."
        )
    certificate: Stability | str
    try:
        certificate = stability(model)
    except (UnsupportedError, ValueError) as error:
        certificate = str(error)
    result = TrustReport(
        type(model).__name__,
        model.num_observations,
        find_alarms(model, record, innovations, gap, effects),
        summary,
        gap,
        certificate,
        capacity_of(model),
        effects,
        None if record is None else Cost.of(record.intervals, since),
        untested,
        moves,
    )
    if path is not None:
        result.save(path)
    return result


@dataclass(frozen=True)
class TrustReport:
    """The result of :func:`report`.

    Attributes:
        model: Name of the model's class.
        observations: Number of observations in the model.
        alarms: What is wrong; empty where nothing is known to be.
        validation: Scores and tests over the stream; None without any row.
        gap: Distance from an exact Gaussian process of some rows; or why it is not known.
        stability: Certificate of the linear system; or why there is none.
        capacity: What the posterior rests on; None where that is not known.
        sensitivity: Effect of each input on the posterior mean, in standard deviations.
        cost: Time and memory with a forecast; None where too few steps were timed.
        untested: The parts that could not be judged, in words.
        hand_overs: Moves of an :class:`~bo_stream.AutoGP` from one family to another.
    """

    model: str
    observations: float
    alarms: tuple[Alarm, ...]
    validation: Validation | None
    gap: ApproximationGap | str
    stability: Stability | str
    capacity: UsedCapacity | None
    sensitivity: list[float]
    cost: Cost | None
    untested: str | None
    hand_overs: tuple[HandOver, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether no alarm rings."""
        return not self.alarms

    @property
    def sufficient(self) -> bool | None:
        """Whether features, points or centres suffice; None where that is not known."""
        if isinstance(self.gap, str):
            return None
        return all(alarm.name != "approximation" for alarm in self.alarms)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, for JSON; infinite or missing numbers are None."""
        content = asdict(self)
        content["healthy"], content["sufficient"] = self.healthy, self.sufficient
        plain: dict[str, Any] = _plain(content)
        return plain

    def plot(self) -> Figure:
        """Draw six panels below a line for each alarm; panels without content say why.

        They have the scores, the calibration, the coverage with signals of drift, the gap, the
        inputs and the cost.
        """
        capacity = "" if self.capacity is None else f", {self.capacity}"
        if self.healthy:
            verdict = ["no alarm" if self.untested is None else self.untested]
        else:
            verdict = [str(alarm) for alarm in self.alarms]
        lines = [f"{self.model}, {self.observations:,.0f} observations{capacity}"]
        lines += [line for text in verdict for line in textwrap.wrap(text, 140)]
        figure = Figure(figsize=(11.0, 6.6 + 0.22 * len(lines)), layout="constrained")
        figure.suptitle(
            "\n".join(lines),
            fontsize=10,
            color=_GOOD if self.healthy else _BAD,
            ha="left",
            x=0.01,
        )
        (scores, calibration, coverage), (gap, inputs, cost) = figure.subplots(2, 3)
        if self.validation is None:
            for axes in (scores, calibration, coverage):
                _say(axes, "no rows were validated")
        else:
            _draw_scores(scores, self.validation)
            _draw_pit(calibration, self.validation)
            _draw_coverage(coverage, self.validation)
        _draw_gap(gap, self.gap)
        _draw_inputs(inputs, self.sensitivity)
        _draw_cost(cost, self.cost, self.hand_overs)
        return figure

    def save(self, folder: str | Path) -> None:
        """Write ``trust.png`` and ``trust.json`` into a folder, which is made if necessary.

        Raises:
            OSError: They cannot be written; the old files stand.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / RECORD) as file:
            file.write(self.to_json())
        with atomic_write(folder / PICTURE) as file:
            self.plot().savefig(file, format="png", dpi=120)

    def to_json(self) -> bytes:
        """Return :meth:`as_dict` as a file in JSON."""
        return (json.dumps(self.as_dict(), indent=2, allow_nan=False) + "\n").encode()

    def __str__(self) -> str:
        alarms = [str(alarm) for alarm in self.alarms] or ["none"]
        rows = {
            "model": f"{self.model}, {self.observations:,.0f} observations",
            "alarms": f"\n{'':<15}".join(alarms),
        }
        if self.validation is not None:
            scores = self.validation.total
            rows |= {"RMSE": _numbers(scores.rmse), "NLL": _numbers(scores.nll)}
            if scores.coverage_50 is not None and scores.coverage_95 is not None:
                halves, most = _numbers(scores.coverage_50), _numbers(scores.coverage_95)
                rows["coverage"] = f"{halves} of 0.5, {most} of 0.95"
        if isinstance(self.gap, str):
            rows["approximation"] = f"not compared: {self.gap}"
        else:
            rows["approximation"] = (
                f"means {self.gap.mean:.2g} predictive standard deviations from the exact ones, "
                f"deviations {self.gap.deviation:.3g} of them, on {self.gap.rows} rows"
            )
        if self.capacity is not None:
            rows["rests on"] = str(self.capacity)
        if self.cost is not None:
            rows["cost"] = (
                f"{1e3 * self.cost.seconds:.3g} ms an observation, "
                f"{1e3 * self.cost.seconds_ahead:.3g} ms at ten times as many; "
                f"{self.cost.bytes / 2**20:.3g} MiB"
            )
        if self.untested is not None:
            rows["not judged"] = self.untested
        return "\n".join(f"{name:<15}{text}" for name, text in rows.items())


def _numbers(values: list[float]) -> str:
    return " ".join(f"{value:.3g}" for value in values)


def _plain(value: Any) -> Any:
    """Replace tuples by lists and numbers that are not finite by None, all the way down."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# --- drawing --------------------------------------------------------------------------------------


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
    course = validation.course
    rows = [scores.rows for scores in course]
    for output, spread in enumerate(validation.outcome_deviation[: len(course[0].rmse)]):
        values = [scores.rmse[output] for scores in course]
        (line,) = axes.plot(rows, values, "o-", ms=3, label=f"RMSE, output {output}")
        axes.axhline(spread, color=line.get_color(), lw=0.8, ls=":")
    are_positive = any(score > 0.0 for scores in course for score in scores.rmse)
    axes.set(xlabel="rows validated", xscale="log", yscale="log" if are_positive else "linear")
    _plain_ticks(axes.xaxis, *([axes.yaxis] if are_positive else []))
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
    course = validation.course
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
