"""All laws on an accelerator: CUDA's where there is one, else the pretend device.

``test_laws`` runs this file in a process of its own; by itself it takes as many as are asked for:
``pytest tests/laws/devices/on_device.py -n 8``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from botorch.fit import fit_gpytorch_mll
from gpytorch.kernels import RBFKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.priors import (
    GammaPrior,
    HalfCauchyPrior,
    HalfNormalPrior,
    LogNormalPrior,
    MultivariateNormalPrior,
    Prior,
    UniformPrior,
)
from torch import Tensor

from bo_stream import WISKI
from bo_stream.acquisition import FeatureNIPV, PoolSelector
from bo_stream.allocation import OIPS, CoverTree, KMeans, Novelty, Random
from bo_stream.models.base import StreamingGP
from bo_stream.models.inducing.osgpr import OSGPR
from bo_stream.tensors import is_in, none_set, read_at_once, read_expected, state_of
from bo_stream.testing import LAWS
from bo_stream.testing.streams import assert_close, assert_untouched, fingerprint, moments
from tests.laws.cases import CASES
from tests.laws.devices import pretend
from tests.laws.registry import Law, Stream, applies, condition_on
from tests.support.problems import Observations, observations
from tests.test_linalg import error_of_root_of_huddled_points

pytestmark = [
    pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid"),
    pytest.mark.integration,
]

HOST, DEVICE = torch.device("cpu"), pretend.accelerator()
counted = pytest.mark.skipif(DEVICE.type != pretend.NAME, reason="counts on the pretend device")

CANONICAL = (
    "WISKI",
    "WISKI, no rows held",
    "WISKI, additive",
    "HeteroscedasticWISKI",
    "OSGPR",
    "LocalGP",
    "BayesianLastLayer",
    "OSVGP, Gaussian",
    "ClusteredGP",
    "QSGP",
    "QSRVM",
    "DirichletWISKI",
    "DecoupledGP",
    "AutoGP, binomial",
)
"""Each model's case that obeys all laws on the device, and one whose outcomes are counts."""

MOVED = (
    *CANONICAL,
    "WISKI, normalised inputs",
    "WISKI, linear stem",
    "WISKI, known noise in part",
    "OSGPR, points by OIPS",
    "OSGPR, a window of rows",
    "LocalGP, scaled Matérn, two nearest",
    "BayesianLastLayer, few rows held",
    "OSVGP, learning",
    "OSVGP, Bernoulli",
    "ClusteredGP, centres by the stream",
    "ClusteredGP, conjugate gradients",
    "WISKI, binomial",
    "OSVGP, beta-binomial with outliers",
    "QSGP, inducing points",
    "QSGP, Bernoulli",
    "DecoupledGP, direct, lengthscale factors",
)
"""Cases that go on upon another device; not those whose control variate begins anew there."""


def streams(names: tuple[str, ...], device: torch.device) -> list[Stream]:
    """Each case in its first setting."""
    cases = [case for case in CASES if case.name in names]
    assert len(cases) == len(names)
    return [Stream(case, replace(case.settings[0], device=device.type)) for case in cases]


@pytest.mark.parametrize(
    ("law", "stream"),
    [
        pytest.param(law, stream, id=f"{law.__name__}-{stream}")
        for law in LAWS.values()
        for stream in streams(CANONICAL, DEVICE)
        if applies(law, stream.case)
    ],
)
def test_law(law: Law, stream: Stream) -> None:
    law(stream)


# --- moving, saving and loading -----------------------------------------------------------------


def to(data: Observations, device: torch.device) -> Observations:
    Yvar = None if data.Yvar is None else data.Yvar.to(device)
    return Observations(data.X.to(device), data.Y.to(device), Yvar)


def by_to(model: StreamingGP, device: torch.device, _: Path) -> StreamingGP:
    return model.to(device)


def by_file(model: StreamingGP, device: torch.device, folder: Path) -> StreamingGP:
    path = folder / "model.pt"
    model.save(path)
    return type(model).load(path, map_location=device)


@pytest.mark.parametrize(("there", "back"), [(by_to, by_file), (by_file, by_to)])
@pytest.mark.parametrize("case", MOVED)
def test_a_model_goes_on_upon_another_device(
    case: str, there: Callable[..., Any], back: Callable[..., Any], tmp_path: Path
) -> None:
    (stream,) = streams((case,), HOST)
    stays, data, more = stream.model(stream.data(12)), stream.data(4), stream.data(3)
    stays.posterior(stream.points)
    moves = there(copy.deepcopy(stays), DEVICE, tmp_path)
    assert_alike(moves, stays, stream.points)
    go_on(moves, stays, data, stream.points)
    moves = back(moves, HOST, tmp_path)
    go_on(moves, stays, more, stream.points)


