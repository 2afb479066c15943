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
    """Let an acquisition function evaluate the points that stay once, not with every candidate.

    Monte Carlo acquisition functions ask for the joint posterior of the candidates and the pending
    points, those like ``qLogNoisyExpectedImprovement`` and
    ``qLogNoisyExpectedHypervolumeImprovement`` of a baseline too: O((k + q) r²) for k such points
    and q candidates. Of streaming models, alone or in a list, it is O(q r² + k q r) after this;
    values and gradients stay as they are. Other models stay as they are too.

    Pending points that are set later are evaluated as before.

    Args:
        acqf: Changed in place; its model is not.
    """
    known: Any = acqf
    baseline = known.X_baseline if isinstance(acqf, CachedCholeskyMCSamplerMixin) else None
    pending = getattr(acqf, "X_pending", None)
    if baseline is not None or pending is not None:
        known.model = with_known_points(known.model, baseline, pending)
    return acqf


def with_known_points(model: Model, first: Tensor | None, last: Tensor | None) -> Model:
    """A model, or a list of models, for joint posteriors of known points around others.

    See :meth:`StreamingGP.with_known_points`.

    Args:
        model: Other models are returned as they are.
        first: Those before the others, ``k x d``.
        last: Those after the others, ``k' x d``.
    """
    if isinstance(model, StreamingGP):
        return model.with_known_points(first, last)
    if not isinstance(model, ModelList | ModelListGP):
        return model
    parts: list[Any] = [with_known_points(cast(Model, part), first, last) for part in model.models]
    return type(model)(*parts)
