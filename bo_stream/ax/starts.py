"""Where the search for a candidate starts: in the whole search space, and near the best points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ax.core.search_space import SearchSpaceDigest
from botorch.acquisition.acquisition import AcquisitionFunction, OneShotAcquisitionFunction
from botorch.acquisition.multioutput_acquisition import MultiOutputAcquisitionFunction
from botorch.utils.sampling import draw_sobol_samples, manual_seed
from torch import Tensor

from bo_stream.ax.nipv import INTEGRATED

CHUNK = {"init_batch_limit": 128}
"""How many of these the acquisition function is given at once; Ax's 32 take twice the time."""

ONCE = {"retry_on_optimization_warning": False}
"""A search of many starts is not repeated because the line search of one ended by rounding. BoTorch
does repeat it and warns: 18 and 40 times in a noisy campaign of 65 trials, ours and Ax's default.
"""

NEAREST, FARTHEST = 1e-3, 0.3
"""Standard deviations of the points near a leader, in widths of the search space."""

OTHERS = (OneShotAcquisitionFunction, MultiOutputAcquisitionFunction, *INTEGRATED)
"""Searched from points of their own, by another search, or not for the best outcome."""

Generator = Callable[[int, int, int | None], Tensor]


def with_starts(options: dict[str, Any], bounds: Tensor, leaders: Tensor) -> dict[str, Any]:
    """Options of ``optimize_acqf`` by which half of the starting points are near the leaders.

    Where the observed points leave little to gain, the maximum of an acquisition function is a
    narrow peak beside the best of them. Random points miss it: of eight searches among 27 points of
    Hartmann-6 by 1,024 of them, four to five end at a corner instead, and none with these.

    Args:
        options: As a user gave them; they hold.
        bounds: Of the search space, ``2 x d``.
        leaders: The best of the observed points, ``k x d``.
    """
    inner = {**CHUNK, **options.get("options", {})}
    return {**ONCE, **options, "options": inner, "generator": near_and_far(bounds, leaders)}


def near_and_far(bounds: Tensor, leaders: Tensor) -> Generator:
    """What draws ``n x q x d`` points: half of a Sobol sequence, half near the leaders.

    Each of the latter is a leader with normal noise, of a standard deviation whose logarithm is
    uniform between ``NEAREST`` and ``FARTHEST``, moved to the nearest point of the box.

    Args:
        bounds: Of the box, ``2 x d``.
        leaders: ``k x d``, k > 0.
    """
    low, high = bounds = bounds.cpu()
    leaders = leaders.cpu().to(bounds)

    def draw(n: int, q: int, seed: int | None) -> Tensor:
        far = draw_sobol_samples(bounds, n - n // 2, q, seed=seed)
        with manual_seed(seed):
            chosen = leaders[torch.randint(len(leaders), (n // 2, q))]
            exponent = torch.rand(n // 2, q, 1, dtype=bounds.dtype)
            noise = torch.randn(chosen.shape, dtype=bounds.dtype)
        scale = NEAREST * (FARTHEST / NEAREST) ** exponent
        near = chosen + scale * (high - low) * noise
        return torch.cat((far, torch.clamp(near, low, high)))

    return draw


def takes_starts(acqf: AcquisitionFunction, digest: SearchSpaceDigest) -> bool:
    """Whether ``optimize_acqf`` searches for the best outcome, so that leaders are of use to it.

    Args:
        acqf: To be maximised.
        digest: Of the search space.
    """
    return not (digest.ordinal_features or digest.categorical_features or isinstance(acqf, OTHERS))
