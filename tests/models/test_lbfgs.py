"""L-BFGS-B in logarithms of positive hyperparameters."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from botorch.exceptions.warnings import OptimizationWarning
from botorch.fit import fit_gpytorch_mll
from botorch.optim.closures import NdarrayOptimizationClosure, get_loss_closure_with_grads
from botorch.optim.core import OptimizationResult, OptimizationStatus
from botorch.optim.fit import fit_gpytorch_mll_scipy
from botorch.optim.utils import get_parameters_and_bounds
from botorch.optim.utils.numpy_utils import get_bounds_as_ndarray
from botorch.optim.utils.timeout import minimize_with_timeout
from botorch.test_functions import Hartmann
from gpytorch.constraints import GreaterThan, Interval
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood, MarginalLogLikelihood
from scipy.optimize import LbfgsInvHessProduct, check_grad
from torch import Tensor

from bo_stream import OSGPR, WISKI, AutoGP
from bo_stream.models import fitting, lbfgs
from bo_stream.models.base import StreamingGP
from bo_stream.models.lbfgs import Fitted, LogObjective, fit_in_logarithms
from tests.support.fits import evaluations


def observations(n: int) -> tuple[Tensor, Tensor]:
    """Hartmann's function in six inputs."""
    X = torch.quasirandom.SobolEngine(6, scramble=True, seed=0).draw(n).to(torch.float64)
    return X, Hartmann(6)(X).unsqueeze(-1)


def objective(model: StreamingGP) -> ExactMarginalLogLikelihood:
    return ExactMarginalLogLikelihood(model.likelihood, model.train())


def log_objective(model: StreamingGP) -> LogObjective:
    mll = objective(model)
    parameters, bounds = get_parameters_and_bounds(mll)
    evaluate = get_loss_closure_with_grads(mll, parameters)
    limits = get_bounds_as_ndarray(parameters, bounds)
    return LogObjective.of(NdarrayOptimizationClosure(evaluate, parameters), limits)


def test_the_gradient_is_that_by_the_variables() -> None:
    found = log_objective(AutoGP(*observations(20)))
    start = found.start
    assert found.positive.sum() == 7  # six lengthscales and the noise, of eight with the mean
    slope = found(start)[1]
    difference = check_grad(lambda v: float(found(v)[0]), lambda v: found(v)[1], start)
    assert difference < 1e-5 * float(np.linalg.norm(slope))


def test_the_gradient_by_scaled_variables() -> None:
    found = log_objective(AutoGP(*observations(20)))
    scaled = replace(found, scales=np.linspace(0.5, 2.0, len(found.scales)))
    np.testing.assert_allclose(scaled.parameters(scaled.start), found.objective.state, rtol=1e-14)
    slope = scaled(scaled.start)[1]
    difference = check_grad(lambda v: float(scaled(v)[0]), lambda v: scaled(v)[1], scaled.start)
    assert difference < 1e-5 * float(np.linalg.norm(slope))


def test_the_gradient_by_variables_that_a_matrix_mixes() -> None:
    found = log_objective(AutoGP(*observations(20)))
    generator = np.random.default_rng(0)
    size = len(found.scales)
    slope = found(found.start)[1]
    mixed = found.scaled(0.3 * np.eye(size) + 0.1 * generator.random((size, size)), slope)
    np.testing.assert_array_equal(mixed.start, np.zeros(size))
    np.testing.assert_allclose(mixed.parameters(mixed.start), found.objective.state, rtol=1e-14)
    somewhere = 0.1 * generator.random(size)
    np.testing.assert_allclose(mixed.variables(mixed.parameters(somewhere)), somewhere, atol=1e-12)
    slope = mixed(somewhere)[1]
    difference = check_grad(lambda v: float(mixed(v)[0]), lambda v: mixed(v)[1], somewhere)
    assert difference < 1e-5 * float(np.linalg.norm(slope))


