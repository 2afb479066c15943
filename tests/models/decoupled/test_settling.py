"""Trainings of decoupled models that settle: their rates fall to zero at the end."""

from __future__ import annotations

import pytest
import torch
from gpytorch.means import ZeroMean

from bo_stream.models.decoupled.learner import DecoupledLearner
from tests.models.decoupled.test_learning import NOISE, D, data, fixed_kernel, small
from tests.support.problems.likelihoods import LIKELIHOODS


@pytest.mark.parametrize("parametrization", ["spectral", "hybrid", "direct"])
def test_rates_fall_to_zero_in_the_last_quarter_of_a_training_that_settles(
    parametrization: str,
) -> None:
    """At half the way nothing changes; seven eighths take half a step; at the end nothing moves."""
    X, Y = data(60)
    moves = []
    for part in (0.0, 0.5, 0.875, 1.0):
        model = small(X, Y, update_steps=3, parametrization=parametrization)
        sizes = model._inference.growth, model._inference.schedule
        learner = DecoupledLearner(model._memory, model.prior, *sizes, growing=False)
        before = [learner.memory.posterior.coefficients, *learner.learned_state()[1]]
        learner.settle(part)
        learner.take_step()
        after = [learner.memory.posterior.coefficients, *learner.learned_state()[1]]
        moves.append([b - a for a, b in zip(before, after, strict=True)])
    for whole, same, half, none in zip(*moves, strict=True):
        assert float(whole.abs().max()) > 0.0
        torch.testing.assert_close(same, whole, rtol=1e-6, atol=1e-9)
        assert float(half.abs().max()) < 0.6 * float(whole.abs().max())
        assert float(none.abs().max()) < 1e-12


@pytest.mark.integration
def test_a_training_that_settles_ends_higher() -> None:
    """With less of the noise of its minibatches, for each of three seeds."""
    kernel, likelihood = fixed_kernel(), LIKELIHOODS["gaussian"]().requires_grad_(False)
    kernel.base_kernel.lengthscale = 0.1
    modules = {"covar_module": kernel, "likelihood": likelihood, "mean_module": ZeroMean()}
    sizes = {"num_mean": 200, "num_covar": 40, "num_added": 64, "batch_size": 50}
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        X = torch.rand(300, D, dtype=torch.float64, generator=generator)
        noise = torch.randn(300, 1, dtype=torch.float64, generator=generator)
        Y = (20.0 * X[:, :1]).sin() + X[:, 1:] ** 2 + NOISE**0.5 * noise
        bounds = []
        for settle in (False, True):
            model = small(X, Y, initial_points=0, seed=seed, **sizes, **modules)
            model.fit(100, settle=settle, progress=False)
            bounds.append(float(model.elbo()))
        assert bounds[0] < bounds[1]
