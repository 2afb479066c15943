"""Alarms: what is wrong with a model or its stream, and the line of code that mends it.

First the alarms, then the numbers that they are computed from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from scipy.stats import theilslopes
from torch import Tensor

from bo_stream.diagnostics.approximation import BY_STEPS, ApproximationGap, finer, rebuilt
from bo_stream.diagnostics.validation import Array, Interval, ProgressiveValidation
from bo_stream.models.auto.auto import AutoGP, family_model
from bo_stream.models.base import StreamingGP
from bo_stream.models.inducing.osgpr import OSVGP
from bo_stream.models.local import LocalGP
from bo_stream.models.wiski.heteroscedastic import HeteroscedasticWISKI

FEWEST = 50
"""Rows from which on an alarm can ring."""

HORIZON = 1000
"""Latest observations among which a signal of the drift test rings the alarm."""

_MOST_GAP = 0.3
"""Root mean squared error of the approximate mean, in standard deviations of a prediction: it then
is 9 % of an innovation's variance.
"""

_MOST_SCALE = 1.4
"""Robust standard deviation of innovations, or one over it: variances are off by a factor of 2."""

_MOST_FAR = 0.0075
"""Share of innovations more than 3.5 robust standard deviations away, 15 times a normal one's."""

_MOST_SKEW = 0.25
"""Skew of the innovations' quantiles; an exponential distribution has 0.46."""

_MOST_REPEATED = 0.05
"""Share of rows that repeat an earlier one, outcomes included."""

_FAR = 3.5
"""Robust standard deviations from which on an innovation is far: 0.05 % of normal ones are."""

LEAST_SENSITIVITY = 0.02
"""Effect of an input on the posterior mean, as a fraction of the largest effect of an input."""


@dataclass(frozen=True)
class Alarm:
    """Something that is wrong, and what to do.

    Attributes:
        name: ``units``, ``repeated rows``, ``approximation``, ``drift``, ``skew``, ``tails``,
            ``noise`` or ``dead input``.
        text: The finding in words.
        value: The measured value.
        threshold: Largest value without alarm; least value, for a dead input.
        remedy: A line of code, in which ``model`` is the model; X, Y, Yvar and ``bounds`` are the
            user's data. ``X_new``, ``Y_new`` and ``Yvar_new`` are those since a change, and
            ``X_old``, ``Y_old`` and ``Yvar_old`` those before it.
    """

    name: str
    text: str
    value: float
    threshold: float
    remedy: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}. {self.remedy}"


def find_alarms(
    model: StreamingGP,
    record: ProgressiveValidation | None,
    innovations: Sequence[Innovations],
    gap: ApproximationGap | str,
    effects: Sequence[float],
) -> tuple[Alarm, ...]:
    """Find what is wrong; an alarm that explains another one silences it.

    A change of units explains all else. Repeated rows, a gap of the approximation and a drift
    explain innovations that are too large or too small; skew and tails explain their scale.

    Args:
        model: The model.
        record: Of its stream.
        innovations: Of each output.
        gap: Distance of its approximation from an exact Gaussian process; or why it is not known.
        effects: Of each input on the posterior mean.
    """
    if record is None or record.rows < FEWEST:
        return ()
    Yvar = record.sample(torch.empty(0, dtype=torch.float64))[2]
    known = "" if Yvar is None else "Yvar"
    change = record.units.change
    if change is not None:
        power = max(change.powers, key=abs)
        text = (
            f"{change.what} are {10.0**power:g} times as large as before, found after row "
            f"{change.row:,} of the record"
        )
        factors, width = [10.0**each for each in change.powers], 2 if Yvar is None else 3
        shown, squared = (
            f"{each[0]:g}" if len(set(each)) == 1 else f"torch.tensor({each})"
            for each in (factors, [factor**2 for factor in factors])
        )
        converted = ["X_new", f"Y_new / {shown}", f"Yvar_new / {squared}"]
        if change.what == "inputs":
            converted = [f"X_new / {shown}", "Y_new", "Yvar_new"]
        new, old = (
            ", ".join(f"{name}_{age}" for name in ("X", "Y", "Yvar")[:width])
            for age in ("new", "old")
        )
        subtracts = isinstance(model.likelihood, _GaussianLikelihoodBase)
        subtracts = subtracts and not isinstance(model, (LocalGP, *BY_STEPS))
        if isinstance(model, HeteroscedasticWISKI):
            subtracts = Yvar is not None and not bool(Yvar.isnan().any())
        before = f"retract({new})" if subtracts else f"clear().update({old})"
        remedy = f"model.{before}.update({', '.join(converted[:width])})"
        if isinstance(model, BY_STEPS):
            remedy += ".fit(seconds=60)"
        return (Alarm("units", text, float(abs(power)), 0.0, remedy),)
    rows: list[Alarm] = []
    share = record.repeated.share
    repeats = bool(record.drift) and share > _MOST_REPEATED and record.repeated.repeated >= 10
    if repeats:
        text = f"{100.0 * share:.0f} % of the rows repeat an earlier one, outcomes included"
        widths = f"({record.inputs}, {model.num_outputs})"
        remedy = f"X, Y = torch.cat((X, Y), -1).unique(dim=0).split({widths}, -1)"
        if Yvar is not None:
            first = "np.unique(torch.cat((X, Y), -1).cpu(), axis=0, return_index=True)[1]"
            remedy = f"rows = {first}; X, Y, Yvar = X[rows], Y[rows], Yvar[rows]"
        rows.append(Alarm("repeated rows", text, share, _MOST_REPEATED, remedy))
    if isinstance(gap, ApproximationGap) and gap.rows >= FEWEST and not gap.mean <= _MOST_GAP:
        text = (
            f"predicted means of {gap.rows} rows are {gap.mean:.2g} predictive standard deviations "
            "from those of an exact Gaussian process with the same hyperparameters"
        )
        rows.append(Alarm("approximation", text, gap.mean, _MOST_GAP, finer(model, known)))
    skew = _skew(model, innovations, record, known)
    level = [] if repeats else _drift(model, record, innovations, bool(skew))
    shape = [] if rows or level else skew or _tails(model, innovations)
    noise = [] if rows or level or shape else _noise(model, innovations, Yvar)
    return (*rows, *level, *shape, *noise, *_dead(model, effects, known))


