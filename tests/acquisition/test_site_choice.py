"""Rounds of sites: against naive rounds, all sets, draws of outcomes, and bad arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.models.transforms.outcome import Log
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, LaplaceLikelihood
from torch import Tensor

import bo_stream
from bo_stream import (
    OSGPR,
    OSVGP,
    WISKI,
    BinomialLikelihood,
    DirichletWISKI,
    prevalence,
    select_from_pool,
)
from bo_stream.acquisition import (
    Criterion,
    ExceedanceEntropy,
    IntegratedVariance,
    Misclassification,
    SiteChoice,
    TargetedVariance,
    select_sites,
)
from bo_stream.acquisition import site_choice as module
from bo_stream.acquisition.site_choice import SiteNoise
from bo_stream.likelihoods.binomial import logit_noise
from bo_stream.models.base import StreamingGP
from bo_stream.testing.streams import assert_close, assert_untouched, fingerprint
from tests.acquisition.examples import small_model, some
from tests.laws.cases import CASES
from tests.laws.registry import Setting, Stream, shared_out
from tests.models.inducing.test_counts import count_kernel, surveys
from tests.oracles import criteria as oracle
from tests.support.problems.inducing import wave

Q = 3


def rand(n: int) -> Tensor:
    return torch.rand(n, 2, dtype=torch.float64)


def count_model(trials: int | None = None, overdispersion: bool = False) -> OSVGP:
    X, Y = surveys(60)
    likelihood = BinomialLikelihood(trials, overdispersion)
    return OSVGP(X, Y, likelihood, count_kernel(), inducing_points=X)


def real_model() -> OSGPR:
    X, Y = wave(40, 2)
    return OSGPR(X, Y, inducing_points=X[:15])


class Naive:
    """Expected sums of an uncertainty after any set of candidates, from the joint posterior."""

    def __init__(
        self, model: StreamingGP, uncertainty: oracle.Uncertainty, pool: Tensor, targets: Tensor
    ) -> None:
        posterior = model.posterior(torch.cat((pool, targets)))
        self.mean = posterior.mean.detach().double().numpy()[:, 0]
        self.covariance = posterior.covariance_matrix.detach().double().numpy()
        inputs = model.process_inputs(pool)
        mean, variance = (moment[0] for moment in model.process(inputs).marginals(inputs))
        noise = SiteNoise.of(model, inputs, None).at(torch.arange(len(pool)), mean, variance)
        self.noise = (noise[0] * model.outcome_scale().square()).numpy()
        self.candidates = range(len(pool))
        self.weights, self.uncertainty = np.ones(len(targets)), uncertainty

    def after(self, sites: list[int]) -> float:
        """Expected sum after observations at some candidates."""
        columns = self.uncertainty, self.mean, self.covariance, self.noise, self.weights
        if not sites:
            first = len(self.noise)
            spread = np.diag(self.covariance)[first:]
            return float(self.uncertainty(self.mean[first:], spread) @ self.weights)
        return oracle.total(*columns, sites)


def near(model: StreamingGP, X: Tensor) -> float:
    """A threshold that half of the values are above, and that some are near to."""
    posterior = model.posterior(X)
    order = posterior.mean.flatten().argsort()
    middle = order[len(order) // 2]
    deviation = posterior.variance.flatten()[middle].sqrt()
    return float((posterior.mean.flatten()[middle] + 0.4 * deviation).detach())


def assert_is_greedy(choice: SiteChoice, naive: Naive, q: int, error: float = 5e-5) -> None:
    """Each pick is the best given those before it, and its gain is what it is worth."""
    picks = choice.indices.tolist()
    assert len(set(picks)) == q
    error *= max(1.0, naive.after([]))
    for k, pick in enumerate(picks):
        sums = {i: naive.after([*picks[:k], i]) for i in naive.candidates if i not in picks[:k]}
        assert sums[pick] <= min(sums.values()) + 2.0 * error
        assert abs(naive.after(picks[:k]) - sums[pick] - float(choice.gains[k])) < error
    assert abs(choice.before - naive.after([])) < error
    assert abs(choice.after - naive.after(picks)) < error


OF_REAL = [case for case in CASES if case.noise != "labels" and "log" not in case.name]
OF_REAL = [case for case in OF_REAL if "power" not in case.name]


@pytest.mark.filterwarnings("ignore::bo_stream.GridResolutionWarning")
@pytest.mark.parametrize("stream", shared_out(Stream(case, Setting()) for case in OF_REAL))
def test_rounds_of_every_model_equal_trying_all(stream: Stream) -> None:
    model = stream.settled(stream.data(30))
    pool, targets = rand(10), rand(8)
    threshold = near(model, targets)
    choice = select_sites(model, pool, Q, Misclassification(threshold, "latent"), targets)
    naive = Naive(model, oracle.misclassification(threshold), pool, targets)
    assert_is_greedy(choice, naive, Q)


MODELS: dict[str, Callable[[], StreamingGP]] = {
    "in feature space": lambda: small_model(some(25)),
    "with a residual": real_model,
    "counts": count_model,
    "overdispersed counts": lambda: count_model(trials=40, overdispersion=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_rounds_for_every_criterion_equal_trying_all(name: str) -> None:
    model, pool, targets = MODELS[name](), rand(6), rand(6)
    t = near(model, targets)
    pairs: list[tuple[Criterion, oracle.Uncertainty]] = [
        (IntegratedVariance(), oracle.variance),
        (IntegratedVariance("prevalence"), oracle.prevalence_variance),
        (ExceedanceEntropy(t, "latent"), oracle.entropy(t)),
    ]
    for criterion, uncertainty in pairs:
        choice = select_sites(model, pool, 2, criterion, targets)
        assert_is_greedy(choice, Naive(model, uncertainty, pool, targets), 2)


@pytest.mark.parametrize("name", MODELS)
def test_targeted_variance_is_the_variance_of_weighted_targets(name: str) -> None:
    model, pool, targets = MODELS[name](), rand(20), rand(15)
    t, posterior = near(model, targets), model.posterior(targets)
    gap = (posterior.mean - t).square() / posterior.variance
    density = ((-0.5 * gap).exp() / posterior.variance.sqrt()).flatten().detach()
    choice = select_sites(model, pool, 5, TargetedVariance(t, "latent"), targets)
    weighted = select_sites(model, pool, 5, IntegratedVariance(), targets, weights=density)
    assert choice.indices.tolist() == weighted.indices.tolist()
    ratio = torch.tensor(2.0 * torch.pi, dtype=torch.float64).sqrt()
    assert_close(choice.gains * ratio, weighted.gains)


def test_latent_variance_chooses_as_select_from_pool_does() -> None:
    for model in (small_model(some(25)), real_model()):
        pool, targets = rand(80), rand(60)
        choice = select_sites(
            model, pool, 8, IntegratedVariance(), targets, exclude=torch.arange(9)
        )
        expected = select_from_pool(model, pool, 8, targets, exclude=torch.arange(9))
        assert torch.equal(choice.indices, expected)
        variance = float(model.posterior(targets).variance.sum())
        assert choice.before == pytest.approx(variance, rel=1e-8)


@pytest.mark.parametrize("q", [1, 2, 3])
def test_a_round_is_near_the_best_of_all_sets(q: int) -> None:
    """The reduction of a greedy round is at least 1 - 1/e of the best, one site the best itself."""
    model, pool, targets = count_model(), rand(8), rand(12)
    t = near(model, targets)
    naive = Naive(model, oracle.misclassification(t), pool, targets)
    choice = select_sites(model, pool, q, Misclassification(t, "latent"), targets)
    best = min(naive.after(list(subset)) for subset in itertools.combinations(range(8), q))
    now, share = naive.after([]), 1.0 if q == 1 else 1.0 - 1.0 / np.e
    assert now - choice.after >= share * (now - best) - 1e-5


def test_what_is_expected_is_the_mean_over_drawn_outcomes() -> None:
    model, pool, targets = real_model(), rand(20), rand(15)
    t = near(model, targets)
    choice = select_sites(model, pool, 4, Misclassification(t, "latent"), targets)
    sampler = SobolQMCNormalSampler(torch.Size([2048]), seed=3)
    later = model.fantasize(pool[choice.indices], sampler).posterior(targets)
    distance = ((later.mean - t).abs() / later.variance.sqrt()).squeeze(-1).detach()
    drawn = torch.special.ndtr(-distance).sum(-1)
    error = float(drawn.std()) / len(drawn) ** 0.5
    assert abs(float(drawn.mean()) - choice.after) < 5.0 * error


@pytest.mark.parametrize("name", MODELS)
def test_pending_sites_count_as_observed(name: str) -> None:
    model, pool, targets = MODELS[name](), rand(30), rand(20)
    for criterion in (IntegratedVariance(), Misclassification(near(model, targets), "latent")):
        whole = select_sites(model, pool, 6, criterion, targets)
        pending, rest = whole.indices[:3], whole.indices[3:]
        choice = select_sites(model, pool, 3, criterion, targets, pending=pending)
        assert torch.equal(choice.indices, rest)
        assert_close(choice.gains, whole.gains[3:])
        assert choice.before == pytest.approx(whole.before - float(whole.gains[:3].sum()), rel=1e-8)


def test_pending_sites_equal_a_conditioned_model_for_the_variance() -> None:
    for model in (small_model(some(25)), real_model()):
        pool, targets, pending = rand(30), rand(20), torch.tensor([4, 11])
        choice = select_sites(model, pool, 4, IntegratedVariance(), targets, pending=pending)
        mean = model.posterior(pool[pending]).mean.detach()
        conditioned = model.condition_on_observations(pool[pending], mean)
        other = select_sites(conditioned, pool, 4, IntegratedVariance(), targets, exclude=pending)
        assert torch.equal(choice.indices, other.indices)
        assert_close(choice.gains, other.gains)


def test_a_survey_is_worth_as_much_as_a_fantasy() -> None:
    """Of binomial counts the noise is that of the model's own sites of hypothetical counts."""
    model, pool, targets = count_model(trials=25), rand(12), rand(10)
    choice = select_sites(model, pool, 1, IntegratedVariance(), targets)
    site = pool[choice.indices]
    counts = torch.tensor([[7.0, 25.0]], dtype=torch.float64)
    left = model.condition_on_observations(site, counts).posterior(targets).variance
    assert choice.after == pytest.approx(float(left.sum()), rel=1e-8)


