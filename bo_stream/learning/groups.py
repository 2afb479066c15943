"""Which parameters of a model are its stem's, and which its hyperparameters."""

from __future__ import annotations

from typing import Any

from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor
from torch.nn import Parameter

from bo_stream.models.streaming_gp import StreamingGP


def stem_parameters(model: StreamingGP) -> list[Parameter]:
    """Learnable parameters of the stem."""
    stem: Any = model._modules.get("stem")
    return [] if stem is None else [p for p in stem.parameters() if p.requires_grad]


def hyperparameters(model: StreamingGP) -> list[Parameter]:
    """Learnable parameters of kernel, mean and likelihood."""
    own = {id(p) for p in stem_parameters(model)}
    return [p for p in model.parameters() if p.requires_grad and id(p) not in own]


def with_priors(mll: ExactMarginalLogLikelihood, log_likelihood: Tensor) -> Tensor:
    """The log likelihood plus the log priors of all hyperparameters, summed over outputs.

    Args:
        mll: Of the model and its likelihood: it knows their priors.
        log_likelihood: ``batch_shape (x m if m > 1)``.
    """
    total: Tensor = mll._add_other_terms(log_likelihood.clone(), []).sum()
    return total