def _drift(
    model: StreamingGP,
    record: ProgressiveValidation,
    innovations: Sequence[Innovations],
    skewed: bool,
) -> list[Alarm]:
    """Ring for a signal; a signal of skewed innovations with a mean of zero is not counted."""
    centred = all(abs(each.mean) < 4.0 / math.sqrt(each.count) for each in innovations)
    if skewed and centred:
        return []
    for output, test in enumerate(record.drift):
        signals = test.within(HORIZON)
        if signals:
            _, began, sign = signals[0]
            side = "above" if sign > 0 else "below"
            text = (
                f"outcomes of output {output} have mostly been {side} their predictions since "
                f"about row {began:,} of the record (a false alarm within {HORIZON:,} rows has a "
                f"probability of {test.false_alarm_probability(HORIZON):.2g})"
            )
            remedy = "model.forget(0.99)  # before each update; after a break: model.clear()"
            if isinstance(model, BY_STEPS):  # these cannot forget
                remedy = "model.clear().update(X_new, Y_new).fit(seconds=60)  # the rows since then"
            return [Alarm("drift", text, float(len(signals)), 0.0, remedy)]
    return []


def _skew(
    model: StreamingGP,
    innovations: Sequence[Innovations],
    record: ProgressiveValidation,
    known: str,
) -> list[Alarm]:
    for output, each in enumerate(innovations):
        most = max(_MOST_SKEW, 6.0 / math.sqrt(each.count))
        if each.count >= FEWEST and abs(each.skew) > most:
            text = f"innovations of output {output} are skewed, {each.skew:.2f} by their quantiles"
            is_positive = each.skew > 0.0 and (record.sampled_outcomes > 0.0).all()
            step = "log=Log()" if is_positive else "bilog=Bilog()"
            chain = f"ChainedOutcomeTransform({step}, z=Standardize({model.num_outputs}))"
            # these take no transform, and Bilog takes no known noise
            fixed = isinstance(family_model(model), (OSVGP, *BY_STEPS))
            kind, Yvar = "OSGPR" if fixed else "", known if is_positive else ""
            remedy = rebuilt(model, f"outcome_transform={chain}", kind=kind, Yvar=Yvar)
            return [Alarm("skew", text, abs(each.skew), most, remedy)]
    return []


def _tails(model: StreamingGP, innovations: Sequence[Innovations]) -> list[Alarm]:
    for output, each in enumerate(innovations):
        most = max(6.0, _MOST_FAR * each.count)
        if each.count >= FEWEST and each.far > most:
            text = (
                f"{each.far} of the last {each.count} innovations of output {output} are more than "
                f"{_FAR:g} robust standard deviations from zero"
            )
            likelihood, scaled = "StudentTLikelihood()", f"Standardize({model.num_outputs})"
            remedy = f"model = OSVGP(X, Y, {likelihood}, outcome_transform={scaled})"
            return [Alarm("tails", text, float(each.far), most, remedy)]
    return []


