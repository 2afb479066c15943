"""What routines of BoTorch and GPyTorch ask of a model besides a posterior."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, Self

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.gpytorch import GPyTorchModel
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.models.gp import GP
from torch import Size, Tensor

from bo_stream.models.fitting import fit_apart
from bo_stream.process import PosteriorProcess

LATEST = 64
"""How many inputs of the latest observations a model holds."""

WAITING = 16
"""At most so many parts, of at most ``2 LATEST`` rows, are stored before they are joined."""


@dataclass(frozen=True)
class LatestInputs:
    """The last ``LATEST`` inputs that a model observed, and those of hypothetical observations.

    Attributes:
        parts: Observed, in order of arrival, each ``... x k x d``; they wait to be joined, so that
            an update costs one copy.
        hypothetical: Each ``... x q x d``, in the order in which a model was conditioned on them.
    """

    parts: tuple[Tensor, ...] = ()
    hypothetical: tuple[Tensor, ...] = ()

    @property
    def observed(self) -> Tensor | None:
        """Those observed, ``... x k x d``, or None before the first."""
        return _last(torch.cat(self.parts, -2)) if self.parts else None

    def with_rows(self, X: Tensor) -> LatestInputs:
        """After n more observations, ``... x n x d``. Cost O(LATEST d)."""
        new = _last(X.detach()).clone()
        former = self.parts if new.shape[-2] < LATEST else ()
        parts = (*former, new)
        if len(parts) > WAITING or sum(part.shape[-2] for part in parts) > 2 * LATEST:
            parts = (_last(torch.cat(parts, -2)),)
        return LatestInputs(parts, self.hypothetical)

    def followed_by(self, later: LatestInputs) -> LatestInputs:
        """Append those of another model, which observed all of its own later."""
        observed = later.observed
        return self if observed is None else self.with_rows(observed)

    def without(self, gone: Tensor, coordinates: Callable[[Tensor], Tensor]) -> LatestInputs:
        """Drop the latest of those rows that were taken out, as often as each was.

        Args:
            gone: In some coordinates, ``... x n x k``.
            coordinates: The map of inputs to them.
        """
        held = self.observed
        if held is None:
            return self
        rows, removed = _as_rows(coordinates(held)), _as_rows(gone)
        times = (rows.unsqueeze(1) == removed).all(-1).sum(-1)
        later = (rows.unsqueeze(1) == rows).all(-1).triu(1).sum(-1)
        return replace(self, parts=(held[..., later >= times, :],))

    def expanded(self, batch_shape: Size, like: Tensor, width: int) -> Tensor:
        """Return all of them in one tensor, ``batch_shape x k x d``.

        Args:
            batch_shape: That the model's posteriors have.
            like: Has the dtype and the device.
            width: Number d of inputs; hypothetical ones of another (under ``AppendFeatures``) are
                left out.
        """
        observed = self.observed
        held = like.new_empty(0, width) if observed is None else observed
        parts = (X.to(like) for X in (held, *self.hypothetical) if X.shape[-1] == width)
        return torch.cat([X.expand(*batch_shape, *X.shape[-2:]) for X in parts], -2)


def _last(X: Tensor) -> Tensor:
    """Return the last ``LATEST`` rows."""
    surplus = X.shape[-2] - LATEST
    return X.narrow(-2, surplus, LATEST) if surplus > 0 else X


def _as_rows(X: Tensor) -> Tensor:
    """Reshape ``batch_shape x n x d`` to ``n x (batch d)``: a row has all batches."""
    return X.double().movedim(-2, 0).flatten(1)


# --- answer what BoTorch's routines ask of a model beside a posterior: its training data ---------


class TrainInputs(Tensor):
    """The inputs that a model knows, as BoTorch reads training inputs: ``... x k x d``.

    A tensor as any other, but for the index -1, by which ``ProximalAcquisitionFunction`` asks for
    the last input. Operations on it return plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    last_input: Callable[[], Tensor]

    @classmethod
    def of(cls, X: Tensor, last_input: Callable[[], Tensor]) -> Self:
        """View a tensor so.

        Args:
            X: ``... x k x d``.
            last_input: Gives the last of them after the model's input transform, ``d'``.
        """
        result = X.as_subclass(cls)
        result.last_input = last_input
        return result

    def __getitem__(self, index: Any) -> Tensor:
        """Index as any tensor; -1 gives the last input after the input transform."""
        if isinstance(index, int) and index == -1:
            return self.last_input()
        return torch.Tensor.__getitem__(self, index)


def _refuse(self: Tensor, *args: object, **kwargs: object) -> NoReturn:
    raise UnsupportedError(
        "A streaming model does not keep the outcomes that this function reads from train_targets: "
        "hand it your own (in place of make_best_f: lambda model, X: {'best_f': "
        "model.posterior(X_observed).mean.amax((-2, -1))})."
    )


