"""Sums of parts of a stream, merged in a tree, are the model of the whole stream."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from botorch.models.transforms.outcome import ChainedOutcomeTransform, Log, Standardize
from gpytorch.kernels import AdditiveKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

import bo_stream
from bo_stream import (
    OSGPR,
    WISKI,
    AutoGP,
    BayesianLastLayer,
    BinomialLikelihood,
    ClusteredGP,
    DecoupledGP,
    DirichletWISKI,
    HeteroscedasticWISKI,
    LocalGP,
    ProjectionWarning,
)
from bo_stream.allocation import CoverTree
from bo_stream.bases.kernels import ProductMatern
from bo_stream.distributed import Sums, accumulate, finish, merge, rebased, sums, zero
from bo_stream.models.base import StreamingGP
from bo_stream.storage.archive import describe_file
from bo_stream.testing.streams import assert_untouched, fingerprint
from tests.distributed.streams import UNIT, assert_same, grid_model, parts_of
from tests.support.problems import Observations, observations

Build = Callable[[Observations], StreamingGP]


def _grid(**options: Any) -> Build:
    return lambda data: grid_model(data, **options)


def _additive() -> AdditiveKernel:
    return AdditiveKernel(*(ScaleKernel(ProductMatern(nu=2.5, active_dims=(i,))) for i in range(2)))


def _log_standardized() -> ChainedOutcomeTransform:
    return ChainedOutcomeTransform(log=Log(), standardize=Standardize(1))


def _dirichlet(data: Observations) -> DirichletWISKI:
    return DirichletWISKI(*labelled(data), bounds=UNIT, grid_size=9)


def _fixed_points(data: Observations) -> OSGPR:
    Z = torch.quasirandom.SobolEngine(2).draw(14, dtype=torch.float64)
    return OSGPR(*data.astuple(), inducing_points=Z, window=0)


def _last_layer(data: Observations) -> BayesianLastLayer:
    return BayesianLastLayer(data.X, data.Y, train_Yvar=data.Yvar)


def _covering_tree(data: Observations) -> ClusteredGP:
    line = torch.linspace(-0.05, 1.05, 60, dtype=torch.float64)
    tree = CoverTree(0.2).insert(torch.cartesian_prod(line, line))
    return ClusteredGP(*data.astuple(), tree=tree)


def labelled(data: Observations) -> tuple[Tensor, Tensor]:
    return data.X, (data.Y.squeeze(-1) - 3.0).clamp(0.0, 2.0).floor()


EXACT: dict[str, tuple[Build, str, int]] = {
    "WISKI": (_grid(), "learned", 1),
    "WISKI, log": (_grid(outcome_transform=_log_standardized()), "learned", 1),
    "WISKI, few features": (_grid(max_rank=30), "learned", 1),
    "WISKI, additive": (_grid(covar_module=_additive()), "learned", 1),
    "WISKI, known noise": (_grid(), "known", 1),
    "WISKI, known noise in part": (_grid(likelihood=GaussianLikelihood()), "mixed", 1),
    "WISKI, two outputs": (_grid(), "learned", 2),
    "WISKI, two outputs, known noise": (_grid(), "known", 2),
    "DirichletWISKI": (_dirichlet, "labels", 1),
    "OSGPR, fixed points": (_fixed_points, "known", 1),
    "OSGPR, fixed points, two outputs": (_fixed_points, "learned", 2),
    "BayesianLastLayer": (_last_layer, "learned", 1),
    "BayesianLastLayer, known noise": (_last_layer, "known", 2),
}
"""Model, kind of noise and number of outputs of what adds up exactly."""


def arguments(data: Observations, noise: str) -> tuple[Any, ...]:
    return labelled(data) if noise == "labels" else data.astuple()


def copied(sums: Sums) -> Sums:
    return pickle.loads(pickle.dumps(sums))


def summed(start: Sums, parts: list[Observations], noise: str) -> Sums:
    """A tree of four parts, each of which goes through a process's border on its way."""
    leaves = []
    for number, part in enumerate(parts):
        leaf = copied(start)
        for rows in (slice(0, 7), slice(7, None)):
            leaf = accumulate(leaf, *arguments(part[rows], noise))
        through = (
            Sums.from_bytes(leaf.to_bytes()) if number % 2 else pickle.loads(pickle.dumps(leaf))
        )
        leaves.append(through)
    return merge(merge(leaves[0], leaves[1]), merge(leaves[2], leaves[3]))


