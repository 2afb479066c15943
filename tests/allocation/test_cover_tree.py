"""The cover tree's guarantees on every level, by brute force."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from torch import Tensor

from bo_stream.allocation import CoverTree
from tests.oracles.allocation import paper_cover_tree

OPTIONS = [(True, True), (True, False), (False, True), (False, False)]


def separation(centres: Tensor) -> float:
    return float(torch.pdist(centres).min()) if len(centres) > 1 else math.inf


def resolution(X: Tensor, centres: Tensor) -> float:
    return max(
        float((rows.unsqueeze(-2) - centres).square().sum(-1).amin(-1).max().sqrt())
        for rows in X.split(2048)
    )


def check_guarantees(tree: CoverTree, X: Tensor) -> None:
    slack = 1e-12 if X.dtype == torch.float64 else 1e-5
    assert tree.radii[-1] == tree.resolution
    assert len(tree.levels[0]) == 1
    for centres, radius in zip(tree.levels, tree.radii, strict=True):
        assert separation(centres) >= radius * (1.0 - slack)
        assert resolution(X, centres) <= radius * (1.0 + slack)
    for coarse, fine in zip(tree.radii, tree.radii[1:], strict=False):
        assert coarse == 2.0 * fine


def clusters(n: int, d: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Dense spots on a thin background."""
    spots = torch.rand(5, d, dtype=dtype)
    near = spots[torch.randint(5, (n,))] + 0.02 * torch.randn(n, d, dtype=dtype)
    return torch.where(torch.rand(n, 1) < 0.7, near, torch.rand(n, d, dtype=dtype))


@pytest.mark.parametrize(("average", "voronoi"), OPTIONS)
@pytest.mark.parametrize(("d", "radius"), [(1, 0.003), (2, 0.04), (3, 0.15), (8, 0.5)])
def test_every_level_is_separated_and_covers(
    d: int, radius: float, average: bool, voronoi: bool, device: torch.device
) -> None:
    X = clusters(700, d).to(device)
    check_guarantees(CoverTree(radius, average, voronoi).insert(X), X)


@pytest.mark.parametrize(("average", "voronoi"), OPTIONS)
def test_insertion_keeps_the_guarantees_and_the_centres(average: bool, voronoi: bool) -> None:
    X = torch.cat((clusters(200, 2), 30.0 * torch.randn(20, 2, dtype=torch.float64)))
    tree = CoverTree(0.05, average, voronoi)
    for i, rows in enumerate((*X[:20].split(1), *X[20:].split(23))):
        before = [] if i == 0 else [centres.clone() for centres in tree.levels]
        tree.insert(rows)
        for old, new in zip(reversed(before), reversed(tree.levels), strict=False):
            assert torch.equal(new[: len(old)], old)
    check_guarantees(tree, X)


def test_float32() -> None:
    X = clusters(2000, 2, torch.float32)
    tree = CoverTree(0.01).insert(X)
    assert tree.centres.dtype == torch.float32
    check_guarantees(tree, X)


def test_the_papers_narrower_neighbourhood_loses_separation() -> None:
    """With 4 (1 − 2^(l−L)) radii, children of parents 2.5 radii apart are never compared."""
    X = torch.rand(1500, 2, dtype=torch.float64)
    centres = torch.as_tensor(paper_cover_tree(X.numpy(), 0.05))
    assert separation(centres) < 0.05
    assert resolution(X, centres) <= 0.05


def test_the_papers_algorithm_separates_in_all_sets_only_with_a_level_more() -> None:
    """Of twelve sets of 400 points, in one to four dimensions at three resolutions each."""
    generator, lost = torch.Generator().manual_seed(0), 0
    for d, finest in ((1, 0.01), (2, 0.05), (3, 0.15), (4, 0.25)):
        for radius in (finest, 1.5 * finest, 2.0 * finest):
            X = torch.rand(400, d, dtype=torch.float64, generator=generator)
            printed, mended = (
                separation(torch.as_tensor(paper_cover_tree(X.numpy(), radius, widened)))
                for widened in (0, 1)
            )
            lost += printed < radius * (1.0 - 1e-12)
            assert mended >= radius * (1.0 - 1e-12)
    assert lost == 5


def test_the_papers_averages_come_too_near_other_centres() -> None:
    """Line 10 tests the uncovered point, which is apart from all centres, for its average."""
    X = np.array([[0.0, 0.0], [1.05, 0.0], [0.6, 0.85], [0.6, -0.85], [-1.5, 0.0]])
    printed = paper_cover_tree(X, 1.0, 1, average="printed")
    mended = paper_cover_tree(X, 1.0, 1, average="mended")
    assert separation(torch.as_tensor(printed)) == pytest.approx(0.75)
    assert separation(torch.as_tensor(mended)) == pytest.approx(1.05)
    assert separation(CoverTree(1.0).insert(torch.as_tensor(X)).centres) >= 1.0


