"""Summaries of a stream, of fixed size: a sample, repeated rows, tests for drift and for units."""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from bo_stream.errors import check_whole

Array = NDArray[np.float64]


class Reservoir:
    """A uniform sample without replacement of all rows so far.

    Algorithm R of Vitter, ACM Transactions on Mathematical Software 11, 1985.

    Attributes:
        size: Most rows in the sample.
        seen: Number of rows so far.
        rows: The sample, ``min(seen, size) x k``; None before any row.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        """Start empty; ``seed`` decides which rows are sampled."""
        self.size, self.seen = size, 0
        self.rows: Array | None = None
        self._random = np.random.default_rng(seed)

    def add(self, rows: Array) -> None:
        """Offer rows, ``n x k``; the width k is the same at every call. Cost O(n k)."""
        if self.rows is None:
            self.rows = rows[:0]
        room = max(0, self.size - len(self.rows))
        first, later = rows[:room], rows[room:]
        self.rows = np.concatenate((self.rows, first))
        counts = np.arange(self.seen + len(first) + 1, self.seen + len(rows) + 1)
        indices = self._random.integers(0, counts) if len(later) else counts
        for row, index in zip(later, indices, strict=True):
            if index < self.size:
                self.rows[index] = row
        self.seen += len(rows)

    def state(self) -> dict[str, Any]:
        """Return all attributes as plain values."""
        rows = None
        if self.rows is not None:
            rows = [
                [None if value != value else value for value in row] for row in self.rows.tolist()
            ]
        generator = self._random.bit_generator.state
        return {"size": self.size, "seen": self.seen, "rows": rows, "generator": generator}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Self:
        """Build a reservoir from :meth:`state`."""
        reservoir = cls(int(state["size"]))
        reservoir.seen = int(state["seen"])
        if state["rows"] is not None:
            reservoir.rows = np.asarray(state["rows"], dtype=np.float64)
        reservoir._random.bit_generator.state = state["generator"]
        return reservoir


@dataclass
class RepeatedRows:
    """How often rows were repeated exactly, from the rows of the smallest digests.

    A row of the ``size`` smallest digests so far has been among them since it first came, so that
    it was counted each time. They are a fair sample of the distinct rows, however far apart the
    repetitions. [Bar-Yossef et al., RANDOM 2002: k minimum values]

    Attributes:
        size: Most digests that are stored.
        counts: How often each of these rows came, by digest.
    """

    size: int = 512
    counts: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._largest = [-digest for digest in self.counts]
        heapq.heapify(self._largest)

    def add(self, rows: Array) -> None:
        """Count rows, ``n x k``. Cost O(n k), a microsecond a row."""
        for row in np.ascontiguousarray(rows + 0.0):  # -0.0 is 0.0
            digest = int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=6).digest(), "big")
            if digest in self.counts:
                self.counts[digest] += 1
            elif len(self.counts) < self.size:
                self.counts[digest] = 1
                heapq.heappush(self._largest, -digest)
            elif digest < -self._largest[0]:
                del self.counts[-heapq.heapreplace(self._largest, -digest)]
                self.counts[digest] = 1

    @property
    def repeated(self) -> int:
        """Number of repetitions of the rows that are counted."""
        return sum(self.counts.values()) - len(self.counts)

    @property
    def share(self) -> float:
        """Estimated share of all observations that repeat an earlier one."""
        total = sum(self.counts.values())
        return self.repeated / total if total else 0.0


# --- a test for a drift ---------------------------------------------------------------------------


DOWN = 2
"""Steps that a cumulative sum goes down for an innovation against it; it goes up by one for an
innovation with it. The sum then is the log likelihood ratio of signs of which 81 % agree (signs of
normal innovations whose mean is 0.87 standard deviations off) against signs of which half do.
"""

_KEPT_SIGNALS = 100
"""Number of the latest signals that are stored."""


@dataclass
class SignTest:
    """A two-sided CUSUM of the signs of innovations: it signals where their median is not zero.

    Under a model that predicts well, each innovation is above or below zero with probability 1/2,
    given all before. One sum goes up by 1 for a positive and down by 2 for a negative one,
    the other is its mirror image; neither goes below zero. A sum that reaches the threshold
    signals, and both begin again. As only signs count, the level of the noise does not change the
    rate of false signals, and :func:`false_alarm_rate` computes it exactly. Tails so heavy that
    outliers move the model's mean do change it. [Page, Biometrika 41, 1954; of coins: Reynolds and
    Stoumbos, Journal of Quality Technology 31, 1999]

    Attributes:
        threshold: Height at which a sum signals, a whole number.
        seen: Number of innovations, zeros left out.
        rows: Number of rows, those without a tested innovation included.
        up: Sum that rises with positive innovations.
        down: Sum that rises with negative ones.
        began: Numbers of rows before which the two sums last left zero.
        signals: The latest signals, each as [row at which it came, row after which the sum last was
            zero, sign]: the second estimates where the drift began.
        count: Number of all signals.
    """

    threshold: int
    seen: int = 0
    up: int = 0
    down: int = 0
    began: list[int] = field(default_factory=lambda: [0, 0])
    signals: list[list[int]] = field(default_factory=list)
    count: int = 0
    rows: int = 0

    @property
    def rate(self) -> float:
        """Mean number of signals an innovation of a model without drift."""
        return false_alarm_rate(self.threshold)

    def observe(self, innovations: Sequence[float], rows: int | None = None) -> None:
        """Add innovations in their order; zero and NaN, which have no sign, are left out.

        Args:
            innovations: Of a batch's first rows.
            rows: Number of all its rows; default: as many as innovations.
        """
        for row, value in enumerate(innovations, self.rows):
            if not (value > 0.0 or value < 0.0):
                continue
            up, down = (1, -DOWN) if value > 0.0 else (-DOWN, 1)
            self.began = [
                row if total == 0 else start
                for total, start in zip((self.up, self.down), self.began, strict=True)
            ]
            self.seen += 1
            self.up, self.down = max(0, self.up + up), max(0, self.down + down)
            if max(self.up, self.down) >= self.threshold:
                side = 0 if self.up > self.down else 1
                self.signals.append([row + 1, self.began[side], 1 - 2 * side])
                self.signals = self.signals[-_KEPT_SIGNALS:]
                self.count += 1
                self.up = self.down = 0
        self.rows += len(innovations) if rows is None else rows

    def within(self, last: int) -> list[list[int]]:
        """Return the signals among the ``last`` latest rows."""
        return [signal for signal in self.signals if signal[0] > self.rows - last]

    def false_alarm_probability(self, innovations: int) -> float:
        """Compute the probability of a signal within a number of innovations without drift.

        ``1 − exp(−rate · innovations)``: the time to a signal is about exponential.
        """
        return -math.expm1(-self.rate * innovations)


@lru_cache(maxsize=64)
def false_alarm_rate(threshold: int) -> float:
    """Compute the mean number of signals an innovation, of signs that are fair independent coins.

    Exact: one sum is a Markov chain on ``0 ... threshold − 1`` that begins again after a signal, so
    that its mean run length solves ``(I − Q) L = 1`` with Q the transitions without a signal.
    [Brook and Evans, Biometrika 59, 1972] The two sums never signal together, and when one signals
    the other is at zero: their rates add.

    Args:
        threshold: Height at which a sum signals, at least 1.

    Raises:
        UsageError: The threshold is no whole number of at least 1.
    """
    check_whole("threshold", threshold, 1)
    transitions = np.zeros((threshold, threshold))
    for state in range(threshold):
        transitions[state, max(0, state - DOWN)] += 0.5
        if state + 1 < threshold:
            transitions[state, state + 1] += 0.5
    lengths = np.linalg.solve(np.eye(threshold) - transitions, np.ones(threshold))
    return 2.0 / float(lengths[0])


def threshold_for(rate: float) -> int:
    """Find the least threshold whose :func:`false_alarm_rate` is at most ``rate``.

    Raises:
        ValueError: The rate is not in [1e-12, 1).
    """
    if not 1e-12 <= rate < 1.0:
        raise ValueError(f"Expected a rate of false alarms in [1e-12, 1), got {rate}.")
    threshold = 1
    while false_alarm_rate(threshold) > rate:
        threshold += 1
    return threshold


# --- a test for a change of units ----------------------------------------------------------------


_POWERS = tuple(k for k in range(-9, 10) if abs(k) >= 2)
"""Exponents of ten of the changes of units that are tested."""

_RECENT = 24
"""Latest rows by which the hypotheses are compared."""

_EVERY = 4
"""Rows between two comparisons."""

_EVIDENCE = 16.0
"""Log likelihood, in nats over the latest rows, by which a change of units must explain them better
than no change: a factor of 10⁷, for many windows are compared.
"""

_SURPRISE = 2.0
"""Median of the latest innovations' absolute values, 0.67 of normal ones, of a change."""

