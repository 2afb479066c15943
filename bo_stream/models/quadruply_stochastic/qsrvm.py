"""QSRVM: a relevance vector machine that learns from a few data and a few functions a step."""

from __future__ import annotations

import math

import torch
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import Mean
from torch import Tensor

from bo_stream.bases.sampled import SampledBasis
from bo_stream.models.quadruply_stochastic.choice import (
    Chevron,
    InducingAtData,
    MeanField,
    StepOptions,
    check_columns,
    check_gaussian,
)
from bo_stream.models.quadruply_stochastic.gp import QuadrupleGP

RELEVANT = 1e4
"""Precisions below it are finite. [Evans2020, section I.3]"""


class QSRVM(QuadrupleGP):
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

        Args:
            train_X: ``n x d``; n may be 0.
            train_Y: ``n x m``.
            likelihood: A ``GaussianLikelihood``; default: BoTorch's.
            covar_module: Any of gpytorch's kernels. Default: BoTorch's RBF kernel.
            mean_module: As for :class:`~bo_stream.QSGP`.
            outcome_transform: As there.
            input_transform: As there.
            max_points: Most functions; data beyond add none.
            covariance: As there, and so are all that follow.
            batch_size: Observations of a step.
            functions: Functions of a draw.
            control_points: Of the control variate.
            learning_rate: Of AdaGrad.
            empirical_bayes: Whether ``fit`` learns the kernel, the mean and the noise too;
                precisions are learned in any case.
            hyper_rate: Of Adam.
            freeze_steps: Steps before precisions and hyperparameters move.
            half_life: Steps in which the rates fall to half.
            update_steps: Of an update.
            initial_points: Of the exact GP before the first step of ``fit``.
            max_rows: Most observations to hold.
            arithmetic: Of steps.
            seed: Of minibatches and draws.

        Raises:
            BotorchTensorDimensionError: As for :class:`~bo_stream.QSGP`.
            InputDataError: As there.
            UnsupportedError: As there, and another likelihood.
            ValueError: As there.
        """
        chosen = InducingAtData(max_points)
        columns = (MeanField() if covariance is None else covariance).columns
        check_columns(columns, chosen)
        check_gaussian(likelihood)
        options = StepOptions(
            batch_size,
            functions,
            control_points,
            update_steps,
            initial_points,
            freeze_steps,
            learning_rate,
            hyper_rate,
            half_life,
        )
        self._start(train_X, train_Y, likelihood, outcome_transform, arithmetic)
        inputs = self._first_inputs(train_X, input_transform)
        if covar_module is None:
            covar_module = get_covar_module_with_dim_scaled_prior(
                inputs.shape[-1], batch_shape=self._parameter_shape
            )
        self._choose_modules(inputs, likelihood, covar_module, mean_module)
        self._choose_steps(options, empirical_bayes, columns, seed)
        self._begin_memory(chosen, inputs, max_rows)
        self._standardize_first(train_X, train_Y, None)
        self._first_update(train_X, train_Y)

    def _first_precisions(self, basis: SampledBasis) -> Tensor | None:
        """1 each: what a weight of a standardised outcome may well be."""
        device = self._units.shift.device
        return torch.ones(self._num_outputs, basis.size, dtype=torch.float64, device=device)

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