def test_averages_and_voronoi_spare_centres() -> None:
    X = torch.rand(4000, 2, dtype=torch.float64)
    sizes = {options: len(CoverTree(0.05, *options).insert(X).centres) for options in OPTIONS}
    assert sizes[True, True] < sizes[False, False]


def test_assign_is_the_nearest_centre() -> None:
    X = clusters(1000, 3)
    tree = CoverTree(0.1).insert(X)
    elsewhere = torch.cat((X, 3.0 * torch.randn(200, 3, dtype=torch.float64), X.mean(0) + 50.0 * X))
    expected = (elsewhere.unsqueeze(-2) - tree.centres).square().sum(-1).argmin(-1)
    assert torch.equal(tree.assign(elsewhere), expected)


def test_equal_points_and_a_far_outlier() -> None:
    X = torch.full((10_000, 2), 0.3, dtype=torch.float64)
    assert CoverTree(0.1).insert(X).centres.tolist() == [pytest.approx([0.3, 0.3])]
    far = torch.cat((torch.randn(300, 2, dtype=torch.float64), torch.full((1, 2), 1e6).double()))
    tree = CoverTree(0.5).insert(far[:-1]).insert(far[-1:])
    check_guarantees(tree, far)


def test_a_batch_of_none_changes_nothing() -> None:
    tree = CoverTree(0.1).insert(torch.zeros(0, 2))
    with pytest.raises(ValueError, match="Use insert first"):
        _ = tree.centres
    with pytest.raises(ValueError, match="Use insert first"):
        tree.assign(torch.zeros(1, 2))
    assert tree.levels == []
    assert tree.radii == []


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_resolution_out_of_range(value: float) -> None:
    with pytest.raises(ValueError, match="Expected resolution to be positive and finite"):
        CoverTree(value)


def test_bad_input_changes_nothing() -> None:
    X = torch.rand(50, 2, dtype=torch.float64)
    tree = CoverTree(0.2).insert(X)
    before = tree.centres.clone()
    for bad, error in (
        (X[:, :1], BotorchTensorDimensionError),
        (X[0], BotorchTensorDimensionError),
        (X.float(), InputDataError),
        (X / 0.0, InputDataError),
    ):
        with pytest.raises(error, match="Expected"):
            tree.insert(bad)
        with pytest.raises(error, match="Expected"):
            tree.assign(bad)
    with pytest.raises(InputDataError, match="floating"):
        CoverTree(0.2).insert(torch.zeros(3, 2, dtype=torch.long))
    assert torch.equal(tree.centres, before)


@pytest.mark.integration
def test_land_surface_temperature(shared_data: Path) -> None:
    """Real coordinates, raster order, 105,569 points."""
    with np.load(shared_data / "modis_lst.npz") as arrays:
        X = torch.as_tensor(arrays["X"][~arrays["test_mask"][:, 0]])
    X = (X - X.mean(0)) / X.std(0)
    tree = CoverTree(0.06)
    for rows in X.split(20_000):
        tree.insert(rows)
    assert 1_500 < len(tree.centres) < 3_000
    check_guarantees(tree, X)


def test_a_coarsened_tree_ends_at_the_level_asked_for() -> None:
    X = clusters(800, 2)
    tree = CoverTree(0.02).insert(X)
    before = tree.levels
    coarse = tree.coarsened(0.1)
    assert coarse.resolution == coarse.radii[-1] == 0.08
    assert torch.equal(coarse.centres, tree.level(0.1))
    more = torch.rand(200, 2, dtype=torch.float64)
    check_guarantees(coarse.insert(more), torch.cat((X, more)))
    assert all(a is b for a, b in zip(tree.levels, before, strict=True))
    with pytest.raises(ValueError, match="of at least"):
        tree.coarsened(0.01)
    assert len(tree.coarsened(1e3).centres) == 1


def test_a_tree_moves_to_another_dtype(device: torch.device) -> None:
    X = clusters(300, 2)
    tree = CoverTree(0.05).insert(X)
    moved = tree.to(torch.zeros(0, dtype=torch.float32, device=device))
    assert moved.centres.dtype == torch.float32
    more = torch.rand(200, 2, device=device)
    check_guarantees(moved.insert(more), torch.cat((X.to(more), more)))


def test_a_copy_that_is_refined_leaves_the_tree_as_it_is() -> None:
    tree = CoverTree(0.1).insert(clusters(300, 2))
    twin = copy.copy(tree)
    levels = len(tree.levels)
    assert len(twin.refine().levels) == levels + 1
    assert len(tree.levels) == levels
    assert tree.resolution == 0.1
