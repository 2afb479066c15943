"""The model of a survey: it finds the prevalence of sites that were not surveyed."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from bo_stream import prevalence
from bo_stream.errors import UsageError
from bo_stream.loops.survey import model as models
from bo_stream.loops.survey.model import SurveyModelSettings, survey_model
from bo_stream.models.base import StreamingGP
from bo_stream.models.fitting import hyperparameters, relearn, total_loss

pytestmark = pytest.mark.usefixtures("whole_fits")


def field(n: int = 120) -> tuple[Tensor, Tensor, Tensor]:
    """Sites of a degree with one covariate that matters, their logits, and counts of all."""
    random = torch.Generator().manual_seed(0)
    sites = torch.rand(n, 4, dtype=torch.float64, generator=random)
    sites[:, :2] += torch.tensor([35.0, -6.0])
    logit = -3.0 + 2.0 * torch.sin(5.0 * sites[:, 2]) + torch.cos(3.0 * (sites[:, 0] - 35.0))
    examined = torch.full((n,), 80.0, dtype=torch.float64)
    positives = torch.binomial(examined, logit.sigmoid(), generator=random)
    return sites, logit, torch.stack((positives, examined), -1)


def rmse(model: StreamingGP, sites: Tensor, logit: Tensor) -> float:
    with torch.no_grad():
        return float((model.posterior(sites).mean[:, 0] - logit).square().mean().sqrt())


@cache
def of_half() -> StreamingGP:
    """The model of the first half of the sites, which no test changes."""
    sites, _, Y = field()
    return survey_model(sites, sites[:60], Y[:60])


def test_it_finds_the_prevalence_of_other_sites() -> None:
    sites, logit, _ = field()
    model = of_half()
    spread = float(logit[60:].std())
    assert rmse(model, sites[60:], logit[60:]) < 0.35 * spread
    with torch.no_grad():
        rates = prevalence(model, sites[60:])
        low, high = rates.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).squeeze(-1)
    truth = logit[60:].sigmoid()
    assert ((low < truth) & (truth < high)).double().mean() > 0.8


def test_a_former_model_is_a_start_and_stays() -> None:
    sites, logit, Y = field()
    former = survey_model(sites, sites[:40], Y[:40])
    before = former.posterior(sites).mean.detach()
    model = survey_model(sites, sites[:60], Y[:60], former=former)
    assert rmse(model, sites[60:], logit[60:]) == pytest.approx(
        rmse(of_half(), sites[60:], logit[60:]), rel=0.15
    )
    assert torch.equal(former.posterior(sites).mean, before)


def test_the_better_of_two_starts_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no fit moves any value, the objective alone decides, and a poor former model loses."""
    sites, _, Y = field(20)
    monkeypatch.setattr(models, "relearn", lambda model: None)
    former = survey_model(sites, sites[:0], Y[:0])
    rough = former.covar_module.kernels[0].base_kernel
    first = rough.lengthscale.detach()
    rough.lengthscale = 0.002 * first
    model = survey_model(sites, sites, Y, former=former)
    assert model.covar_module.kernels[0].base_kernel.lengthscale.item() > first.item()
    former.update(sites, Y)
    again = survey_model(sites, sites, Y, former=former)
    assert total_loss(model) < total_loss(again) - 2.0
    torch.testing.assert_close(hyperparameters(again), hyperparameters(former))


@pytest.mark.integration
def test_a_cold_fit_of_a_real_map_ends_in_the_best_maximum(shared_data: Path) -> None:
    """In Haiti the kernel's first values lead to one that is 5 nats worse, rough in position."""
    with np.load(shared_data / "hotspots_hti.npz") as arrays:
        X, rate = arrays["X"], arrays["y"]
    random = np.random.default_rng(7)
    rows = random.permutation(len(X))[:800]
    positives = random.binomial(100, rate[rows])
    chosen = np.random.default_rng(8).permutation(800)[:100]
    sites = torch.as_tensor(X[rows], dtype=torch.float64)
    Y = torch.as_tensor(np.column_stack((positives, np.full(800, 100)))[chosen]).double()
    cold = survey_model(sites, sites[chosen], Y)
    smooth = survey_model(sites, sites[:0], Y[:0])
    position = smooth.covar_module.kernels[0]
    position.base_kernel.lengthscale = 5.0 * position.base_kernel.lengthscale.detach()
    position.outputscale = 0.3 * position.outputscale.detach()
    other = survey_model(sites, sites[chosen], Y, former=smooth)
    assert total_loss(cold) < total_loss(other) + 0.5


def test_a_round_that_ends_lower_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites of a likelihood with outliers have several maxima: those found anew may be worse."""
    sites, _, Y = field(30)
    losses: list[float] = []

    def worse(model: StreamingGP) -> float:
        losses.append(total_loss(model) + 1.0 * len(losses))
        return losses[-1]

    monkeypatch.setattr(models, "total_loss", worse)
    shared = survey_model(sites, sites, Y)
    assert len(losses) == 3  # two starts, and the round that is taken back
    assert total_loss(shared) in (losses[0], losses[1] - 1.0)


def test_without_results_it_is_the_prior() -> None:
    sites, _, Y = field(10)
    model = survey_model(sites, sites[:0], Y[:0], SurveyModelSettings(trials=50))
    assert model.posterior(sites).variance.min() > 1.0
    assert model.likelihood.trials == 50


def test_overdispersed_counts_have_a_learned_concentration() -> None:
    """And the other hyperparameters are those of a fit, not where its last steps left them."""
    sites, _, Y = field(20)
    high, low = 1.6 * Y[:, 0] + 6.0, 0.4 * Y[:, 0]  # two surveys of a site that disagree
    positives = torch.cat((torch.minimum(high, Y[:, 1]), low)).round()
    twice = torch.stack((positives, Y[:, 1].repeat(2)), -1)
    settings = SurveyModelSettings(overdispersion=True)
    model = survey_model(sites, sites.repeat(2, 1), twice, settings)
    assert float(model.likelihood.concentration) < 45.0
    bound = float(model.log_marginal_likelihood().detach())
    relearn(model)
    assert float(model.log_marginal_likelihood().detach()) == pytest.approx(bound, abs=0.1)


def test_settings_are_checked() -> None:
    with pytest.raises(UsageError, match="max_points"):
        SurveyModelSettings(max_points=0)
    with pytest.raises(UsageError, match="outliers"):
        SurveyModelSettings(outliers=1.0)


def test_sites_close_to_each_other_and_twice() -> None:
    """A town of houses a few centimetres apart, of which some have two surveys."""
    sites, _, Y = field(80)
    sites[20:40, :2] = sites[0, :2] + 5e-7 * torch.arange(20.0, dtype=torch.float64).unsqueeze(-1)
    sites[40:50] = sites[30:40]
    model = survey_model(sites, sites[:60], Y[:60])
    posterior = model.posterior(sites)
    assert posterior.mean.abs().max() < 20.0
    assert posterior.variance.min() > 0.0
    assert posterior.variance.max() < 20.0


def test_one_village_unlike_all_others_does_not_move_the_map() -> None:
    sites, logit, Y = field(60)
    before = survey_model(sites, sites, Y)
    Y[7] = torch.tensor([79.0, 80.0])
    after = survey_model(sites, sites, Y, SurveyModelSettings(outliers=0.02))
    others = torch.arange(60) != 7
    ratio = rmse(after, sites[others], logit[others]) / rmse(before, sites[others], logit[others])
    assert ratio < 1.5
