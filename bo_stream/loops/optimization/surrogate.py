"""The model beside the ledger: it holds the told outcomes, no more and no less."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.loops.errors import UsageError
from bo_stream.loops.kernels import KERNELS
from bo_stream.loops.models import MODELS, Options, build_model
from bo_stream.loops.optimization.settings import OptimizationSettings
from bo_stream.loops.optimization.trials import Ledger
from bo_stream.loops.prediction import predict_mean
from bo_stream.loops.refits import FEW_PER_INPUT, learn
from bo_stream.loops.units import is_off, unit_of
from bo_stream.models.refit import (
    Hyperparameters,
    hyperparameters,
    learned_values,
    set_hyperparameters,
)
from bo_stream.models.streaming_gp import StreamingGP

FEWEST = 2
"""Outcomes from which a model can be built."""


class Surrogate:
    """A model over the unit cube that follows a ledger by differences.

    What was told since is put in by ``update``, what was withdrawn is taken out by ``retract``, an
    amended outcome is both. So a step costs the same whatever was told before. A model that cannot
    take outcomes out exactly is built anew from all that are left; so is any model when the spread
    of the outcomes turns out to be of another order. Outcomes enter in the order of keys, not of
    arrival.

    Attributes:
        model: None until there are enough outcomes.
        held: Key to outcome, of what is in the model's memory.
        refits: Numbers of outcomes at which the hyperparameters were learned.
        revision: Grows whenever the model changes.
        is_whole: False while the model is on its way to what the ledger says.
        unit: In which the model has the outcomes: acquisition functions have absolute tolerances.
    """

    def __init__(
        self,
        settings: OptimizationSettings,
        model: StreamingGP | None = None,
        held: dict[int, float] | None = None,
        refits: Sequence[int] = (),
        revision: int = 0,
    ) -> None:
        """Begin empty, or with what a checkpoint held.

        Raises:
            UsageError: A model cannot be built with these settings: said before any evaluation.
        """
        self.settings = settings
        self.model = model
        self.held = {} if held is None else dict(held)
        self.refits = list(refits)
        self.revision = revision
        self.unit = 1.0
        self.is_whole = True
        if model is None:
            self._built(*self._no_data())

    def follow(self, ledger: Ledger) -> None:
        """Bring the model to the ledger's told outcomes, and learn hyperparameters where due.

        Raises:
            UsageError: A model cannot be built with these settings.
        """
        wanted = {trial.key: trial.Y for trial in ledger.with_status("told")}
        stale = [key for key, Y in self.held.items() if wanted.get(key) != Y]
        fresh = [key for key, Y in wanted.items() if self.held.get(key) != Y]
        if not stale and not fresh:
            return
        self.revision += 1
        self.is_whole = False
        few = self.model is None or len(self.held) - len(stale) < FEWEST
        if few or is_off(self.unit, [_outcome(ledger, key) for key in wanted]):
            self._begin(ledger, sorted(wanted))
        elif stale and not MODELS[self.settings.model].retracts and self.model is not None:
            self._rebuild(ledger, sorted(wanted), self.model)
        else:
            self._take_out(ledger, sorted(stale))
            self._put_in(ledger, fresh)
        self._refit_if_due(ledger)
        self.is_whole = True

    def _begin(self, ledger: Ledger, keys: list[int]) -> None:
        self.model, self.held, self.refits = None, {}, []
        if len(keys) < FEWEST:
            return
        self.unit = unit_of([_outcome(ledger, key) for key in keys])
        self.model = self._built(*self._data(ledger, keys))
        self.held = {key: _outcome(ledger, key) for key in keys}

    def _rebuild(self, ledger: Ledger, keys: list[int], former: StreamingGP) -> None:
        """Of the outcomes of these keys, with the hyperparameters and the record of before."""
        self.model = self._built(*self._data(ledger, keys), deepcopy(former.covar_module))
        set_hyperparameters(self.model, hyperparameters(former))
        for event in former.numerical_log:
            self.model.log_event(event.what, event.size, event.jitter)
        self.held = {key: _outcome(ledger, key) for key in keys}

    def _built(
        self, X: Tensor, Y: Tensor, kernel: Kernel | None = None, more: Options | None = None
    ) -> StreamingGP:
        settings = self.settings
        if kernel is None:
            kernel = KERNELS[settings.kernel](settings.dim)
        options = {**settings.model_options, **(more or {})}
        return build_model(settings.model, options, X, Y, kernel.to(X), settings.grid)

    def _take_out(self, ledger: Ledger, keys: list[int]) -> None:
        if not keys or self.model is None:
            return
        X = self.settings.to_unit_cube([ledger[key].X for key in keys])
        self.model.retract(X, self._outcomes([self.held[key] for key in keys]))
        for key in keys:
            del self.held[key]

    def _put_in(self, ledger: Ledger, keys: list[int]) -> None:
        if not keys or self.model is None:
            return
        self.model.update(*self._data(ledger, keys))
        self.held |= {key: _outcome(ledger, key) for key in keys}

    def _data(self, ledger: Ledger, keys: list[int]) -> tuple[Tensor, Tensor]:
        X = self.settings.to_unit_cube([ledger[key].X for key in keys])
        return X, self._outcomes([_outcome(ledger, key) for key in keys])

    def _no_data(self) -> tuple[Tensor, Tensor]:
        return self.settings.to_unit_cube([]), self._outcomes([])

    def _outcomes(self, Y: list[float]) -> Tensor:
        return self.settings.tensor([y / self.unit for y in Y]).unsqueeze(-1) * self.settings.sign

    def _refit_if_due(self, ledger: Ledger) -> None:
        if self.model is None:
            return
        growth, count = self.settings.refit, len(self.held)
        if not self.refits or (growth > 0.0 and count >= growth * self.refits[-1]):
            learn(self.model, self._further_starts(ledger))
            self.refits.append(count)

    def _further_starts(self, ledger: Ledger) -> list[Hyperparameters]:
        if not self.refits or len(self.held) > FEW_PER_INPUT * self.settings.dim:
            return []
        data = self._data(ledger, sorted(self.held)[:FEWEST])
        draft = self._built(*data, more=MODELS[self.settings.model].unlearned)
        return [learned_values(draft)]

    @torch.no_grad()
    def means(self, X: Tensor) -> Tensor:
        """Posterior means at ``n x d`` points of the unit cube, ``n``; large: good; in ``unit``."""
        if self.model is None:
            raise UsageError(f"There is no model yet: it needs {FEWEST} outcomes.")
        return predict_mean(self.model, X)


def _outcome(ledger: Ledger, key: int) -> float:
    value = ledger[key].Y
    if value is None:
        raise UsageError(f"Trial {key} has no outcome.")
    return value
