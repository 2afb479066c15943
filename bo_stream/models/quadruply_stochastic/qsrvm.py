"""QSRVM: a relevance vector machine that learns from a few data and a few functions a step."""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import Mean
from torch import Tensor
from torch.utils.data import Dataset

from bo_stream.models.base import StreamingGP
from bo_stream.models.checks import check_instance
from bo_stream.models.quadruply_stochastic.choice import (
    Chevron,
    InducingAtData,
    MeanField,
    Schedule,
)
from bo_stream.models.quadruply_stochastic.inference import (
    SUPPORT_PLACE,
    QuadruplyStochasticInference,
    build,
)
from bo_stream.models.quadruply_stochastic.memory import QuadruplyStochasticMemory
from bo_stream.models.quadruply_stochastic.steps import SampledGradient
from bo_stream.models.stochastic.replay import build_from
from bo_stream.models.stochastic.training import Training

RELEVANT = 1e4
"""Precisions below it are finite. [Evans2020, section I.3]"""


class QSRVM(StreamingGP):
    """A weighted sum of kernel functions at the data, of which most weights become zero.

    Each weight has a prior precision of its own, which is learned; where it goes to infinity the
    function is no part of the model (Tipping, 2001). Steps are those of :class:`~bo_stream.QSGP`
    (Evans and Nair, 2020, section I.3), and each gives the functions drawn their best precisions
    for what the weights are.

    - Memory, update and fantasy: as of :class:`~bo_stream.QSGP` with ``InducingAtData``, and one
      number more for each function.
    - Exact: the bound's optimum in each precision and its weight's variance, the mean held.
    - Approximate: as there. The prior is degenerate: far from all relevance vectors the variance is
      that of the noise alone.
    - When: a sparse model of very many data is wanted, not a good variance.

    Example:
        >>> model = QSRVM(train_X, train_Y)
        >>> model.fit(steps=2000)
        >>> model.relevance_vectors
    """

    _memory: QuadruplyStochasticMemory
    _inference: QuadruplyStochasticInference

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        likelihood: GaussianLikelihood | None = None,
        covar_module: Kernel | None = None,
        mean_module: Mean | None = None,
        outcome_transform: OutcomeTransform | _DefaultType | None = DEFAULT,
        input_transform: InputTransform | None = None,
        max_points: int = 100_000,
        covariance: MeanField | Chevron | None = None,
        batch_size: int | None = None,
        functions: int | None = None,
        control_points: int = 300,
        learning_rate: float = 0.1,
        empirical_bayes: bool = True,
        hyper_rate: float = 5e-3,
        freeze_steps: int = 200,
        half_life: float = math.inf,
        update_steps: int = 10,
        initial_points: int = 1000,
        max_rows: int | None = None,
        arithmetic: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> None:
        """Build the model, and take the first steps on the first observations.

        Arguments and errors are those of :class:`~bo_stream.QSGP`, but that the likelihood is
        Gaussian, the kernel any of gpytorch's (default: BoTorch's RBF kernel), and the basis that
        of at most ``max_points`` data. ``empirical_bayes`` says whether ``fit`` learns the kernel,
        the mean and the noise too; precisions are learned in any case, once ``freeze_steps`` are
        taken.
        """
        covariance = MeanField() if covariance is None else covariance
        check_instance("covariance", covariance, MeanField | Chevron, "MeanField()")
        if likelihood is not None and not isinstance(likelihood, GaussianLikelihood):
            raise UnsupportedError(
                "Expected likelihood to be a GaussianLikelihood, got "
                f"{type(likelihood).__name__}: precisions are learned for that alone. For other "
                "likelihoods take QSGP."
            )
        sizes = batch_size, functions, control_points, update_steps, initial_points, freeze_steps
        rates = learning_rate, hyper_rate, half_life
        schedule = Schedule(*sizes, *rates, arithmetic, seed)
        inference = QuadruplyStochasticInference(
            schedule, covariance.columns, max_rows, empirical_bayes, relevance=True
        )
        modules = likelihood, covar_module, mean_module, outcome_transform, input_transform
        build(self, inference, InducingAtData(max_points), (train_X, train_Y), *modules)

    @property
    def precisions(self) -> Tensor:
        """S of the functions, ``p``, or ``m x p`` for m > 1 outputs."""
        precisions = self._memory.progress.precisions
        assert precisions is not None  # noqa: S101
        own = precisions.to(self.train_targets, copy=True)
        return own.squeeze(0) if self._num_outputs == 1 else own

    @property
    def relevance_vectors(self) -> Tensor:
        """Points, in transformed inputs, whose function any output has use for, ``k x d``."""
        relevant = (self.precisions < RELEVANT).reshape(self._num_outputs, -1).any(0)
        return self._memory.layout.points[relevant].to(self.train_targets)

    @classmethod
    def from_dataset(cls, dataset: Dataset[Any], **options: Any) -> Self:
        """Build a model that learns from a data set; see :meth:`QSGP.from_dataset`."""
        return build_from(cls, dataset, options, SUPPORT_PLACE)

    def fit(
        self, steps: int | None = None, seconds: float | None = None, progress: bool = True
    ) -> Training:
        """Learn weights, precisions and hyperparameters by steps; see :meth:`QSGP.fit`."""
        self._check_not_conditioned("fit")
        limits = steps, seconds, progress
        return self._inference.fit(self._memory, self._prior, *limits, self._set_memory)

    @property
    def num_steps(self) -> int:
        """Steps taken so far, by updates and fits."""
        return self._memory.progress.steps

    @torch.no_grad()
    def elbo(self) -> Tensor:
        """Compute the bound on the log marginal likelihood; see :meth:`QSGP.elbo`."""
        return self.log_marginal_likelihood()

    @torch.no_grad()
    def elbo_estimate(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw an unbiased estimate of :meth:`elbo`; see :meth:`QSGP.elbo_estimate`."""
        estimate = self._inference.estimate(self._memory, self._prior, generator)
        return self._from_per_output(estimate)

    def elbo_gradient_estimate(
        self, generator: torch.Generator | None = None
    ) -> tuple[Tensor, SampledGradient]:
        """Draw the bound and its gradient; see :meth:`QSGP.elbo_gradient_estimate`."""
        return self._inference.gradient_estimate(self._memory, self._prior, generator)
