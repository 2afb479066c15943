"""The WISKI paper's other streams, behind a stem that was learned beforehand."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

from bo_stream import OSVGP, WISKI
from bo_stream.allocation import OIPS
from bo_stream.models.base import StreamingGP
from bo_stream.models.local import LocalGP

POINTS = 256
"""Most inducing points, or rows of a local model: as many as the grid has nodes."""
CORRELATION = 0.95
"""At which O-SVGP places a point. More points predict no better: on skillcraft's first 1,000 rows
92, 219 and 256 of them, at 0.95, 0.995 and 0.9995, have an RMSE of 0.650, 0.653 and 0.657."""
LEARNING_RATE = 0.005


@dataclass(frozen=True)
class Projected:
    """Rows as a learned stem has them, and what was learned with it.

    Attributes:
        learned: On the first rows, with its stem; not changed.
        X: Projected inputs, ``n x k``.
        Y: ``n x 1``.
        test_X: Projected, ``t x k``.
        first: Rows that were learned from.
    """

    learned: WISKI
    X: Tensor
    Y: Tensor
    test_X: Tensor
    first: int

    @classmethod
    def of(cls, learned: WISKI, X: Tensor, Y: Tensor, test_X: Tensor, first: int) -> Projected:
        """By a model's stem as it is now."""
        inputs, test = learned.coordinates(X), learned.coordinates(test_X)
        return cls(deepcopy(learned), inputs, Y, test, first)


Predictions = tuple[Tensor, Tensor, list[float]]
"""Means and variances of outcomes at the test inputs, ``t x 1`` each, and seconds of each step."""


def o_svgp(data: Projected) -> Predictions:
    """O-SVGP: a natural step and one of the hyperparameters for each point.

    Starts from the learned kernel and noise. Points are placed where none is correlated, up to
    ``POINTS``. [Bui2017]
    """
    noise = GaussianLikelihood().to(data.X)
    noise.noise = data.learned.likelihood.noise.detach()
    model = OSVGP(
        data.X[: data.first],
        data.Y[: data.first],
        noise,
        deepcopy(data.learned.covar_module),
        allocator=OIPS(CORRELATION),
        max_points=POINTS,
        natural_steps=1,
        hyper_steps=1,
        learning_rate=LEARNING_RATE,
    )
    return _streamed(model, data)


def local_gps(data: Projected) -> Predictions:
    """Local GPs with the kernel and noise that were learned. [NguyenTuong2008]"""
    model = LocalGP(
        data.X[: data.first],
        data.Y[: data.first],
        covar_module=deepcopy(data.learned.covar_module),
        outcome_transform=None,
        max_size=POINTS,
    )
    model.likelihood.noise = data.learned.likelihood.noise.detach()
    return _streamed(model, data)


PEERS: dict[str, Callable[[Projected], Predictions]] = {"O-SVGP": o_svgp, "local GPs": local_gps}


def _streamed(model: StreamingGP, data: Projected) -> Predictions:
    """The rows after the first ones, one at a time."""
    steps = []
    for i in range(data.first, len(data.X)):
        begin = time.perf_counter()
        model.update(data.X[i : i + 1], data.Y[i : i + 1])
        steps.append(time.perf_counter() - begin)
    with torch.no_grad():
        mean, variance = model.process().marginals(data.test_X.double())
        noise = model.noise_at(data.test_X.double())
    return mean.mT, (variance + noise).mT, steps
