"""Noisy acquisition functions whose baseline is evaluated once."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.acquisition.cached_cholesky import CachedCholeskyMCSamplerMixin
from botorch.models.model import Model, ModelList
from botorch.models.model_list_gp_regression import ModelListGP
from torch import Tensor

from bo_stream.models.streaming_gp import StreamingGP

A = TypeVar("A", bound=AcquisitionFunction)


def evaluate_baseline_once(acqf: A) -> A:
    """Let an acquisition function evaluate its baseline once, not with every candidate.

    ``qLogNoisyExpectedImprovement``, ``qLogNoisyExpectedHypervolumeImprovement`` and their kind ask
    for the joint posterior of their baseline and the candidates, O((k + q) r²) for k and q points.
    Of streaming models, alone or in a list, it is O(q r² + k q r) after this; values and gradients
    stay as they are. Other acquisition functions and other models stay as they are too.

    Args:
        acqf: Changed in place; its model is not.
    """
    if _has_baseline(acqf):
        noisy: Any = acqf
        noisy.model = with_baseline(noisy.model, noisy.X_baseline)
    return acqf


def with_baseline(model: Model, X: Tensor) -> Model:
    """A model, or a list of models, for joint posteriors of k points with others after them.

    See :meth:`StreamingGP.with_baseline`.

    Args:
        model: Other models are returned as they are.
        X: ``k x d``.
    """
    if isinstance(model, StreamingGP):
        return model.with_baseline(X)
    if not isinstance(model, ModelList | ModelListGP):
        return model
    parts: list[Any] = [with_baseline(cast(Model, part), X) for part in model.models]
    return type(model)(*parts)


def _has_baseline(acqf: AcquisitionFunction) -> bool:
    return isinstance(acqf, CachedCholeskyMCSamplerMixin)
