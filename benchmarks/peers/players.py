"""Models that take part in an optimization: they observe, are refitted, and are asked."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from botorch.exceptions.errors import ModelFittingError
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.model import Model
from botorch.optim.closures import get_loss_closure_with_grads
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from bo_stream.models.base import StreamingGP

Parameters = dict[str, Tensor]
"""A model's hyperparameters by name."""


class Player(ABC):
    """A model that observes, is refitted, and is asked.

    Attributes:
        failed_fits: Refits that raised; the hyperparameters stay then.
    """

    failed_fits = 0

    def __init__(self, model: Model) -> None:
        """Begin with the default hyperparameters of a model."""
        self._defaults = parameters_of(model)

    @property
    @abstractmethod
    def model(self) -> Model:
        """As it is now."""

    @abstractmethod
    def update(self, X: Tensor, Y: Tensor) -> None:
        """Take observations, ``n x d`` and ``n x 1``."""

    def refit(self) -> None:
        """``fit_gpytorch_mll`` with every default, from the present hyperparameters."""
        try:
            fit_gpytorch_mll(ExactMarginalLogLikelihood(self.model.likelihood, self.model))
        except ModelFittingError:
            self.failed_fits += 1
            self.model.eval()

    def search(self) -> None:
        """Refit from the present and from the default hyperparameters; the better end is kept."""
        ends = []
        for start in (parameters_of(self.model), self._defaults):
            give_parameters(self.model, start)
            self.refit()
            ends.append((self._loss(), parameters_of(self.model)))
        give_parameters(self.model, min(ends, key=lambda end: end[0])[1])

    def _loss(self) -> float:
        """What a refit minimises."""
        mll = ExactMarginalLogLikelihood(self.model.likelihood, self.model).train()
        loss, _ = get_loss_closure_with_grads(mll, dict(self.model.named_parameters()))()
        self.model.eval()
        return float(loss)


class StreamPlayer(Player):
    """A streaming model, updated in place."""

    def __init__(self, model: StreamingGP) -> None:
        """Begin with a model of the first observations."""
        self._model = model
        super().__init__(model)

    @property
    def model(self) -> StreamingGP:
        """The one that follows the stream."""
        return self._model

    def update(self, X: Tensor, Y: Tensor) -> None:
        """In place."""
        self._model.update(X, Y)


class ExactPlayer(Player):
    """``SingleTaskGP`` with every default, built anew around the hyperparameters it had."""

    def __init__(self, X: Tensor, Y: Tensor) -> None:
        """Begin."""
        self._X, self._Y = X, Y
        self._model = SingleTaskGP(X, Y)
        super().__init__(self._model)

    @property
    def model(self) -> SingleTaskGP:
        """The last one."""
        return self._model

    def update(self, X: Tensor, Y: Tensor) -> None:
        """All data at once, standardised anew."""
        self._X, self._Y = torch.cat((self._X, X)), torch.cat((self._Y, Y))
        former = self._model.state_dict()
        self._model = SingleTaskGP(self._X, self._Y)
        kept = {k: v for k, v in former.items() if not k.startswith("outcome_transform")}
        self._model.load_state_dict(kept, strict=False)
        self._model.eval()


def parameters_of(model: Model) -> Parameters:
    """Copies."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def give_parameters(model: Model, values: Parameters) -> None:
    """Replace a model's."""
    model.load_state_dict(values, strict=False)
    model.eval()
