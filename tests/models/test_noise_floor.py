"""How small known noise may be, as the outcomes' scale moves, and where outcomes are counted from.

Against the exact process of the variances as given.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.exceptions.warnings import InputDataWarning
from botorch.fit import fit_gpytorch_mll
from gpytorch.kernels import RBFKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from bo_stream import (
    OSGPR,
    WISKI,
    AutoGP,
    BayesianLastLayer,
    ClusteredGP,
    CoarsePointsWarning,
    HeteroscedasticWISKI,
    LocalGP,
)
from bo_stream.models.base import StreamingGP
from bo_stream.models.clustered.inference import ClusterInference
from bo_stream.models.outcomes.noise import LEAST_NOISE, NOISE_FLOOR
from bo_stream.testing.streams import (
    assert_close,
    assert_same_posterior,
    assert_untouched,
    fingerprint,
)
from tests.oracles.gaussian_process import DenseGP
from tests.oracles.kernels import dense_kernel
from tests.oracles.reference import reference_posterior

BOX = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()


def kernel() -> RBFKernel:
    result = RBFKernel(ard_num_dims=2).double()
    result.lengthscale = 0.4
    return result


def grid_model(X: Tensor, Y: Tensor, Yvar: Tensor | None = None) -> WISKI:
    return WISKI(X, Y, Yvar, covar_module=kernel(), bounds=BOX, grid_size=12, tolerance=0.0)


MODELS: dict[str, Callable[..., StreamingGP]] = {
    "WISKI": grid_model,
    "OSGPR": lambda *data: OSGPR(*data, covar_module=kernel(), inducing_points=spread(60)),
    "ClusteredGP": lambda *data: ClusteredGP(*data, covar_module=kernel(), resolution=0.01),
    "LocalGP": lambda *data: LocalGP(*data, covar_module=kernel()),
}


def spread(n: int) -> Tensor:
    return torch.quasirandom.SobolEngine(2, seed=3).draw(n).double()


def wave(X: Tensor) -> Tensor:
    return (4.0 * X[:, :1]).sin() + X[:, 1:].square()


@contextmanager
def silence() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("retracted", [False, True], ids=["kept", "retracted"])
def test_one_penalty_among_the_first_does_not_drown_what_follows(retracted: bool) -> None:
    X = spread(105)
    Y, Yvar = wave(X), torch.full((105, 1), 0.01).double()
    Y[2] = 1e4
    with silence():
        model = grid_model(X[:5], Y[:5], Yvar[:5]).update(X[5:], Y[5:], Yvar[5:])
    rows = torch.ones(105, dtype=torch.bool)
    if retracted:
        model.retract(X[2:3], Y[2:3], Yvar[2:3])
        rows[2] = False
    model.train()
    model.eval()
    T = torch.rand(9, 2).double()
    mean, _ = reference_posterior(model, X[rows], Y[rows], T, Yvar[rows])
    scale = float(Y[rows].std())
    assert_close(model.posterior(T).mean / scale, mean / scale, factor=100)


@pytest.mark.parametrize("name", MODELS)
def test_small_outcomes_of_a_model_built_empty_keep_their_noise(name: str) -> None:
    X = spread(30)
    Y, Yvar = 1e-6 * wave(X), torch.full((30, 1), 1e-16).double()
    with silence():
        model = MODELS[name](X[:0], Y[:0], Yvar[:0]).update(X, Y, Yvar)
    model.train()
    model.eval()
    level = model.noise_level() * model.outcome_scale().square()
    assert_close(level / 1e-16, torch.ones_like(level))
    with silence():
        model.update(X[:1] + 0.001, Y[:1], Yvar[:1])


def test_the_floor_falls_with_the_stream_and_is_said() -> None:
    X = spread(60)
    Y = torch.cat((1e6 * wave(X[:4]), wave(X[4:])))
    zero = torch.zeros_like(Y)
    first = float(Y[:4].var())
    with pytest.warns(InputDataWarning, match=rf"4 variances .* raised to {NOISE_FLOOR * first:g}"):
        model = grid_model(X[:4], Y[:4], zero[:4])
    model.retract(X[:4], Y[:4], zero[:4])
    later = float(Y[4:].var())
    with pytest.warns(InputDataWarning, match=rf"56 variances .*to {NOISE_FLOOR * later:g}"):
        model.update(X[4:], Y[4:], zero[4:])
    T = torch.rand(9, 2).double()
    model.train()
    model.eval()
    mean, _ = reference_posterior(model, X[4:], Y[4:], T, zero[4:] + NOISE_FLOOR * later)
    assert_close(model.posterior(T).mean, mean, factor=1e3)


@pytest.mark.parametrize("name", MODELS)
def test_what_zeros_are_raised_to_moves_as_the_warning_says(name: str) -> None:
    X = spread(24)
    Y, zero = torch.cat((wave(X[:12]), 10.0 * wave(X[12:]))), torch.zeros(24, 1).double()
    with pytest.warns(InputDataWarning, match="raised to") as told:
        MODELS[name](X[:12], Y[:12], zero[:12]).update(X[12:], Y[12:], zero[12:])
    verb = "follows" if name == "WISKI" else "falls with"
    for each in told:
        assert f", which {verb} the outcomes' variance at each refit." in str(each.message)
    levels = [float(re.findall(r"raised to (\S+),", str(each.message))[0]) for each in told]
    assert (levels[-1] > levels[0]) == (verb == "follows")


def test_what_was_raised_is_taken_out_as_it_was_raised_or_not_at_all() -> None:
    X = spread(40)
    Y = torch.cat((1e6 * wave(X[:4]), wave(X[4:])))
    small = torch.full_like(Y, 1e-3)
    with pytest.warns(InputDataWarning, match="4 variances"):
        model = grid_model(X[:4], Y[:4], small[:4])
    raised = torch.full_like(Y[:4], LEAST_NOISE * float(Y[:4].var()))
    once = copy.deepcopy(model)
    model.retract(X[1:3], Y[1:3], small[1:3])
    once.retract(X[1:3], Y[1:3], raised[:2])
    assert_same_posterior(model, once, X[5:9])
    model.retract(X[:1], Y[:1], small[:1]).retract(X[3:4], Y[3:4], small[3:4])
    with silence():
        model.update(X[4:], Y[4:], small[4:]).retract(X[4:9], Y[4:9], small[4:9])
    never = grid_model(X[9:], Y[9:], small[9:])
    model.train()
    model.eval()
    assert_same_posterior(model, never, X[5:9], factor=1e4)


def test_variances_whose_floor_fell_are_not_guessed() -> None:
    X = spread(44)
    Y = torch.cat((1e6 * wave(X[:4]), wave(X[4:])))
    small = torch.full_like(Y, 1e-3)
    with pytest.warns(InputDataWarning, match="4 variances"):
        model = grid_model(X[:4], Y[:4], small[:4])
    model.retract(X[:3], Y[:3], small[:3])
    with pytest.warns(InputDataWarning, match="40 variances"):
        model.update(X[4:], Y[4:], small[4:])
    before = fingerprint(model)
    with pytest.raises(UnsupportedError, match=r"has fallen since.* clear\(\)"):
        model.retract(X[4:], Y[4:], small[4:])
    assert_untouched(model, before)
    large = torch.full_like(small, 1e9)
    model.update(X[:2], Y[:2], large[:2]).retract(X[:2], Y[:2], large[:2])
    with silence():
        model.clear().update(X[4:9], Y[4:9], small[4:9]).retract(X[4:5], Y[4:5], small[4:5])


@pytest.mark.filterwarnings("ignore:Yvar holds")
@pytest.mark.parametrize("name", ["WISKI", "OSGPR", "ClusteredGP"])
def test_observations_without_noise_are_taken_out_whatever_came_since(name: str) -> None:
    X, T = spread(44), torch.rand(9, 2).double()
    Y = torch.cat((1e2 * wave(X[:4]), wave(X[4:])))
    zero = torch.zeros_like(Y)
    model = MODELS[name](X[:4], Y[:4], zero[:4])
    model.update(X[4:], Y[4:], zero[4:]).retract(X[:4], Y[:4], zero[:4])
    model.update(X[:2], 1e3 + Y[:2], zero[:2]).retract(X[:2], 1e3 + Y[:2], zero[:2])
    never = MODELS[name](X[4:], Y[4:], zero[4:])
    for each in (model, never):
        each.train()
        each.eval()
    assert_close(model.noise_level(), never.noise_level())
    assert_same_posterior(model, never, T, factor=1e4)


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:Yvar holds")
@pytest.mark.parametrize("noise", [0.0, 0.01])
@pytest.mark.parametrize("kind", ["constant", "nearly"])
@pytest.mark.parametrize("name", ["WISKI", "OSGPR", "ClusteredGP"])
def test_a_stream_may_begin_on_a_plateau(name: str, kind: str, noise: float) -> None:
    X = torch.cat((0.1 * spread(5), spread(100)))
    T = torch.rand(100, 2).double()
    Y = 1.0 + 3.0 * X.prod(-1, keepdim=True) ** 3
    Y[:5] = 1.0
    Y[1:5:2] += 1e-6 * (kind == "nearly")
    Yvar = torch.full_like(Y, noise)
    Yvar[:5] = 0.0
    Y[5:] += noise**0.5 * torch.randn(100, 1).double()
    stream = MODELS[name](X[:5], Y[:5], Yvar[:5]).update(X[5:], Y[5:], Yvar[5:])
    once = MODELS[name](X, Y, Yvar)
    error = []
    for model in (stream, once):
        model.train()
        error.append(model.posterior(T).mean - 1.0 - 3.0 * T.prod(-1, keepdim=True) ** 3)
    first, second = (float(e.square().mean().sqrt()) for e in error)
    assert first < 1.3 * second
    if kind == "constant":
        assert_same_posterior(stream, once, T, factor=1e4)


@pytest.mark.parametrize("name", MODELS)
def test_a_large_offset_of_a_model_built_empty_is_set_apart(name: str) -> None:
    X, T = spread(40), torch.rand(6, 2).double()
    Y = (wave(X) * 2**20).round() / 2**20  # so that an offset of 2^30 rounds nothing
    models = []
    for offset in (0.0, 2.0**30):
        model = MODELS[name](X[:0], Y[:0]).update(X[:1], Y[:1] + offset)
        model.update(X[1:], Y[1:] + offset).train()
        model.eval()
        models.append(model)
    plain, moved = models
    assert_close(moved.outcome_scale(), plain.outcome_scale())
    assert_close(moved.posterior(T).mean - 2.0**30, plain.posterior(T).mean, factor=100)
    assert_close(moved.posterior(T).variance, plain.posterior(T).variance, factor=10)


@pytest.mark.parametrize("name", ["WISKI", "OSGPR", "ClusteredGP"])
def test_an_empty_model_takes_the_offset_of_what_is_merged(name: str) -> None:
    X = spread(40)
    Y = wave(X) + 1e9
    empty, full = MODELS[name](X[:0], Y[:0]), MODELS[name](X, Y)
    shard, other = MODELS[name](X[:15], Y[:15]), MODELS[name](X[15:], Y[15:])
    empty.merge(shard).merge(other)
    for model in (empty, full):
        model.train()
        model.eval()
    T = torch.rand(6, 2).double()
    assert_close(empty.posterior(T).variance, full.posterior(T).variance, factor=1e3)


def test_a_refused_first_batch_leaves_an_empty_model_empty() -> None:
    X = spread(5)
    model = grid_model(X[:0], X[:0, :1], X[:0, :1])
    before = fingerprint(model)
    with pytest.raises(Exception, match="too far outside"):
        model.update(X + 40.0, X[:, :1] + 7.0, X[:, :1] + 1.0)
    assert_untouched(model, before)


# --- simulators: known noise that is next to nothing ----------------------------------------------

BUILT: dict[str, Callable[..., StreamingGP]] = {
    "AutoGP": AutoGP,
    "OSGPR": OSGPR,
    "ClusteredGP": ClusteredGP,
    "WISKI": lambda X, Y, Yvar: WISKI(X, Y, Yvar, bounds=BOX.to(X)),
    "HeteroscedasticWISKI": lambda X, Y, Yvar: HeteroscedasticWISKI(X, Y, Yvar, bounds=BOX.to(X)),
    "LocalGP": LocalGP,
}
"""Models that are close to the exact process, by their default options."""

NOISES = (0.0, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2)

SWEEP = [
    (name, noise) for name in BUILT for noise in NOISES if (name, noise) != ("LocalGP", NOISES[-1])
]
"""At the largest noise local models are coarser than the exact process, and calibrated: their z is
up to 0.25 larger than its, and below 1."""


def sines(X: Tensor) -> Tensor:
    return (5.0 * X.double()).sin().sum(-1, keepdim=True)


def simulated(
    n: int, noise: float, repeats: int = 1, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, outcomes and noise variances of sines, each input several times over."""
    X = torch.rand(n, 2).double().repeat(repeats, 1).to(dtype)
    Y = sines(X) + noise**0.5 * torch.randn(n * repeats, 1).double()
    return X, Y.to(dtype), torch.full_like(Y, noise).to(dtype)


