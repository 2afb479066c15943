"""The kernels that a loop offers by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch is imported when a kernel is built, not for its name
    from gpytorch.kernels import Kernel


def _scaled_matern(nu: float) -> Callable[[int], Kernel]:
    """A scaled Matérn kernel with the priors of the WISKI paper's malaria study."""

    def build(dim: int) -> Kernel:
        from gpytorch.kernels import MaternKernel, ScaleKernel
        from gpytorch.priors import GammaPrior

        matern = MaternKernel(nu=nu, ard_num_dims=dim, lengthscale_prior=GammaPrior(3.0, 6.0))
        return ScaleKernel(matern, outputscale_prior=GammaPrior(2.0, 0.15))

    return build


def _rbf(dim: int) -> Kernel:
    """BoTorch's own default."""
    from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior

    kernel: Kernel = get_covar_module_with_dim_scaled_prior(dim)
    return kernel


KERNELS: dict[str, Callable[[int], Kernel]] = {
    "rbf": _rbf,
    "matern12": _scaled_matern(0.5),
    "matern32": _scaled_matern(1.5),
    "matern52": _scaled_matern(2.5),
}
"""Name to a function of the number of inputs, for inputs in the unit cube."""
