"""What the constructor of a model of latent values checks and chooses."""

from __future__ import annotations

from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.outcome import OutcomeTransform, Standardize
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.likelihoods import (
    GaussianLikelihood,
    LaplaceLikelihood,
    Likelihood,
    StudentTLikelihood,
)
from torch import Size

from bo_stream.allocation.allocator import checked_number


def latent_kernel(dim: int, batch_shape: Size) -> Kernel:
    """BoTorch's kernel with dimension-scaled priors, and an output scale."""
    base = get_covar_module_with_dim_scaled_prior(dim, batch_shape=batch_shape)
    return ScaleKernel(base, batch_shape=batch_shape)


REAL = (GaussianLikelihood, LaplaceLikelihood, StudentTLikelihood)
"""Likelihoods of real outcomes, which are the same family in any units."""


def check_transform(transform: OutcomeTransform | None, likelihood: Likelihood | None) -> None:
    """Check that outcomes stay as they are, or are standardised where the likelihood allows it.

    Raises:
        UnsupportedError: Another transform, or a likelihood of labels or counts.
    """
    if transform is None:
        return
    if not isinstance(transform, Standardize):
        raise UnsupportedError(
            f"Expected outcome_transform to be Standardize or None, got {type(transform).__name__}:"
            " the likelihood is of outcomes as they are. Transform Y yourself."
        )
    if likelihood is not None and not isinstance(likelihood, REAL):
        raise UnsupportedError(
            f"Expected outcome_transform to be None with a {type(likelihood).__name__}, got "
            "Standardize: its outcomes are no real numbers of some unit."
        )


def check_steps(beta: float, rate: float, natural: int, hyper: int, fantasy: int) -> None:
    """Check the options of learning.

    Raises:
        ValueError: One is out of range.
    """
    for name, share in (("beta", beta), ("natural_rate", rate)):
        if not 0.0 < share <= 1.0:
            raise ValueError(f"Expected {name} in (0, 1], got {share}.")
    least = {
        "natural_steps": (natural, 1),
        "hyper_steps": (hyper, 0),
        "fantasy_steps": (fantasy, 1),
    }
    for name, (number, smallest) in least.items():
        checked_number(name, number, smallest)