def dense(model: StreamingGP, X: Tensor, Y: Tensor, Yvar: Tensor) -> DenseGP:
    """The exact process with a model's hyperparameters and the noise as it was given."""
    with torch.no_grad():
        kernel = copy.deepcopy(model.covar_module).double()
        mean = model.mean_module.constant.detach().double().reshape(1)
    y, scale = Y.double()[:, 0] - Y.double().mean(), Y.double().std()
    noise = Yvar.double()[:, 0].clamp_min(1e-14) / scale.square()
    return DenseGP(
        lambda A, B: dense_kernel(kernel, A, B).detach(), mean, X.double(), y / scale, noise
    )


def z_of(mean: Tensor, variance: Tensor, T: Tensor, noise: float) -> float:
    """Root mean square error of means in their predictive standard deviations."""
    error = mean.detach().double().reshape(-1, 1) - sines(T)
    spread = (variance.detach().double().reshape(-1, 1).clamp_min(0.0) + noise).sqrt()
    return float((error / spread.clamp_min(1e-12)).square().mean().sqrt())


def exact_z(model: StreamingGP, data: tuple[Tensor, Tensor, Tensor], T: Tensor) -> float:
    """That of the exact process, solved in numpy's widest floats."""
    Y = data[1].double()
    gp = dense(model, *data)
    solve = gp.precise_posterior if len(data[0]) <= 1000 else gp.refined_posterior
    mean, variance = solve(T.double())
    return z_of(
        Y.mean() + Y.std() * mean, Y.var() * variance.clamp_min(0.0), T, float(data[2][0, 0])
    )


