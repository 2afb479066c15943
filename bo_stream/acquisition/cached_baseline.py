"""Acquisition functions whose baseline and pending points are evaluated once."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.acquisition.cached_cholesky import CachedCholeskyMCSamplerMixin
from botorch.models.model import Model, ModelList
from botorch.models.model_list_gp_regression import ModelListGP
from torch import Tensor

from bo_stream.models.base import StreamingGP

A = TypeVar("A", bound=AcquisitionFunction)


def evaluate_known_points_once(acqf: A) -> A:
    """Cache the model's evaluations at an acquisition function's baseline and pending points.

    Monte Carlo acquisition functions ask for the joint posterior of q candidates and k points that
    stay: pending ones, and the baseline of those like ``qLogNoisyExpectedImprovement`` and
    ``qLogNoisyExpectedHypervolumeImprovement``. Cost of streaming models, alone or in a list,
    O(q r² + k q r) instead of O((k + q) r²); values and gradients stay as they are. Other models
    stay as they are, and pending points that are set later are evaluated with every candidate.

    Args:
        acqf: Changed in place; its model is not.
    """
    known: Any = acqf
    baseline = known.X_baseline if isinstance(acqf, CachedCholeskyMCSamplerMixin) else None
    pending = getattr(acqf, "X_pending", None)
    if baseline is not None or pending is not None:
        known.model = _with_known_points(known.model, baseline, pending)
    return acqf


def _with_known_points(model: Model, first: Tensor | None, last: Tensor | None) -> Model:
    """Return a model, or list of models, that caches k points before and k' after all others."""
    if isinstance(model, StreamingGP):
        return model.with_known_points(first, last)
    if not isinstance(model, ModelList | ModelListGP):
        return model
    parts: list[Any] = [_with_known_points(cast(Model, part), first, last) for part in model.models]
    return type(model)(*parts)
