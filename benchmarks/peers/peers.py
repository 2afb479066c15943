"""The exact peers: BoTorch's ``SingleTaskGP``, stock and with two slips of gpytorch repaired.

Both repairs matter for fairness, for a stock exact fantasy is slower or wrong for no good reason:

- gpytorch 1.12 to 1.15 writes the mean cache of a conditioned model under one key and reads it
  under another, so the first posterior mean of a fantasy solves the whole system again;
- the covariance cache of a fantasy is detached, so gradients of BoTorch's qNIPV are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import gpytorch
from botorch.models import SingleTaskGP
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from gpytorch.kernels import Kernel
from gpytorch.models import exact_prediction_strategies as strategies
from torch import Tensor

from bo_stream.bases.kernels import as_product

KERNELS = ("RBF", "Matern-5/2")


def _with_policy(add_to_cache: Callable[..., Any]) -> Callable[..., Any]:
    def add(obj: object, name: str, value: object, *args: object, **kwargs: object) -> object:
        if name == "mean_cache" and not args:
            args = (gpytorch.settings.observation_nan_policy.value(),)
        return add_to_cache(obj, name, value, *args, **kwargs)

    return add


@contextmanager
def repaired() -> Iterator[None]:
    """Within it, exact fantasies read the mean cache they wrote, and variances have gradients."""
    with (
        mock.patch.object(strategies, "add_to_cache", _with_policy(strategies.add_to_cache)),
        gpytorch.settings.detach_test_caches(False),
    ):
        yield


PEERS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "stock": nullcontext,
    "repaired": repaired,
}


def default_kernel(name: str, d: int) -> Kernel:
    """BoTorch's kernel with dimension-scaled priors, for one of :data:`KERNELS`."""
    return get_covar_module_with_dim_scaled_prior(d, use_rbf_kernel=name == "RBF")


def product_kernel(name: str, d: int) -> Kernel:
    """The kernel of :func:`default_kernel` as a product over dimensions, which a grid can have.

    For RBF they are one; a Matern becomes a product of the same hyperparameters and priors.
    """
    return as_product(default_kernel(name, d), d)


def exact(kernel: str, X: Tensor, Y: Tensor, own: bool = False) -> SingleTaskGP:
    """``SingleTaskGP`` with a kernel of :data:`KERNELS` and every other default.

    Args:
        kernel: Its name.
        X: ``n x d``.
        Y: ``n x 1``.
        own: Take BoTorch's own Matern kernel instead of the product that WISKI has.
    """
    make = default_kernel if own else product_kernel
    return SingleTaskGP(X, Y, covar_module=make(kernel, X.shape[-1]))