def go_on(moves: StreamingGP, stays: StreamingGP, data: Observations, points: Tensor) -> None:
    """Update both models by the same draws; they predict alike, whatever is conditioned."""
    for model in (moves, stays):
        torch.manual_seed(1)
        model.update(*to(data, model.train_targets.device).astuple())
    assert_alike(moves, stays, points)
    conditioned = [condition_on(m, to(data[:2], m.train_targets.device)) for m in (moves, stays)]
    assert_alike(*conditioned, points)


def assert_alike(moves: StreamingGP, stays: StreamingGP, points: Tensor) -> None:
    found = moments(moves, points.to(moves.train_targets.device))
    for actual, expected in zip(found, moments(stays, points), strict=True):
        assert_close(actual.to(HOST), expected, factor=100)  # what is kept here is made again there


ALLOCATORS = (Novelty(8), KMeans(8), Random(8), CoverTree(0.2), CoverTree(0.3, per_lengthscale=0.4))


@pytest.mark.parametrize("way", [by_to, by_file])
@pytest.mark.parametrize("allocator", ALLOCATORS, ids=lambda allocator: type(allocator).__name__)
def test_what_an_allocator_remembers_moves_along(
    allocator: Any, way: Callable[..., Any], tmp_path: Path
) -> None:
    data, more = observations(15), observations(9)
    model = OSGPR(*data.astuple(), allocator=allocator, window=0).eval()
    moved = way(copy.deepcopy(model), DEVICE, tmp_path)
    for one, rows in ((model, more), (moved, to(more, DEVICE))):
        one.update(*rows.astuple())
    assert torch.equal(moved.inducing_points.to(HOST), model.inducing_points)


def test_hyperparameters_are_learned_on_the_device() -> None:
    for case in ("WISKI", "OSGPR, points by OIPS"):
        levels = []
        for device in (HOST, DEVICE):
            torch.manual_seed(0)
            (stream,) = streams((case,), device)
            model = stream.model(stream.data(20))
            mll = ExactMarginalLogLikelihood(model.likelihood, model)
            fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": 5}})
            levels.append(model.noise_level().detach().to(HOST))
        torch.testing.assert_close(*levels, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("way", [by_to, by_file])
def test_a_move_shows_the_allocator_no_row_twice(way: Callable[..., Any], tmp_path: Path) -> None:
    data, more = observations(30), observations(6)
    stays = OSGPR(*data.astuple(), allocator=KMeans(8), window=12).eval()
    stays.posterior(data.X)
    moves = way(copy.deepcopy(stays), DEVICE, tmp_path)
    for rows, device in ((more[:4], DEVICE), (more[4:], HOST)):
        moves = moves.to(device)
        stays.update(*rows.astuple())
        moves.update(*to(rows, device).astuple())
    assert torch.equal(moves.inducing_points, stays.inducing_points)
    stays.covar_module.lengthscale = moves.covar_module.lengthscale = 0.4
    for model in (stays, moves.to(DEVICE)):
        model.update(*to(data[:1], model.train_targets.device).astuple())
    assert torch.equal(moves.inducing_points.to(HOST), stays.inducing_points)


PRIORS: dict[str, Callable[[Tensor], Prior]] = {
    "log-normal": lambda v: LogNormalPrior(v, v),
    "half-normal": lambda v: HalfNormalPrior(v),
    "half-Cauchy": lambda v: HalfCauchyPrior(v),
    "gamma": lambda v: GammaPrior(v, v),
    "uniform": lambda v: UniformPrior(0.1 * v, 10.0 * v),
    "normal": lambda v: MultivariateNormalPrior(v, torch.eye(len(v))),
}


@pytest.mark.parametrize("way", [by_to, by_file])
@pytest.mark.parametrize("name", PRIORS)
def test_priors_with_a_value_for_each_input_move_along(
    name: str, way: Callable[..., Any], tmp_path: Path
) -> None:
    prior = PRIORS[name](torch.tensor([0.5, 0.7]))
    kernel = RBFKernel(ard_num_dims=2, lengthscale_prior=prior)
    model = WISKI(*observations(20).astuple(), covar_module=kernel, grid_size=8)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    expected = model.compute_custom_loss(mll).detach()
    moved = way(copy.deepcopy(model), DEVICE, tmp_path)
    found = moved.compute_custom_loss(ExactMarginalLogLikelihood(moved.likelihood, moved))
    torch.testing.assert_close(found.detach().to(HOST), expected, rtol=1e-6, atol=1e-6)


@counted
def test_a_models_state_is_compared_in_one_wait() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).to(DEVICE)
    state = state_of(module)
    pretend.SYNCS.clear()
    assert is_in(module, state)
    assert pretend.SYNCS == {"item": 1}
    with torch.no_grad():
        module[1].bias[2] += 1.0
    assert not is_in(module, state)


