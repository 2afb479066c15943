"""What a record of progressive validation says: scores, innovations, and cost with its forecast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import theilslopes

from bo_stream.diagnostics.validation import Interval, ProgressiveValidation

Array = NDArray[np.float64]

NORMAL_MEDIAN = 0.6744897501960817
"""Median of the absolute value of a standard normal number."""

FAR = 3.5
"""Robust standard deviations from which on an innovation is far: 0.05 % of normal ones are."""

AHEAD = 10.0
"""Factor of the number of observations to which the cost is forecast."""

_SLOPE_INTERVALS = 8
"""Last intervals from which the growth of the cost is estimated."""


@dataclass(frozen=True)
class Scores:
    """Scores of predictions of rows that the model had not seen; a number for each output.

    Attributes:
        rows: Number of rows at the end of what is scored.
        count: Number of rows that are scored.
        rmse: Root mean squared error, in units of the outcomes; of labels of several classes the
            root of the mean Brier score.
        nll: Mean negative log density, or log probability, of an outcome, in nats.
        coverage_50: Share of outcomes in their central 50 % interval; None for labels and counts.
        coverage_95: Share in their central 95 % interval.
    """

    rows: int
    count: int
    rmse: list[float]
    nll: list[float]
    coverage_50: list[float] | None
    coverage_95: list[float] | None

    @classmethod
    def of(cls, intervals: Sequence[Interval], has_intervals: bool) -> Scores:
        """Join intervals; ``has_intervals`` says whether outcomes have predictive intervals."""
        count = sum(interval.count for interval in intervals)
        means = {
            name: [float(sum(column)) / count for column in zip(*values, strict=True)]
            for name in ("squares", "nll", "within_50", "within_95")
            for values in [[getattr(interval, name) for interval in intervals]]
        }
        within = [means[name] if has_intervals else None for name in ("within_50", "within_95")]
        rmse = [math.sqrt(square) for square in means["squares"]]
        return cls(intervals[-1].rows, count, rmse, means["nll"], *within)


@dataclass(frozen=True)
class Innovations:
    """Innovations of the latest rows, standard normal under the model: one output.

    Attributes:
        count: Number of rows.
        mean: Their mean.
        scale: Their robust standard deviation: median absolute value over that of a normal number.
        far: Number of those more than ``FAR`` robust standard deviations from zero.
        skew: ``(q90 + q10 − 2 q50) / (q90 − q10)`` of their quantiles; 0 for a symmetric
            distribution, 0.46 for an exponential one.
    """

    count: int
    mean: float
    scale: float
    far: int
    skew: float

    @classmethod
    def of(cls, values: Array) -> Innovations:
        """Summarise at least one innovation, ``n``."""
        scale = float(np.median(np.abs(values))) / NORMAL_MEDIAN
        low, middle, high = np.quantile(values, (0.1, 0.5, 0.9))
        skew = float((high + low - 2.0 * middle) / (high - low)) if high > low else 0.0
        far = int((np.abs(values) > FAR * scale).sum())
        return cls(len(values), float(values.mean()), scale, far, skew)


@dataclass(frozen=True)
class Cost:
    """Time and memory now and at ``AHEAD`` times as many observations.

    Attributes:
        observations: Number of observations now.
        seconds: Of predicting and updating, for an observation.
        exponent: Power of the number of observations that the seconds grow by.
        seconds_ahead: Seconds an observation at ``AHEAD`` times as many.
        hours_to: Hours of the observations from now to then.
        bytes: Size of memory and caches.
        bytes_ahead: The same at ``AHEAD`` times as many.
        timed: Numbers of observations at which time was measured.
        timed_seconds: Seconds an observation there.
    """

    observations: float
    seconds: float
    exponent: float
    seconds_ahead: float
    hours_to: float
    bytes: float
    bytes_ahead: float
    timed: list[float]
    timed_seconds: list[float]

    @classmethod
    def of(cls, intervals: Sequence[Interval], since: float = 0.0) -> Cost | None:
        """Forecast from the last intervals that were timed; None where there are less than three.

        The exponent is the median of the slopes between pairs of intervals, of log seconds over log
        observations (Theil and Sen), and not below zero.

        Args:
            intervals: Of the record.
            since: Number of observations at which the model last went over to another family.
                Intervals before are left out of the forecast, if three remain.
        """
        every = [each for each in intervals if each.timed and each.observations > 0.0]
        later = [each for each in every if each.observations - each.count >= since]
        timed = (later if len(later) >= 3 else every)[-_SLOPE_INTERVALS:]
        if len(timed) < 3:
            return None
        n = [each.observations for each in timed]
        seconds = [each.seconds / each.timed for each in timed]
        sized = [each for each in timed if each.bytes]
        memory = [float(each.bytes) for each in sized]
        exponent = _exponent(n, seconds)
        growth = _exponent([each.observations for each in sized], memory)
        now, size = float(np.median(seconds[-3:])), memory[-1] if memory else math.nan
        ahead = now * AHEAD**exponent
        mean = now * (AHEAD ** (exponent + 1.0) - 1.0) / ((exponent + 1.0) * (AHEAD - 1.0))
        hours = mean * (AHEAD - 1.0) * n[-1] / 3600.0
        course = [each.observations for each in every], [s.seconds / s.timed for s in every]
        return cls(n[-1], now, exponent, ahead, hours, size, size * AHEAD**growth, *course)


def _exponent(n: Sequence[float], values: Sequence[float]) -> float:
    """Return the robust slope of log values over log n, at least 0."""
    if len(n) < 3 or len(set(n)) < 2 or min(values) <= 0.0:
        return 0.0
    return max(0.0, float(theilslopes(np.log(values), np.log(n)).slope))


@dataclass(frozen=True)
class Validation:
    """Progressive validation of a stream in numbers.

    Attributes:
        total: Scores of the whole stream.
        course: Scores over consecutive intervals of growing length.
        outcome_deviation: Standard deviation of the outcomes in the sample, an output each.
        pit: Share of the probability integral transforms in each of 20 bins, for each output; None
            for labels and counts. Uniform, 0.05 each, where predictions are calibrated.
        innovations: Summary of the latest ones, an output each.
        drift_rate: False alarms of the drift test an observation, all outputs together.
        drift_signals: Its latest signals: output, row, row after which the drift began, and sign.
        repeated_share: Estimated share of rows that repeat an earlier one, outcomes included.
    """

    total: Scores
    course: list[Scores]
    outcome_deviation: list[float]
    pit: list[list[float]] | None
    innovations: list[Innovations]
    drift_rate: float
    drift_signals: list[tuple[int, int, int, int]]
    repeated_share: float

    @classmethod
    def of(cls, record: ProgressiveValidation) -> Validation:
        """Summarise a record of at least one row."""
        real = bool(record.drift)
        rows = record.reservoir.rows
        outputs = record.outputs
        width = 0 if rows is None else (rows.shape[-1] - record.inputs) // 2
        sample = np.zeros((1, outputs)) if rows is None else rows[:, record.inputs :][:, :width]
        values = np.asarray(record.innovations).reshape(-1, outputs).T
        signals = [
            (output, row, began, sign)
            for output, test in enumerate(record.drift)
            for row, began, sign in test.signals
        ]
        return cls(
            Scores.of(record.intervals, real),
            [Scores.of([interval], real) for interval in record.intervals],
            sample.std(0).tolist(),
            [(np.asarray(n) / sum(n)).tolist() for n in record.histogram] if real else None,
            [Innovations.of(column) for column in values] if real else [],
            sum(test.rate for test in record.drift),
            signals,
            record.repeated.share,
        )
