"""BoTorch's own acquisition functions on a grid model: values, gradients, optimisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from botorch.acquisition import (
    AcquisitionFunction,
    LogExpectedImprovement,
    UpperConfidenceBound,
    qKnowledgeGradient,
    qLogExpectedImprovement,
    qLogNoisyExpectedImprovement,
    qLowerBoundMaxValueEntropy,
    qMaxValueEntropy,
    qSimpleRegret,
    qUpperConfidenceBound,
)
from botorch.acquisition.active_learning import qNegIntegratedPosteriorVariance
from botorch.acquisition.joint_entropy_search import qJointEntropySearch
from botorch.acquisition.multi_objective.logei import qLogNoisyExpectedHypervolumeImprovement
from botorch.acquisition.objective import GenericMCObjective
from botorch.acquisition.thompson_sampling import PathwiseThompsonSampling
from botorch.acquisition.utils import get_optimal_samples
from botorch.models import ModelListGP
from botorch.models.model import Model
from botorch.models.transforms.input import Normalize
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from torch import Tensor

from bo_stream import WISKI
from bo_stream.acquisition import FeatureNIPV
from bo_stream.testing.streams import assert_close, assert_gradient
from tests.acquisition.examples import small_model, some
from tests.support.smooth_points import smooth_points

UNIT = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)


def points(*shape: int) -> Tensor:
    return 0.03 + 0.94 * torch.rand(*shape, 2, dtype=torch.float64)


def sampler(count: int = 16) -> SobolQMCNormalSampler:
    return SobolQMCNormalSampler(torch.Size([count]), seed=0)


@dataclass(frozen=True)
class Acquisition:
    """How to build one.

    Attributes:
        build: From a model and pending points.
        q: Number of points to choose.
        augmented: The same with the solutions of its fantasies.
        transforms: Whether it works on a model with transforms. BoTorch's GIBBON multiplies
            covariances in standardised units by the inverse of those in the outcomes' units; where
            that exceeds the variance, rounding is all that is left, on a ``SingleTaskGP`` too.
    """

    build: Callable[[WISKI, Tensor | None], AcquisitionFunction]
    q: int
    augmented: int | None = None
    transforms: bool = True


def low(model: WISKI) -> Tensor:
    """Points of low mean: improvement over them is likely, and its logarithm not too steep."""
    X = points(40)
    return X[model.posterior(X).mean.squeeze(-1).argsort()[:5]].detach()


def entropy_search(model: WISKI, X_pending: Tensor | None) -> AcquisitionFunction:
    inputs, outputs = get_optimal_samples(model, UNIT, num_optima=4, raw_samples=32, num_restarts=2)
    return qJointEntropySearch(model, inputs, outputs, X_pending=X_pending)


ACQUISITIONS = {
    "qUpperConfidenceBound": Acquisition(
        lambda m, P: qUpperConfidenceBound(m, beta=2.0, sampler=sampler(), X_pending=P), q=2
    ),
    "qSimpleRegret": Acquisition(
        lambda m, P: qSimpleRegret(m, sampler=sampler(), X_pending=P), q=2
    ),
    "qLogExpectedImprovement": Acquisition(
        lambda m, P: qLogExpectedImprovement(m, best_f=4.0, sampler=sampler(), X_pending=P), q=2
    ),
    "qLogNoisyExpectedImprovement": Acquisition(
        lambda m, P: qLogNoisyExpectedImprovement(
            m, X_baseline=low(m), sampler=sampler(), X_pending=P, prune_baseline=False
        ),
        q=2,
    ),
    "qKnowledgeGradient": Acquisition(
        lambda m, P: qKnowledgeGradient(m, num_fantasies=3, sampler=sampler(3), X_pending=P),
        q=2,
        augmented=5,
    ),
    "qNegIntegratedPosteriorVariance": Acquisition(
        lambda m, P: qNegIntegratedPosteriorVariance(m, points(30), X_pending=P), q=2
    ),
    "qNegIntegratedPosteriorVariance, many points": Acquisition(
        lambda m, P: qNegIntegratedPosteriorVariance(m, points(600), X_pending=P), q=2
    ),
    "FeatureNIPV": Acquisition(lambda m, P: FeatureNIPV(m, points(30), X_pending=P), q=2),
    "qMaxValueEntropy": Acquisition(
        lambda m, P: qMaxValueEntropy(
            m, points(20), num_fantasies=4, num_y_samples=16, X_pending=P, train_inputs=points(3)
        ),
        q=1,
    ),
    "qLowerBoundMaxValueEntropy": Acquisition(
        lambda m, P: qLowerBoundMaxValueEntropy(m, points(20), X_pending=P, train_inputs=points(3)),
        q=1,
        transforms=False,
    ),
    "qJointEntropySearch": Acquisition(entropy_search, q=2),
    "UpperConfidenceBound": Acquisition(lambda m, _: UpperConfidenceBound(m, beta=2.0), q=1),
    "LogExpectedImprovement": Acquisition(lambda m, _: LogExpectedImprovement(m, 4.0), q=1),
    "PathwiseThompsonSampling": Acquisition(lambda m, _: PathwiseThompsonSampling(m), q=2),
}

CASES = [
    (name, pending)
    for name in ACQUISITIONS
    for pending in (False, True)
    if not (pending and (name.startswith(("Upper", "Log", "Pathwise"))))
]


@pytest.fixture(params=CASES, ids=lambda case: case[0] + (", pending" if case[1] else ""))
def case(request: pytest.FixtureRequest) -> tuple[Acquisition, Tensor | None]:
    name, pending = request.param
    return ACQUISITIONS[name], points(2) if pending else None


@pytest.fixture
def model(case: tuple[Acquisition, Tensor | None]) -> WISKI:
    if not case[0].transforms:
        return small_model(some(), outcome_transform=None)
    return small_model(some(), input_transform=Normalize(2, bounds=UNIT * 1.0))


def sloped(function: AcquisitionFunction, X: Tensor) -> Tensor:
    """The first two candidates at which differences of a step of 1e-5 tell a gradient.

    Where it is flat they are mere rounding. Where the logarithm of a value f that grows linearly
    has the slope g = f'/f, their relative error is (1e-5 g)² / 3: 1e-7 at 55.
    """
    X = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(X).sum(), X)
    slope = gradient.flatten(1).norm(dim=-1)
    return X.detach()[(slope > 1e-4) & (slope < 55.0)][:2]


def test_values_and_gradients(model: WISKI, case: tuple[Acquisition, Tensor | None]) -> None:
    acquisition, X_pending = case
    function = acquisition.build(model, X_pending)
    X = sloped(function, smooth_points(model, 30, acquisition.augmented or acquisition.q))
    values = function(X)
    assert values.shape == (2,)
    assert bool(values.isfinite().all())
    assert_gradient(lambda X: function(X).sum(), X)


def test_optimisation(model: WISKI, case: tuple[Acquisition, Tensor | None]) -> None:
    acquisition, X_pending = case
    function = acquisition.build(model, X_pending)
    X, value = optimize_acqf(
        function, UNIT, acquisition.q, num_restarts=2, raw_samples=4, options={"maxiter": 3}
    )
    assert X.shape == (acquisition.q, 2)
    assert bool(((X >= 0.0) & (X <= 1.0)).all())
    assert bool(value.isfinite())
    assert model.num_observations == 25


# --- several outputs ----------------------------------------------------------------------------


def constrained_improvement(model: Model) -> AcquisitionFunction:
    return qLogNoisyExpectedImprovement(
        model,
        X_baseline=BASELINE,
        sampler=sampler(),
        objective=GenericMCObjective(lambda samples, X=None: samples[..., 0]),
        constraints=[lambda samples: samples[..., 1] - 10.0],
        prune_baseline=False,
        cache_root=True,
    )


def hypervolume_improvement(model: Model) -> AcquisitionFunction:
    return qLogNoisyExpectedHypervolumeImprovement(
        model,
        ref_point=[0.0, 0.0],
        X_baseline=BASELINE,
        sampler=sampler(),
        prune_baseline=False,
        cache_root=True,
    )


def test_the_density_of_several_outputs_is_the_product_of_theirs() -> None:
    model, X = small_model(some(outputs=2)), points(3)
    Y = model.posterior(X).mean.detach() + 0.1 * torch.randn(3, 2).double()
    joint = model.posterior(X, observation_noise=True).distribution
    alone = [model.posterior(X, [i], observation_noise=True).distribution for i in range(2)]
    expected = sum(one.log_prob(Y[:, i]) for i, one in enumerate(alone))
    assert_close(joint.log_prob(Y), expected, factor=1e3)
    assert_close(joint.expand(torch.Size([4])).log_prob(Y), expected.expand(4), factor=1e3)


BASELINE = torch.tensor([[0.2, 0.3], [0.6, 0.5], [0.4, 0.9]], dtype=torch.float64)


@pytest.mark.parametrize("build", [constrained_improvement, hypervolume_improvement])
def test_objectives_and_constraints_of_several_outputs(
    build: Callable[[Model], AcquisitionFunction],
) -> None:
    """With BoTorch's cached root, which asks how outputs are laid out in a posterior."""
    model = small_model(some(outputs=2))
    function, X = build(model), smooth_points(model, 3, 2)
    single = build(ModelListGP(model.subset_output([0]), model.subset_output([1])))
    assert_close(function(X), single(X), factor=1e4)
    assert_gradient(lambda X: function(X).sum(), X)
    chosen, _ = optimize_acqf(
        function, UNIT, 2, num_restarts=1, raw_samples=4, options={"maxiter": 3}, sequential=True
    )
    assert chosen.shape == (2, 2)