def model_z(model: StreamingGP, T: Tensor, noise: float) -> float:
    posterior = model.posterior(T)
    return z_of(posterior.mean, posterior.variance, T, noise)


def check_simulated(
    build: Callable[..., StreamingGP], data: tuple[Tensor, Tensor, Tensor], fit: bool
) -> None:
    """Check that a model is as well calibrated as the exact process, or has said that it is not."""
    is_large = len(data[0]) > 1000  # where each point costs the oracle much
    noise, T = float(data[2][0, 0]), torch.rand(30 if is_large else 100, 2).to(data[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = build(*data)
        if fit:
            fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        z = model_z(model, T, noise)
    told = any(issubclass(w.category, InputDataWarning | CoarsePointsWarning) for w in caught)
    exact, most = exact_z(model, data, T), 0.5
    if is_large:  # centres are far from the inputs, and the warning says how far
        said = " ".join(str(w.message) for w in caught)
        far = re.findall(r"off by (\S+) of its standard deviations", said)
        most = max(most, *map(float, far or [0.0]))
    assert z < exact + 0.1 or (told and z < exact + most)
    assert told or noise > 1e-11  # at 1e-10 it depends on the variance of the outcomes drawn


@pytest.mark.matrix
@pytest.mark.parametrize("fit", [False, True], ids=["as built", "fitted"])
@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "noise"), SWEEP)
def test_models_of_a_simulator_are_calibrated(
    name: str, noise: float, dtype: torch.dtype, repeats: int, fit: bool
) -> None:
    check_simulated(BUILT[name], simulated(40, noise, repeats, dtype), fit)


