"""The model of an optimization: kept equal to the outcomes, in units of their spread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy

from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.diagnostics.cross_validation import retracts_exactly
from bo_stream.diagnostics.validation import ProgressiveValidation
from bo_stream.loops.models import KERNELS, build_model
from bo_stream.loops.optimization.settings import OptimizationSettings
from bo_stream.loops.optimization.trials import Ledger
from bo_stream.models.auto.auto import AutoGP
from bo_stream.models.base import StreamingGP
from bo_stream.models.fitting import (
    hyperparameters,
    relearn,
    set_hyperparameters,
)
from bo_stream.models.wiski.wiski import WISKI

FEWEST = 2
"""Number of outcomes from which a model can be built."""

LEFT_OUT = 1e-4
"""Prior variance truncated from the model's features between refits, over the noise variance."""

OFF = 1024.0
"""Factor by which the spread of the outcomes may differ from the unit."""


class Surrogate:
    """A model over the unit cube that is kept equal to a ledger by differences.

    New outcomes enter by ``update``, withdrawn ones leave by ``retract``, an amended one does both,
    so that a step costs the same whatever was told before. A model that cannot retract exactly is
    built anew from all outcomes that are left; so is any model when the spread of the outcomes
    turns out to be of another order. Outcomes enter in the order of keys, not of arrival.

    Attributes:
        model: None until there are enough outcomes.
        held: Outcomes in the model's memory, by key.
        refits: Numbers of outcomes at which the hyperparameters were learned.
        unit: Unit of the outcomes in the model: acquisition functions have absolute tolerances.
        is_whole: False while the model is being brought to the ledger.
        validation: Record of how well the model predicted each outcome, in its units; begun anew
            with a model in other units.
    """

    def __init__(
        self,
        settings: OptimizationSettings,
        model: StreamingGP | None = None,
        held: Mapping[int, float] | None = None,
        refits: Sequence[int] = (),
        unit: float = 1.0,
        validation: ProgressiveValidation | None = None,
    ) -> None:
        """Begin empty, or with the content of a checkpoint.

        Raises:
            UsageError: A model cannot be built with these settings: said before any evaluation.
        """
        self.settings, self.model, self.unit = settings, model, unit
        self.held, self.refits = dict(held or {}), list(refits)
        self.is_whole = True
        self.validation = ProgressiveValidation() if validation is None else validation
        if model is None:
            self._built(*self._data(Ledger(), {}))

    def follow(self, ledger: Ledger) -> StreamingGP | None:
        """Bring the model to the ledger's told outcomes, learn where due, and return the model."""
        told = ledger.with_status("told")
        wanted = {trial.key: trial.Y for trial in told if trial.Y is not None}
        stale = {key: Y for key, Y in sorted(self.held.items()) if wanted.get(key) != Y}
        fresh = {key: Y for key, Y in wanted.items() if self.held.get(key) != Y}
        if not stale and not fresh:
            return self.model
        self.is_whole = False
        few = len(self.held) - len(stale) < FEWEST
        if self.model is None or few or is_off(self.unit, list(wanted.values())):
            self._begin(ledger, wanted)
        elif stale and not retracts_exactly(self.model):
            if fresh:
                self.validation.add(self.model, *self._data(ledger, fresh))
            self._rebuild(ledger, wanted, self.model)
        else:
            self._replace(ledger, stale, fresh, self.model)
        count = len(self.held)
        if self.model is not None and self.settings.refit_is_due(count, self.refits):
            learn(self.model)
            self.refits.append(count)
        self.is_whole = True
        return self.model

    def _begin(self, ledger: Ledger, outcomes: dict[int, float]) -> None:
        self.model, self.held, self.refits = None, {}, []
        self.validation = ProgressiveValidation()
        if len(outcomes) >= FEWEST:
            self.unit = unit_of(list(outcomes.values()))
            self.model = self._built(*self._data(ledger, outcomes))
            self.held = outcomes

    def _rebuild(self, ledger: Ledger, outcomes: dict[int, float], former: StreamingGP) -> None:
        """Build a model of other outcomes, with hyperparameters and log of the former one."""
        self.model = self._built(*self._data(ledger, outcomes), deepcopy(former.covar_module))
        self.model._first_values = former._first_values
        set_hyperparameters(self.model, hyperparameters(former))
        for event in former.numerical_log:
            self.model.log_event(event.what, event.size, event.jitter)
        self.held = outcomes

    def _replace(
        self, ledger: Ledger, stale: dict[int, float], fresh: dict[int, float], model: StreamingGP
    ) -> None:
        if stale:
            model.retract(*self._data(ledger, stale))
        self.held = {key: Y for key, Y in self.held.items() if key not in stale}
        if fresh:
            self.validation.observe(model, *self._data(ledger, fresh))
        self.held |= fresh

    def _built(self, X: Tensor, Y: Tensor, kernel: Kernel | None = None) -> StreamingGP:
        settings = self.settings
        if kernel is None:
            kernel = KERNELS[settings.kernel](settings.dim)
        kernel, options = kernel.to(X), settings.model_options
        return build_model(settings.model, options, X, Y, kernel, settings.grid)

    def _data(self, ledger: Ledger, outcomes: Mapping[int, float]) -> tuple[Tensor, Tensor]:
        """Return inputs and outcomes, by key, as the model takes them."""
        X = self.settings.to_unit_cube([ledger[key].X for key in outcomes])
        Y = X.new_tensor([y / self.unit for y in outcomes.values()])
        return X, Y.unsqueeze(-1) * self.settings.sign


def learn(model: StreamingGP) -> None:
    """Learn hyperparameters in place (``relearn``).

    All features are used, as the noise may turn out to be smaller; then :func:`thin` is called.
    """
    if isinstance(model, AutoGP | WISKI):
        model.truncate(0.0)
    relearn(model)
    thin(model)


def thin(model: StreamingGP) -> None:
    """Truncate the features of a model on a grid, in place, to those that exceed the noise."""
    if isinstance(model, AutoGP | WISKI):
        model.truncate(LEFT_OUT)


def unit_of(Y: Sequence[float]) -> float:
    """Return a power of two near the spread of one or more outcomes: dividing by it is exact."""
    largest = max(abs(y) for y in Y)
    spread = max(max(Y) - min(Y), 1e-9 * largest)
    return float(2.0 ** round(math.log2(spread))) if spread > 0.0 else 1.0


def is_off(unit: float, Y: Sequence[float]) -> bool:
    """Return whether a unit is of another order than the spread of one or more outcomes."""
    return not 1.0 / OFF < unit_of(Y) / unit < OFF