def test_more_examined_are_worth_more() -> None:
    model, pool, targets = count_model(), rand(12), rand(10)

    def gain(model: StreamingGP, trials: int | Tensor) -> float:
        criterion = Misclassification(0.1, "prevalence")
        return float(select_sites(model, pool, 1, criterion, targets, trials=trials).gains[0])

    gains = [gain(model, trials) for trials in (10, 100, 1000)]
    assert gains == sorted(gains)
    assert gain(model, torch.full((12,), 100)) == gains[1]
    assert gain(count_model(overdispersion=True), 1000) < gains[-1]


def test_each_site_has_its_own_number_examined() -> None:
    model, pool, targets = count_model(), rand(12), rand(10)
    trials = torch.arange(1, 13) * 10
    every = torch.arange(12)
    for i in (0, 7):
        others = every[every != i]
        alone = [
            select_sites(model, pool, 1, IntegratedVariance(), targets, exclude=others, trials=n)
            for n in (trials, int(trials[i]))
        ]
        assert_close(alone[0].gains, alone[1].gains)


def test_a_survey_where_prevalence_is_nothing_tells_nothing() -> None:
    """Its noise is large and finite, also where no information is left in floating point."""
    mean = torch.tensor([-1.0, -40.0, -800.0, 800.0], dtype=torch.float64)
    noise = logit_noise(torch.full_like(mean, 50.0), mean, torch.full_like(mean, 0.1))
    assert bool(noise.isfinite().all())
    assert noise[1:].min() > 1e6 * noise[0]
    counts = SiteNoise.of(count_model(), rand(4), 50)
    assert bool(counts.at(torch.arange(4), mean, torch.full_like(mean, -1e-12)).isfinite().all())
    X, Y = surveys(60)
    model = OSVGP(X, Y, BinomialLikelihood(), count_kernel(), inducing_points=X)
    model.mean_module.constant = -900.0
    model.clear()
    choice = select_sites(model, rand(6), 2, ExceedanceEntropy(0.1, "prevalence"), trials=50)
    assert bool(choice.gains.isfinite().all())