class UnkeptOutcomes(Tensor):
    """An empty tensor in place of outcomes that are not kept: it has their dtype and device.

    Functions of BoTorch that read outcomes do so by the methods below, which raise
    UnsupportedError. Operations on it return plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    max = size = unsqueeze = transpose = __sub__ = _refuse


class BoTorchHooks(GPyTorchModel, GP, ABC):
    """What routines of BoTorch and GPyTorch ask of a model besides a posterior, for StreamingGP."""

    covar_module: Kernel
    _input_dim: int
    _num_outputs: int
    _latest: LatestInputs = LatestInputs()
    _is_fitting: bool = False
    _has_transformed_inputs: bool = True  # routines that ask are sent to _original_train_inputs

    @abstractmethod
    def process(self, X: Tensor | None = None) -> PosteriorProcess:
        """Return the posterior as a process over transformed inputs."""

    @property
    def train_targets(self) -> Tensor:
        """An empty tensor of the model's dtype and device: outcomes are not kept.

        Those functions of BoTorch that read them raise UnsupportedError.
        """
        return next(self.covar_module.parameters()).new_empty(0).as_subclass(UnkeptOutcomes)

    @property
    def train_inputs(self) -> tuple[Tensor]:
        """Inputs of the latest observations, as they came, for functions of BoTorch that ask.

        At most ``LATEST`` of them and those of hypothetical observations, the last one last,
        ``batch_shape (x m if m > 1) x k x d``. For predictive entropy searches, which compare
        optima with the function there (single-objective ones do not depend on them), for max-value
        entropy searches, multi-objective joint ones and ``ProximalAcquisitionFunction``.
        """
        X = self._latest.expanded(self.batch_shape, self.train_targets, self._input_dim)
        if self.num_outputs > 1:
            X = X.unsqueeze(-3).expand(*self.batch_shape, self.num_outputs, *X.shape[-2:])
        return (TrainInputs.of(X, partial(self._last_input, X)),)

    @property
    def _original_train_inputs(self) -> Tensor:  # type: ignore[override]
        """Return :attr:`train_inputs` as a tensor, for routines that ask for untransformed ones.

        Raises:
            UnsupportedError: There are none, so that BoTorch starts its search without a baseline.
        """
        (X,) = self.train_inputs
        if X.shape[-2] == 0:
            raise UnsupportedError("Expected a model that has observed something, got an empty one")
        return X

    def _revert_to_original_inputs(self) -> None:
        """Leave observations as they are; overrides ``Model``'s, which a ``ModelListGP`` calls."""

    def _set_transformed_inputs(self) -> None:
        """Leave observations as they are, likewise."""

    @torch.no_grad()
    def _last_input(self, X: Tensor) -> Tensor:
        """Transform the last of some inputs as ``ProximalAcquisitionFunction`` expects it."""
        if self.batch_shape or X.shape[-2] == 0:
            raise UnsupportedError(
                "ProximalAcquisitionFunction needs the last input of a model with observations and "
                f"without a batch shape, got {X.shape[-2]} and {tuple(self.batch_shape)}: take "
                "PenalizedAcquisitionFunction with a GaussianPenalty around a point of your own."
            )
        last: Tensor = self.transform_inputs(X.reshape(-1, X.shape[-1])[-1:])
        return last.squeeze(-2)

    def forward(self, X: Tensor) -> MultivariateNormal:
        """Return the posterior at transformed inputs, in transformed units.

        Raises:
            BotorchTensorDimensionError: X is not as wide as transformed inputs are.
            InputDataError: X is not finite; on a grid, too far outside.
            UnsupportedError: X is :attr:`train_inputs`, at which BoTorch's cross-validation and its
                criteria of fit expect the prior, to compare outcomes with; or the model is in
                training mode, in which a loop of GPyTorch's does.
        """
        if isinstance(X, TrainInputs):
            raise UnsupportedError(
                "A streaming model does not keep the data that loo_cv, efficient_loo_cv and "
                "compute_in_sample_model_fit_metric read: take bo_stream.diagnostics."
                "leave_one_out(model, X, Y) or model.log_marginal_likelihood()."
            )
        if self.training:
            raise UnsupportedError(
                "Expected a model in evaluation mode, got one in training mode: its posterior "
                "knows the outcomes that a marginal likelihood would compare it with. Fit by "
                "fit_gpytorch_mll(mll), or minimise model.compute_custom_loss(mll) in a loop of "
                "your own; predict by model.posterior(X)."
            )
        joint = self.process(X).joint(X.to(torch.float64))
        zero = torch.zeros_like(joint.mean[..., :1])
        return joint.distribution(zero, zero + 1.0, None, X.dtype)

    @property
    def custom_fit(self) -> Callable[..., MarginalLogLikelihood]:
        """BoTorch's hook for fitting: batch elements and outputs apart, see :func:`fit_elements`.

        Raises:
            AttributeError: Such a fit is under way, for which BoTorch shall use its own routine.
        """
        if self._is_fitting:
            raise AttributeError("custom_fit is absent during a fit.")
        return self._fit

    def _fit(self, mll: MarginalLogLikelihood, **kwargs: Any) -> MarginalLogLikelihood:
        """Fit as ``fit_gpytorch_mll``, by :func:`fit_apart`; called by BoTorch's ``custom_fit``.

        Raises:
            UnsupportedError: The model is conditioned on hypothetical observations: it shares its
                hyperparameters with the original, and its own posterior would not follow them.
        """
        mll.model._check_not_conditioned("fit_gpytorch_mll")
        self._is_fitting = True
        try:
            return fit_apart(mll, **kwargs)
        finally:
            self._is_fitting = False
