"""Outliers are clipped as Ax's default strategy clips them, at cutoffs that stay."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from ax.adapter.base import Adapter
from ax.adapter.transforms.winsorize import Winsorize
from ax.exceptions.core import AxOptimizationWarning
from ax.generators.torch.botorch_modular.generator import BoTorchGenerator

from bo_stream.ax.nipv import INTEGRATED
from bo_stream.ax.units import KeepsUnits

Cutoffs = tuple[float, float]

MOVED = 0.5
"""Cutoffs stay until they are off by this part of the distance from the median."""


class SteadyWinsorize(Winsorize):
    """Clips outcomes far on the bad side, by Tukey's rule as Ax does (q3 + 1.5 (q3 - q1)).

    Ax's cutoffs move with each outcome, and each clipped row of the data with them. Here they stay
    until they are off by far, so that they move a number of times that is logarithmic in the
    spread. Then the clipped rows, as they were put in, are taken out of the models, and go in anew.
    Nothing is clipped where the quartiles coincide, nor where the strategy says so, nor where the
    criterion is an integrated variance: that learns the function everywhere.
    """

    def __init__(
        self,
        search_space: Any = None,
        experiment_data: Any = None,
        adapter: Adapter | None = None,
        config: Any = None,
    ) -> None:
        """Find the cutoffs, or those that the adapter's generator remembers."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AxOptimizationWarning)
            super().__init__(search_space, experiment_data, adapter, config)
        generator = None if adapter is None else adapter.generator
        if experiment_data is None or _takes_all(generator):
            self.cutoffs = {}
            return
        kept: dict[str, list[float | None]] = (
            generator.cutoffs if isinstance(generator, KeepsUnits) else {}
        )
        means = experiment_data.observation_data["mean"]
        for metric, fresh in self.cutoffs.items():
            outcomes = means[metric].dropna().to_numpy(dtype=float)
            self.cutoffs[metric] = _steady(_read(kept.get(metric)), _rounded(fresh), outcomes)
            kept[metric] = _written(self.cutoffs[metric])


def _takes_all(generator: Any) -> bool:
    if isinstance(generator, KeepsUnits) and not generator.winsorize:
        return True
    kind = generator._botorch_acqf_class if isinstance(generator, BoTorchGenerator) else None
    return kind is not None and issubclass(kind, INTEGRATED)


def _steady(kept: Cutoffs | None, fresh: Cutoffs, outcomes: Any) -> Cutoffs:
    if len(outcomes) == 0 or np.ptp(np.quantile(outcomes, (0.25, 0.75))) == 0.0:
        return -math.inf, math.inf
    if kept is None:
        return fresh
    middle = float(np.median(outcomes))
    return _side(kept[0], fresh[0], middle), _side(kept[1], fresh[1], middle)


def _side(kept: float, fresh: float, middle: float) -> float:
    if math.isinf(kept) or math.isinf(fresh):
        return fresh
    return kept if abs(kept - fresh) <= MOVED * abs(fresh - middle) else fresh


def _rounded(cutoffs: Cutoffs) -> Cutoffs:
    low, high = cutoffs
    return float(low), float(high)


def _written(cutoffs: Cutoffs) -> list[float | None]:
    """As Ax can store them; None: no cutoff."""
    return [None if math.isinf(value) else value for value in cutoffs]


def _read(stored: Sequence[float | None] | None) -> Cutoffs | None:
    if stored is None:
        return None
    low, high = stored
    return -math.inf if low is None else low, math.inf if high is None else high
