"""Counts are predicted without their fold, and their intervals have the probability they say."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from torch import Tensor

from bo_stream import OSVGP, BinomialLikelihood
from bo_stream.loops.survey import model as survey_models
from bo_stream.loops.survey.findings import find
from bo_stream.loops.survey.model import coverage, held_out_counts
from bo_stream.loops.survey.survey import Survey
from tests.loops.survey.villages import SETTINGS, results_of, villages


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


@pytest.mark.integration
def test_folds_of_a_report_start_from_the_model_of_all_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A third of the work, for the same predictions."""
    fits: list[int] = []
    relearn = survey_models.relearn

    def counted(model: OSVGP) -> None:
        fits.append(1)
        relearn(model)

    monkeypatch.setattr(survey_models, "relearn", counted)
    told = Survey(villages(), SETTINGS)
    told.tell(results_of([f"V{row:03d}" for row in range(12)]))
    found = find(told, "campaign", rounds=1, q=1).held_out
    assert len(fits) <= survey_models.FIRST_ROUNDS + 1 + 10 * survey_models.ROUNDS
    anew = held_out_counts(told.fit, *told.observations)
    for name in ("expected", "low_95", "high_95"):
        assert (found[name] - anew[name]).abs().max() <= 1.0  # of 50 examined


def test_intervals_have_the_probability_that_they_say() -> None:
    X, Y = survey(30)
    model = fit(X[:12], Y[:12])
    table = held_out_counts(lambda *_: model, X, Y, folds=2)
    logit = model.posterior(X)
    generator = torch.Generator().manual_seed(2)
    normal = torch.randn(20_000, 30, generator=generator, dtype=torch.float64)
    chance = (logit.mean.squeeze(-1) + logit.variance.squeeze(-1).sqrt() * normal).sigmoid()
    drawn = torch.binomial(torch.full_like(chance, 40.0), chance.detach(), generator)
    torch.testing.assert_close(drawn.mean(0), column(table, "expected"), rtol=0.0, atol=0.4)
    for level in (50, 95):
        low, high = (column(table, f"{side}_{level}") for side in ("low", "high"))
        inside = ((low <= drawn) & (drawn <= high)).double().mean(0)
        promised = column(table, f"chance_{level}")
        torch.testing.assert_close(inside, promised, rtol=0.0, atol=0.02)
        assert (promised >= level / 100 - 1e-9).all()


def column(table: pd.DataFrame, name: str) -> Tensor:
    return torch.tensor(table[name].tolist(), dtype=torch.float64)


def test_coverage_counts_what_is_inside() -> None:
    table = pd.DataFrame({"positive": [1.0, 4.0, 9.0, 5.0], "low_95": 1.0, "high_95": 5.0})
    assert coverage(table.assign(chance_95=[0.96, 0.97, 0.98, 0.97]), 95) == (
        pytest.approx(0.75),
        pytest.approx(0.97),
    )
