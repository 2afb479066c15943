"""A sequential test for a drift: two cumulative sums of signs, with an exact false-alarm rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Self

import numpy as np

DOWN = 2
"""Steps that a cumulative sum goes down for an innovation against it; it goes up by one for one
with it. The sum then is that of the likelihood ratios of signs of which 81 % agree, those of
normal innovations whose mean is 0.87 standard deviations off, against signs of which half do.
"""

KEPT_SIGNALS = 100
"""Number of the latest signals whose places are kept."""


@dataclass
class SignTest:
    """A two-sided CUSUM of the signs of innovations: it signals where their median is not zero.

    Under a model that predicts well, each innovation is above or below zero with probability 1/2,
    given all before. One sum goes up by 1 for a positive and down by ``DOWN`` for a negative one,
    the other is its mirror image; neither goes below zero. A sum that reaches the threshold
    signals, and both begin again. As only signs count, neither the level of the noise nor heavy
    tails change the rate of false signals, and :func:`false_alarm_rate` computes it exactly. [Page,
    Biometrika 41, 1954; of coins: Reynolds and Stoumbos, Journal of Quality Technology 31, 1999]

    Attributes:
        threshold: Height at which a sum signals, a whole number.
        seen: Number of innovations, zeros left out.
        up: Sum that rises with positive innovations.
        down: Sum that rises with negative ones.
        began: Numbers of innovations at which the two sums last left zero.
        signals: The latest signals, each as [innovation at which it came, innovation after which
            the sum last was zero, sign]: the second estimates where the drift began.
        count: Number of all signals.
    """

    threshold: int
    seen: int = 0
    up: int = 0
    down: int = 0
    began: list[int] = field(default_factory=lambda: [0, 0])
    signals: list[list[int]] = field(default_factory=list)
    count: int = 0

    @property
    def rate(self) -> float:
        """Mean number of signals an innovation of a model without drift."""
        return false_alarm_rate(self.threshold)

    def observe(self, innovations: Iterable[float]) -> None:
        """Add innovations in their order; zero and NaN, which have no sign, are left out."""
        for value in innovations:
            if value > 0.0:
                self._step(1, -DOWN)
            elif value < 0.0:
                self._step(-DOWN, 1)

    def _step(self, up: int, down: int) -> None:
        self.began = [
            self.seen if total == 0 else start
            for total, start in zip((self.up, self.down), self.began, strict=True)
        ]
        self.seen += 1
        self.up, self.down = max(0, self.up + up), max(0, self.down + down)
        if max(self.up, self.down) >= self.threshold:
            side = 0 if self.up > self.down else 1
            self.signals.append([self.seen, self.began[side], 1 - 2 * side])
            self.signals = self.signals[-KEPT_SIGNALS:]
            self.count += 1
            self.up = self.down = 0

    def within(self, last: int) -> list[list[int]]:
        """Return the signals among so many of the latest innovations."""
        return [signal for signal in self.signals if signal[0] > self.seen - last]

    def false_alarm_probability(self, innovations: int) -> float:
        """Compute the probability of a signal within so many innovations without drift.

        ``1 − exp(−rate · innovations)``: the time to a signal is about exponential.
        """
        return -math.expm1(-self.rate * innovations)

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Self:
        """Build a test of its attributes, as ``vars`` returns them."""
        return cls(**state)


@lru_cache(maxsize=64)
def false_alarm_rate(threshold: int, share: float = 0.5) -> float:
    """Compute the mean number of signals an innovation, of signs that are independent coins.

    Exact: one sum is a Markov chain on ``0 ... threshold − 1`` that begins again after a signal, so
    that its mean run length solves ``(I − Q) L = 1`` with Q the transitions without a signal.
    [Brook and Evans, Biometrika 59, 1972] The two sums never signal together, and when one signals
    the other is at zero: their rates add.

    Args:
        threshold: Height at which a sum signals, at least 1.
        share: Probability that an innovation is positive.

    Raises:
        ValueError: The threshold is not at least 1, or the share not in (0, 1).
    """
    if threshold < 1 or not 0.0 < share < 1.0:
        raise ValueError(
            f"Expected threshold of at least 1 and share in (0, 1), got {threshold} and {share}."
        )
    return sum(1.0 / _mean_run_length(threshold, p) for p in (share, 1.0 - share))


def _mean_run_length(threshold: int, share: float) -> float:
    transitions = np.zeros((threshold, threshold))
    for state in range(threshold):
        transitions[state, max(0, state - DOWN)] += 1.0 - share
        if state + 1 < threshold:
            transitions[state, state + 1] += share
    lengths = np.linalg.solve(np.eye(threshold) - transitions, np.ones(threshold))
    return float(lengths[0])


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
