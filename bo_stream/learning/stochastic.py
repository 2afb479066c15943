"""Hyperparameters learned by stochastic gradients, without a factor of all centres."""

from __future__ import annotations

import torch
from gpytorch.mlls import ExactMarginalLogLikelihood

from bo_stream.learning.fits import hyperparameters, with_priors
from bo_stream.models.clustered.clustered import ClusteredGP
from bo_stream.models.stochastic.optimisers import ConstrainedAdam


def maximise_stochastically(
    model: ClusteredGP,
    steps: int = 100,
    learning_rate: float = 0.05,
    probes: int = 10,
    batch_size: int = 1000,
    tolerance: float | None = None,
    seed: int = 0,
) -> ClusteredGP:
    """Learn a model's hyperparameters by Adam on stochastic gradients, in place.

    Each step follows an unbiased estimate of the gradient of the log marginal likelihood and the
    log priors; no matrix is factorised. Cost of a step O(M²) for each iteration of conjugate
    gradients. [Terenin2024, appendix B.2]

    Args:
        model: Not conditioned on hypothetical observations; left in evaluation mode.
        steps: Number of steps.
        learning_rate: Adam's step; for positive parameters in their logarithms.
        probes: Hutchinson's probes in a step.
        batch_size: Centres whose rows of the kernel are differentiated in a step.
        tolerance: Relative residual at which conjugate gradients stop; the model's if omitted.
        seed: Seed of probes and rows.

    Returns:
        The model.

    Raises:
        ValueError: The learning rate is negative.
    """
    model.train()
    ascent = ConstrainedAdam(model, hyperparameters(model), learning_rate)
    generator = torch.Generator().manual_seed(seed)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    count = max(model.num_observations, 1.0)
    for _ in range(steps):
        objective = model.stochastic_objective(probes, batch_size, generator, tolerance)
        ascent.ascend(with_priors(mll, objective) / count)
    return model.eval()