@counted
@pytest.mark.parametrize("case", ["WISKI", "WISKI, no rows held", "WISKI, additive"])
def test_constants_of_a_grid_are_uploaded_once(case: str) -> None:
    (stream,) = streams((case,), DEVICE)
    model, points = stream.model(stream.data(12)), stream.points
    first, more = stream.data(3), stream.data(3)
    model.update(*first.astuple()).posterior(points)
    for verb in (lambda: model.update(*more.astuple()), lambda: model.posterior(points)):
        pretend.SYNCS.clear()
        verb()
        assert pretend.SYNCS["copy"] == 0


MOST_WAITS = (1, 1, 2)
"""Most times that the host waits for the device in an update, a posterior, and fantasies with one:
once a verb for the finiteness of what is given, how much of the noise is known, the
hyperparameters' equality with those of what is cached, the success of a factorisation, and whether
a grid holds the inputs."""

WAITING = ("WISKI, no rows held", "OSGPR", "AutoGP")

GPYTORCHS = 2
"""Waits of GPyTorch's in an objective: priors of noise and lengthscales check their values."""


@counted
@pytest.mark.parametrize("case", WAITING)
def test_the_host_waits_once_in_each_verb(case: str) -> None:
    (stream,) = streams((case,), DEVICE)
    model, points = stream.model(stream.data(12)), stream.points
    for _ in range(2):
        model.update(*stream.data(3).astuple()).posterior(points)
    more, known = stream.data(3), stream.data(3)
    verbs = (
        lambda: model.update(*more.astuple()),
        lambda: model.posterior(points),
        lambda: condition_on(model, known).posterior(points),
    )
    found = []
    for verb in verbs:
        pretend.SYNCS.clear()
        with torch.no_grad():
            verb()
        found.append(sum(pretend.SYNCS.values()))
    assert all(count <= most for count, most in zip(found, MOST_WAITS, strict=True)), found


def waits(call: Callable[[], object]) -> int:
    """Count the waits of a call, the second of two: what is computed once is."""
    call()
    pretend.SYNCS.clear()
    call()
    return sum(pretend.SYNCS.values())


@counted
@pytest.mark.parametrize("case", WAITING)
def test_the_host_waits_once_or_twice_for_a_choice_and_for_an_objective(case: str) -> None:
    (stream,) = streams((case,), DEVICE)
    model, points = stream.model(stream.data(12)), stream.points
    model.update(*stream.data(3).astuple())
    selector = PoolSelector(model, points, points)
    found = [waits(partial(selector.select, q)) for q in (1, 2, 4)]
    assert found[0] == found[1] == found[2] <= 2
    X = points[..., :3, :].detach().clone().requires_grad_(True)
    if case.startswith("WISKI"):
        nipv = FeatureNIPV(model, points)
        assert waits(lambda: torch.autograd.grad(nipv(X).sum(), X)) <= 1
    mll = ExactMarginalLogLikelihood(model.likelihood, model.train())
    parameters = [p for p in model.parameters() if p.requires_grad]

    def gradient() -> object:
        return torch.autograd.grad(model.compute_custom_loss(mll).sum(), parameters)

    assert waits(gradient) <= 1 + GPYTORCHS


STEPPING = {"DecoupledGP": 1.1, "QSGP": 1.0, "QSRVM": 2.0}
"""Most waits of a step, on average: one for the bound; an eigendecomposition of a decoupled model
waits every tenth step, and GPyTorch's kernels compare inputs by value to see whether they are the
same."""


@counted
@pytest.mark.parametrize("case", STEPPING)
def test_the_host_waits_once_for_a_step(case: str) -> None:
    (stream,) = streams((case,), DEVICE)
    model = stream.model(stream.data(12))
    model.fit(steps=10, progress=False)
    few, many = (waits(partial(model.fit, steps=steps, progress=False)) for steps in (10, 40))
    assert 10 <= many - few <= 30 * STEPPING[case]


SELECTING = {"Novelty": 40, "OIPS": 15, "KMeans": 10, "Random": 5}
"""Most waits for a batch of an allocator, of any size."""