def test_variables_are_logarithms_of_what_is_positive() -> None:
    model = AutoGP(*observations(20))
    with torch.no_grad():
        model.mean_module.constant.fill_(-2.0)
        model.covar_module.lengthscale = 3.0
    found = log_objective(model)
    state = found.objective.state
    variables = found.start
    assert sorted(set(variables[found.positive].round(12)))[-1] == pytest.approx(math.log(3.0))
    assert variables[~found.positive].tolist() == [-2.0]
    np.testing.assert_allclose(found.parameters(variables), state, rtol=1e-15)


def test_parameters_stay_within_bounds_that_their_logarithms_miss_by_rounding() -> None:
    found = log_objective(AutoGP(*observations(20)))
    least = found.variables(found.bounds[:, 0])
    shifted = np.where(found.positive, np.nextafter(least, -np.inf), least)
    parameters = found.parameters(shifted)
    assert bool((parameters[found.positive] >= found.bounds[found.positive, 0]).all())


def test_what_may_be_negative_or_is_zero_is_moved_itself() -> None:
    X, Y = observations(20)
    kernel = ScaleKernel(RBFKernel(), outputscale_constraint=GreaterThan(0.0, transform=None))
    kernel.base_kernel.register_constraint("raw_lengthscale", Interval(-1.0, 9.0, transform=None))
    kernel.base_kernel.lengthscale = 0.5
    model = AutoGP(X, Y, covar_module=kernel)
    for scale, positive in ((0.1, 2), (0.0, 1)):  # it and the noise, or the noise
        with torch.no_grad():
            model.covar_module.raw_outputscale.fill_(scale)
        assert log_objective(model).positive.sum() == positive


def in_the_parameters(mll: MarginalLogLikelihood, **kwargs: Any) -> OptimizationResult:
    """An optimizer that BoTorch does not take for its default one."""
    return fit_gpytorch_mll_scipy(mll, **kwargs)


def end_of(model: StreamingGP, optimizer: Callable[..., Any]) -> tuple[int, float]:
    """Number of evaluations of a fit, and the loss where it ends."""
    with evaluations() as counted:
        fit_gpytorch_mll(objective(model), optimizer=optimizer)
    with torch.no_grad():
        return len(counted), float(model.train().compute_custom_loss(objective(model)).sum())


@pytest.mark.parametrize("kind", [AutoGP, OSGPR])
def test_a_fit_takes_half_the_evaluations_and_is_as_good(kind: type[StreamingGP]) -> None:
    X, Y = observations(60)
    ours, loss = end_of(kind(X, Y), fit_in_logarithms)
    theirs, peer = end_of(kind(X, Y), in_the_parameters)
    assert ours <= 0.5 * theirs
    assert loss <= peer + 1e-4


