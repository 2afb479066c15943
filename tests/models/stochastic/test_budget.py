"""Budgets of trainings, on a clock that is asked for the time instead of running."""

from __future__ import annotations

import itertools

import pytest
import torch
from linear_operator.utils.errors import NotPSDError
from torch import Tensor
from torch.nn import Parameter

from bo_stream import (
    QSGP,
    BayesianLastLayer,
    DecoupledGP,
    FourierFeatures,
    ShortTrainingWarning,
)
from bo_stream.bases.kernels import default_kernel
from bo_stream.models.stochastic import budget
from bo_stream.models.stochastic.budget import Budget, ConstrainedAdam, judgement_said
from bo_stream.models.stochastic.training import Training

Stochastic = DecoupledGP | QSGP


def data() -> tuple[Tensor, Tensor]:
    X = torch.rand(60, 2, dtype=torch.float64)
    return X, (6.0 * X).sin().sum(-1, keepdim=True)


def built(kind: str, initial_points: int = 20, update_steps: int = 0) -> Stochastic:
    if kind == "decoupled":
        return DecoupledGP(*data(), num_mean=20, num_covar=5, initial_points=initial_points)
    options = {"initial_points": initial_points, "update_steps": update_steps}
    return QSGP(*data(), basis=FourierFeatures(40), **options)