@counted
@pytest.mark.parametrize("rows", [100, 1000])
@pytest.mark.parametrize("name", SELECTING)
def test_the_host_waits_as_often_for_a_large_batch(name: str, rows: int) -> None:
    options = {"Novelty": Novelty(60), "OIPS": OIPS(0.8), "KMeans": KMeans(40)}
    allocator = options.get(name, Random(40))
    X, kernel = torch.rand(rows, 2, dtype=torch.float64).to(DEVICE), RBFKernel(ard_num_dims=2)
    kernel = kernel.double().to(DEVICE)
    kernel.lengthscale = 0.2
    Z = allocator.update(X[:0], X[:30], kernel)
    pretend.SYNCS.clear()
    chosen = allocator.update(Z, X[30:], kernel)
    assert sum(pretend.SYNCS.values()) <= SELECTING[name]
    assert len(chosen) > 20


@counted
def test_the_host_waits_by_the_depth_of_a_cover_tree() -> None:
    found = []
    for rows in (1_000, 4_000):
        tree, X = CoverTree(0.1), torch.rand(rows, 2, dtype=torch.float64).to(DEVICE)
        pretend.SYNCS.clear()
        tree.insert(X)
        found.append(sum(pretend.SYNCS.values()))
    assert found[1] < 2 * found[0], found


@counted
def test_a_step_whose_factorisation_fails_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    (stream,) = streams(("DecoupledGP",), DEVICE)
    model, points = stream.model(stream.data(12)), stream.points
    other, factorise, failures = copy.deepcopy(model), torch.linalg.cholesky_ex, []

    def failing(matrix: Tensor) -> tuple[Tensor, Tensor]:
        factor, info = factorise(matrix)
        expected = none_set(torch.ones_like(info))  # as within a step, to begin with
        if expected and len(failures) < 3:
            failures.append(info)
        return factor, info

    model.fit(steps=12, progress=False)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", failing)
    other.fit(steps=12, progress=False)
    assert len(failures) == 3
    assert torch.equal(model.posterior(points).mean, other.posterior(points).mean)


@counted
@pytest.mark.parametrize("case", WAITING)
def test_what_is_not_as_expected_is_found_and_undone(case: str) -> None:
    (stream,) = streams((case,), DEVICE)
    model, points = stream.model(stream.data(12)), stream.points
    model.update(*stream.data(3).astuple()).posterior(points)
    before, bad = fingerprint(model), stream.data(3)
    X, Y = bad.X.clone(), bad.Y.clone()
    X[..., 1, 0] = math.nan
    for call in (lambda: model.update(X, Y), lambda: model.posterior(X)):
        with pytest.raises(InputDataError, match="X to be finite"):
            call()
    assert_untouched(model, before)
    for parameter in model.covar_module.parameters():  # as GPyTorch's setters do
        parameter.data.mul_(1.1)
    fresh = copy.deepcopy(model)
    fresh._cache = None
    for name in ("mean", "variance"):
        found, expected = (getattr(each.posterior(points), name) for each in (model, fresh))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@counted
def test_flags_are_read_at_once_or_one_by_one() -> None:
    none = torch.zeros(2, device=DEVICE)
    undone: list[str] = []

    def made_twice(*flags: Tensor, fails: bool = False) -> tuple[int, int]:
        """Count the waits, and the calls."""
        calls: list[bool] = []

        def call() -> None:
            calls.append(all(none_set(each) for each in flags))
            if fails:
                raise ValueError("it fails")

        pretend.SYNCS.clear()
        try:
            read_at_once(call, lambda: undone.append("undone"))
        finally:
            counts = sum(pretend.SYNCS.values()), len(calls)
        return counts

    assert made_twice(none, none, none) == (1, 1)
    assert not undone
    assert made_twice(none, none + 1.0, none) == (1 + 2, 2)
    assert undone == ["undone"]
    with pytest.raises(ValueError, match="it fails"):
        made_twice(none, fails=True)
    assert undone == ["undone"]
    with pytest.raises(ValueError, match="it fails"):
        made_twice(none + 1.0, fails=True)
    assert undone == ["undone"] * 2

    def interrupted() -> None:
        assert none_set(none + 1.0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_at_once(interrupted, lambda: undone.append("undone"))
    assert undone == ["undone"] * 3

    def before_a_change() -> bool:
        assert none_set(none)
        read_expected()
        return none_set(none + 1.0)  # read where it is asked for

    assert not read_at_once(before_a_change, lambda: undone.append("never"))
    assert not none_set(none + 1.0)
    assert undone == ["undone"] * 3


def test_root_of_huddled_points() -> None:
    assert error_of_root_of_huddled_points(DEVICE) < 1e-12
