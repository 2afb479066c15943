"""Records of streams against the exact process, one row after another, and dense sums."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.models.transforms.outcome import Log, Standardize
from gpytorch.kernels import RBFKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    LaplaceLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)
from scipy import integrate, stats

from bo_stream import OSGPR, OSVGP, DirichletWISKI, HeteroscedasticWISKI
from bo_stream.diagnostics import ProgressiveValidation
from bo_stream.diagnostics.sketches import RepeatedRows, Reservoir
from bo_stream.diagnostics.validation import SAMPLE, model_bytes, predict_batch
from bo_stream.models.base import StreamingGP
from bo_stream.testing.streams import assert_close
from tests.laws.registry import Setting
from tests.oracles.gaussian_process import DenseGP
from tests.oracles.kernels import dense_kernel
from tests.support.problems import Observations, observations

pytestmark = pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid")


def kernel() -> RBFKernel:
    found = RBFKernel(ard_num_dims=2).double()
    found.lengthscale = 0.5
    return found


def osgpr(data: Observations, **options: object) -> OSGPR:
    """An exact model, as every input is an inducing point."""
    return OSGPR(*data.astuple(), covar_module=kernel().to(data.X), **options)


def small(data: Observations, **options: object) -> OSGPR:
    """A fast model of nine inducing points that stay."""
    line = torch.linspace(0.1, 0.9, 3, dtype=torch.float64)
    points = torch.cartesian_prod(line, line).to(data.X)
    return osgpr(data, inducing_points=points, window=0, **options)


def exact(model: StreamingGP, data: Observations, output: int = 0) -> DenseGP:
    """The dense process of a model's hyperparameters and some rows, in the model's units."""
    outcomes, noise = model.standardized(*data.astuple())
    mean = model.prior.mean[output].reshape(1)
    return DenseGP(
        lambda A, B: dense_kernel(model.covar_module, A, B).detach(),
        mean.detach(),
        data.X,
        outcomes[output],
        noise[output].detach(),
    )


def one_after_another(known: DenseGP, new: DenseGP) -> tuple[list[float], list[float]]:
    """Errors of one-step-ahead predictions over their deviations, and log densities."""
    ratios, densities = [], []
    for row in range(len(new.X)):
        x, y, noise = new.X[row : row + 1], new.y[row], new.noise[row]
        mean, covariance = known.posterior(x)
        deviation = (covariance[0, 0] + noise).sqrt()
        ratios.append(float((y - mean[0]) / deviation))
        densities.append(float(torch.distributions.Normal(mean[0], deviation).log_prob(y)))
        known = known.condition(x, y.reshape(1), noise.reshape(1))
    return ratios, densities


@pytest.mark.parametrize("noise", ["learned", "known", "mixed"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_innovations_are_those_of_rows_one_after_another(noise: str, outputs: int) -> None:
    data = observations(30, outputs=outputs).with_noise(noise)
    shape = torch.Size([outputs] if outputs > 1 else [])
    likelihood = GaussianLikelihood(batch_shape=shape)
    model = osgpr(data[:12], likelihood=None if noise == "known" else likelihood)
    found = predict_batch(model, *data[12:].astuple())
    assert found.tested == 18
    for output in range(outputs):
        known, new = exact(model, data[:12], output), exact(model, data[12:], output)
        ratios, _ = one_after_another(known, new)
        assert_close(torch.as_tensor(found.innovations[:, output]), torch.tensor(ratios), 10.0)


def test_scores_are_of_single_rows_in_units_of_the_outcomes() -> None:
    data = observations(25)
    model = osgpr(data[:15])
    found = predict_batch(model, data[15:].X, data[15:].Y)
    posterior = model.posterior(data[15:].X, observation_noise=True)
    mean, deviation = posterior.mean[:, 0], posterior.variance[:, 0].sqrt()
    normal = torch.distributions.Normal(mean, deviation)
    Y = data[15:].Y[:, 0]
    for ours, expected in (
        (found.mean, mean),
        (found.deviation, deviation),
        (found.error, Y - mean),
        (found.log_density, normal.log_prob(Y)),
        (found.pit, normal.cdf(Y)),
    ):
        assert_close(torch.as_tensor(ours[:, 0]), expected.detach(), 10.0)
    assert_close(torch.as_tensor(found.log_density), model.log_predictive(data[15:].X, data[15:].Y))


def test_rows_beyond_a_joint_covariance_enter_no_test(monkeypatch: pytest.MonkeyPatch) -> None:
    data = observations(40)
    model = osgpr(data[:10])
    whole = predict_batch(model, data[10:].X, data[10:].Y)
    monkeypatch.setattr("bo_stream.diagnostics.validation.JOINT", 7)
    parts = predict_batch(model, data[10:].X, data[10:].Y)
    assert (whole.tested, parts.tested) == (30, 7)
    assert_close(torch.as_tensor(parts.innovations[:7]), torch.as_tensor(whole.innovations[:7]))
    assert_close(torch.as_tensor(parts.pit), torch.as_tensor(whole.pit))
    single = stats.norm.ppf(whole.pit[7:])
    assert_close(torch.as_tensor(parts.innovations[7:]), torch.as_tensor(single), 100.0)


def test_transformed_outcomes_have_the_same_calibration() -> None:
    data = observations(30)
    logs = Observations(data.X, data.Y.log())
    one = predict_batch(osgpr(data[:10], outcome_transform=Log()), data[10:].X, data[10:].Y)
    other = predict_batch(osgpr(logs[:10], outcome_transform=None), logs[10:].X, logs[10:].Y)
    for ours, expected in ((one.pit, other.pit), (one.innovations, other.innovations)):
        assert_close(torch.as_tensor(ours), torch.as_tensor(expected))


@pytest.mark.parametrize("likelihood", [LaplaceLikelihood, StudentTLikelihood])
def test_the_pit_integrates_the_predictive_density(likelihood: type) -> None:
    data = observations(14)
    model = OSVGP(
        data[:10].X, data[:10].Y, likelihood(), kernel(), outcome_transform=Standardize(m=1)
    )
    found = predict_batch(model, data[10:].X, data[10:].Y)
    steps = torch.linspace(-12.0, 12.0, 4001, dtype=torch.float64)
    for row in range(4):
        x, middle = data.X[10 + row : 11 + row], float(found.mean[row, 0])
        y = middle + 0.01 * steps.sinh()
        density = model.log_predictive(x, y[:, None, None]).exp().flatten() * 0.01 * steps.cosh()
        below = integrate.cumulative_trapezoid(density.detach(), steps, initial=0.0)
        expected = np.interp(float(data.Y[10 + row]), y, below)
        assert found.pit[row, 0] == pytest.approx(expected, abs=5e-3)  # quadrature of 20 nodes
    assert found.tested == 1
    assert_close(torch.as_tensor(stats.norm.cdf(found.innovations)), torch.as_tensor(found.pit))


@pytest.mark.parametrize("kind", ["labels", "counts", "classes"])
def test_labels_and_counts_have_scores_only(kind: str) -> None:
    X = observations(40).X
    if kind == "classes":
        Y = (X.sum(-1, keepdim=True) * 1.4).floor()
        box = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).to(X)
        model: StreamingGP = DirichletWISKI(X[:30], Y[:30], bounds=box, grid_size=8)
    else:
        likelihood = BernoulliLikelihood() if kind == "labels" else PoissonLikelihood()
        Y = (X.sum(-1, keepdim=True) > 1.0).to(X) * (1.0 if kind == "labels" else 3.0)
        model = OSVGP(X[:30], Y[:30], likelihood, covar_module=kernel())
    record = ProgressiveValidation()
    record.observe(model, X[30:], Y[30:])
    assert record.drift == []
    assert record.histogram == []
    found = record.intervals[0]
    assert found.count == 10
    assert np.isfinite([*found.nll, *found.squares]).all()


def test_a_label_of_a_new_class_is_improbable_and_learned() -> None:
    X = observations(20).X
    box = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).to(X)
    model = DirichletWISKI(X[:10], (X[:10, :1] > 0.5).to(X), bounds=box, grid_size=8)
    record = ProgressiveValidation()
    record.observe(model, X[10:11], torch.full_like(X[:1, :1], 2.0))
    assert record.intervals[0].nll[0] > 10.0
    assert model.num_outputs == 3


def test_noise_that_varies_is_predicted() -> None:
    data = observations(24)
    box = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).to(data.X)
    options = {"bounds": box, "grid_size": 24, "noise_grid_size": 24, "tolerance": 0.0}
    model = HeteroscedasticWISKI(data.X[:16], data.Y[:16], covar_module=kernel(), **options)
    found = predict_batch(model, data.X[16:], data.Y[16:])
    posterior = model.posterior(data.X[16:], observation_noise=True)
    assert_close(torch.as_tensor(found.deviation), posterior.variance.detach().sqrt(), 10.0)


# --- records --------------------------------------------------------------------------------------


def streamed(
    model: StreamingGP, data: Observations, batch: int = 5, **options: float
) -> ProgressiveValidation:
    record = ProgressiveValidation(**options)
    for begin in range(0, len(data), batch):
        record.observe(model, *data[begin : begin + batch].astuple())
    return record


def test_sums_are_those_of_all_batches() -> None:
    data = observations(110, outputs=2)
    model, twin = small(data[:10]), small(data[:10])
    record = streamed(model, data[10:], 10)
    batches = []
    for begin in range(10, 110, 10):
        part = data[begin : begin + 10]
        batches.append(predict_batch(twin, part.X, part.Y))
        twin.update(part.X, part.Y)
    assert record.rows == 100 == sum(interval.count for interval in record.intervals)
    sums = np.sum([interval.squares for interval in record.intervals], 0)
    np.testing.assert_allclose(sums, np.sum([(b.error**2).sum(0) for b in batches], 0))
    nll = np.sum([interval.nll for interval in record.intervals], 0)
    np.testing.assert_allclose(nll, -np.sum([b.log_density.sum(0) for b in batches], 0))
    pit = np.concatenate([b.pit for b in batches])
    within = np.sum([interval.within_95 for interval in record.intervals], 0)
    assert within.tolist() == (np.abs(pit - 0.5) <= 0.475).sum(0).tolist()
    assert np.asarray(record.histogram).tolist() == [
        np.histogram(column, 20, (0.0, 1.0))[0].tolist() for column in pit.T
    ]
    np.testing.assert_array_equal(
        np.asarray(record.innovations), np.concatenate([b.innovations for b in batches])
    )
    assert [test.seen for test in record.drift] == [100, 100]
    assert sum(interval.timed for interval in record.intervals) == 100
    assert record.intervals[0].bytes > 0


def test_the_model_learns_as_without_a_record() -> None:
    data = observations(60)
    model, twin = small(data[:20]), small(data[:20])
    streamed(model, data[20:])
    for begin in range(20, 60, 5):
        twin.update(*data[begin : begin + 5].astuple())
    assert_close(model.posterior(data.X).mean, twin.posterior(data.X).mean)


def test_it_has_a_fixed_size_and_intervals_that_grow() -> None:
    record = ProgressiveValidation()
    data = observations(3000)
    model = small(data[:20])
    for begin in range(20, 3000, 149):
        record.add(model, data.X[begin : begin + 149], data.Y[begin : begin + 149])
    assert len(record.intervals) <= 16
    ends = [interval.rows for interval in record.intervals]
    assert all(b >= 1.2 * a for a, b in pairwise(ends[:-1]))
    assert len(record.reservoir.rows) == SAMPLE
    rows = torch.cat((data.X, data.Y), -1).numpy()
    kept = {row.tobytes() for row in record.reservoir.rows[:, :3]}
    assert kept <= {row.tobytes() for row in np.ascontiguousarray(rows)}
    assert len(json.dumps(record.state())) < 200_000


def test_a_record_goes_on_from_json() -> None:
    data = observations(700, outputs=2).with_noise("mixed")
    model = small(data[:20], likelihood=GaussianLikelihood(batch_shape=torch.Size([2])))
    whole, parts = ProgressiveValidation(seed=3), ProgressiveValidation(seed=3)
    for begin in range(20, 700, 40):
        batch = data[begin : begin + 40].astuple()
        whole.add(model, *batch)
        parts = ProgressiveValidation.of_state(json.loads(json.dumps(parts.state())))
        parts.add(model, *batch)
    assert json.dumps(parts.state()) == json.dumps(whole.state())
    X, Y, Yvar = parts.sample(data.X)
    assert (X.shape, Y.shape) == ((SAMPLE, 2), (SAMPLE, 2))
    assert Yvar is not None
    assert 0.0 < float(Yvar.isnan().double().mean()) < 1.0


def test_a_state_stays_as_it_was_when_the_record_goes_on() -> None:
    data = observations(60)
    model, record = small(data[:20]), ProgressiveValidation()
    record.add(model, *data[20:40].astuple())
    state = record.state()
    before = json.dumps(state)
    record.add(model, *data[40:].astuple())
    assert json.dumps(state) == before


def test_bad_input_changes_neither_model_nor_record() -> None:
    data = observations(30)
    model = small(data[:20])
    record = streamed(model, data[20:25])
    before, count = json.dumps(record.state()), model.num_observations
    bad = data.X[25:].clone()
    bad[0, 0] = torch.nan
    with pytest.raises(InputDataError, match="X to be finite"):
        record.observe(model, bad, data.Y[25:])
    with pytest.raises(BotorchTensorDimensionError, match="Expected"):
        record.observe(model, data.X[25:], data.Y[25:].expand(-1, 2))
    other = osgpr(observations(10, outputs=2))
    with pytest.raises(BotorchTensorDimensionError, match="a record for each model"):
        record.observe(other, data.X[25:], data.Y[25:].expand(-1, 2).clone())
    assert (json.dumps(record.state()), model.num_observations) == (before, count)


def test_models_that_cannot_be_validated() -> None:
    data = observations(10, batch_shape=(2,))
    with pytest.raises(UnsupportedError, match="without batch shape"):
        ProgressiveValidation().add(OSGPR(data.X, data.Y), data.X, data.Y)
    data = observations(10)
    model = osgpr(data).condition_on_observations(data.X[:1], data.Y[:1])
    with pytest.raises(UnsupportedError, match="hypothetical"):
        ProgressiveValidation().add(model, data.X, data.Y)
    with pytest.raises(ValueError, match="false_alarms"):
        ProgressiveValidation(false_alarms=0.0)
    with pytest.raises(ValueError, match="at least one row"):
        ProgressiveValidation().sample(data.X)


def test_no_rows_change_nothing() -> None:
    data = observations(10)
    record = ProgressiveValidation()
    record.add(osgpr(data), data.X[:0], data.Y[:0])
    assert record.rows == 0


def test_torchs_generator_is_left_alone() -> None:
    data = observations(40)
    model = small(data[:20])
    before = torch.get_rng_state()
    streamed(model, data[20:])
    assert torch.equal(torch.get_rng_state(), before)


# --- sketches -------------------------------------------------------------------------------------


@pytest.mark.fixed_seed
def test_every_row_is_as_likely_in_the_sample() -> None:
    rows, counts = np.arange(20.0)[:, None], np.zeros(20)
    for seed in range(2000):
        sample = Reservoir(5, seed)
        for part in (rows[:3], rows[3:4], rows[4:]):
            sample.add(part)
        assert (sample.seen, len(set(sample.rows[:, 0]))) == (20, 5)
        counts[sample.rows[:, 0].astype(int)] += 1
    assert np.abs(counts - 500.0).max() < 5.0 * np.sqrt(2000 * 0.25 * 0.75)


def times(rows: np.ndarray) -> Counter[bytes]:
    return Counter(row.tobytes() for row in rows)


@pytest.mark.parametrize("make", [lambda n: n // 3, lambda n: n % 40, lambda n: n])
def test_repetitions_are_counted_however_far_apart(make: Callable[[int], int]) -> None:
    rows = np.asarray([[float(make(n)), 1.0] for n in range(3000)])
    sketch = RepeatedRows(50)
    for begin in range(0, 3000, 70):
        sketch.add(rows[begin : begin + 70])
    every = times(rows)
    assert len(sketch.counts) == min(50, len(every))
    assert set(sketch.counts.values()) <= set(every.values())
    share = 1.0 - len(every) / 3000.0
    assert sketch.share == pytest.approx(share, abs=1e-12)
    again = RepeatedRows(50, dict(sketch.counts))
    again.add(rows)
    sketch.add(rows)
    assert again == sketch


def test_zeros_of_either_sign_are_one_row() -> None:
    sketch = RepeatedRows()
    sketch.add(np.asarray([[0.0, 1.0], [-0.0, 1.0]]))
    assert sketch.repeated == 1


@pytest.mark.parametrize("setting", [Setting(), Setting(torch.float32)], ids=str)
def test_the_size_of_a_model_is_that_of_its_tensors(setting: Setting) -> None:
    data = observations(50, dtype=setting.dtype)
    model = small(data)
    model.posterior(data.X)
    memory = model._memory.values.Z
    assert model_bytes(model) >= memory.untyped_storage().nbytes()
    more = OSGPR(data.X, data.Y, covar_module=kernel().to(data.X))
    assert 0 < model_bytes(model) < model_bytes(more)
