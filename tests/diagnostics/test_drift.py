"""The drift test's rate against the chain of both sums together, and what it does with signs."""

from __future__ import annotations

import numpy as np
import pytest

from bo_stream.diagnostics.sketches import DOWN, SignTest, false_alarm_rate, threshold_for


def rate_of_both(threshold: int) -> float:
    """Signals a step of the stationary chain of the pair (up, down), restarted at each signal."""
    size = threshold**2
    chain, signals = np.zeros((size, size)), np.zeros(size)
    for up in range(threshold):
        for down in range(threshold):
            here = up * threshold + down
            moves = ((up + 1, max(0, down - DOWN)), (max(0, up - DOWN), down + 1))
            for a, b in moves:
                signal = max(a, b) >= threshold
                signals[here] += 0.5 * signal
                chain[here, 0 if signal else a * threshold + b] += 0.5
    system = np.vstack((chain.T - np.eye(size), np.ones(size)))
    stationary = np.linalg.lstsq(system, np.r_[np.zeros(size), 1.0], rcond=None)[0]
    return float(stationary @ signals)


@pytest.mark.parametrize("threshold", [1, 2, 5, 12])
def test_the_rate_is_that_of_both_sums(threshold: int) -> None:
    assert false_alarm_rate(threshold) == pytest.approx(rate_of_both(threshold), 1e-9)


@pytest.mark.parametrize("rate", [0.5, 1e-3, 1e-5, 1e-9])
def test_the_threshold_is_the_least_that_keeps_the_rate(rate: float) -> None:
    threshold = threshold_for(rate)
    assert false_alarm_rate(threshold) <= rate < false_alarm_rate(threshold - 1 or 1) * 1.0001


def test_a_run_of_one_sign_signals_and_says_where_it_began() -> None:
    test = SignTest(10)
    test.observe([1.0, -1.0] * 20)
    test.observe([0.0, float("nan")])  # no sign
    test.observe([-0.1] * 10)
    assert (test.seen, test.count) == (50, 1)
    assert test.signals[0] == [51, 39, -1]  # the last of the first signs was negative, too
    assert (test.up, test.down) == (0, 1)
    assert test.within(1) == []
    assert test.within(2) == test.signals


def test_signals_are_of_rows_where_the_first_of_a_batch_are_tested() -> None:
    test = SignTest(10)
    test.observe([1.0, -1.0] * 5, rows=1000)
    test.observe([0.1] * 8, rows=1000)
    test.observe([0.1] * 8, rows=1000)
    assert (test.seen, test.rows) == (26, 3000)
    assert test.signals == [[2002, 1000, 1]]
    assert test.within(998) == []
    assert test.within(999) == test.signals


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_only_signs_count(scale: float) -> None:
    values = np.random.default_rng(0).standard_t(1.0, 2000)
    one, other = SignTest(8), SignTest(8)
    one.observe(values)
    other.observe(scale * values)
    assert vars(one) == vars(other)


def test_it_goes_on_from_its_state() -> None:
    values = np.random.default_rng(1).standard_normal(300)
    whole, parts = SignTest(6), SignTest(6)
    whole.observe(values)
    parts.observe(values[:137])
    parts = SignTest(**vars(parts))
    parts.observe(values[137:])
    assert vars(parts) == vars(whole)
    assert whole.count > 0


def test_the_probability_of_a_false_alarm_grows_with_the_horizon() -> None:
    test = SignTest(15)
    assert test.false_alarm_probability(0) == 0.0
    assert test.false_alarm_probability(10) == pytest.approx(10 * test.rate, 0.01)
    assert test.false_alarm_probability(10**9) == pytest.approx(1.0)


def test_a_threshold_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected threshold"):
        false_alarm_rate(0)


@pytest.mark.parametrize("rate", [0.0, 1.0, 1e-13, float("nan")])
def test_bad_rates(rate: float) -> None:
    with pytest.raises(ValueError, match="Expected a rate of false alarms"):
        threshold_for(rate)
