"""Predicted counts against scipy's distributions and draws, and coverage of held-out counts."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from scipy.stats import betabinom, binom
from torch import Tensor

from bo_stream import OSVGP, BinomialLikelihood
from bo_stream.loops.sampling.survey_calibration import (
    count_probabilities,
    coverage,
    held_out_counts,
)

FAINT = torch.tensor(1e-10, dtype=torch.float64)
LOGIT = torch.tensor(-1.5, dtype=torch.float64)


def test_a_known_logit_leaves_the_binomial() -> None:
    found = count_probabilities(LOGIT, FAINT, torch.tensor(30.0))
    expected = binom(30, LOGIT.sigmoid().item()).pmf(range(31))
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=1e-5, atol=1e-9)


def test_a_known_logit_leaves_the_beta_binomial() -> None:
    chance, concentration = LOGIT.sigmoid().item(), 12.0
    shares = (concentration * chance, concentration * (1 - chance))
    found = count_probabilities(LOGIT, FAINT, torch.tensor(30.0), torch.tensor([concentration]))
    expected = betabinom(30, *shares).pmf(range(31))
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=1e-5, atol=1e-9)


def test_an_unknown_logit_widens_the_counts_as_draws_do() -> None:
    variance = torch.tensor(0.8, dtype=torch.float64)
    found = count_probabilities(LOGIT, variance, torch.tensor(20.0))
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(40_000, generator=generator, dtype=torch.float64)
    logits = LOGIT + variance.sqrt() * normal
    drawn = torch.from_numpy(binom(20, logits.sigmoid().numpy()).pmf([[k] for k in range(21)]))
    torch.testing.assert_close(found, drawn.mean(-1), rtol=0.0, atol=5e-3)


def fit(X: Tensor, Y: Tensor) -> OSVGP:
    return OSVGP(X, Y, BinomialLikelihood())


def survey(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(n, 1, generator=generator, dtype=torch.float64)
    examined = torch.full((n,), 40.0, dtype=torch.float64)
    positives = torch.binomial(examined, (3.0 * X[:, 0] - 2.0).sigmoid(), generator)
    return X, torch.stack((positives, examined), -1)


def test_each_count_is_predicted_without_its_fold() -> None:
    X, Y = survey(24)
    seen: list[Tensor] = []

    def recording(rows: Tensor, outcomes: Tensor) -> OSVGP:
        seen.append(rows)
        return fit(rows, outcomes)

    table = held_out_counts(recording, X, Y, folds=4)
    assert [len(rows) for rows in seen] == [18] * 4
    held = [{x for x in X[:, 0].tolist() if x not in rows[:, 0].tolist()} for rows in seen]
    assert set.union(*held) == set(X[:, 0].tolist())
    assert sum(map(len, held)) == 24
    assert table["positive"].tolist() == Y[:, 0].tolist()


def test_a_changed_count_does_not_change_its_own_prediction() -> None:
    X, Y = survey(24)
    other = Y.clone()
    other[5, 0] = 40.0
    first, second = (held_out_counts(fit, X, outcomes, folds=8) for outcomes in (Y, other))
    columns = [name for name in first if name != "positive"]
    pd.testing.assert_series_equal(first.loc[5, columns], second.loc[5, columns])
    assert not first.loc[6, columns].equals(second.loc[6, columns])


def test_intervals_hold_their_level() -> None:
    X, Y = survey(60)
    table = held_out_counts(fit, X, Y, folds=3)
    for level in (50, 95):
        inside, expected = coverage(table, level)
        assert expected >= level / 100
        assert inside == pytest.approx(expected, abs=0.25)
    assert (table["low_95"] <= table["low_50"]).all()
    assert (table["high_50"] <= table["high_95"]).all()