def test_exceedance_is_that_of_prevalence() -> None:
    model, targets = count_model(), rand(10)
    chance = prevalence(model, targets).exceedance(0.2)
    expected = float(torch.minimum(chance, 1.0 - chance).sum())
    choice = select_sites(model, targets, 1, Misclassification(0.2, "prevalence"))
    assert choice.before == pytest.approx(expected, abs=1e-5)


def test_targets_of_no_weight_do_not_matter() -> None:
    model, pool, targets = count_model(), rand(15), rand(10)
    criterion = ExceedanceEntropy(0.2, "prevalence")
    weights = torch.zeros(10)
    weights[:4] = torch.tensor([1.0, 2.0, 0.5, 3.0])
    first = select_sites(model, pool, 3, criterion, targets, weights=weights)
    second = select_sites(model, pool, 3, criterion, targets[:4], weights=weights[:4])
    assert torch.equal(first.indices, second.indices)
    assert_close(first.gains, second.gains)


def test_targets_are_the_pool_or_some_of_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pool = count_model(), rand(40)
    criterion = Misclassification(0.2, "prevalence")
    choice, told = (select_sites(model, pool, 2, criterion, targets) for targets in (None, pool))
    assert torch.equal(choice.indices, told.indices)
    monkeypatch.setattr(module, "MOST_TARGETS", 30)
    thinned = select_sites(model, pool, 2, criterion)
    assert abs(thinned.before / choice.before - 1.0) < 0.5
    assert thinned.before != choice.before
    weights = torch.zeros(40)
    weights[:25] = 2.0
    few = select_sites(model, pool, 2, criterion, weights=weights)
    told = select_sites(model, pool, 2, criterion, pool[:25], weights=weights[:25])
    assert torch.equal(few.indices, told.indices)
    assert_close(few.gains, told.gains)


