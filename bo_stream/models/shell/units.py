"""Bring outcomes, noise variances and inputs from a user's units to those of the process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from botorch.exceptions.errors import UnsupportedError
from torch import Tensor

from bo_stream.models.outcomes.counts import CountOutcomes
from bo_stream.models.shell.construction import observed_inputs

if TYPE_CHECKING:
    from bo_stream.models.base import StreamingGP


def outcome_scale(model: StreamingGP) -> Tensor:
    """Factor from transformed to target units, ``batch_shape x m``; 1 without Standardize."""
    return model._outcomes.offset_and_scale(model._units.shift)[1].clone()


def transformed_noise(model: StreamingGP, Yvar: Tensor) -> Tensor:
    """Noise variances from original to transformed units, as ``noise`` is expected to be in.

    Args:
        model: Itself.
        Yvar: ``... x q x m``, as :meth:`update` takes them.

    Raises:
        UnsupportedError: Variances in transformed units depend on the outcomes.
    """
    if model._outcomes.fixed:
        names = ", ".join(type(step).__name__ for step in model._outcomes.fixed)
        raise UnsupportedError(
            f"Expected outcome_transform to be Standardize or None, got {names}: what variance "
            "the transformed outcomes have depends on the outcomes. Transform it yourself."
        )
    return Yvar / model.outcome_scale().unsqueeze(-2).square().to(Yvar)


def noise_level(model: StreamingGP) -> Tensor:
    """Return the learned noise variance, or the mean known one, ``batch_shape x m``.

    Where all that are known are zero: what they are raised to.

    Raises:
        UnsupportedError: The likelihood has no Gaussian noise.
    """
    return model._units.noise_level(model._prior, model._memory)


def noise_given(
    model: StreamingGP,
    inputs: Tensor,
    mean: Tensor,
    variance: Tensor,
    trials: Tensor | None = None,
) -> Tensor:
    """Noise variances of hypothetical observations, given the moments of the process there.

    Of counts those of observations of the logit with the same expected information, in units of
    the process; else :meth:`noise_at`, whatever the moments.

    Args:
        model: Itself.
        inputs: After :meth:`transform_inputs`, ``n x d``.
        mean: Of the process at each, ``n``.
        variance: Of the process at each, ``n``.
        trials: Examined at each, ``n``, of a model of counts; default: its likelihood's, else the
            rounded mean of those observed.

    Returns:
        Broadcastable to ``m x n``, float64.

    Raises:
        UnsupportedError: Trials of a model that is not of counts; a model of labels; or one of
            counts that knows of no number of trials.
    """
    if isinstance(model._units, CountOutcomes):
        return model._units.survey_noise(model._prior, mean, variance, trials)
    if trials is not None:
        raise UnsupportedError(
            "Expected trials only of a model of counts, with a BinomialLikelihood, got trials "
            f"for a {type(model).__name__} with a {type(model.likelihood).__name__}."
        )
    return model.noise_at(inputs).double()


def calibrated_inputs(model: StreamingGP, X: Tensor) -> Tensor:
    """Inputs as the process takes them by a stem that is calibrated on them, differentiable.

    Args:
        model: Itself.
        X: ``... x n x d``.
    """
    stem = getattr(model, "stem", None)
    if stem is None:
        return model.hypothetical_inputs(X)
    return stem.calibrated_forward(observed_inputs(X, getattr(model, "input_transform", None)))


@torch.no_grad()
def standardized(
    model: StreamingGP, X: Tensor, Y: Tensor, Yvar: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Outcomes and noise variances as the process has them, ``batch x m x n`` each, float64.

    Args:
        model: Itself.
        X: ``batch_shape x n x d``.
        Y: ``batch_shape x n x m``.
        Yvar: Known noise variances shaped as Y; NaN: unknown.
    """
    Y, Yvar, _ = model._units.checked(model, X, Y, Yvar, "standardized")
    return model._prior.standardized(model._observations(X, Y, Yvar, 1.0))