@pytest.mark.integration
@pytest.mark.parametrize("n", [20, 160, 700])
@pytest.mark.parametrize(("name", "noise"), SWEEP)
def test_models_of_a_simulator_are_calibrated_whatever_their_size(
    name: str, noise: float, n: int
) -> None:
    data = simulated(n, noise)
    check_simulated(BUILT[name], data, fit=False)
    if n <= 160:
        check_simulated(BUILT[name], data, fit=True)


@pytest.mark.matrix
@pytest.mark.parametrize("noise", [1e-10, 1e-7, 1e-4])
@pytest.mark.parametrize("name", BUILT)
def test_models_of_a_large_simulator_are_calibrated(name: str, noise: float) -> None:
    """Beyond what the exact model takes, and inducing points."""
    check_simulated(BUILT[name], simulated(1_050, noise), fit=False)


@pytest.mark.parametrize("noise", [1e-8, 1e-4])
def test_a_refined_posterior_is_the_precise_one(noise: float) -> None:
    data, T = simulated(60, noise), torch.rand(5, 2).double()
    gp = dense(OSGPR(*data, covar_module=kernel()), *data)
    for found, expected in zip(gp.refined_posterior(T), gp.precise_posterior(T), strict=True):
        assert_close(found, expected, factor=10.0)


