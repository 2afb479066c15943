"""A metric's model that goes on from one trial to the next, and the rows in its memory.

:class:`Stream` is both; :class:`Record` is what a model has learned, for its successors, in this
process or another; :class:`LeaveOutModel` predicts rows without them, for cross-validation.
"""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NotRequired, TypedDict, cast

import numpy as np
import torch
from botorch.exceptions.errors import BotorchError
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.utils.datasets import SupervisedDataset
from gpytorch.constraints import Interval
from gpytorch.priors import Prior
from torch import Tensor

from bo_stream.diagnostics import leave_one_out, without
from bo_stream.diagnostics.cross_validation import retracts_exactly
from bo_stream.loops.optimization.surrogate import learn
from bo_stream.models.base import StreamingGP
from bo_stream.models.inducing.osgpr import OSGPR
from bo_stream.models.outcomes.noise import NOISE_FLOOR
from bo_stream.tensors import is_in, state_of

Moments = tuple[Tensor, Tensor]
"""Means and variances."""

REFIT = 1.3
"""Growth of the data beyond ``OFTEN`` at which hyperparameters are learned anew."""

OFTEN = 100
"""Number of observations up to which they are learned at every trial, as in Ax."""


@dataclass(frozen=True)
class Rows:
    """Observations of an experiment; rows of equal values are equal, whichever trials they are of.

    Attributes:
        X: Inputs, ``n x d``.
        Y: Outcomes, ``n x m``.
        Yvar: Noise variances, ``n x m``; NaN: unknown.
    """

    X: Tensor
    Y: Tensor
    Yvar: Tensor

    @classmethod
    def of(cls, data: SupervisedDataset, floor: float) -> Rows:
        """Take the observations of a data set, with known noise variances raised to a floor."""
        unknown = torch.full_like(data.Y, torch.nan)
        return cls(data.X, data.Y, unknown if data.Yvar is None else data.Yvar.clamp_min(floor))

    def __len__(self) -> int:
        """Return the number n of observations."""
        return len(self.X)

    def __getitem__(self, index: list[int] | Tensor) -> Rows:
        """Return some observations, by indices or a mask."""
        return Rows(self.X[index], self.Y[index], self.Yvar[index])

    @property
    def known_noise(self) -> Tensor | None:
        """Return the noise variances as models take them: None where none is known."""
        return None if bool(self.Yvar.isnan().all()) else self.Yvar

    @cached_property
    def keys(self) -> list[bytes]:
        """Return each row's values as bytes; the sign of a NaN or of a zero does not count.

        They are kept: the rows wanted at one trial are those held at the next.
        """
        values = torch.cat((self.X, self.Y, self.Yvar), -1).detach().cpu().double() + 0.0
        array = np.ascontiguousarray(torch.where(values.isnan(), torch.nan, values).numpy())
        return [row.tobytes() for row in array]

    def without(self, others: Rows) -> Rows:
        """Return the rows left when each other one has struck out one equal to it. Cost O(n)."""
        struck, left = Counter(others.keys), []
        for place, key in enumerate(self.keys):
            if struck[key] > 0:
                struck[key] -= 1
            else:
                left.append(place)
        return self[left]


def noise_floor(data: SupervisedDataset) -> float:
    """Return what known noise variances of zero are raised to, given a stream's first observations.

    It is ten times what a model raises them to. So a model that is built of more data does not
    raise them further, and equals one that has followed the stream.
    """
    variance = float(data.Y.var(correction=0))
    return 10.0 * NOISE_FLOOR * (variance if variance > 0.0 else 1.0)


@dataclass
class Stream:
    """A model and the rows in its memory.

    Attributes:
        model: The model, changed in place.
        rows: The rows in its memory.
        bounded: Whether it was built with the bounds of the search space.
        fitted_at: Number of observations at the last refit; 0: none yet.
    """

    model: StreamingGP
    rows: Rows
    bounded: bool
    fitted_at: int = 0
    _left_out: LeaveOutModel | None = None

    def follow(self, wanted: Rows) -> str | None:
        """Bring the model to the rows that it should have, or return why that cannot be done.

        A model that refuses an observation is left with some of them: it must be built anew then.
        """
        fresh, gone = wanted.without(self.rows), self.rows.without(wanted)
        if len(gone) > 0 and len(gone) >= len(self.rows):
            return "none of its observations is left"
        if len(gone) > 0 and not retracts_exactly(self.model):
            name = type(self.model).__name__
            return f"{len(gone)} observations are gone, and {name} cannot take them out"
        try:
            if len(fresh) > 0:
                self.model.update(fresh.X, fresh.Y, fresh.known_noise)
            if len(gone) > 0:
                self.model.retract(gone.X, gone.Y, gone.known_noise)
        except BotorchError as error:
            return f"the model refused them: {error}"
        self.rows = wanted
        return None

    def refit_if_due(self, growth: float | None) -> bool:
        """Learn hyperparameters if that :func:`is_due`; return whether it was."""
        count = len(self.rows)
        if not is_due(count, self.fitted_at, growth):
            return False
        learn(self.model)
        self.fitted_at = count
        return True

    def predict_without(self, gone: Tensor, X: Tensor, observation_noise: bool) -> Moments | None:
        """Predict points given all rows but some; see :meth:`LeaveOutModel.predict`."""
        known = self._left_out
        if known is None or known.rows is not self.rows or not is_in(self.model, known.state):
            known = self._left_out = LeaveOutModel(self.model, self.rows)
        return known.predict(gone, X, observation_noise)