SIZES = {"in rows": (20, 9, 30, 11), "on the grid": (200, 310, 40, 150)}


@pytest.mark.matrix
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", EXACT)
def test_a_tree_of_parts_is_one_stream(name: str, sizes: tuple[int, ...]) -> None:
    build, noise, outputs = EXACT[name]
    data = observations(sum(sizes) + 12, outputs=outputs).with_noise(
        "learned" if noise == "labels" else noise
    )
    model = build(data[sum(sizes) :])
    model.eval()
    streamed = copy.deepcopy(model)
    parts = parts_of(data, sizes)
    for part in parts:
        streamed.update(*arguments(part, noise))
    before = fingerprint(model)
    sums = summed(zero(model), parts, noise)
    assert_untouched(model, before)
    assert sums.rows == sum(sizes)
    assert finish(model, sums) is model
    assert_same(model, streamed, torch.rand(5, 2, dtype=torch.float64))


@pytest.mark.parametrize("build", [_covering_tree, _last_layer], ids=["clusters", "last layer"])
def test_a_tree_that_covers_all_inputs_adds_up_exactly(build: Build) -> None:
    parts = parts_of(observations(81), (20, 9, 30, 11, 11))
    model = build(parts[4])
    streamed = copy.deepcopy(model)
    for part in parts[:4]:
        streamed.update(*part.astuple())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ProjectionWarning)
        start = zero(model)
    finish(model, summed(start, parts[:4], "learned"))
    assert_same(model, streamed, torch.rand(5, 2, dtype=torch.float64))


def test_grids_that_grow_apart_are_joined_exactly() -> None:
    model, parts = grid_model(), parts_of(observations(700), (340, 360))
    left = Observations(parts[0].X - 0.8, parts[0].Y)
    right = Observations(parts[1].X + 0.7, parts[1].Y)
    streamed = copy.deepcopy(model).update(*left.astuple()).update(*right.astuple())
    sums = [accumulate(zero(model), *part.astuple()) for part in (left, right)]
    finish(model, merge(*sums))
    assert model.grid_size == streamed.grid_size
    assert_same(model, streamed, torch.rand(5, 2, dtype=torch.float64) * 2.0 - 0.6)


@pytest.mark.parametrize("rows", [9, 400])
def test_sums_grow_as_far_as_the_model_may(rows: int) -> None:
    """So that a call which adds rows is refused, not the last one, which puts all in."""
    data = observations(rows)
    model = grid_model(data).update(data.X + 2.2, data.Y)
    sums = zero(model)
    with pytest.raises(InputDataError, match="4 times its first width"):
        accumulate(sums, data.X - 2.2, data.Y)
    accumulate(sums, data.X + 2.4, data.Y)
    assert finish(model, sums).num_observations == 3 * rows


def test_classes_that_only_one_part_has_are_known_afterwards() -> None:
    X = torch.rand(40, 2, dtype=torch.float64)
    model = DirichletWISKI(X[:5], torch.zeros(5), bounds=UNIT, grid_size=9)
    labels = (X[:, 0] * 3.0).floor()
    streamed = (
        copy.deepcopy(model).update(X[:20], labels[:20].clamp_max(1.0)).update(X[20:], labels[20:])
    )
    one = accumulate(zero(model), X[:20], labels[:20].clamp_max(1.0))
    two = accumulate(zero(model), X[20:], labels[20:])
    finish(model, merge(one, two))
    assert model.num_outputs == streamed.num_outputs == 3
    assert_same(model, streamed, X[:5])


