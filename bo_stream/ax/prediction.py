"""Posterior means of all metrics at many points."""

from __future__ import annotations

from typing import cast

import torch
from botorch.models.model import Model, ModelList
from botorch.models.model_list_gp_regression import ModelListGP
from botorch.posteriors.gpytorch import GPyTorchPosterior
from torch import Tensor

from bo_stream.loops.prediction import predict_mean
from bo_stream.models.streaming_gp import StreamingGP

CHUNK = 4096
"""Points that another model predicts at once."""


@torch.no_grad()
def predicted_means(model: Model, X: Tensor) -> Tensor:
    """Posterior means, ``n x d -> n x m``; of streaming models O(r) a point.

    Args:
        model: Of m outputs, or a list of models.
        X: As the model takes them.
    """
    if isinstance(model, ModelList | ModelListGP):
        return torch.cat([predicted_means(cast(Model, part), X) for part in model.models], -1)
    if isinstance(model, StreamingGP) and model.num_outputs == 1:
        return predict_mean(model, X).unsqueeze(-1)
    return torch.cat([_marginal_means(model, chunk) for chunk in X.split(CHUNK)])


def _marginal_means(model: Model, X: Tensor) -> Tensor:
    posterior = cast(GPyTorchPosterior, model.posterior(X.unsqueeze(-2)))
    return posterior.mean.squeeze(-2)
