"""Sets for sparse regression whose hyperparameters are learned once: what differs is Z alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from botorch.fit import fit_gpytorch_mll
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
from gpytorch.means import ZeroMean
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from benchmarks.common.data import levy, real, real_file
from benchmarks.common.harness import Options
from bo_stream import OSGPR
from bo_stream.allocation import GreedyVariance
from bo_stream.bases.inducing import frozen

TRAIN, HELD = 20_000, 5_000
"""Rows of modis_lst; of a smaller set a fifth is held out."""
POINTS, WINDOW, ROUNDS = 512, 512, 2
"""What hyperparameters are learned with."""


@dataclass(frozen=True)
class Problem:
    """A set and its hyperparameters.

    Attributes:
        name: Of the set.
        X: Training inputs, ``n x d``, in random order; in lengthscales once these are learned.
        Y: Standardised, ``n x 1``.
        test_X: Held out, ``n' x d``.
        test_Y: ``n' x 1``.
        kernel: RBF.
        noise: Its variance.
        lengthscales: In sd of the inputs, once learned.
    """

    name: str
    X: Tensor
    Y: Tensor
    test_X: Tensor
    test_Y: Tensor
    kernel: Kernel
    noise: float
    lengthscales: tuple[float, ...] = ()

    @property
    def dim(self) -> int:
        """Number of inputs."""
        return self.X.shape[-1]

    def shuffled(self, seed: int) -> Tensor:
        """Training inputs in another order; seed 0: as they are."""
        if seed == 0:
            return self.X
        generator = torch.Generator().manual_seed(seed)
        return self.X[torch.randperm(len(self.X), generator=generator)]

    def model(self, Z: Tensor, window: int = 0) -> OSGPR:
        """Of all training rows, with the points Z."""
        model = OSGPR(
            self.X[:0],
            self.Y[:0],
            covar_module=self.kernel,
            mean_module=ZeroMean(),
            outcome_transform=None,
            inducing_points=Z,
            max_points=len(Z),
            window=window,
        )
        model.likelihood.noise = self.noise
        return model.eval().update(self.X, self.Y)

    def settings(self) -> dict[str, object]:
        """Sizes and hyperparameters."""
        return {
            "rows": len(self.X),
            "held": len(self.test_X),
            "lengthscales": self.lengthscales,
            "outputscale": float(self.kernel.outputscale),
            "noise": self.noise,
        }


def problem_of(name: str, options: Options) -> Problem:
    """A set, standardised by its training rows, with hyperparameters learned from them."""
    X, y = _rows(name, options)
    held = options.pick(min(HELD, len(X) // 5), 60)
    train = slice(held, held + TRAIN)
    X = (X - X[train].mean(0)) / X[train].std(0)
    y = (y - y[train].mean()) / y[train].std()
    kernel = ScaleKernel(RBFKernel(ard_num_dims=X.shape[-1]))
    raw = Problem(name, X[train], y[train], X[:held], y[:held], kernel, 0.1)
    return _learned(raw, options.pick(POINTS, 20), options.pick(ROUNDS, 1))


def _rows(name: str, options: Options) -> tuple[Tensor, Tensor]:
    """Inputs and target in random order; a simulated set in a smoke run."""
    if options.smoke:
        return levy(300, d=2 if name == "modis_lst" else 4)
    X, y = real(name)
    if name == "modis_lst":
        with np.load(real_file(name), allow_pickle=False) as arrays:
            training = ~torch.as_tensor(arrays["test_mask"][:, 0])
        X, y = X[training], y[training]
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
    return X[order], y[order]


def _learned(problem: Problem, points: int, rounds: int) -> Problem:
    """With hyperparameters by the bound, in rounds of which each places its points anew."""
    for _ in range(rounds):
        Z = GreedyVariance(points).update(problem.X[:0], problem.X, problem.kernel)
        model = problem.model(Z, WINDOW)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))  # learns the kernel
        problem = replace(problem, noise=float(model.likelihood.noise.detach()))
    return _in_lengthscales(problem)


def _in_lengthscales(problem: Problem) -> Problem:
    """The same with inputs in units of the lengthscales."""
    kernel = frozen(problem.kernel)
    scale = kernel.base_kernel.lengthscale.squeeze(0)
    isotropic = ScaleKernel(RBFKernel())
    isotropic.outputscale = kernel.outputscale
    isotropic.base_kernel.lengthscale = 1.0
    X, test_X = problem.X / scale, problem.test_X / scale
    return replace(
        problem,
        X=X,
        test_X=test_X,
        kernel=frozen(isotropic),
        lengthscales=tuple(scale.tolist()),
    )
