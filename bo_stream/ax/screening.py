"""The best of many candidates by an acquisition function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from torch import Tensor

CHUNK = 4096
"""Candidates that are evaluated at once."""

FINALISTS = 16_384
"""Candidates that are evaluated with all samples; a pool of no more is not screened."""


@torch.no_grad()
def best_of(
    acqf: AcquisitionFunction,
    X: Tensor,
    n: int,
    screening: Callable[[], AcquisitionFunction | None],
) -> Tensor:
    """Choose n candidates one after the other, each the best given those before.

    Of more than ``FINALISTS`` candidates only as many are evaluated where there is a cheaper
    function: half of them the best by that one, the others drawn at random. So the choice is the
    best of all as far as the two functions agree, and in any case the best of thousands.

    Args:
        acqf: Takes pending points if n > 1; its own are put back.
        X: Candidates, ``N x d``.
        n: How many, at most N and ``FINALISTS``.
        screening: Makes the cheaper function; None: there is none.

    Returns:
        Places in X, ``n``.
    """
    cheap = screening() if len(X) > FINALISTS else None
    if cheap is None:
        return _greedy(acqf, X, n)
    places = _finalists(values(cheap, X))
    return places[_greedy(acqf, X[places], n)]


def _greedy(acqf: AcquisitionFunction, X: Tensor, n: int) -> Tensor:
    picks = X.new_empty(0, dtype=torch.long)
    pending = acqf.X_pending if n > 1 else None
    for _ in range(n):
        worth = values(acqf, X)
        worth[picks] = -torch.inf
        picks = torch.cat((picks, worth.argmax(keepdim=True)))
        if n > 1:
            acqf.set_X_pending(_joined(pending, X[picks]))
    if n > 1:
        acqf.set_X_pending(pending)
    return picks


def _finalists(worth: Tensor) -> Tensor:
    """Half of them the best, the others drawn from the rest, in ascending order."""
    order = worth.argsort(descending=True)
    best, rest = order[: FINALISTS // 2], order[FINALISTS // 2 :]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randperm(len(rest), generator=generator)[: FINALISTS - len(best)]
    return torch.cat((best, rest[drawn.to(rest.device)])).sort().values


@torch.no_grad()
def values(acqf: AcquisitionFunction, X: Tensor) -> Tensor:
    """Of single candidates, ``N x d -> N``."""
    return torch.cat([acqf(chunk.unsqueeze(-2)) for chunk in X.split(CHUNK)])


def _joined(pending: Tensor | None, picks: Tensor) -> Tensor:
    return picks if pending is None else torch.cat((pending, picks))
