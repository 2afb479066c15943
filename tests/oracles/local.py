"""Local models, one by one and blended."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.oracles.kernels import DenseKernel, correlation


def local_groups(X: Tensor, kernel: DenseKernel, w_gen: float, size: int) -> list[list[int]]:
    """Rows that each local model holds after all came one by one. [NguyenTuong2008, algorithm 1]"""
    groups: list[list[int]] = []
    for i, x in enumerate(X):
        likeness = [correlation(kernel, x[None], centre(X[rows]))[0, 0] for rows in groups]
        if groups and max(likeness) >= w_gen:
            rows = groups[likeness.index(max(likeness))]
            rows.append(i)
            del rows[:-size]
        else:
            groups.append([i])
    return groups


def centre(X: Tensor) -> Tensor:
    return X.mean(0, keepdim=True)


def blended_models(
    models: list[tuple[Tensor, Tensor, Tensor]], kernel: DenseKernel, nearest: int, T: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and covariance at T of exact GPs of (X, y, noise), weighted by likeness to centres."""
    likeness = torch.cat([correlation(kernel, T, centre(X)) for X, _, _ in models], -1)
    weights = torch.zeros_like(likeness)
    for row, values in zip(weights, likeness, strict=True):
        best = values.argsort(descending=True)[:nearest]
        row[best] = values[best] / values[best].sum()
    mean, covariance = torch.zeros(len(T)).to(T), torch.zeros(len(T), len(T)).to(T)
    for w, (X, y, noise) in zip(weights.mT, models, strict=True):
        gain = torch.linalg.solve(kernel(X, X) + noise.diag(), kernel(X, T)).mT
        mean += w * (gain @ y)
        covariance += torch.outer(w, w).sqrt() * (kernel(T, T) - gain @ kernel(X, T))
    return mean, covariance
