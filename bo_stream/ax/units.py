"""Outcomes as a model is given them, in a unit that stays."""

from __future__ import annotations

from typing import Any

from ax.adapter.base import Adapter
from ax.adapter.transforms.standardize_y import StandardizeY

from bo_stream.loops.units import is_off, unit_of


class KeepsUnits:
    """A generator that remembers the units of the metrics, and where their outliers are clipped.

    Attributes:
        units: By metric.
        cutoffs: By metric: lower and upper one; None: there is none.
        winsorize: Whether any is clipped.
    """

    units: dict[str, float]
    cutoffs: dict[str, list[float | None]]
    winsorize: bool


class OutcomeUnits(StandardizeY):
    """Divides each metric by a power of two near its spread, and shifts nothing.

    Acquisition functions are optimised to absolute tolerances, so that outcomes of 1e-6 would look
    flat to them. The unit stays until the spread is of another order: a transform that is learned
    anew at every trial, as Ax's, would change all rows of the data, and nothing could stream.
    """

    def __init__(
        self,
        search_space: Any = None,
        experiment_data: Any = None,
        adapter: Adapter | None = None,
        config: Any = None,
    ) -> None:
        """Find the units, or those that the adapter's generator remembers."""
        super().__init__(search_space, experiment_data, adapter, config)
        generator = None if adapter is None else adapter.generator
        kept: dict[str, float] = generator.units if isinstance(generator, KeepsUnits) else {}
        means = experiment_data.observation_data["mean"]
        for metric in self.Ymean:
            outcomes = means[metric].dropna().tolist()
            if metric not in kept or is_off(kept[metric], outcomes):
                kept[metric] = unit_of(outcomes)
            self.Ymean[metric], self.Ystd[metric] = 0.0, kept[metric]
