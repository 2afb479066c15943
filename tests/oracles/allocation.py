"""Rules that choose inducing points, as in their papers."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def paper_cover_tree(
    X: np.ndarray, resolution: float, widened: int = 0, average: str = ""
) -> np.ndarray:
    """The finest centres by the paper's loops and its bound on neighbours. [Terenin2024, alg. 9]

    Neighbours are within ``4 (1 − 2^(l − L))`` radii at level l of L, as printed, or with L larger
    by ``widened``. Of the optional steps there are lines 9 and 10 where ``average`` is "printed",
    or "mended": whether the average, not the point, is apart from other children.
    """
    root = X.mean(0)
    depth = math.ceil(math.log2(np.linalg.norm(X - root, axis=1).max() / resolution))
    centres, families, neighbours = [root], [list(range(len(X)))], [[0]]
    for level in range(1, depth + 1):
        radius = 2.0 ** (depth - level) * resolution
        below: list[np.ndarray] = []
        below_families: list[list[int]] = []
        children: list[list[int]] = [[] for _ in centres]
        parents: list[int] = []
        for p in range(len(centres)):
            while families[p]:
                centre = X[families[p][0]]
                if average:
                    around = [X[i] for i in families[p] if np.linalg.norm(X[i] - centre) <= radius]
                    mean = np.mean(around, 0)
                    tested = centre if average == "printed" else mean
                    others = [below[c] for r in neighbours[p] for c in children[r]]
                    if all(np.linalg.norm(tested - other) > radius for other in others):
                        centre = mean
                taken = []
                for r in neighbours[p]:
                    near = [i for i in families[r] if np.linalg.norm(X[i] - centre) <= radius]
                    taken += near
                    families[r] = [i for i in families[r] if i not in near]
                children[p].append(len(below))
                parents.append(p)
                below.append(centre)
                below_families.append(taken)
        bound = 4.0 * (1.0 - 0.5 ** (depth + widened - level)) * radius
        neighbours = [
            [
                c
                for r in neighbours[parents[i]]
                for c in children[r]
                if np.linalg.norm(below[c] - below[i]) <= bound
            ]
            for i in range(len(below))
        ]
        centres, families = below, below_families
    return np.array(centres)


def oips(K: Tensor, rho: float) -> list[int]:
    """Accept what no accepted point is correlated with by rho. [Galy-Fajou2021, algorithm 1]"""
    scale = K.diagonal().sqrt()
    likeness = K / scale / scale.unsqueeze(-1)
    chosen: list[int] = []
    for i in range(len(K)):
        if all(float(likeness[i, j]) < rho for j in chosen):
            chosen.append(i)
    return chosen


def printed_points_bound(n: int, d: int, rho: float, lengthscale: float) -> float:
    """Expected points of n uniform inputs in the unit cube. [Galy-Fajou2021, theorem 1, printed]

    The kernel is ``exp(−|x − x'|² / (2 lengthscale²))``, the paper's lengthscale √2 times that.
    """
    alpha = (lengthscale * math.sqrt(-2.0 * d * math.log(rho)) / 2.0) ** d
    return (1.0 - (1.0 - alpha) ** (n + 1)) / alpha


def exchanged(
    correlations: Tensor, kept: list[int], waiting: list[int], better: float, most: int
) -> list[int]:
    """Indices that are kept after exchanges, everything computed anew for each."""
    kept, waiting = list(kept), list(waiting)
    for _ in range(min(most, len(waiting))):
        inner = correlations[kept][:, kept]
        own = 1.0 / torch.linalg.inv(inner).diagonal()
        cross = correlations[kept][:, waiting]
        left = 1.0 - (cross * torch.linalg.solve(inner, cross)).sum(0)
        if left.max() <= better * own.min():
            break
        del kept[int(own.argmin())]
        kept.append(waiting.pop(int(left.argmax())))
    return kept
