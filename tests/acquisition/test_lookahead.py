"""BoTorch's acquisition functions that look ahead through fantasies, and lists of models.

An OSGPR whose inducing points are the observations is the exact process: it must give what
``SingleTaskGP`` gives at the same hyperparameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from botorch.acquisition import PosteriorMean, qKnowledgeGradient
from botorch.acquisition.cost_aware import InverseCostWeightedUtility
from botorch.acquisition.fixed_feature import FixedFeatureAcquisitionFunction
from botorch.acquisition.knowledge_gradient import qMultiFidelityKnowledgeGradient
from botorch.acquisition.multi_objective.hypervolume_knowledge_gradient import (
    qHypervolumeKnowledgeGradient,
)
from botorch.acquisition.multi_step_lookahead import qMultiStepLookahead
from botorch.acquisition.utils import project_to_target_fidelity
from botorch.exceptions.errors import BotorchTensorDimensionError, UnsupportedError
from botorch.models import ModelList, ModelListGP, SingleTaskGP, SingleTaskMultiFidelityGP
from botorch.models.cost import AffineFidelityCostModel
from botorch.models.model import Model
from botorch.models.transforms.input import Normalize
from botorch.models.transforms.outcome import Standardize
from botorch.optim import optimize_acqf, optimize_acqf_mixed
from botorch.sampling import ListSampler, SobolQMCNormalSampler
from torch import Tensor

from bo_stream import OSGPR, WISKI
from bo_stream.testing.streams import assert_close, assert_gradient, joint_covariance
from tests.support.problems import Observations, observations

pytestmark = pytest.mark.filterwarnings("ignore:std\\(\\). degrees of freedom")  # BoTorch's own

UNIT = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)


def sampler(count: int) -> SobolQMCNormalSampler:
    return SobolQMCNormalSampler(torch.Size([count]), seed=0)


def pair(outputs: int = 1, noise: str = "learned") -> tuple[OSGPR, SingleTaskGP]:
    """The exact process by both, at the same hyperparameters."""
    data = observations(14, 2, outputs).with_noise(noise)
    exact = SingleTaskGP(*data.astuple())
    with torch.no_grad():
        exact.covar_module.lengthscale = torch.full_like(exact.covar_module.lengthscale, 0.4)
        if noise == "learned":
            exact.likelihood.noise = 0.02
    model = OSGPR(*data.astuple(), inducing_points=data.X, allocator=None)
    model.load_state_dict(exact.state_dict())
    exact.posterior(data.X)  # which fills the caches that conditioning needs
    return model, exact


def knowledge_gradient(model: Model) -> qKnowledgeGradient:
    value = torch.tensor(4.0, dtype=torch.float64)
    return qKnowledgeGradient(model, num_fantasies=4, sampler=sampler(4), current_value=value)


def fidelity_knowledge_gradient(model: Model) -> qMultiFidelityKnowledgeGradient:
    cost_model = AffineFidelityCostModel(fidelity_weights={1: 1.0}, fixed_cost=5.0)
    return qMultiFidelityKnowledgeGradient(
        model,
        num_fantasies=4,
        sampler=sampler(4),
        current_value=torch.tensor(4.0, dtype=torch.float64),
        cost_aware_utility=InverseCostWeightedUtility(cost_model=cost_model),
        project=partial(project_to_target_fidelity, target_fidelities={1: 1.0}, d=2),
    )


def two_steps(model: Model) -> qMultiStepLookahead:
    return qMultiStepLookahead(model, batch_sizes=[1, 1], samplers=[sampler(2), sampler(2)])


def hypervolume_knowledge_gradient(model: Model) -> qHypervolumeKnowledgeGradient:
    draws = ListSampler(sampler(2), sampler(2))
    low = torch.tensor([0.0, 0.0], dtype=torch.float64)
    return qHypervolumeKnowledgeGradient(
        model, ref_point=low, num_fantasies=2, num_pareto=3, sampler=draws
    )


@pytest.mark.parametrize("build", [knowledge_gradient, fidelity_knowledge_gradient, two_steps])
@pytest.mark.parametrize("noise", ["learned", "known"])
def test_values_are_those_of_the_exact_process(build: Callable[[Model], Any], noise: str) -> None:
    own, theirs = (build(model) for model in pair(noise=noise))
    X = 0.05 + 0.9 * torch.rand(2, own.get_augmented_q_batch_size(1), 2, dtype=torch.float64)
    assert_close(own(X), theirs(X), factor=1e3)
    assert_gradient(lambda X: own(X).sum(), X[:1])


def test_hypervolume_knowledge_gradient_is_that_of_the_exact_processes() -> None:
    models, exact = zip(pair(), pair(), strict=True)
    own, theirs = (
        hypervolume_knowledge_gradient(ModelListGP(*members)) for members in (models, exact)
    )
    X = 0.05 + 0.9 * torch.rand(2, own.get_augmented_q_batch_size(1), 2, dtype=torch.float64)
    assert_close(own(X), theirs(X), factor=1e3)
    assert_gradient(lambda X: own(X).sum(), X[:1])


@pytest.mark.parametrize("build", [knowledge_gradient, fidelity_knowledge_gradient])
def test_evaluation_with_restarts_is_that_of_the_exact_process(
    build: Callable[[Model], Any],
) -> None:
    X, values = torch.rand(3, 2, 2, dtype=torch.float64), []
    for model in pair():
        torch.manual_seed(1)
        values.append(build(model).evaluate(X, bounds=UNIT, num_restarts=3, raw_samples=64))
    assert values[0].shape == (3,)
    torch.testing.assert_close(*values, rtol=1e-3, atol=1e-3)


def test_mixed_optimisation_of_the_knowledge_gradient() -> None:
    model, _ = pair()
    X, value = optimize_acqf_mixed(
        knowledge_gradient(model),
        UNIT,
        q=2,
        num_restarts=2,
        raw_samples=4,
        fixed_features_list=[{1: 0.0}, {1: 1.0}],
        options={"maxiter": 4},
    )
    assert X.shape == (2, 2)
    assert set(X[:, 1].tolist()) <= {0.0, 1.0}
    assert bool(value.isfinite().all())


def fidelity_model(data: Observations) -> OSGPR:
    """With the kernel of BoTorch's model of fidelities."""
    exact = SingleTaskMultiFidelityGP(*data.astuple(), data_fidelities=[1])
    return OSGPR(*data.astuple(), covar_module=exact.covar_module, inducing_points=data.X)


