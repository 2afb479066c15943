"""The best of the points that were observed."""

from __future__ import annotations

from ax.core.search_space import SearchSpaceDigest
from ax.generators.torch.botorch_modular.surrogate import Surrogate
from ax.generators.torch.utils import _get_X_pending_and_observed
from ax.generators.torch_base import TorchOptConfig
from torch import Tensor

from bo_stream.ax.acquisition import ranked


def best_observed(
    surrogate: Surrogate, digest: SearchSpaceDigest, config: TorchOptConfig
) -> Tensor | None:
    """The observed point of the best posterior mean, ``d``, or None where none is feasible.

    Args:
        surrogate: The fitted models.
        digest: Bounds of the search space.
        config: One objective, outcome constraints, constraints on parameters.
    """
    _, X = _get_X_pending_and_observed(
        Xs=surrogate.Xs,
        objective_weights=config.objective_weights,
        bounds=digest.bounds,
        outcome_constraints=config.outcome_constraints,
        linear_constraints=config.linear_constraints,
        fixed_features=config.fixed_features,
    )
    if X is None:
        return None
    return ranked(surrogate.model, X, config.objective_weights, config.outcome_constraints)[1]