@pytest.mark.parametrize("name", ["AutoGP", "OSGPR", "ClusteredGP"])
def test_an_objective_keeps_its_digits_without_noise(name: str) -> None:
    X, Y, Yvar = spread(60), sines(spread(60)), torch.full((60, 1), 1e-9).double()
    model = BUILT[name](X, Y, Yvar, covar_module=kernel()).train()
    objective, _ = model._inference.objective(model._memory, model._cache, model.prior)
    slope = torch.autograd.grad(objective.sum(), model.mean_module.parameters())[0]
    gp = dense(model, X, Y, Yvar)
    assert abs(float(objective.detach()) - float(gp.log_marginal_likelihood())) < 1e-3
    both = torch.linalg.solve(gp.noisy_covariance(), torch.stack((gp.y, torch.ones(60)), -1))
    assert abs(float(slope) - float(both[:, 0].sum())) < 1e-3 * (1.0 + abs(float(slope)))


def test_a_grid_takes_noise_as_small_as_its_kernel_is_known() -> None:
    X, Yvar = spread(160), torch.full((160, 1), 1e-9).double()
    with pytest.warns(InputDataWarning, match="160 variances .* less than 1e-06 of the outcomes"):
        model = WISKI(X, sines(X), Yvar, bounds=BOX)
    floor = NOISE_FLOOR * float(sines(X).var())
    assert_close(model.noise_level() * model.outcome_scale().square() / floor, torch.ones(1))
    model.retract(X[:5], sines(X[:5]), Yvar[:5])
    with pytest.warns(InputDataWarning):
        rest = WISKI(X[5:], sines(X[5:]), torch.full((155, 1), floor / 2.0).double(), bounds=BOX)
    for each in (model, rest):
        each.train()
    T = torch.rand(9, 2).double()
    assert_close(model.posterior(T).mean, rest.posterior(T).mean, factor=1e6)


@pytest.mark.filterwarnings("ignore:Yvar holds")
def test_a_grid_that_begins_in_a_flat_place_is_no_surer() -> None:
    X = torch.cat((0.28 + 0.06 * spread(20), spread(140)))  # sin 5x has its maximum there
    noise = torch.zeros(160, 1).double()
    model = WISKI(X[:20], sines(X[:20]), noise[:20], bounds=BOX)
    model.update(X[20:], sines(X[20:]), noise[20:])
    model.train()
    level = model.eval().noise_level() * model.outcome_scale().square()
    assert_close(level / (NOISE_FLOOR * sines(X).var()), torch.ones(1))


def test_a_simulator_is_handed_over_to_a_model_that_takes_so_small_a_noise() -> None:
    """A grid is off by many posterior standard deviations there, and is not taken."""
    X, T = spread(80), torch.rand(50, 2).double()
    data = X, sines(X), torch.full((80, 1), 1e-8).double()
    model = AutoGP(*data, covar_module=kernel(), bounds=BOX, max_exact=70, grid_size=12)
    assert model.family == "OSGPR"
    assert model_z(model, T, 1e-8) < exact_z(model, data, T) + 0.1


