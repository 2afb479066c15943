"""Local Gaussian processes: many small exact models, the baseline of streaming papers."""

from __future__ import annotations

import math

import torch
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch.kernels import Kernel
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.means import Mean
from torch import Tensor

from bo_stream.allocation.allocator import checked_number
from bo_stream.bases.kernels import stacked_kernel
from bo_stream.linalg import solve_lower
from bo_stream.models.construction import warn_of_scaling
from bo_stream.models.input_transforms import split_transform
from bo_stream.models.local.body import LocalBody
from bo_stream.models.local.memory import LocalMemory, Router
from bo_stream.models.local.process import factor_of
from bo_stream.models.prior import in_dtype


class LocalGP(LocalBody):
    """Small exact Gaussian processes side by side, each of the newest data near its centre.

    An observation goes to the local model whose centre (the mean of its inputs) is most like it, by
    the kernel's correlation, or begins a new one; a full model drops its oldest observation.
    Predictions are averages of the nearest models, weighted by the same correlation (Nguyen-Tuong,
    Seeger and Peters, 2008), as the marginals of one joint process that can be conditioned.
    Hyperparameters are shared. Each batch element and output has local models of its own.

    - Memory: O(C s²) for C models of s observations.
    - Update: O(n C) to find the models, O(s³) for each that took an observation.
    - A fantasy: O(q s²) for each model near, and one q x q factor.
    - Exact: while there is one model that is not full, the exact GP.
    - Approximate: a model knows nothing of the others' data; what was dropped is lost, but for the
      standardisation of the outcomes, which is of all of them. Observations stay where they were
      put when hyperparameters move; up to 64 of one update are routed by the same centres.
    - Learned: hyperparameters by the sum of the models' marginal likelihoods, of the data held.
    - When: a baseline. Learn the hyperparameters from a first batch: while lengthscales are too
      long, all data are alike and one model keeps the newest of them.

    Example:
        >>> model = LocalGP(train_X, train_Y)
        >>> fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        >>> model.update(new_X, new_Y).posterior(test_X).mean
    """

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        train_Yvar: Tensor | None = None,
        likelihood: _GaussianLikelihoodBase | None = None,
        covar_module: Kernel | None = None,
        mean_module: Mean | None = None,
        outcome_transform: OutcomeTransform | _DefaultType | None = DEFAULT,
        input_transform: InputTransform | None = None,
        max_size: int = 100,
        w_gen: float = 0.5,
        nearest: int = 3,
        max_models: int = 256,
    ) -> None:
        """Build the model and put the first observations into memory.

        Args:
            train_X: ``batch_shape x n x d``; n may be 0, which gives the prior.
            train_Y: ``batch_shape x n x m``.
            train_Yvar: Known noise variances, ``batch_shape x n x m``; NaN in a row: unknown,
                learned.
            likelihood: A ``GaussianLikelihood``; default: BoTorch's with a log-normal prior, or
                fixed noise where every variance is known.
            covar_module: Any of gpytorch's kernels, of batch shape ``batch_shape x m`` (without m
                if that is 1) or none. Default: BoTorch's own default.
            mean_module: ``ConstantMean`` (default) or ``ZeroMean``.
            outcome_transform: As for :class:`WISKI`; default ``Standardize``.
            input_transform: Any. One with parameters to learn (``Warp``) becomes a part of the
                kernel, ``covar_module.input_transform``, and is learned with it.
            max_size: Largest number s of observations of a local model.
            w_gen: Correlation with the most similar centre below which a new model begins, in (0,
                1).
            nearest: How many models predict at an input.
            max_models: Largest number of models; then the most similar one takes any observation.

        Raises:
            BotorchTensorDimensionError: Shapes do not fit together.
            InputDataError: Wrong dtypes or devices, NaN, infinities, negative variances.
            UnsupportedError: A mean, likelihood or transform that a stream cannot represent.
            ValueError: A number is out of range.
        """
        self._begin(train_X, train_Y, train_Yvar, outcome_transform)
        input_transform, learned = split_transform(input_transform)
        inputs = self._first_inputs(train_X, input_transform)
        self._set_modules(inputs.shape[-1], train_Yvar, likelihood, covar_module, mean_module)
        inputs = self._learn_transform(learned, inputs)
        _check(max_size, w_gen, nearest, max_models)
        self.max_size, self.nearest = max_size, nearest
        self._router = Router(w_gen, max_models)
        batch = torch.Size((*self._batch_shape, self._num_outputs))
        self._set_memory(LocalMemory.empty(batch, max_size, inputs.shape[-1], train_X.device))
        self._standardize_first(train_X, train_Y, train_Yvar)
        if train_X.shape[-2] > 0:
            self._observe(train_X, train_Y, train_Yvar, 1.0)
        warn_of_scaling(inputs, self._standardized(train_Y.double()), covar_module is not None)

    @property
    def num_models(self) -> Tensor:
        """Number of local models, ``batch_shape x m``."""
        return self._memory.alive.sum(0)

    @property
    def centres(self) -> Tensor:
        """Mean of the inputs of each local model, ``batch_shape x m x C x d``; transformed inputs.

        Beyond :attr:`num_models` they are 0.
        """
        return self._memory.centres.to(self.train_targets)

    def _log_marginal_likelihood(self) -> Tensor:
        return self._learning_objective()

    def _learning_objective(self) -> Tensor:
        """Sum over the local models, each observation's likelihood to the power of its weight."""
        rows, outputs = self._memory.rows, self._num_outputs
        K = in_dtype(
            self.covar_module,
            torch.float64,
            lambda kernel: stacked_kernel(kernel, rows.X, rows.X, outputs),
        )
        residual, variance = self._residuals(rows)
        factor, root = factor_of(K, rows.weight / variance)
        white = solve_lower(factor, (root * residual).unsqueeze(-1)).squeeze(-1)
        logs = rows.weight * (2.0 * math.pi * variance).log()
        each = -0.5 * (logs + white.square()) - factor.diagonal(dim1=-2, dim2=-1).log()
        return each.sum(-1).sum(0)


def _check(max_size: int, w_gen: float, nearest: int, max_models: int) -> None:
    for name, number in (("max_size", max_size), ("nearest", nearest), ("max_models", max_models)):
        checked_number(name, number)
    if not 0.0 < w_gen < 1.0:
        raise ValueError(f"Expected w_gen in (0, 1), a correlation, got {w_gen}.")