def test_the_model_stays_as_it_is_and_dtypes_do_not_matter() -> None:
    X, Y = surveys(60)
    single = OSVGP(X.float(), Y.float(), BinomialLikelihood(), inducing_points=X.float())
    pool, criterion = rand(20).float(), ExceedanceEntropy(0.2, "prevalence")
    single.posterior(pool)  # it keeps what it has solved
    kept = fingerprint(single)
    choice = select_sites(single, pool, 3, criterion, pending=torch.tensor([2]))
    assert_untouched(single, kept)
    assert choice.indices.dtype == torch.long
    assert choice.gains.dtype == torch.float64
    assert 2 not in choice.indices.tolist()


def test_masks_and_fewer_left_than_asked_for() -> None:
    model, pool = count_model(), rand(6)
    mask = torch.tensor([True, False, False, True, True, False])
    options: dict[str, Any] = {"exclude": mask, "pending": torch.tensor([1, 1])}
    choice = select_sites(model, pool, 5, IntegratedVariance(), **options)
    assert sorted(choice.indices.tolist()) == [2, 5]
    assert len(choice.gains) == len(choice.costs) == 2
    assert float(choice.costs.abs().sum()) == 0.0


def labels_of(X: Tensor) -> Tensor:
    return (X[:, :1] > 0.5).double()