def grid_model(data: Observations) -> WISKI:
    return WISKI(*data.astuple(), bounds=UNIT)


@pytest.mark.parametrize(
    "build", [pytest.param(fidelity_model, marks=pytest.mark.integration), grid_model]
)
def test_the_tutorial_of_several_fidelities(build: Callable[[Observations], Model]) -> None:
    """Of BoTorch: the best value of the target fidelity, then the next points and fidelities."""
    model = build(observations(14, 2))
    target = FixedFeatureAcquisitionFunction(PosteriorMean(model), d=2, columns=[1], values=[1.0])
    limits: dict[str, Any] = {"num_restarts": 1, "raw_samples": 4, "options": {"maxiter": 2}}
    _, current = optimize_acqf(target, UNIT[:, :1], q=1, **limits)
    function = fidelity_knowledge_gradient(model)
    function.current_value = current
    X, value = optimize_acqf_mixed(
        function, UNIT, q=2, fixed_features_list=[{1: 0.5}, {1: 1.0}], **limits
    )
    assert X.shape == (2, 2)
    assert set(X[:, 1].tolist()) <= {0.5, 1.0}
    assert bool(value.isfinite().all())


# --- lists of models ----------------------------------------------------------------------------


def assert_same(model: Model, other: Model, X: Tensor) -> None:
    own, theirs = model.posterior(X), other.posterior(X)
    assert own.mean.shape == theirs.mean.shape
    assert_close(own.mean, theirs.mean, factor=1e3)
    assert_close(joint_covariance(own), joint_covariance(theirs).expand_as(own), factor=1e3)


