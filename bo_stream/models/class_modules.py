"""The kernel and mean of class scores: one for all classes, so that later ones are well defined."""

from __future__ import annotations

from botorch.exceptions.errors import UnsupportedError
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.means import ConstantMean, Mean
from torch import Size

from bo_stream.models.module_checks import check_instance

OUTPUTSCALE = 6.0
"""At the start. Scores lie between about -7 (surely not) and 0."""

MEAN = -3.0
"""At the start."""


def default_kernel(dim: int) -> Kernel:
    """BoTorch's kernel with dimension-scaled priors and an output scale."""
    kernel = ScaleKernel(get_covar_module_with_dim_scaled_prior(dim))
    kernel.outputscale = OUTPUTSCALE
    return kernel


def default_mean() -> Mean:
    """A constant."""
    mean = ConstantMean()
    mean.constant = MEAN
    return mean


def check_shared(kernel: Kernel | None, mean: Mean | None) -> None:
    """Check that modules are not per class.

    Raises:
        UnsupportedError: One is.
    """
    if kernel is not None:
        check_instance("covar_module", kernel, Kernel, "ScaleKernel(RBFKernel(ard_num_dims=d))")
    if mean is not None:
        check_instance("mean_module", mean, Mean, "ConstantMean()")
    for name, module in (("covar_module", kernel), ("mean_module", mean)):
        shape = getattr(module, "batch_shape", Size())
        if len(shape) > 0:
            raise UnsupportedError(
                f"Expected {name} without batch shape where later classes may come, got one of "
                f"{tuple(shape)}: a class that comes late has the kernel and mean of all. Pass "
                "num_classes for modules per class."
            )