REFUSED: dict[str, tuple[Callable[[Tensor], StreamingGP], str]] = {
    "two classes": (lambda X: OSVGP(X, labels_of(X), BernoulliLikelihood()), "class labels"),
    "classes": (lambda X: DirichletWISKI(X, labels_of(X).squeeze(-1).long()), "class labels"),
    "two outputs": (lambda X: WISKI(X, X), r"one output.*subset_output"),
    "a batch": (lambda X: WISKI(X.expand(2, -1, -1), X[:, :1].expand(2, -1, -1)), "batch shape"),
    "logarithms": (lambda X: small_model(some(20), outcome_transform=Log()), "Log"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_it_cannot_choose_for(name: str) -> None:
    build, message = REFUSED[name]
    with pytest.raises(UnsupportedError, match=message):
        select_sites(build(rand(20) + 0.01), rand(5), 2, IntegratedVariance())


def test_one_output_of_several() -> None:
    X = rand(20)
    model = OSGPR(X, X, inducing_points=X[:6])
    choice = select_sites(model.subset_output([1]), rand(9), 2, Misclassification(0.5, "latent"))
    assert len(choice.indices) == 2


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": 0}, ValueError, "q of 1 or more"),
    ({"pool": torch.rand(5, 3).double()}, BotorchTensorDimensionError, "pool"),
    ({"pool": torch.full((5, 2), torch.nan).double()}, InputDataError, "pool"),
    ({"mc_points": torch.rand(5, 3).double()}, BotorchTensorDimensionError, "mc_points"),
    ({"weights": torch.ones(4)}, BotorchTensorDimensionError, "one for each of pool"),
    ({"weights": -torch.ones(5)}, InputDataError, "zero or more"),
    ({"exclude": torch.tensor([5])}, InputDataError, "0 to 4 in exclude"),
    ({"pending": torch.tensor([-1])}, InputDataError, "0 to 4 in pending"),
    ({"pending": torch.tensor([0.5])}, InputDataError, "pending to hold"),
    ({"exclude": torch.ones(4).bool()}, BotorchTensorDimensionError, "exclude"),
    ({"exclude": torch.arange(4), "pending": torch.tensor([4])}, InputDataError, "all excluded"),
    ({"trials": 0}, InputDataError, "trials of 1 or more, got 0"),
    ({"trials": torch.ones(4)}, BotorchTensorDimensionError, "trials"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    model, arguments = count_model(), {"pool": rand(5), "q": 2}
    with pytest.raises(error, match=message):
        select_sites(model, criterion=IntegratedVariance(), **{**arguments, **change})


def test_trials_are_of_counts() -> None:
    X, Y = wave(30, 2)
    for model in (real_model(), OSVGP(X, Y, LaplaceLikelihood(), inducing_points=X[:9])):
        with pytest.raises(UnsupportedError, match="trials only of a model of counts"):
            select_sites(model, rand(5), 2, IntegratedVariance(), trials=100)


def test_it_is_a_public_name() -> None:
    assert bo_stream.select_sites is select_sites


def test_a_smooth_kernel_needs_few_sites() -> None:
    """A round spreads out: what the first site tells about is not asked for again."""
    X = 0.05 * rand(20)
    kernel = ScaleKernel(RBFKernel()).double()
    kernel.base_kernel.lengthscale = 0.15
    counts = torch.tensor([[5.0, 20.0]], dtype=torch.float64).expand(20, 2)
    model = OSVGP(X, counts, BinomialLikelihood(), kernel, inducing_points=X[:8])
    pool = rand(200)
    places = pool[select_sites(model, pool, 6, IntegratedVariance("prevalence")).indices]
    apart = torch.cdist(places, places) + torch.eye(6)
    assert float(apart.min()) > 0.15