@pytest.mark.filterwarnings("ignore:Yvar holds")
def test_a_window_of_a_simulator_moves_along() -> None:
    X = spread(60)
    Y, Yvar, T = sines(X), torch.full((60, 1), 1e-9).double(), torch.rand(9, 2).double()
    Y[30:] *= 0.9
    model = WISKI(X[:20], Y[:20], Yvar[:20], bounds=BOX)
    for start in (20, 40):
        rows = slice(start, start + 20)
        model.update(X[rows], Y[rows], Yvar[rows])
        model.retract(X[start - 20 : start], Y[start - 20 : start], Yvar[start - 20 : start])
    level = torch.full_like(Y[40:], float(model.noise_level()) * float(model.outcome_scale()) ** 2)
    rest = WISKI(X[40:], Y[40:], level, bounds=BOX)
    for each in (model, rest):
        each.train()
    assert_close(model.posterior(T).mean, rest.posterior(T).mean, factor=1e6)


@pytest.mark.fixed_seed
@pytest.mark.filterwarnings("ignore:Yvar holds")
def test_a_line_search_that_rounding_stalls_ends_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ClusteredGP(*simulated(12, 1e-2))
    whole = ClusterInference.objective
    before = float(model.train().log_marginal_likelihood().detach())

    def rounded(self: ClusterInference, *args: Any) -> tuple[Tensor, Any]:
        value, cache = whole(self, *args)
        lost = value - (value / 0.3).round() * 0.3
        return value - lost.detach(), cache

    monkeypatch.setattr(ClusterInference, "objective", rounded)
    with silence():
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    monkeypatch.undo()
    assert float(model.log_marginal_likelihood().detach()) > before + 0.3


def test_centres_that_miss_a_function_say_how_far() -> None:
    X, Yvar = spread(40), torch.full((40, 1), 1e-8).double()
    model = ClusteredGP(X, sines(X), Yvar, covar_module=kernel(), resolution=0.1)
    with pytest.warns(CoarsePointsWarning, match=r"off by \S+ of its .* finer resolution"):
        model.posterior(X)


@pytest.mark.filterwarnings("ignore:Yvar holds")
def test_local_models_that_miss_a_function_say_how_far() -> None:
    X = spread(160)
    two = torch.cat((sines(X), X[:, :1]), -1)
    for noise, misses in ((1e-8, True), (10.0, False)):
        model = LocalGP(X, two, torch.full((160, 2), noise).double())
        expected = pytest.warns(CoarsePointsWarning, match="deviations of the known noise")
        with expected if misses else silence():
            model.posterior(X)
        with silence():  # it is said once, and a model alone is exact
            model.update(X[:1], two[:1], torch.full((1, 2), noise).double()).posterior(X)
            one = LocalGP(X, two, torch.full((160, 2), noise).double(), max_models=1, max_size=200)
            one.posterior(X)


@pytest.mark.integration
@pytest.mark.parametrize("n", [20, 160, 700])
@pytest.mark.parametrize("noise", NOISES)
def test_a_last_layer_of_a_simulator_is_the_process_of_its_features(noise: float, n: int) -> None:
    """Or says that outcomes are not resolved; how good the features are is another question."""
    (X, Y, Yvar), T = simulated(n, noise), torch.rand(100, 2).double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = BayesianLastLayer(X, Y, train_Yvar=Yvar)
        z = model_z(model, T, noise)
    told = any(issubclass(w.category, InputDataWarning | CoarsePointsWarning) for w in caught)
    scale = Y.std()
    gp = DenseGP(
        lambda A, B: model.covar_module(A, B).to_dense().detach(),
        model.mean_module.constant.detach().reshape(1),
        X,
        (Y[:, 0] - Y.mean()) / scale,
        Yvar[:, 0].clamp_min(LEAST_NOISE * float(Y.var())) / scale.square(),
    )
    mean, variance = gp.precise_posterior(T)
    exact = z_of(Y.mean() + scale * mean, scale.square() * variance.clamp_min(0.0), T, noise)
    assert told or z < exact + 0.1


def test_features_that_miss_a_function_say_how_far() -> None:
    X = spread(160)
    for noise, misses in ((1e-8, True), (1.0, False)):
        model = BayesianLastLayer(X, sines(X), train_Yvar=torch.full((160, 1), noise).double())
        expected = pytest.warns(CoarsePointsWarning, match="deviations of their known noise")
        with expected if misses else silence():
            model.posterior(X)
