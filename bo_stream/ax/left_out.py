"""One metric predicted without some of its rows, from the model that has them all."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from botorch.exceptions.errors import BotorchError
from botorch.posteriors.gpytorch import GPyTorchPosterior
from torch import Tensor

from bo_stream.ax.rows import Rows
from bo_stream.diagnostics import leave_one_out, without
from bo_stream.models.osgpr import OSGPR
from bo_stream.models.streaming_gp import StreamingGP
from bo_stream.module_state import State, is_in, state_of

Moments = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LeftOut:
    """A model and the rows in its memory, any of which can be left out.

    Attributes:
        model: Stays as it is.
        rows: All that it has.
        state: Of the model's hyperparameters, for which the closed form holds.
    """

    model: StreamingGP
    rows: Rows
    state: State

    @classmethod
    def of(cls, model: StreamingGP, rows: Rows) -> LeftOut:
        """Of a model as it is now."""
        return cls(model, rows, state_of(model))

    def is_of(self, model: StreamingGP, rows: Rows) -> bool:
        """Whether it is of this model with these rows, as they are now."""
        same = self.model is model and self.rows is rows
        return same and is_in(model, self.state)

    def predict(self, gone: Tensor, X: Tensor, observation_noise: bool) -> Moments | None:
        """Means and variances at X, ``t`` each, given all rows but some; None: it cannot say.

        Args:
            gone: Whether a row is left out, ``n``.
            X: ``t x d``.
            observation_noise: Whether variances are of outcomes.
        """
        if bool(gone.all()):
            return None  # no model has no data
        try:
            if self._is_one(gone, X) and not observation_noise:
                mean, variance = self._each
                return mean[gone], variance[gone]
            return self._without(gone, X, observation_noise)
        except BotorchError:
            return None

    def _is_one(self, gone: Tensor, X: Tensor) -> bool:
        return int(gone.sum()) == 1 and torch.equal(X, self.rows.X[gone])

    @cached_property
    def _told(self) -> StreamingGP:
        """The model, or one in whose window all the rows are, at the same points."""
        model = self.model
        if not isinstance(model, OSGPR) or len(self.rows) <= model.window:
            return model
        return with_all_rows(model, self.rows)

    @cached_property
    def _each(self) -> Moments:
        """Each row, given all others. Cost O(n r²)."""
        rows = self.rows
        found = leave_one_out(self._told, rows.X, rows.Y, rows.known_noise, False)
        return _moments(found.posterior)

    @torch.no_grad()
    def _without(self, gone: Tensor, X: Tensor, observation_noise: bool) -> Moments:
        rows = Rows(self.rows.X[gone], self.rows.Y[gone], self.rows.Yvar[gone])
        model = without(self._told, rows.X, rows.Y, rows.known_noise)
        return _moments(model.posterior(X.unsqueeze(-2), observation_noise=observation_noise))


def with_all_rows(model: OSGPR, rows: Rows) -> OSGPR:
    """A model of the same points and hyperparameters that forgets no row. Cost O(n M²)."""
    fresh = deepcopy(model)
    fresh.allocator = None
    fresh.window = len(rows)
    return fresh.clear().update(rows.X, rows.Y, rows.known_noise)


def _moments(posterior: object) -> Moments:
    known = cast(GPyTorchPosterior, posterior)
    return known.mean.flatten(), known.variance.flatten()
