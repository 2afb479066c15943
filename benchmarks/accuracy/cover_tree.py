"""The cover tree on land surface temperature: seconds, near-linear, its guarantees by brute force.

Coordinates of modis_lst's training rows, each standardised, in random order. The slope is that of
log time over log n from 10,000 points to all, fitted to medians of a few builds each.
"""

from __future__ import annotations

import math
import statistics

import numpy as np
import torch
from torch import Tensor

from benchmarks.common.data import real_file
from benchmarks.common.harness import Options, seconds, start
from benchmarks.common.report import Claim, at_least, at_most, finish, stated
from bo_stream.allocation import CoverTree

RESOLUTION = 0.059
SIZES = (10_000, 30_000, 105_569)
SECONDS = 10.0
SLOPE = 1.2
ROWS = 2048


def coordinates(options: Options) -> Tensor:
    """Standardised, ``n x 2``, in random order."""
    if options.smoke:
        return torch.rand(600, 2)
    with np.load(real_file("modis_lst"), allow_pickle=False) as arrays:
        X = torch.as_tensor(arrays["X"][~arrays["test_mask"][:, 0]])
    X = X[torch.randperm(len(X), generator=torch.Generator().manual_seed(0))]
    return (X - X.mean(0)) / X.std(0)


def separation(centres: Tensor) -> float:
    """Least distance between two centres."""
    return float(torch.pdist(centres).min()) if len(centres) > 1 else math.inf


def resolution(X: Tensor, centres: Tensor) -> float:
    """Largest distance from a point to its nearest centre."""
    return max(
        float((rows.unsqueeze(-2) - centres).square().sum(-1).amin(-1).max().sqrt())
        for rows in X.split(ROWS)
    )


def guarantees(tree: CoverTree, X: Tensor) -> list[Claim]:
    """Over all levels: the least separation and the largest resolution, in parts of the radius."""
    levels = list(zip(tree.levels, tree.radii, strict=True))
    sizes = ", ".join(f"{len(centres):,}" for centres, _ in levels)
    separations = [separation(centres) / radius for centres, radius in levels]
    resolutions = [resolution(X, centres) / radius for centres, radius in levels]
    return [
        at_least("least separation of a level over its radius", min(separations), 1.0, "", sizes),
        at_most("largest resolution of a level over its radius", max(resolutions), 1.0, "", sizes),
    ]


def main() -> None:
    """Run it."""
    options = start(__doc__)
    X = coordinates(options)
    sizes = options.pick(SIZES, (200, 600))
    repeats = options.pick(5, 1)
    times = {
        n: statistics.median(
            seconds(lambda: CoverTree(RESOLUTION).insert(X[:n]))  # noqa: B023
            for _ in range(repeats)
        )
        for n in sizes
    }
    tree = CoverTree(RESOLUTION).insert(X)
    len(tree.centres)
    slope = np.polyfit(np.log(list(times)), np.log(list(times.values())), 1)[0]
    built = ", ".join(f"{n:,}: {t:.2f} s" for n, t in times.items())
    streamed = CoverTree(RESOLUTION).insert(X[: len(X) // 2])
    rest = X[len(X) // 2 :][: options.pick(2_000, 50)]
    one_by_one = seconds(lambda: [streamed.insert(row) for row in rest.split(1)])
    claims = [
        at_most(
            f"{len(X):,} points, {len(tree.centres):,} centres", times[sizes[-1]], SECONDS, "s"
        ),
        at_most("slope of log time over log n", float(slope), SLOPE, "", built),
        *guarantees(tree, X),
        stated("a point more", 1e3 * one_by_one / len(rest), "ms", f"{len(rest):,} one by one"),
    ]
    finish("cover_tree", claims, options, {"resolution": RESOLUTION, "sizes": sizes})


if __name__ == "__main__":
    main()
