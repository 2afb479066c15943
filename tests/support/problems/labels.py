"""Labels to put into classifiers, and small classifiers to put them in."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.means import ConstantMean
from torch import Tensor

from bo_stream import DirichletWISKI

UNIT = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)


def labelled(n: int, classes: int = 3) -> tuple[Tensor, Tensor]:
    """Uniform points of the unit square, and labels by bands, some of them wrong."""
    X = torch.rand(n, 2, dtype=torch.float64)
    labels = (classes * (0.7 * X[:, 0] + 0.3 * X[:, 1])).long().clamp_max(classes - 1)
    wrong = torch.rand(n) < 0.1
    return X, torch.where(wrong, torch.randint(classes, (n,)), labels)


def small_classifier(X: Tensor, labels: Tensor, **options: Any) -> DirichletWISKI:
    """A model that keeps every eigenvector, with fixed hyperparameters."""
    kernel = ScaleKernel(RBFKernel(ard_num_dims=X.shape[-1]))
    kernel.outputscale = 5.0
    kernel.base_kernel.lengthscale = torch.tensor([[0.3, 0.4][: X.shape[-1]]])
    mean = ConstantMean()
    mean.constant = -2.5
    bounds = UNIT[:, : X.shape[-1]]
    defaults = {"covar_module": kernel, "mean_module": mean, "bounds": bounds}
    defaults |= {"grid_size": 9, "tolerance": 0.0}
    return DirichletWISKI(X, labels, **{**defaults, **options}).eval()