def state(model: Stochastic) -> list[Tensor]:
    X = torch.rand(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    posterior = model.posterior(X)
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    return [*parameters, posterior.mean.detach(), posterior.variance.detach()]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes whenever the time is asked for."""
    seconds = itertools.count()
    monkeypatch.setattr(budget.time, "monotonic", lambda: float(next(seconds)))


@pytest.mark.parametrize("kind", ["decoupled", "qsgp"])
def test_no_budget_leaves_a_model_as_it_was(kind: str) -> None:
    model = built(kind)
    before = state(model)
    with pytest.warns(ShortTrainingWarning, match="No step was taken in 0 s"):
        done = model.fit(seconds=0.0, progress=False)
    assert (done.steps, done.is_kept) == (0, True)
    assert all(map(torch.equal, state(model), before))
    assert not model._memory.begun


def test_no_budget_leaves_the_collapsed_bound_alone() -> None:
    model = built("decoupled")
    before = state(model)
    with pytest.warns(ShortTrainingWarning):
        assert model.fit_collapsed(seconds=0.0, progress=False).steps == 0
    assert all(map(torch.equal, state(model), before))


@pytest.mark.usefixtures("clock")
def test_a_start_without_a_step_is_undone_where_it_predicts_worse() -> None:
    """After it nothing is known of the functions: the model would predict its prior mean."""
    model = built("decoupled")
    model.optimize_posterior(progress=False)
    before = state(model)
    with pytest.warns(ShortTrainingWarning, match="too few"):
        done = model.fit(seconds=6.0, progress=False)
    assert (done.steps, done.is_kept) == (0, False)
    assert all(map(torch.equal, state(model), before))
    assert not model._memory.begun


@pytest.mark.parametrize("kind", ["decoupled", "qsgp"])
def test_single_steps_are_kept_so_that_many_calls_get_far(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ones predict worse than the model before them, which knew no functions either."""
    monkeypatch.setattr(budget, "_is_no_worse", lambda *_: False)
    model = built(kind)
    for _ in range(3):
        assert model.fit(steps=1, progress=False).is_kept
        assert model._memory.begun


@pytest.mark.parametrize("kind", ["decoupled", "qsgp"])
def test_steps_that_are_undone_leave_a_model_as_it_was(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "_is_no_worse", lambda *_: False)
    model = built(kind, initial_points=0, update_steps=3)
    before = state(model)
    with pytest.warns(ShortTrainingWarning, match="too few"):
        done = model.fit(steps=3, seconds=1e6, progress=False)
    assert (done.steps, done.is_kept) == (3, False)
    model._cache = None
    assert all(map(torch.equal, state(model), before))


@pytest.mark.parametrize("limits", [{"steps": 3}, {"steps": 3, "seconds": 1e6}])
def test_steps_of_a_last_layer_are_undone_where_its_bound_is_lower(
    limits: dict[str, float],
) -> None:
    X, Y = data()
    model = BayesianLastLayer(X, Y)
    model.fit(steps=30, progress=False)
    model.eval()
    T = torch.rand(5, 2, dtype=torch.float64)
    before = model.posterior(T).mean.detach(), *(p.detach().clone() for p in model.parameters())
    with pytest.warns(ShortTrainingWarning, match="were too few"):
        done = model.fit(learning_rate=1.0, progress=False, **limits)  # type: ignore[arg-type]
    assert (done.steps, done.is_kept) == (3, False)
    after = model.posterior(T).mean.detach(), *model.parameters()
    assert all(map(torch.equal, before, after))


def test_says_what_the_time_went_into() -> None:
    model = built("decoupled")
    done = model.fit(steps=30, progress=False)
    assert done.steps == 30
    assert min(done.start, done.stepping, done.final) > 0.0
    assert done.start + done.stepping + done.final == pytest.approx(done.seconds)
    assert done.coverage is not None
    assert 0.0 <= done.coverage <= 1.0


@pytest.mark.usefixtures("clock")
def test_a_budget_counts_from_the_call() -> None:
    counted = Budget(10.0)
    assert counted.left() == 9.0
    assert counted.left(0.5) == 3.0
    assert counted.left(0.1) == 0.0
    assert Budget(None).left() is None


@pytest.mark.parametrize(
    ("gain", "coverage", "warns"),
    [(0.1, 0.9, False), (13.0, 0.9, True), (0.1, 0.18, True), (float("nan"), None, False)],
)
def test_warns_of_a_training_that_has_not_come_far(
    gain: float, coverage: float | None, warns: bool, recwarn: pytest.WarningsRecorder
) -> None:
    judgement_said(Training(50, 1.0, (), gain=gain, coverage=coverage), None)
    assert [w.category for w in recwarn] == [ShortTrainingWarning] * warns


def test_a_training_of_few_steps_is_judged_by_its_coverage_alone(
    recwarn: pytest.WarningsRecorder,
) -> None:
    judgement_said(Training(0, 1.0, (), coverage=0.3), None)  # none were wanted
    assert len(recwarn) == 0
    judgement_said(Training(5, 1.0, (), coverage=0.3), None)
    assert "far: 30% of outcomes are in their 90 % intervals. Call" in str(recwarn.pop().message)


@pytest.mark.parametrize("edge", [2.0, 3.5])
def test_a_bound_that_cannot_be_computed_everywhere_is_climbed_where_it_can(edge: float) -> None:
    x = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    tried: list[float] = []

    def bound() -> Tensor:
        tried.append(x.item())
        if tried[-1] > edge:
            raise NotPSDError("too far")
        return -(1.0 + (x - 3.0).square()).log().sum() * 10.0

    budget.maximise(bound, [x], 30)
    assert max(tried) > edge  # a step that was too long
    assert 1.0 < x.item() <= edge
    assert x.item() == pytest.approx(min(edge, 3.0), abs=0.1)


def test_a_bound_that_cannot_be_computed_at_the_start_is_an_error() -> None:
    def bound() -> Tensor:
        raise NotPSDError("nowhere")

    with pytest.raises(NotPSDError, match="nowhere"):
        budget.maximise(bound, [torch.zeros(1, requires_grad=True)], 5)


@pytest.mark.parametrize("frozen", [False, True])
def test_steps_follow_a_model_that_is_cast_or_frozen(frozen: bool) -> None:
    """In float32 as in float64; what a model does not learn for a while goes on where it was."""
    reached = []
    for dtype in (torch.float64, torch.float32):
        kernel = default_kernel(2, torch.Size([2])).double()
        offset = Parameter(torch.zeros(2).double())
        kernel.register_parameter("offset", offset)
        adam = ConstrainedAdam(kernel, [kernel.raw_lengthscale, offset], 0.1)
        for step in range(6):
            if step == 3:
                kernel.to(dtype)
            is_still = frozen and step in (2, 3)
            before = kernel.lengthscale.clone()
            kernel.raw_lengthscale.requires_grad_(not is_still)
            adam.ascend(kernel.lengthscale.log().sum() + offset.sum() * (1.0 + step))
            assert torch.equal(kernel.lengthscale, before) == is_still
        reached.append((kernel.lengthscale.detach().double(), offset.detach().double()))
    torch.testing.assert_close(*reached, rtol=1e-5, atol=1e-5)