_NARROW = 0.1
"""Spread of the latest outcomes, in predictive standard deviations, that is a change, too: no
outcomes with noise are so much alike.
"""

_MOST = 20.0
"""Most nats that a row counts for."""

_SIZE = 1.5
"""Exponent of ten from which on inputs are of unusual size."""


@dataclass(frozen=True)
class UnitChange:
    """A change of units that was found.

    Attributes:
        what: ``outcomes`` or ``inputs``.
        powers: Exponent of ten of each output, or of each input: recent values are ``10 ** power``
            times as large as they were.
        row: Number of rows after which it was found.
    """

    what: str
    powers: tuple[int, ...]
    row: int


@dataclass
class UnitTest:
    """Compares likelihoods of the latest rows in the old units and in units powers of ten apart.

    Of outcomes y, with median m and robust standard deviation s in a sample of earlier rows, normal
    densities of ``N(m, s²)``, of ``N(c m, c² s²)`` for ``c = 10^k``, and of a change of level. It
    must surprise the model, which an optimizer that comes to rest near zero does not, and it must
    be sudden: some earlier window had no better explanation by units. If inputs are more than 30
    times as large or small as earlier ones, the predictions at the inputs in the previous units are
    compared with the predictions at the inputs as they came.

    Attributes:
        latest: The latest rows, each with its outcomes, innovations and predictive standard
            deviations, m numbers each; its gain, the log density at inputs in the previous units
            less the log density at the inputs as they came, 0 where these are of usual size; and
            its inputs' absolute values.
        seen: Number of rows so far.
        usual: Whether a window was once explained without a change.
        change: The first change that was found.
    """

    latest: deque[tuple[Any, ...]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    seen: int = 0
    usual: bool = False
    change: UnitChange | None = None

    def powers_of(self, X: Array, earlier: Array | None) -> Array | None:
        """Return the exponent of ten of each input's present size; None where all are 0.

        Args:
            X: Inputs of the next rows, ``n x d``.
            earlier: A sample of earlier inputs, ``N x d``.
        """
        latest = [*(sizes for *_, sizes in self.latest), *np.abs(X).tolist()][-_RECENT:]
        if earlier is None or len(earlier) < 2 * _RECENT or len(latest) < _RECENT:
            return None
        now, before = np.median(latest, 0), np.median(np.abs(earlier), 0)
        if not ((now > 0.0) & (before > 0.0)).all():
            return None
        ratio = np.log10(now / before)
        powers: Array = np.where(np.abs(ratio) > _SIZE, np.rint(ratio), 0.0)
        return powers if powers.any() else None

    def add(
        self,
        X: Array,
        outcomes: Array,
        innovations: Array,
        deviations: Array,
        gain: Array,
        powers: Array,
        earlier: Array,
    ) -> None:
        """Add rows, in their order, and compare hypotheses about the latest ones.

        Args:
            X: Inputs, ``n x d``.
            outcomes: ``n x m``.
            innovations: ``n x m``.
            deviations: Predictive standard deviations, noise included, ``n x m``; 0 where they are
                in other units.
            gain: See :attr:`latest`, ``n``.
            powers: Exponents of ten of the inputs' present size, ``d``.
            earlier: A sample of outcomes so far, ``N x m``.
        """
        columns = (outcomes, innovations, deviations, gain.clip(-_MOST, _MOST), np.abs(X))
        for row in zip(*(column.tolist() for column in columns), strict=True):
            self.latest.append(row)
            self.seen += 1
            due = self.seen % _EVERY == 0 and len(earlier) >= 2 * _RECENT
            if self.change is not None or not due or len(self.latest) < _RECENT:
                continue
            *latest, gains, _ = zip(*self.latest, strict=True)
            outputs = zip(*(np.asarray(column).T for column in latest), earlier.T, strict=True)
            found = [_power(*output) for output in outputs]
            if sum(gains) > _EVIDENCE and self.usual:
                self.change = UnitChange("inputs", tuple(int(power) for power in powers), self.seen)
            elif any(found) and self.usual:
                self.change = UnitChange("outcomes", tuple(found), self.seen)
            self.usual = self.usual or not any(found)

    def state(self) -> dict[str, Any]:
        """Return all attributes as plain values."""
        latest = {name: [row[i] for row in self.latest] for i, name in enumerate(_LATEST)}
        change = None if self.change is None else asdict(self.change)
        return {**latest, "seen": self.seen, "usual": self.usual, "change": change}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Self:
        """Build a test from :meth:`state`."""
        saved, change = state["change"], None
        if saved is not None:
            change = UnitChange(saved["what"], tuple(saved["powers"]), saved["row"])
        rows = zip(*(state[name] for name in _LATEST), strict=True)
        return cls(deque(rows, maxlen=_RECENT), state["seen"], state["usual"], change)


_LATEST = ("outcomes", "innovations", "deviations", "gains", "sizes")
"""Names of the columns of the latest rows in a saved test."""


def _power(outcomes: Array, innovations: Array, deviations: Array, earlier: Array) -> int:
    """Return the exponent of ten of a change of units of one output; 0 for none."""
    middle = float(np.median(earlier))
    spread = _spread(earlier)
    surprising = float(np.median(np.abs(innovations))) > _SURPRISE
    narrow = _spread(outcomes) < _NARROW * float(np.median(deviations))
    if spread == 0.0 or not (surprising or narrow):
        return 0
    level = float(np.median(outcomes))
    factors = 10.0 ** np.asarray(_POWERS)[:, None]
    changed = _log_density(outcomes, factors * middle, factors * spread).sum(-1)
    others = (_log_density(outcomes, np.asarray(m), spread).sum() for m in (middle, level))
    best = int(np.argmax(changed))
    return _POWERS[best] if changed[best] > max(others) + _EVIDENCE else 0


def _spread(values: Array) -> float:
    """Return a robust standard deviation."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


def _log_density(outcomes: Array, mean: Array, deviation: Array | float) -> Array:
    """Return normal log densities, bounded so that an outlier costs no more than some nats."""
    square = ((outcomes - mean) / deviation) ** 2
    bounded: Array = -0.5 * np.minimum(square, 2.0 * _MOST + np.log1p(square)) - np.log(deviation)
    return bounded - 0.5 * math.log(2.0 * math.pi)