@pytest.mark.parametrize("kind", ["single", "elements"])
def test_the_default_fit_is_in_logarithms(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    X, Y = observations(12)
    made = list[LogObjective]()
    monkeypatch.setattr(LogObjective, "of", classmethod(_noting(made)))
    model = WISKI(X[:, :2], Y if kind == "single" else torch.cat((Y, Y.cos()), -1))
    fit_gpytorch_mll(objective(model), optimizer_kwargs={"options": {"maxiter": 2}})
    assert made
    assert all(each.positive.sum() == 3 for each in made)  # of four a fit moves, of each element
    assert made[0].bounds.shape == (4, 2)


def _noting(made: list[LogObjective]) -> Any:
    make = LogObjective.of.__func__  # type: ignore[attr-defined]

    def of(cls: type[LogObjective], *args: Any) -> LogObjective:
        made.append(make(cls, *args))
        return made[-1]

    return of


def pairs_of_steps(k: int, m: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps, and the changes of the gradient of a quadratic objective, ``k x m`` each."""
    generator = np.random.default_rng(1)
    steps = generator.normal(size=(k, m))
    return steps, steps * (0.5 + generator.random(m))


@pytest.mark.parametrize("before", [1.0, 0.3])
def test_the_diagonal_of_an_inverse_hessian_is_that_of_the_matrix(before: float) -> None:
    s, y = pairs_of_steps(6, 40)
    unit = LbfgsInvHessProduct(s / math.sqrt(before), y * math.sqrt(before)).todense()
    found = lbfgs._inverse_diagonal(s, y, before)
    np.testing.assert_allclose(found, before * np.diag(unit), rtol=1e-10)


def test_scales_of_many_parameters_take_no_matrix() -> None:
    pairs = LbfgsInvHessProduct(*pairs_of_steps(10, 20_000))
    tracemalloc.start()
    found = lbfgs._scales_from(pairs, np.ones(20_000), scaled=False)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.shape == (20_000,)
    assert most < 50 * pairs.sk.nbytes  # a matrix: 2,000 times as much


@pytest.mark.filterwarnings("ignore:Data")  # not of the unit cube
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize(("n", "width"), [(15, 9.0), (40, 14.0)])
def test_a_tolerance_does_not_end_a_fit_on_a_plateau(n: int, width: float, outputs: int) -> None:
    """With points some lengthscales apart a first step gains less than the tolerance."""
    U = torch.quasirandom.SobolEngine(2, seed=3).draw(n).double()
    Y = (5.0 * U[:, :1]).sin() + U[:, 1:].square()
    Y = torch.cat((Y, Y.flip(0) * U[:, :1]), -1)[:, :outputs]

    def found(options: dict[str, float]) -> Tensor:
        model = OSGPR(width * U, Y)
        mll = ExactMarginalLogLikelihood(model.likelihood, model)
        fit_gpytorch_mll(mll, optimizer_kwargs={"options": options})
        return model.log_marginal_likelihood().detach()

    assert bool((found({}) > found({"ftol": lbfgs.SCIPYS_FTOL}) - 0.2).all())


def test_a_caller_s_bounds_hold() -> None:
    model = AutoGP(*observations(20))
    name = "model.covar_module.raw_lengthscale"
    result = fit_in_logarithms(objective(model), bounds={name: (0.5, 0.6)}, options={"maxiter": 9})
    lengthscales = model.covar_module.lengthscale
    assert bool(((lengthscales >= 0.5) & (lengthscales <= 0.6)).all())
    assert result.status in (OptimizationStatus.SUCCESS, OptimizationStatus.STOPPED)


def test_the_last_iteration_and_the_last_second_stop_it() -> None:
    model = AutoGP(*observations(20))
    for limit in ({"options": {"maxiter": 1}}, {"timeout_sec": 0.0}):
        result = fit_in_logarithms(objective(deepcopy(model)), **limit)  # type: ignore[arg-type]
        assert (result.step, result.status) == (1, OptimizationStatus.STOPPED)


def test_what_only_botorch_s_optimizer_takes_goes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[int]()
    model = AutoGP(*observations(20))
    monkeypatch.setattr(lbfgs.LogObjective, "of", None)
    fit_in_logarithms(
        objective(model),
        callback=lambda parameters, result: seen.append(result.step),
        options={"maxiter": 3},
        method="L-BFGS-B",
    )
    assert seen == [1, 2, 3]


@pytest.mark.parametrize("limit", [None, 3600.0])
def test_a_callback_is_told_each_iteration_and_costs_no_evaluation(limit: float | None) -> None:
    seen = list[tuple[int, float, float]]()

    def callback(parameters: Any, result: OptimizationResult) -> None:
        with torch.no_grad():
            loss = model.compute_custom_loss(mll).sum()
        assert parameters["model.covar_module.raw_lengthscale"] is raw
        seen.append((result.step, result.fval, float(loss)))

    model = AutoGP(*observations(20))
    raw, mll = model.covar_module.raw_lengthscale, objective(model)
    with evaluations() as counted:
        end = fit_in_logarithms(mll, options={"maxiter": 5}, callback=callback, timeout_sec=limit)
    steps, told, found = zip(*seen, strict=True)
    assert steps == (1, 2, 3, 4, 5)
    assert told == pytest.approx(found, rel=1e-12)
    assert end.fval == pytest.approx(told[-1], rel=1e-12)
    with evaluations() as others:
        fit_in_logarithms(objective(AutoGP(*observations(20))), options={"maxiter": 5})
    assert len(counted) - len(seen) == len(others)


def quadratic(model: StreamingGP, curvatures: Tensor) -> Callable[[], Any]:
    """A loss with some curvatures by the logarithms of lengthscales, least where they are 0.7."""
    raw = model.covar_module.raw_lengthscale

    def closure() -> tuple[Tensor, list[Tensor]]:
        off = (model.covar_module.lengthscale / 0.7).log()
        loss = 0.5 * (curvatures * off.square()).sum()
        return loss, [torch.autograd.grad(loss, raw)[0]]

    return closure


def test_scales_are_deviations_of_the_inverse_hessian() -> None:
    model, name = AutoGP(*observations(20)), "model.covar_module.raw_lengthscale"
    model.covar_module.register_constraint("raw_lengthscale", Interval(1e-3, 1e3, transform=None))
    curvatures = 10.0 ** torch.linspace(-2.0, 2.0, 6, dtype=torch.float64)
    moved = {name: model.covar_module.raw_lengthscale}
    evaluate = quadratic(model, curvatures)

    def fitted(start: float, scales: Any) -> tuple[int, Fitted]:
        model.covar_module.lengthscale = start
        taken.clear()
        options = {"ftol": 1e-14, "gtol": 1e-9}
        found = fit_in_logarithms(
            objective(model), counted, parameters=moved, options=options, scales=scales
        )
        assert isinstance(found, Fitted)
        torch.testing.assert_close(
            model.covar_module.lengthscale,
            torch.full_like(curvatures, 0.7)[None],
            rtol=1e-4,
            atol=0.0,
        )
        return len(taken), found

    taken = list[None]()

    def counted() -> Any:
        taken.append(None)
        return evaluate()

    first, found = fitted(0.5, None)
    assert found.scales is not None
    ratios = found.scales[name].square().sum(-1).sqrt() * curvatures.sqrt()
    assert bool(((ratios > 0.5) & (ratios < 2.0)).all())
    exact, again = fitted(0.8, {name: curvatures.rsqrt()[None]})
    assert exact <= 3 < first  # the start, Newton's step, and that nothing is left to gain
    assert again.scales is not None
    assert fitted(0.5, found.scales)[0] < 0.6 * first


def correlated() -> Tensor:
    """A Hessian of six parameters of which a narrow valley runs across all axes."""
    generator = torch.Generator().manual_seed(0)
    square = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    axes = torch.linalg.qr(square).Q
    return axes @ torch.diag(10.0 ** torch.linspace(-2.0, 2.0, 6).double()) @ axes.mT


def valley(
    model: StreamingGP, hessian: Tensor, centre: float | Tensor
) -> tuple[list[float], Callable[[], Any]]:
    """A quadratic loss by the logarithms of lengthscales, least at a centre, and its values."""
    raw, values = model.covar_module.raw_lengthscale, list[float]()

    def closure() -> tuple[Tensor, list[Tensor]]:
        off = (model.covar_module.lengthscale / centre).log()[0]
        loss = 0.5 * off @ hessian @ off
        values.append(float(loss.detach()))
        return loss, [torch.autograd.grad(loss, raw)[0]]

    return values, closure


EXACT = {"ftol": 1e-14, "gtol": 1e-9}


@pytest.mark.parametrize("most", [lbfgs.MATRIX, 3])
def test_scales_follow_a_valley_across_the_axes(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(lbfgs, "MATRIX", most)
    model, name = AutoGP(*observations(20)), "model.covar_module.raw_lengthscale"
    model.covar_module.register_constraint("raw_lengthscale", Interval(1e-3, 1e3, transform=None))
    moved = {name: model.covar_module.raw_lengthscale}
    values, evaluate = valley(model, correlated(), 0.7)

    def fitted(start: float, scales: Any) -> tuple[int, Any]:
        model.covar_module.lengthscale = start
        values.clear()
        found: Any = fit_in_logarithms(
            objective(model), evaluate, parameters=moved, options=EXACT, scales=scales
        )
        assert values[-1] < 1e-6
        return len(values), found

    first, found = fitted(0.5, None)
    again, _ = fitted(0.9, found.scales)
    if most == 3:
        assert found.scales[name].shape == (1, 6)
        return
    assert found.scales[name].shape == (1, 6, 6)
    assert again < 0.7 * first
    root = torch.linalg.cholesky(torch.linalg.inv(correlated()))
    assert fitted(0.6, {name: root[None]})[0] <= 4  # the start, Newton's step, and its end


def test_of_many_parameters_each_has_a_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lbfgs, "MATRIX", 3)
    mll = objective(AutoGP(*observations(20)))
    result: Any = fit_in_logarithms(mll, options={"maxiter": 3})
    shapes = {name: p.shape for name, p in mll.named_parameters() if p.requires_grad}
    assert torch.Size(()) in shapes.values()
    assert {name: value.shape for name, value in result.scales.items()} == shapes


def test_a_bound_ends_the_mixing_of_parameters() -> None:
    name, ends = "model.covar_module.raw_lengthscale", list[Tensor]()
    centre = torch.tensor([0.2, 0.9, 0.6, 0.8, 1.2, 0.7], dtype=torch.float64)
    root = torch.linalg.cholesky(torch.linalg.inv(correlated()))
    for scales in (None, {name: root[None]}):
        model = AutoGP(*observations(20))
        limits = Interval(0.5, 1.0, transform=None)
        model.covar_module.register_constraint("raw_lengthscale", limits)
        model.covar_module.lengthscale = 0.75
        parameters = {name: model.covar_module.raw_lengthscale}
        _, evaluate = valley(model, correlated(), centre)
        result = fit_in_logarithms(
            objective(model), evaluate, parameters=parameters, options=EXACT, scales=scales
        )
        assert result.status == OptimizationStatus.SUCCESS
        ends.append(model.covar_module.lengthscale.detach().clone())
    assert bool(((ends[0] == 0.5) | (ends[0] == 1.0)).any())
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_line_search_that_ends_at_a_bound_gives_no_warning_where_the_fit_goes_on(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, failing: int
) -> None:
    name, minimize, parts = "model.covar_module.raw_lengthscale", minimize_with_timeout, list[int]()

    def ending(*args: Any, **kwargs: Any) -> Any:
        end = minimize(*args, **kwargs)
        parts.append(end.nit)
        if len(parts) == failing:
            end.success, end.status, end.message = False, 2, "ABNORMAL: "
        return end

    monkeypatch.setattr(lbfgs, "minimize_with_timeout", ending)
    root = torch.linalg.cholesky(torch.linalg.inv(correlated()))
    model = AutoGP(*observations(20))
    limits = Interval(0.5, 1.0, transform=None)
    model.covar_module.register_constraint("raw_lengthscale", limits)
    model.covar_module.lengthscale = 0.75
    _, evaluate = valley(model, correlated(), torch.full((6,), 0.2, dtype=torch.float64))
    result = fit_in_logarithms(
        objective(model),
        evaluate,
        parameters={name: model.covar_module.raw_lengthscale},
        options=EXACT,
        scales={name: root[None]},
    )
    assert (len(parts), result.step) == (2, sum(parts))
    warned = [w for w in recwarn if issubclass(w.category, OptimizationWarning)]
    assert len(warned) == failing - 1
    assert (result.status == OptimizationStatus.FAILURE) == (failing == 2)


def test_scales_let_no_logarithm_move_far_in_the_first_step() -> None:
    model, name = AutoGP(*observations(20)), "model.covar_module.raw_lengthscale"
    seen = list[Tensor]()
    mll = objective(model)
    learned = {n: p for n, p in mll.named_parameters() if p.requires_grad}
    evaluate = get_loss_closure_with_grads(mll, learned)

    def closure() -> Any:
        seen.append(model.covar_module.lengthscale.detach().clone())
        return evaluate()

    far = {n: torch.full_like(p, 1e4) for n, p in learned.items()}
    fit_in_logarithms(mll, closure, scales=far, options={"maxiter": 1})
    assert name in learned
    step = (seen[1] / seen[0]).log().abs()
    assert 0.1 < float(step.max()) <= lbfgs.FIRST_STEP + 1e-9


@pytest.mark.filterwarnings("ignore")  # outcomes that are not standardised
def test_a_large_mean_stays_where_the_fit_begins() -> None:
    X, Y = observations(20)
    model = AutoGP(X, Y + 1e12, outcome_transform=None)
    with torch.no_grad():
        model.mean_module.constant.fill_(1e12)
    mll = objective(model)
    scales = {n: torch.full_like(p, 1e-3) for n, p in mll.named_parameters() if p.requires_grad}
    fit_in_logarithms(mll, scales=scales, options={"maxiter": 2})
    assert abs(float(model.mean_module.constant) - 1e12) < 10.0


def test_scales_that_lack_a_parameter_are_left_alone() -> None:
    ends = list[float]()
    for scales in (None, {"model.covar_module.raw_lengthscale": torch.ones(1, 6)}):
        model = AutoGP(*observations(20))
        fit_in_logarithms(objective(model), scales=scales, options={"maxiter": 3})
        ends.append(fitting.total_loss(model))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("kind", [AutoGP, OSGPR])
def test_a_refit_knows_the_curvature_of_the_last_fit(kind: type[StreamingGP]) -> None:
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(480, 2, generator=generator, dtype=torch.float64)
    Y = ((6.0 * X).sin().sum(-1, keepdim=True)) + 0.3 * torch.randn(
        480, 1, generator=generator, dtype=torch.float64
    )

    def refitted(forgets: bool) -> tuple[int, float]:
        taken = 0
        model = kind(X[:240], Y[:240])
        fit_gpytorch_mll(objective(model))
        for begin in range(240, 480, 40):
            model.update(X[begin : begin + 40], Y[begin : begin + 40])
            if forgets:
                model._last_fit = None
            with evaluations() as counted:
                fit_gpytorch_mll(objective(model))
            taken += len(counted)
        return taken, fitting.total_loss(model.train())

    (knows, loss), (forgets, least) = refitted(False), refitted(True)
    assert knows <= 0.85 * forgets
    assert loss <= least + 0.01


def ended(**options: float) -> tuple[int, float]:
    """Number of evaluations of a refit with the default optimizer, and its loss in nats."""
    X, Y = observations(63)
    model = AutoGP(X[:60], Y[:60])
    fit_gpytorch_mll(objective(model), optimizer_kwargs={"options": {"ftol": 1e-12}})
    model.update(X[60:], Y[60:])
    with evaluations() as counted:
        fit_gpytorch_mll(objective(model), optimizer_kwargs={"options": options})
    with torch.no_grad():
        return len(counted), 63.0 * float(model.train().compute_custom_loss(objective(model)).sum())


def test_a_fit_ends_where_an_iteration_gains_a_thousandth_of_a_nat() -> None:
    (few, loss), (many, least) = ended(), ended(ftol=2.2e-9)
    assert few <= 0.8 * many
    assert loss <= least + 0.01
    assert ended(ftol=fitting.LEAST_GAIN / 63) == (few, loss)


def test_the_tolerance_is_scipy_s_from_half_a_million_observations() -> None:
    for n, expected in ((20, fitting.LEAST_GAIN / 20), (0, fitting.LEAST_GAIN)):
        model = OSGPR(*(each[:n] for each in observations(20)))
        assert fitting.tolerance(model._counts()) == pytest.approx(expected)
    assert fitting.tolerance(torch.tensor([[1e6]])) == pytest.approx(2.2e-9, rel=0.01)