def test_sums_do_not_share_what_a_model_learns_or_holds() -> None:
    data = observations(30)
    model = grid_model(data)
    sums = zero(model)
    before = fingerprint(sums.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    model.update(*data.astuple())
    assert_untouched(sums.model, before)


@pytest.mark.parametrize("noise", ["learned", "known"])
@pytest.mark.parametrize("rows", [20, 400])
def test_merging_changes_neither(noise: str, rows: int) -> None:
    parts = parts_of(observations(2 * rows + 5).with_noise(noise), (rows, rows, 5))
    start = zero(grid_model(parts[2]))
    one, two = (accumulate(copy.deepcopy(start), *part.astuple()) for part in parts[:2])
    before = [fingerprint(each.model) for each in (one, two)]
    both = merge(one, two)
    accumulate(both, *parts[2].astuple())
    for each, was in zip((one, two), before, strict=True):
        assert_untouched(each.model, was)
    assert both.rows == 2 * rows + 5


def test_bad_rows_leave_sums_as_they_were() -> None:
    data = observations(400)
    sums = accumulate(zero(grid_model()), *data.astuple())
    before = fingerprint(sums.model)
    Y = data.Y.clone()
    Y[7] = torch.nan
    for X, values in ((data.X, Y), (data.X + 40.0, data.Y)):
        with pytest.raises(InputDataError):
            accumulate(sums, X, values)
    assert_untouched(sums.model, before)


# --- what is refused, and what is said ----------------------------------------------------------


def test_what_cannot_be_summed_says_so_and_what_can() -> None:
    data = observations(12)
    model = DecoupledGP(data.X, data.Y, num_mean=9, num_covar=4)
    with pytest.raises(UnsupportedError, match=r"got a DecoupledGP: .*WISKI, Dirichlet"):
        zero(model)


NEARLY: dict[str, tuple[Build, str]] = {
    "noise": (lambda data: HeteroscedasticWISKI(*data.astuple(), grid_size=8), "noise is learned"),
    "centres": (lambda data: ClusteredGP(*data.astuple()), "other centres"),
    "points": (lambda data: OSGPR(*data.astuple()), "inducing points of its own"),
    "window": (
        lambda data: OSGPR(*data.astuple(), inducing_points=data.X),
        "posteriors are exact.*window=0",
    ),
    "experts": (lambda data: LocalGP(*data.astuple()), "rows before it"),
    "counts": (
        lambda data: WISKI(
            data.X,
            torch.stack((data.Y.squeeze(-1).round(), torch.full((len(data),), 9.0).double()), -1),
            likelihood=BinomialLikelihood(),
            grid_size=8,
        ),
        "by the posterior that its part has",
    ),
}


@pytest.mark.parametrize("name", NEARLY)
def test_what_nearly_adds_up_is_said_before_anything_is_summed(name: str) -> None:
    build, said = NEARLY[name]
    model = build(observations(12))
    with pytest.warns(ProjectionWarning, match=f"only nearly the {type(model).__name__}.*{said}"):
        zero(model)


def test_every_model_is_exact_said_to_be_nearly_so_or_refused() -> None:
    public = (getattr(bo_stream, name) for name in bo_stream.__all__)
    models = {each for each in public if isinstance(each, type) and issubclass(each, StreamingGP)}
    exact = {name.partition(",")[0] for name in EXACT}
    nearly = {"HeteroscedasticWISKI", "OSVGP", "ClusteredGP", "LocalGP"}
    refused = {each.__name__ for each in (*sums.BY_STEPS, AutoGP)}
    assert exact | nearly | refused == {each.__name__ for each in models}
    assert not exact & (nearly | refused)


@pytest.mark.filterwarnings("ignore::bo_stream.HandOverWarning")
def test_an_auto_gp_is_told_how_to_get_ready_and_keeps_its_family() -> None:
    parts = parts_of(observations(80), (20, 9, 30, 11, 10))
    model = AutoGP(*parts[4].astuple(), bounds=UNIT, grid_size=9)
    with pytest.raises(UnsupportedError, match=r'model.move_to\("WISKI"\)'):
        zero(model)
    model.move_to("WISKI")
    streamed = copy.deepcopy(model)
    for part in parts[:4]:
        streamed.update(*part.astuple())
    finish(model, summed(zero(model), parts[:4], "learned"))
    assert model.family == "WISKI"
    assert_same(model, streamed, torch.rand(5, 2, dtype=torch.float64))


def _moved(model: StreamingGP) -> StreamingGP:
    model.covar_module.base_kernel.lengthscale = 0.7
    return model


OTHERS: dict[str, tuple[Callable[[], StreamingGP], str]] = {
    "lengthscale": (lambda: _moved(_scaled()), r"raw_lengthscale: \[\[.*\]\] and \[\["),
    "kernel": (lambda: _scaled(nu=1.5), "nu: 2.5 and 1.5"),
    "noise": (lambda: _scaled(likelihood=GaussianLikelihood()), "likelihood"),
    "grid": (lambda: _scaled(grid_size=10), "grids: .*9, 9. nodes.*10, 10"),
    "class": (lambda: BayesianLastLayer(*observations(9).astuple()[:2]), "classes: 'WISKI'"),
}


def _scaled(nu: float = 2.5, **options: Any) -> WISKI:
    kernel = ScaleKernel(ProductMatern(nu=nu, ard_num_dims=2))
    return grid_model(covar_module=kernel, **options)


@pytest.mark.parametrize("name", OTHERS)
def test_what_differs_is_named_and_nothing_changes(name: str) -> None:
    build, said = OTHERS[name]
    mine, theirs = _scaled(), build()
    ours, others = zero(mine), zero(theirs)
    before = fingerprint(mine)
    for call in (lambda: merge(ours, others), lambda: finish(mine, others)):
        with pytest.raises(UnsupportedError, match=f"different .*{said}"):
            call()
    assert_untouched(mine, before)


def test_other_inducing_points_are_named() -> None:
    points = [torch.rand(6, 2, dtype=torch.float64) for _ in range(2)]
    data = observations(9).astuple()
    sums = [zero(OSGPR(*data, inducing_points=Z, window=0)) for Z in points]
    with pytest.raises(UnsupportedError, match="different inducing points"):
        merge(*sums)


@pytest.mark.parametrize("rows", [40, 400])
def test_sums_are_expressed_in_other_hyperparameters_when_asked(rows: int) -> None:
    data = observations(rows)
    sums = accumulate(zero(_scaled()), *data.astuple())
    model = _moved(_scaled())
    streamed = copy.deepcopy(model).update(*data.astuple())
    before = fingerprint(sums.model)
    finish(model, rebased(sums, model))
    assert_same(model, streamed, torch.rand(5, 2, dtype=torch.float64))
    assert_untouched(sums.model, before)


def test_bytes_are_a_file_that_is_described_and_damage_is_found(tmp_path: Path) -> None:
    sums = accumulate(zero(grid_model()), *observations(400).astuple())
    content = sums.to_bytes()
    (tmp_path / "sums").write_bytes(content)
    about = describe_file(tmp_path / "sums")
    assert (about["class"], about["observations"]) == ("WISKI", 400.0)
    wrong = bytearray(content)
    wrong[-9] ^= 1
    for bad in (bytes(wrong), content[:-50], b"", b"\x80\x04pickle", content[8:]):
        with pytest.raises(ValueError, match="damaged"):
            Sums.from_bytes(bad)


class Wiggly(RBFKernel):
    """A kernel of a user's own."""


def test_a_kernel_of_your_own_is_read_when_it_is_trusted() -> None:
    content = zero(grid_model(covar_module=ScaleKernel(Wiggly(ard_num_dims=2)))).to_bytes()
    with pytest.raises(ValueError, match="Wiggly"):
        Sums.from_bytes(content)
    assert Sums.from_bytes(content, trusted=[Wiggly]).rows == 0.0