def _noise(
    model: StreamingGP, innovations: Sequence[Innovations], Yvar: Tensor | None
) -> list[Alarm]:
    for output, each in enumerate(innovations):
        most = max(_MOST_SCALE, math.exp(5.0 / math.sqrt(each.count)))
        factor = max(each.scale, 1.0 / max(each.scale, 1e-300))
        if each.count >= FEWEST and factor > most:
            small = "larger than predicted: the noise is too small, or the function has changed"
            large = "smaller than predicted: the noise is too large"
            size = small if each.scale > 1.0 else large
            text = f"innovations of output {output} are {factor:.2g} times {size}"
            remedy = _relearning(model, each.scale**2, Yvar)
            return [Alarm("noise", text, factor, most, remedy)]
    return []


def _relearning(model: StreamingGP, factor: float, Yvar: Tensor | None = None) -> str:
    """Return the line of code that learns a model's noise, or corrects the known one."""
    if Yvar is not None and not bool(Yvar.isnan().any()):
        return rebuilt(model, Yvar=f"{factor:.2g} * Yvar")
    if isinstance(model, BY_STEPS):
        return "model.fit(seconds=60)"
    if isinstance(model, AutoGP) and isinstance(family_model(model), OSVGP):
        # sites: by steps, as no fit reaches their noise
        if model.memory.held is None:
            return rebuilt(model)
        return 'model.move_to("OSVGP", hyper_steps=20)  # learns it from all rows'
    if isinstance(model, OSVGP):
        return "model.hyper_steps = 20  # the next updates learn it"
    return "fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))"


def _dead(model: StreamingGP, effects: Sequence[float], known: str) -> list[Alarm]:
    largest = max(effects, default=0.0)
    dead = [i for i, effect in enumerate(effects) if effect <= LEAST_SENSITIVITY * largest]
    used = [i for i in range(len(effects)) if i not in dead]
    if not dead or not used:
        return []
    which = f"input {dead[0]} has" if len(dead) == 1 else f"inputs {dead} have"
    text = f"{which} next to no effect on the posterior mean"
    value = max(effects[i] for i in dead) / largest
    remedy = rebuilt(model, inputs=f"[:, {used}]", Yvar=known)
    return [Alarm("dead input", text, value, LEAST_SENSITIVITY, remedy)]


# --- numbers that alarms are computed from --------------------------------------------------------


_NORMAL_MEDIAN = 0.6744897501960817
"""Median of the absolute value of a standard normal number."""

AHEAD = 10.0
"""The cost is forecast to this many times the present number of observations."""

_SLOPE_INTERVALS = 8
"""Last intervals from which the growth of the cost is estimated."""


@dataclass(frozen=True)
class PredictionScores:
    """Scores of predictions of rows that the model had not seen; a number for each output.

    Attributes:
        rows: Number of rows of the stream up to the last scored one.
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
    def of(cls, intervals: Sequence[Interval], has_intervals: bool) -> PredictionScores:
        """Join intervals; ``has_intervals``: whether outcomes have predictive intervals."""
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
        scale: Their robust standard deviation: the median absolute value, divided by the median of
            a standard normal number's.
        far: Number of innovations more than 3.5 robust standard deviations from zero.
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
        scale = float(np.median(np.abs(values))) / _NORMAL_MEDIAN
        low, middle, high = np.quantile(values, (0.1, 0.5, 0.9))
        skew = float((high + low - 2.0 * middle) / (high - low)) if high > low else 0.0
        far = int((np.abs(values) > _FAR * scale).sum())
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
        innovations: Summary of the latest innovations, an output each.
        drift_rate: False alarms of the drift test an observation, all outputs together.
        drift_signals: Its latest signals: output, row, row after which the drift began, and sign.
        repeated_share: Estimated share of rows that repeat an earlier one, outcomes included.
    """

    total: PredictionScores
    course: list[PredictionScores]
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
        values = np.asarray(record.innovations).reshape(-1, record.outputs).T
        signals = [
            (output, row, began, sign)
            for output, test in enumerate(record.drift)
            for row, began, sign in test.signals
        ]
        return cls(
            PredictionScores.of(record.intervals, real),
            [PredictionScores.of([interval], real) for interval in record.intervals],
            record.sampled_outcomes.std(0).tolist(),
            [(np.asarray(n) / sum(n)).tolist() for n in record.histogram] if real else None,
            [Innovations.of(column) for column in values] if real else [],
            sum(test.rate for test in record.drift),
            signals,
            record.repeated.share,
        )
