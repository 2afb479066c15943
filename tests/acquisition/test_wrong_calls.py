"""Expected wrong calls, beside quadrature and beside the criterion of which they are a case."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import norm

from bo_stream import prevalence, select_sites
from bo_stream.acquisition.criteria import Misclassification
from bo_stream.acquisition.wrong_calls import expected_wrong_calls, wrong_call
from bo_stream.loops.survey.model import SurveyModelSettings, survey_model


@pytest.mark.parametrize("cut", [0.2, 1.0 / 3.0, 0.5, 0.7])
def test_a_wrong_call_is_the_integral_over_what_will_be_known(cut: float) -> None:
    nodes = np.linspace(-9.0, 9.0, 200_001)
    weights = norm.pdf(nodes) * (nodes[1] - nodes[0])
    for distance in (-2.5, -0.4, 0.0, 0.3, 1.7):
        for share in (0.01, 0.3, 0.9):
            mean = distance + np.sqrt(share) * nodes
            chance = norm.cdf(mean / np.sqrt(1.0 - share))
            expected = np.where(chance >= cut, 1.0 - chance, chance) @ weights
            found = wrong_call(torch.tensor([distance]), torch.tensor([share]), cut)
            assert float(found[0]) == pytest.approx(expected, abs=1e-4)


def test_nothing_and_everything_observed() -> None:
    distance = torch.tensor([-1.0, 0.0, 0.5, 2.0], dtype=torch.float64)
    above = torch.special.ndtr(distance)
    now = wrong_call(distance, torch.zeros(4), 1.0 / 3.0)
    torch.testing.assert_close(now, torch.where(above >= 1.0 / 3.0, 1.0 - above, above))
    assert float(wrong_call(distance, torch.ones(4), 1.0 / 3.0).max()) < 1e-5


def test_of_a_model_it_is_what_the_criterion_expects() -> None:
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(40, 2, generator=generator, dtype=torch.float64) + torch.tensor([30.0, -3.0])
    examined = torch.full((15,), 50.0, dtype=torch.float64)
    rate = (3.0 * (4.0 * X[:15, 0]).sin() - 2.0).sigmoid()
    Y = torch.stack((torch.binomial(examined, rate, generator=generator), examined), -1)
    model = survey_model(X, X[:15], Y, SurveyModelSettings(trials=50))
    sites = X[[20, 31, 7]]
    shares = expected_wrong_calls(model, X, sites, 0.1, 50)
    chance = prevalence(model, X).exceedance(0.1).squeeze(-1)
    torch.testing.assert_close(shares[0], torch.minimum(chance, 1.0 - chance).mean())
    criterion = Misclassification(0.1, "prevalence")
    choice = select_sites(model, X, 1, criterion, pending=torch.tensor([20, 31, 7]), trials=50)
    torch.testing.assert_close(float(shares[3]) * 40.0, choice.before, rtol=1e-3, atol=1e-4)
    assert (shares.diff() <= 1e-6).all()