def lists(noise: str = "learned") -> tuple[ModelListGP, ModelListGP]:
    pairs = [pair(noise=noise), pair(noise=noise)]
    return ModelListGP(*(own for own, _ in pairs)), ModelListGP(*(theirs for _, theirs in pairs))


@pytest.mark.parametrize("batch", [(), (5,)], ids=str)
@pytest.mark.parametrize("noise", ["learned", "known"])
def test_a_list_is_conditioned_as_botorch_s_is(batch: tuple[int, ...], noise: str) -> None:
    own, theirs = lists(noise)
    own.eval()
    X, Y = torch.rand(*batch, 3, 2).double(), torch.randn(*batch, 3, 2).double()
    options = {} if noise == "learned" else {"noise": 0.1 + torch.rand_like(Y)}
    conditioned = own.condition_on_observations([X, X], Y, **options)
    T = torch.rand(4, 2).double()
    expected = theirs.condition_on_observations([X, X], Y, **options)
    a, b = conditioned.posterior(T), expected.posterior(T)
    assert a.mean.shape == b.mean.shape
    assert_close(a.mean, b.mean, factor=1e3)
    assert_close(a.variance, b.variance, factor=1e3)


@pytest.mark.parametrize("kind", [ModelListGP, ModelList])
def test_fantasies_of_a_list_are_botorch_s(kind: type[ModelList]) -> None:
    own, theirs = (kind(*members.models) for members in lists())
    X, T = torch.rand(5, 2, 2).double(), torch.rand(4, 2).double()
    fantasy, expected = (models.fantasize(X, sampler(3)) for models in (own, theirs))
    assert fantasy.batch_shape == expected.batch_shape == (3, 5)
    for a, b in zip(fantasy.models, expected.models, strict=True):
        assert_close(a.posterior(T).mean, b.posterior(T).mean, factor=1e3)


def test_a_list_in_training_mode_learns_nothing_from_hypothetical_data() -> None:
    """BoTorch passes outcomes through the members' transforms, which would learn from them."""
    model, _ = pair()
    model.train()
    before = model.posterior(UNIT).mean
    model.train()
    X, Y = torch.rand(4, 1, 2).double(), 100.0 + torch.randn(4, 1, 1).double()
    ModelListGP(model).condition_on_observations([X], Y)
    assert torch.equal(model.posterior(UNIT).mean, before)


def test_a_list_of_models_with_input_transforms_is_refused() -> None:
    """BoTorch does not apply them there, and conditions at the wrong inputs without a word."""
    data = observations(10, 2)
    model = WISKI(*data.astuple(), input_transform=Normalize(2, bounds=2.0 * UNIT))
    with pytest.raises(UnsupportedError, match=r"Use condition_on_observations of each model"):
        ModelListGP(model).condition_on_observations([data.X[:2]], data.Y[:2])


@pytest.mark.parametrize("outputs", [1, 2])
def test_gpytorch_s_conditioning_is_ours(outputs: int) -> None:
    data, more = observations(10, 2, outputs), observations(3, 2, outputs)
    model = WISKI(*data.astuple(), bounds=UNIT)
    model.eval()
    transform = model.outcome_transform
    assert isinstance(transform, Standardize)
    targets = transform(more.Y)[0].mT
    rows = targets.squeeze(-2) if outputs == 1 else targets
    own = model.get_fantasy_model(more.X, rows)
    assert_close(
        own.posterior(UNIT).mean,
        model.condition_on_observations(more.X, more.Y).posterior(UNIT).mean,
    )
    with pytest.raises(BotorchTensorDimensionError, match="Y"):
        model.get_fantasy_model(more.X, rows[..., :2])