def is_due(count: int, fitted_at: int, growth: float | None) -> bool:
    """Return whether hyperparameters are to be learned anew from a number of observations.

    Args:
        count: That number.
        fitted_at: That at the last refit; 0: none yet.
        growth: Factor by which it must have grown; 0: learn once; None: whenever there is another
            one up to ``OFTEN``, then whenever those beyond have grown by ``REFIT``.
    """
    if fitted_at == 0:
        return True
    if growth is not None:
        return growth > 0.0 and count >= growth * fitted_at
    return count > fitted_at and (count <= OFTEN or count - OFTEN >= REFIT * (fitted_at - OFTEN))


class Record(TypedDict):
    """Hyperparameters and standardisation after a refit, as Ax stores them with a generator run.

    Attributes:
        count: Number of observations at that refit.
        bounds: Bounds of the search space then.
        unit: Unit in which the model had the outcomes.
        floor: Value that known noise variances are raised to.
        bounded: Whether the model was given the bounds; not in records of older versions.
        values: What was learned, as nested lists by name in ``state_dict``.
    """

    count: int
    bounds: list[list[float]]
    unit: float
    floor: float
    bounded: NotRequired[bool]
    values: dict[str, Any]


def restore(model: StreamingGP, record: Record) -> bool:
    """Give a new model what one of the same shape had learned; return whether it has that shape."""
    state, former = learned_state(model), record["values"]
    if former.keys() != state.keys():
        return False
    values = {name: value.new_tensor(former[name]) for name, value in state.items()}
    if any(values[name].shape != value.shape for name, value in state.items()):
        return False
    model.load_state_dict({**model.state_dict(), **values})
    return True


def learned_state(model: StreamingGP) -> dict[str, Tensor]:
    """Return a model's state without what the search space, bounds and priors give."""
    modules = model.named_modules()
    constants = [f"{name}." for name, part in modules if isinstance(part, Interval | Prior)]
    given = ("input_transform.", *constants)
    return {name: v for name, v in model.state_dict().items() if not name.startswith(given)}


class LeaveOutModel:
    """A model and the rows in its memory, any of which can be left out in closed form.

    Attributes:
        model: The model; stays as it is.
        rows: All rows in its memory.
        state: State of the model for which the closed form holds.
    """

    def __init__(self, model: StreamingGP, rows: Rows) -> None:
        """Take a model as it is now."""
        self.model, self.rows, self.state = model, rows, state_of(model)

    def predict(self, gone: Tensor, X: Tensor, observation_noise: bool) -> Moments | None:
        """Predict points given all rows but some.

        Args:
            gone: Whether a row is left out, ``n``.
            X: Points, ``t x d``.
            observation_noise: Whether variances are of outcomes.

        Returns:
            Means and variances, ``t`` each; None: the model cannot say, or no row would be left.
        """
        if bool(gone.all()):
            return None
        try:
            is_one = int(gone.sum()) == 1 and torch.equal(X, self.rows.X[gone])
            if is_one and not observation_noise:
                mean, variance = self._each
                return mean[gone], variance[gone]
            return self._without(gone, X, observation_noise)
        except BotorchError:
            return None

    @cached_property
    def _complete(self) -> StreamingGP:
        """Return the model, or one at the same points that forgets no row. Cost O(n M²)."""
        model, rows = self.model, self.rows
        if not isinstance(model, OSGPR) or len(rows) <= model.window:
            return model
        fresh = deepcopy(model)
        fresh.allocator, fresh.window = None, len(rows)
        return fresh.clear().update(rows.X, rows.Y, rows.known_noise)

    @cached_property
    def _each(self) -> Moments:
        """Predict each row given all others. Cost O(n r²)."""
        rows = self.rows
        found = leave_one_out(self._complete, rows.X, rows.Y, rows.known_noise, False)
        return _moments(found.posterior)

    @torch.no_grad()
    def _without(self, gone: Tensor, X: Tensor, observation_noise: bool) -> Moments:
        rows = self.rows[gone]
        model = without(self._complete, rows.X, rows.Y, rows.known_noise)
        return _moments(model.posterior(X.unsqueeze(-2), observation_noise=observation_noise))


def _moments(posterior: object) -> Moments:
    known = cast(GPyTorchPosterior, posterior)
    return known.mean.flatten(), known.variance.flatten()
