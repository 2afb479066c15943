"""Answer what BoTorch's routines ask of a model beside a posterior: its training data, mostly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from bo_stream.models.checks import check_hypothetical, check_inputs
from bo_stream.models.shell.posteriors import (
    check_query,
    keeps_tensors,
    leave_training,
    process_inputs,
    pseudo_observations,
    solved,
    transform_inputs,
    with_process,
)
from bo_stream.process.cached_baseline import CachedBaseline, arrangements

if TYPE_CHECKING:
    from bo_stream.models.base import StreamingGP

M = TypeVar("M", bound="StreamingGP")


def train_inputs(model: StreamingGP) -> tuple[Tensor]:
    """Inputs of the latest observations, as they came, for functions of BoTorch that ask.

    At most ``LATEST`` of them and those of hypothetical observations, the last one last,
    ``batch_shape (x m if m > 1) x k x d``. For predictive entropy searches, which compare
    optima with the function there (single-objective ones do not depend on them), for max-value
    entropy searches, multi-objective joint ones and ``ProximalAcquisitionFunction``.
    """
    X = model._latest.expanded(model.batch_shape, model.train_targets, model._input_dim)
    if model.num_outputs > 1:
        X = X.unsqueeze(-3).expand(*model.batch_shape, model.num_outputs, *X.shape[-2:])
    return (TrainInputs.of(X, partial(_last_input, model, X)),)


def original_train_inputs(model: StreamingGP) -> Tensor:
    """Return the inputs of :attr:`train_inputs`, where BoTorch asks for those before transforms.

    Raises:
        UnsupportedError: There are none, so that BoTorch starts its search without a baseline.
    """
    (X,) = model.train_inputs
    if X.shape[-2] == 0:
        raise UnsupportedError("Expected a model that has observed something, got an empty one")
    return X


@torch.no_grad()
def _last_input(model: StreamingGP, X: Tensor) -> Tensor:
    """Transform the last of some inputs as ``ProximalAcquisitionFunction`` expects it."""
    if model.batch_shape or X.shape[-2] == 0:
        raise UnsupportedError(
            "ProximalAcquisitionFunction needs the last input of a model with observations and "
            f"without a batch shape, got {X.shape[-2]} and {tuple(model.batch_shape)}: take "
            "PenalizedAcquisitionFunction with a GaussianPenalty around a point of your own."
        )
    last: Tensor = transform_inputs(model, X.reshape(-1, X.shape[-1])[-1:])
    return last.squeeze(-2)


def forward(model: StreamingGP, X: Tensor) -> MultivariateNormal:
    """Return the posterior at transformed inputs, in transformed units.

    Raises:
        UnsupportedError: X is :attr:`train_inputs`, at which BoTorch expects the prior.
    """
    check_not_train_inputs(X)
    joint = model.process(X).joint(X.to(torch.float64))
    zero = torch.zeros_like(joint.mean[..., :1])
    return joint.distribution(zero, zero + 1.0, None, X.dtype)


def get_fantasy_model(
    model: M, inputs: Tensor, targets: Tensor, noise: Tensor | None = None, **kwargs: Any
) -> M:
    """Condition on hypothetical observations in transformed units, as ``ModelListGP`` asks.

    Args:
        model: Itself.
        inputs: ``batch_shape x q x d``.
        targets: Outcomes in transformed units, ``batch_shape' (x m if m > 1) x q``.
        noise: Variances shaped as targets, in transformed units; the model's own if omitted.
        kwargs: Ignored, for BoTorch's callers.

    Raises:
        BotorchTensorDimensionError: A wrong width, number of rows or batch shape.
        InputDataError: A wrong dtype or device, NaN or infinity, or a negative noise.
        UnsupportedError: The model has an input transform, which ``ModelListGP`` leaves out.
    """
    transform = getattr(model, "input_transform", None)
    if transform is not None:
        raise UnsupportedError(
            "get_fantasy_model cannot know whether its inputs are transformed "
            "(ModelListGP.condition_on_observations leaves out the model's "
            f"{type(transform).__name__}). Use condition_on_observations of each "
            "model and build the list from what they return."
        )
    leave_training(model)
    check_inputs(inputs, model._input_dim, model.train_targets, finite=True)
    rows = _as_rows(model, targets)
    variances = None if noise is None else _as_rows(model, noise)
    check_hypothetical(inputs, rows, variances, model.num_outputs * model._units.columns)
    known = None if variances is None else variances.double().mT
    X = inputs.double()
    process = solved(model, model._inference.process, X)
    told = pseudo_observations(model, process, X, rows.double().mT, known)
    return with_process(model, process.condition(X, *told), inputs)


def _as_rows(model: StreamingGP, values: Tensor) -> Tensor:
    """Bring GPyTorch's ``... (x m if m > 1) x q`` to ``... x q x m``."""
    return values.unsqueeze(-1) if model.num_outputs == 1 else values.mT


@keeps_tensors
def with_known_points(model: M, first: Tensor | None = None, last: Tensor | None = None) -> M:
    """Evaluate k points once, for joint posteriors of them and others; return a model.

    For acquisition functions with a baseline, which BoTorch puts before the candidates, and
    with pending points, which it puts after them: the candidates then cost O(q r² + k q r) a
    batch instead of O((k + q) r²). Posteriors are those of this model as it is now; gradients
    flow to what is between the known points, not to them. As a fantasy model it cannot be updated.

    Args:
        model: Itself.
        first: Those before the others, ``batch_shape x k x d``.
        last: Those after the others, ``batch_shape x k' x d``.

    Raises:
        BotorchTensorDimensionError: One has the wrong width or too few dimensions.
        InputDataError: One has a wrong dtype or device, is not finite, or is outside the
            bounds.
    """
    leave_training(model)
    for X in (first, last):
        if X is not None:
            check_query(model, X)
    known = arrangements(first, last)
    inputs = [process_inputs(model, X) for X, _ in known]
    process = solved(model, model._inference.process, inputs[0] if inputs else None)
    prepared = with_process(model, process)
    prepared._known = tuple(
        CachedBaseline.of(X, leading, process, own)
        for (X, leading), own in zip(known, inputs, strict=True)
    )
    return prepared


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


def check_not_train_inputs(X: Tensor) -> None:
    """Check that a distribution is not asked for at the training inputs, to compare outcomes with.

    Raises:
        UnsupportedError: It is, by BoTorch's cross-validation or by its criteria of fit.
    """
    if isinstance(X, TrainInputs):
        raise UnsupportedError(
            "A streaming model does not keep the data that loo_cv, efficient_loo_cv and "
            "compute_in_sample_model_fit_metric read: take "
            "bo_stream.diagnostics.leave_one_out(model, X, Y) or model.log_marginal_likelihood()."
        )


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
