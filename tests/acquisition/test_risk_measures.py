"""BoTorch's risk measures: posteriors of several inputs for each candidate.

As in its tutorials of risk-averse optimisation with input perturbations, and with environmental
variables. An OSGPR whose inducing points are the observations is the exact process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from botorch.acquisition import AcquisitionFunction, qSimpleRegret
from botorch.acquisition.knowledge_gradient import qMultiFidelityKnowledgeGradient
from botorch.acquisition.logei import qLogNoisyExpectedImprovement
from botorch.acquisition.monte_carlo import qNoisyExpectedImprovement
from botorch.acquisition.risk_measures import CVaR, Expectation, RiskMeasureMCObjective, VaR
from botorch.models import SingleTaskGP
from botorch.models.model import Model
from botorch.models.transforms.input import AppendFeatures, InputPerturbation, InputTransform
from botorch.optim import optimize_acqf
from botorch.optim.initializers import gen_one_shot_kg_initial_conditions
from botorch.sampling import SobolQMCNormalSampler
from torch import Tensor

from bo_stream import OSGPR, WISKI
from bo_stream.acquisition import evaluate_known_points_once
from bo_stream.testing.streams import assert_close, assert_gradient
from tests.support.problems import observations

pytestmark = [  # BoTorch's own
    pytest.mark.filterwarnings("ignore:std\\(\\). degrees of freedom"),
    pytest.mark.filterwarnings("ignore:qNoisyExpectedImprovement has known numerical issues"),
    pytest.mark.filterwarnings("ignore:A not p.d., added jitter"),
]

UNIT = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
SHIFTS = 0.05 * torch.tensor([[0.0, 0.0], [1.0, -0.5], [-0.7, 0.3], [0.2, 0.9]]).double()
LEVELS = torch.tensor([[0.15], [0.45], [0.85]], dtype=torch.float64)
BASELINE = torch.tensor([[0.2, 0.3], [0.6, 0.5], [0.4, 0.85]], dtype=torch.float64)


def sampler(count: int) -> SobolQMCNormalSampler:
    return SobolQMCNormalSampler(torch.Size([count]), seed=0)


def perturbation() -> InputPerturbation:
    return InputPerturbation(SHIFTS, bounds=UNIT)


def environment() -> AppendFeatures:
    return AppendFeatures(feature_set=LEVELS)


def pair(transform: Callable[[], InputTransform]) -> tuple[OSGPR, SingleTaskGP]:
    """The exact process by both, at the same hyperparameters."""
    data = observations(14, 2)
    exact = SingleTaskGP(data.X, data.Y, input_transform=transform())
    model = OSGPR(data.X, data.Y, input_transform=transform(), inducing_points=data.X)
    with torch.no_grad():
        exact.covar_module.lengthscale = torch.full_like(exact.covar_module.lengthscale, 0.5)
        exact.likelihood.noise = 0.02
    model.load_state_dict(exact.state_dict())
    exact.posterior(data.X[:, :1] if isinstance(exact.input_transform, AppendFeatures) else data.X)
    return model, exact


def regret(model: Model, measure: RiskMeasureMCObjective) -> AcquisitionFunction:
    return qSimpleRegret(model, sampler=sampler(16), objective=measure)


def noisy(model: Model, measure: RiskMeasureMCObjective) -> AcquisitionFunction:
    return qNoisyExpectedImprovement(
        model, BASELINE, sampler=sampler(16), objective=measure, prune_baseline=False
    )


def log_noisy(model: Model, measure: RiskMeasureMCObjective) -> AcquisitionFunction:
    return qLogNoisyExpectedImprovement(
        model, BASELINE, sampler=sampler(16), objective=measure, prune_baseline=False
    )


@pytest.mark.parametrize("build", [regret, noisy, log_noisy])
@pytest.mark.parametrize(
    "measure", [VaR(alpha=0.6, n_w=4), CVaR(alpha=0.5, n_w=4)], ids=["VaR", "CVaR"]
)
def test_measures_of_perturbed_inputs_are_those_of_the_exact_process(
    build: Callable[..., AcquisitionFunction], measure: RiskMeasureMCObjective
) -> None:
    own, theirs = (build(model, measure) for model in pair(perturbation))
    X = 0.1 + 0.8 * torch.rand(3, 2, 2, dtype=torch.float64)
    assert_close(own(X), theirs(X), factor=1e4)


@pytest.mark.parametrize("kind", [OSGPR, WISKI])
def test_the_tutorial_of_perturbed_inputs(kind: Any) -> None:
    data = observations(14, 2)
    model = kind(data.X, data.Y, input_transform=perturbation())
    measure = CVaR(alpha=0.5, n_w=4)
    function = qLogNoisyExpectedImprovement(
        model, data.X, sampler=sampler(16), objective=measure, prune_baseline=True
    )
    C = 0.1 + 0.8 * torch.rand(2, 2, 2, dtype=torch.float64)
    plain = function(C)
    evaluate_known_points_once(function)
    assert_close(function(C), plain, factor=1e4)
    X, value = optimize_acqf(
        function, UNIT, q=2, num_restarts=1, raw_samples=4, options={"maxiter": 3}
    )
    assert X.shape == (2, 2)
    assert bool(value.isfinite())
    assert model.update(X, X.sum(-1, keepdim=True)).num_observations == 16


def test_gradients_of_a_smooth_measure() -> None:
    model, _ = pair(perturbation)
    function = regret(model, Expectation(n_w=4))  # without a kink where the order changes
    X = 0.1 + 0.8 * torch.rand(2, 2, 2, dtype=torch.float64)
    assert_gradient(lambda X: function(X).sum(), X)


def without_environment(X: Tensor) -> Tensor:
    return X[..., :-1]


def knowledge_gradient(model: Model) -> qMultiFidelityKnowledgeGradient:
    return qMultiFidelityKnowledgeGradient(
        model,
        num_fantasies=3,
        sampler=sampler(3),
        objective=VaR(alpha=0.6, n_w=3),
        inner_sampler=sampler(8),
        project=without_environment,
    )


def test_knowledge_gradients_over_environments_are_those_of_the_exact_process() -> None:
    own, theirs = (knowledge_gradient(model) for model in pair(environment))
    X = 0.1 + 0.8 * torch.rand(2, own.get_augmented_q_batch_size(1), 2, dtype=torch.float64)
    assert_close(own(X), theirs(X), factor=1e4)


@pytest.mark.parametrize("kind", [OSGPR, WISKI])
def test_the_tutorial_of_environmental_variables(kind: Any) -> None:
    data = observations(14, 2)
    model = kind(data.X, data.Y, input_transform=environment())
    function = knowledge_gradient(model)
    start = gen_one_shot_kg_initial_conditions(
        function,
        UNIT,
        q=1,
        num_restarts=2,
        raw_samples=4,
        options={"num_inner_restarts": 2, "raw_inner_samples": 4, "maxiter": 10},
    )
    X, value = optimize_acqf(
        function,
        UNIT,
        q=1,
        num_restarts=2,
        batch_initial_conditions=start,
        return_full_tree=True,
        options={"maxiter": 3},
    )
    assert X.shape == (4, 2)
    assert bool(value.isfinite())
    found = model.posterior(X[:1, :1])
    assert found.mean.shape == (3, 1)
