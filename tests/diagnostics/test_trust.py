"""Each illness is planted in a stream: its alarm rings, and no other; none on healthy streams."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.fit import fit_gpytorch_mll
from botorch.models.transforms.outcome import Bilog, ChainedOutcomeTransform, Standardize
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood, StudentTLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from scipy.integrate import trapezoid
from torch import Tensor

import bo_stream
from bo_stream import (
    OSGPR,
    OSVGP,
    WISKI,
    AutoGP,
    BinomialLikelihood,
    ClusteredGP,
    DirichletWISKI,
    LocalGP,
)
from bo_stream.allocation import Novelty
from bo_stream.bases.kernels import ProductMatern
from bo_stream.diagnostics import ProgressiveValidation, TrustReport, report
from bo_stream.diagnostics.alarms import AHEAD, HORIZON, Cost, Innovations
from bo_stream.diagnostics.approximation import (
    ApproximationGap,
    approximation_gap,
    exact_marginals,
    sensitivities,
)
from bo_stream.diagnostics.validation import Interval
from bo_stream.models.base import StreamingGP
from bo_stream.testing.streams import assert_close
from tests.laws.cases import CASES
from tests.laws.registry import Stream, shared_out
from tests.oracles.gaussian_process import DenseGP
from tests.oracles.kernels import dense_kernel

pytestmark = pytest.mark.filterwarnings("ignore:The grid of", "ignore:The kernel's lengthscale")

UNBATCHED = {
    case: [setting for setting in case.settings if not setting.batch_shape] for case in CASES
}
FIRST = [Stream(case, settings[0]) for case, settings in UNBATCHED.items() if settings]

NOISE = 0.2
CHANGE = 200
"""Row after which a change begins."""

Rows = tuple[Tensor, Tensor]


def both_inputs(X: Tensor) -> Tensor:
    return torch.sin(8.0 * X[:, :1]) + torch.cos(5.0 * X[:, 1:])


def as_they_are(_: int, X: Tensor, Y: Tensor) -> Rows:
    return X, Y


def normal(n: int) -> Tensor:
    return NOISE * torch.randn(n, 1, dtype=torch.float64)


def heavy(n: int) -> Tensor:
    return NOISE * torch.distributions.StudentT(torch.tensor(1.5).double()).sample((n, 1))


def skewed(n: int) -> Tensor:
    return NOISE * (torch.randn(n, 1, dtype=torch.float64).exp() - math.exp(0.5))


@dataclass(frozen=True)
class Planted:
    """A stream of 400 rows, and the model of it.

    Attributes:
        noise: Draws it.
        change: Of a batch, by the number of rows before it.
        noise_factor: Noise variance of the model over the true one.
        lengthscale: Of each input.
        function: Of the inputs.
        options: Of the class of the model.
    """

    noise: Callable[[int], Tensor] = normal
    change: Callable[[int, Tensor, Tensor], Rows] = as_they_are
    noise_factor: float = 1.0
    lengthscale: tuple[float, float] = (0.3, 0.3)
    function: Callable[[Tensor], Tensor] = both_inputs
    options: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()

    def model(self, kind: str, X: Tensor, Y: Tensor) -> StreamingGP:
        kernel = ScaleKernel(RBFKernel(ard_num_dims=2)).double()
        kernel.base_kernel.lengthscale = torch.tensor([self.lengthscale])
        likelihood = GaussianLikelihood().double()
        likelihood.noise = self.noise_factor * NOISE**2 / float(Y.var())
        options: dict[str, Any] = {"covar_module": kernel, "likelihood": likelihood}
        if kind == "WISKI":
            options |= {"bounds": torch.tensor([[0.0, 0.0], [1.0, 1.0]]).to(X), "grid_size": 16}
        chosen = dict(dict(self.options).get(kind, ()))
        model: StreamingGP = getattr(bo_stream, kind)(X, Y, **{**options, **chosen})
        return model

    def stream(self, kind: str, rows: int = 400, batch: int = 20) -> tuple[StreamingGP, Any]:
        """A model that has observed it, and the record of that."""
        X = torch.rand(60, 2, dtype=torch.float64)
        model = self.model(kind, X, self.function(X) + self.noise(60))
        record = ProgressiveValidation(false_alarms=1e-9)
        for begin in range(0, rows, batch):
            X = torch.rand(batch, 2, dtype=torch.float64)
            Y = self.function(X) + self.noise(batch)
            record.observe(model, *self.change(begin, X, Y))
        return model, record


def after(change: Callable[[Tensor, Tensor], Rows]) -> Callable[[int, Tensor, Tensor], Rows]:
    return lambda row, X, Y: change(X, Y) if row >= CHANGE else (X, Y)


class Twice:
    """Gives each batch a second time later on."""

    def __init__(self) -> None:
        self.batches: list[Rows] = []

    def __call__(self, row: int, X: Tensor, Y: Tensor) -> Rows:
        if row == 0:
            self.batches = []
        self.batches.append((X, Y))
        return self.batches[len(self.batches) // 2]


COARSE = (("WISKI", (("grid_size", 5),)), ("OSGPR", (("max_points", 10),)))
HEALTHY = Planted()
ILLNESSES: dict[str, tuple[str, Planted]] = {
    "drift": ("drift", Planted(change=after(lambda X, Y: (X, Y + 3.0 * NOISE)))),
    "too little noise": ("noise", Planted(noise_factor=1.0 / 16.0)),
    "too much noise": ("noise", Planted(noise_factor=16.0)),
    "heavy tails": ("tails", Planted(noise=heavy)),
    "skewed noise": ("skew", Planted(noise=skewed)),
    "a coarse approximation": ("approximation", Planted(options=COARSE)),
    "a dead input": (
        "dead input",
        Planted(lengthscale=(0.3, 40.0), function=lambda X: torch.sin(8.0 * X[:, :1])),
    ),
    "duplicated rows": ("repeated rows", Planted(change=Twice())),
    "outcomes in thousandths": ("units", Planted(change=after(lambda X, Y: (X, 1000.0 * Y)))),
    "outcomes in thousands": ("units", Planted(change=after(lambda X, Y: (X, Y / 1000.0)))),
    "inputs in thousands": ("units", Planted(change=after(lambda X, Y: (X / 1000.0, Y)))),
}
FAST = "WISKI"


@pytest.mark.fixed_seed
@pytest.mark.parametrize("illness", ILLNESSES)
def test_the_right_alarm_rings_and_no_other(illness: str) -> None:
    name, planted = ILLNESSES[illness]
    model, record = planted.stream(FAST)
    found = report(model, record)
    assert [alarm.name for alarm in found.alarms] == [name], str(found)
    assert not found.healthy
    assert str(found.alarms[0]) in str(found)


@pytest.mark.integration
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["WISKI", "OSGPR"])
@pytest.mark.parametrize("illness", ILLNESSES)
def test_the_right_alarm_rings_in_every_stream(illness: str, kind: str, seed: int) -> None:
    torch.manual_seed(100 + seed)
    name, planted = ILLNESSES[illness]
    found = report(*planted.stream(kind))
    assert [alarm.name for alarm in found.alarms] == [name], str(found)


@pytest.mark.integration
@pytest.mark.parametrize("seed", range(3))
def test_inputs_far_from_all_before_are_a_change_of_units(seed: int) -> None:
    """On a grid they are refused; a model of inducing points knows nothing there."""
    torch.manual_seed(seed)
    planted = Planted(change=after(lambda X, Y: (1000.0 * X, Y)))
    found = report(*planted.stream("OSGPR"))
    assert [alarm.name for alarm in found.alarms] == ["units"]
    assert "X_new / 1000" in found.alarms[0].remedy


@pytest.mark.fixed_seed
@pytest.mark.parametrize("kind", [FAST])
def test_no_alarm_rings_in_health(kind: str) -> None:
    found = report(*HEALTHY.stream(kind))
    assert found.alarms == ()
    assert found.healthy
    assert found.sufficient
    assert "alarms         none" in str(found)


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["WISKI", "OSGPR", "ClusteredGP"])
@pytest.mark.parametrize("seed", range(6))
def test_no_alarm_rings_in_health_of_learned_models(kind: str, seed: int) -> None:
    torch.manual_seed(200 + seed)
    X = torch.rand(100, 2, dtype=torch.float64)
    model = HEALTHY.model(kind, X, both_inputs(X) + normal(100))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    record = ProgressiveValidation(false_alarms=1e-9)
    for _ in range(60):
        X = torch.rand(10, 2, dtype=torch.float64)
        record.observe(model, X, both_inputs(X) + normal(10))
    assert report(model, record).alarms == ()


# --- remedies ------------------------------------------------------------------------------------

NAMES = {
    "torch": torch,
    "fit_gpytorch_mll": fit_gpytorch_mll,
    "ExactMarginalLogLikelihood": ExactMarginalLogLikelihood,
    "Novelty": Novelty,
    "WISKI": WISKI,
    "OSGPR": OSGPR,
    "OSVGP": OSVGP,
    "ClusteredGP": ClusteredGP,
    "LocalGP": LocalGP,
    "StudentTLikelihood": StudentTLikelihood,
    "Standardize": Standardize,
    "ChainedOutcomeTransform": ChainedOutcomeTransform,
    "Bilog": Bilog,
}


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["WISKI", "OSGPR"])
@pytest.mark.parametrize("illness", ILLNESSES)
def test_remedies_are_lines_that_run(illness: str, kind: str) -> None:
    torch.manual_seed(3)
    _, planted = ILLNESSES[illness]
    model, record = planted.stream(kind)
    (alarm,) = report(model, record).alarms
    X = torch.rand(50, 2, dtype=torch.float64)
    X, Y = planted.change(CHANGE, X, planted.function(X) + normal(50))
    model.update(X, Y)
    names: dict[str, Any] = {**NAMES, "model": model, "X": X, "Y": Y, "X_new": X, "Y_new": Y}
    exec(alarm.remedy, names)
    assert isinstance(names["model"], StreamingGP)


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["WISKI", "OSGPR", "ClusteredGP", "LocalGP"])
def test_a_finer_approximation_is_nearer(kind: str) -> None:
    coarse = {
        "WISKI": {"grid_size": 6},
        "OSGPR": {"max_points": 10},
        "ClusteredGP": {"resolution": 0.4},
        "LocalGP": {"max_size": 20},
    }
    options = ((kind, tuple(coarse[kind].items())),)
    planted = Planted(options=options)
    model, record = planted.stream(kind)
    found = report(model, record)
    (alarm,) = found.alarms
    assert alarm.name == "approximation"
    X, Y, _ = record.sample(torch.zeros(1, dtype=torch.float64))
    names: dict[str, Any] = {**NAMES, "model": model, "X": X, "Y": Y}
    exec(alarm.remedy, names)
    mended = names["model"]
    if mended is model:  # further rows go where there is room now
        mended = model.clear().update(X, Y)
    gap = approximation_gap(mended, X, Y)
    assert isinstance(gap, ApproximationGap)
    assert isinstance(found.gap, ApproximationGap)
    assert gap.mean < 0.7 * found.gap.mean


# --- parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["OSGPR", "WISKI"])
def test_the_exact_process_is_the_dense_one(kind: str) -> None:
    X = torch.rand(30, 2, dtype=torch.float64)
    Y = both_inputs(X) + normal(30)
    Yvar = 0.01 + 0.1 * torch.rand_like(Y)
    kernel = ScaleKernel(ProductMatern(nu=2.5, ard_num_dims=2)).double()  # a product on a grid
    if kind == "OSGPR":
        kernel = ScaleKernel(RBFKernel(ard_num_dims=2)).double()
    model = getattr(bo_stream, kind)(X, Y, Yvar, covar_module=kernel)
    outcomes, noise = model.standardized(X, Y, Yvar)
    mean, variance = exact_marginals(model, X, outcomes, noise)
    dense = DenseGP(
        lambda A, B: dense_kernel(kernel, A, B).detach(),
        model.prior.mean[0].reshape(1).detach(),
        X,
        outcomes[0],
        noise[0],
    )
    expected, covariance = dense.posterior(X)
    assert_close(mean[0].detach(), expected)
    assert_close(variance[0].detach(), covariance.diagonal())


@pytest.mark.parametrize("kind", [WISKI, AutoGP])
def test_counts_are_not_compared_with_an_exact_process(kind: type[StreamingGP]) -> None:
    X = torch.rand(40, 2, dtype=torch.float64)
    Y = torch.stack((torch.full((40,), 3.0), torch.full((40,), 9.0)), -1).double()
    model = kind(X, Y, likelihood=BinomialLikelihood())
    said = "a BinomialLikelihood has no exact Gaussian process"
    assert approximation_gap(model, X[:20], Y[:20]) == said


@pytest.mark.parametrize("points", [None, 6])
def test_the_gap_is_that_of_a_model_of_the_rows(points: int | None) -> None:
    X = torch.rand(80, 2, dtype=torch.float64)
    Y = both_inputs(X) + normal(80)
    options = {} if points is None else {"inducing_points": X[:points]}
    kernel = RBFKernel(ard_num_dims=2).double()
    kernel.lengthscale = 0.4
    model = OSGPR(X[:40], Y[:40], covar_module=kernel, **options)
    before = model.posterior(X).mean
    gap = approximation_gap(model, X[20:60], Y[20:60])
    assert isinstance(gap, ApproximationGap)
    assert_close(model.posterior(X).mean, before)
    likelihood, rows = model.likelihood, (X[20:60], Y[20:60])
    twin = OSGPR(
        *rows,
        covar_module=kernel,
        likelihood=likelihood,
        mean_module=model.mean_module,
        outcome_transform=model.outcome_transform,
        inducing_points=model.inducing_points,
    )
    twin._standardize_by(model._memory.totals, model._outcomes.shift)
    assert gap.rows == 40
    own = (twin.posterior(rows[0]).mean[:, 0] - model._offset_and_scale()[0].squeeze()).detach()
    assert_close(torch.tensor(gap.approximate), own / model.outcome_scale().squeeze(), 100.0)
    assert (gap.mean < 0.3) == (points is None)


def test_an_input_without_effect_has_none() -> None:
    X = torch.rand(200, 3, dtype=torch.float64)
    X[:, 2] = 0.5
    kernel = RBFKernel(ard_num_dims=3).double()
    kernel.lengthscale = torch.tensor([[0.3, 1e6, 0.3]])
    model = OSGPR(X, torch.sin(8.0 * X[:, :1]), covar_module=kernel)
    effects = sensitivities(model, X)
    assert effects[0] > 0.5
    assert effects[1] < 1e-6
    assert effects[2] == 0.0
    assert sensitivities(model, X) == effects


@pytest.mark.parametrize("exponent", [0.0, 0.5, 2.0])
def test_the_cost_is_forecast_by_its_power(exponent: float) -> None:
    intervals = [
        Interval(n, n, 10, [0.0], [0.0], [0], [0], 2, 10, 10 * 1e-6 * n**exponent, 8 * n)
        for n in (100, 125, 160, 200, 250, 300)
    ]
    cost = Cost.of(intervals)
    assert cost is not None
    assert cost.exponent == pytest.approx(exponent, abs=1e-9)
    assert cost.seconds_ahead == pytest.approx(cost.seconds * AHEAD**exponent)
    assert cost.bytes == 2400
    assert cost.bytes_ahead == pytest.approx(24_000)
    n = np.linspace(300, 3000, 100_001)
    hours = trapezoid(cost.seconds * (n / 300) ** exponent, n) / 3600.0
    assert cost.hours_to == pytest.approx(hours, rel=1e-6)
    assert Cost.of(intervals[:2]) is None
    slow = [replace(each, seconds=7.0 * each.seconds, bytes=9) for each in intervals[:3]]
    later = Cost.of([*slow, *intervals[3:]], since=155.0)
    assert later is not None
    assert later.exponent == pytest.approx(exponent, abs=1e-9)
    assert later.bytes_ahead == pytest.approx(24_000)


def test_innovations_are_summarised_by_quantiles() -> None:
    values = np.r_[np.linspace(-1.0, 1.0, 101), 50.0]
    found = Innovations.of(values)
    assert found.count == 102
    assert found.scale == pytest.approx(0.505 / 0.6745, rel=0.02)
    assert found.far == 1
    assert abs(found.skew) < 0.03
    assert Innovations.of(np.zeros(5)).skew == 0.0
    assert Innovations.of(-np.log(np.linspace(0.001, 1.0, 1000))).skew == pytest.approx(0.465, 0.01)


# --- the report ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def healthy() -> tuple[StreamingGP, ProgressiveValidation]:
    torch.manual_seed(0)
    return HEALTHY.stream(FAST)


def test_files_are_a_picture_and_strict_json(
    healthy: tuple[StreamingGP, ProgressiveValidation], tmp_path: Path
) -> None:
    found = report(*healthy, path=tmp_path / "run")
    assert matplotlib.image.imread(tmp_path / "run" / "trust.png").shape[0] > 400

    def refuse(name: str) -> None:
        raise AssertionError(name)

    content = json.loads((tmp_path / "run" / "trust.json").read_text(), parse_constant=refuse)
    assert content == json.loads(json.dumps(found.as_dict()))
    assert content["healthy"] is True
    assert content["validation"]["total"]["count"] == 400
    assert content["gap"]["rows"] == 400
    assert content["stability"]["float64"]["to_spare"] > 1.0
    assert content["capacity"]["what"] == "features"
    assert content["cost"]["seconds"] > 0.0


def test_hand_overs_are_told_and_marked() -> None:
    X = torch.rand(140, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    Y, record = both_inputs(X), ProgressiveValidation()
    model = AutoGP(X[:20], Y[:20], max_exact=60)
    for rows in range(20, 140, 10):
        record.observe(model, X[rows : rows + 10], Y[rows : rows + 10])
    found = report(model, record)
    assert found.hand_overs == model.history
    (told,) = found.as_dict()["hand_overs"]
    assert (told["observations"], told["before"], told["after"]) == (70.0, "exact", "OSGPR")
    time = next(axes for axes in found.plot().axes if axes.get_title() == "time an observation")
    (mark,) = (line for line in time.lines if line.get_label() == "exact to OSGPR")
    assert list(mark.get_xdata()) == [70.0, 70.0]


def test_a_report_leaves_the_model_and_the_record_as_they_are(
    healthy: tuple[StreamingGP, ProgressiveValidation],
) -> None:
    model, record = healthy
    X = torch.rand(5, 2, dtype=torch.float64)
    state, before, log = json.dumps(record.state()), model.posterior(X).mean, model.numerical_log
    generator = torch.get_rng_state()
    report(model, record)
    assert json.dumps(record.state()) == state
    assert torch.equal(model.posterior(X).mean, before)
    assert model.numerical_log == log
    assert torch.equal(torch.get_rng_state(), generator)


def test_held_out_rows_are_validated_as_one_batch(
    healthy: tuple[StreamingGP, ProgressiveValidation], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = healthy
    X = torch.rand(120, 2, dtype=torch.float64)
    Y = both_inputs(X) + normal(120)
    found = report(model, X=X, Y=Y)
    assert found.validation is not None
    error = (Y - model.posterior(X).mean).square().mean().sqrt()
    assert found.validation.total.rmse == pytest.approx([float(error)])
    monkeypatch.setattr("bo_stream.diagnostics.trust.MOST_ROWS", 30)
    some = report(model, X=X, Y=Y)
    assert some.validation is not None
    assert some.validation.total.count == 30


def test_without_rows_there_are_certificates_only(
    healthy: tuple[StreamingGP, ProgressiveValidation],
) -> None:
    model, _ = healthy
    for found in (report(model), report(model, ProgressiveValidation())):
        assert found.alarms == ()
        assert found.validation is None
        assert found.sufficient is None
        assert found.untested is not None
        assert "No rows" in found.untested
        assert not isinstance(found.stability, str)
        found.plot()


@pytest.mark.filterwarnings("ignore:Data .* is not standardized")
def test_predictions_without_error_are_drawn() -> None:
    """On a linear scale: a logarithmic one would be a warning."""
    X, record = torch.linspace(0, 1, 40, dtype=torch.float64).unsqueeze(-1), ProgressiveValidation()
    model = AutoGP(X[:20], torch.ones_like(X[:20]))
    record.observe(model, X[20:], torch.ones_like(X[20:]))
    errors = report(model, record).plot().axes[0]
    assert (errors.get_xscale(), errors.get_yscale()) == ("log", "linear")


def test_few_rows_ring_no_alarm() -> None:
    model, record = replace(HEALTHY, noise_factor=1e4).stream(FAST, rows=40)
    found = report(model, record)
    assert found.alarms == ()
    assert found.untested is not None
    assert "Only 40 rows" in found.untested


def test_a_signal_of_long_ago_rings_no_more() -> None:
    model, record = HEALTHY.stream(FAST, rows=100)
    record.drift[0].signals = [[60, 40, 1]]
    record.drift[0].rows = HORIZON
    assert [alarm.name for alarm in report(model, record).alarms] == ["drift"]
    record.drift[0].rows = HORIZON + 60
    assert report(model, record).alarms == ()


def test_labels_are_reported_as_far_as_possible() -> None:
    X = torch.rand(150, 2, dtype=torch.float64)
    Y = (both_inputs(X) > 0.3).double()
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2)).double()
    model = OSVGP(X[:60], Y[:60], BernoulliLikelihood(), covar_module=kernel, max_points=20)
    record = ProgressiveValidation()
    for begin in range(60, 150, 30):
        record.observe(model, X[begin : begin + 30], Y[begin : begin + 30])
    found = report(model, record)
    found.plot()
    assert found.alarms == ()
    assert found.untested is not None
    assert "labels or counts" in found.untested
    assert isinstance(found.gap, str)
    assert found.validation is not None
    assert found.validation.total.coverage_95 is None


def test_bad_arguments(healthy: tuple[StreamingGP, ProgressiveValidation]) -> None:
    model, record = healthy
    X = torch.rand(5, 2, dtype=torch.float64)
    for arguments in ({"X": X}, {"Y": X[:, :1]}):
        with pytest.raises(ValueError, match="held-out rows X and Y"):
            report(model, **arguments)
    with pytest.raises(ValueError, match="got validation, X, Y"):
        report(model, record, X, X[:, :1])
    with pytest.raises(UnsupportedError, match="hypothetical"):
        report(model.condition_on_observations(X, X[:, :1]), record)


@pytest.mark.parametrize("stream", shared_out(FIRST))
def test_every_model_has_a_report(stream: Stream) -> None:
    data = stream.data(90)
    model = stream.model(data[:30])
    record = ProgressiveValidation()
    first, expected = data[30:50], None
    plain = not isinstance(model, DirichletWISKI) and not model.prior.chain.fixed
    if plain and data.Yvar is None:
        expected = model.log_predictive(first.X, first.Y).double().detach()
    record.observe(model, *first.astuple())
    if expected is not None:
        nll = torch.as_tensor(np.sum([each.nll for each in record.intervals], 0)).to(data.X)
        assert_close(nll, -expected.sum(0), 10.0)
    for begin in (50, 70):
        record.observe(model, *data[begin : begin + 20].astuple())
    found = report(model, record)
    assert isinstance(found, TrustReport)
    assert found.validation is not None
    assert np.isfinite(found.validation.total.rmse).all()
    json.dumps(found.as_dict(), allow_nan=False)
    assert found.model in str(found)
