"""Local Gaussian processes: many small exact models, the baseline of streaming papers."""

from __future__ import annotations

import math
from typing import Self

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.means import Mean
from torch import Tensor

from bo_stream.bases.inducing import frozen
from bo_stream.bases.stacked_kernel import stacked_kernel
from bo_stream.linalg import solve_lower
from bo_stream.models.compatibility import check_mergeable
from bo_stream.models.construction import warn_of_scaling
from bo_stream.models.double_kernel import in_double
from bo_stream.models.local_memory import LocalMemory, Rows
from bo_stream.models.local_process import Experts, LocalProcess, factor_of, whitener_of
from bo_stream.models.local_router import Router
from bo_stream.models.memory import Observations
from bo_stream.models.remembering_gp import RememberingGP, shifted_targets
from bo_stream.models.validation import check_finite
from bo_stream.module_state import State, is_same, state_of
from bo_stream.process import PosteriorProcess

ROWS = 64
"""Observations that are routed together."""


class LocalGP(RememberingGP):
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
      put when hyperparameters move; up to ``ROWS`` of one update are routed by the same centres.
    - Learned: hyperparameters by the sum of the models' marginal likelihoods, of the data held.
    - When: a baseline. Learn the hyperparameters from a first batch: while lengthscales are too
      long, all data are alike and one model keeps the newest of them.

    Example:
        >>> model = LocalGP(train_X, train_Y)
        >>> fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        >>> model.update(new_X, new_Y).posterior(test_X).mean
    """

    _memory: LocalMemory
    _touched: Tensor

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
            input_transform: Any without parameters to learn.
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
        inputs = self._first_inputs(train_X, input_transform)
        self._set_modules(inputs.shape[-1], train_Yvar, likelihood, covar_module, mean_module)
        _check(max_size, w_gen, nearest, max_models)
        self.max_size, self.nearest = max_size, nearest
        self._router = Router(w_gen, max_models)
        batch = torch.Size((*self._batch_shape, self._num_outputs))
        self._set_memory(LocalMemory.empty(batch, max_size, inputs.shape[-1], train_X.device))
        self._standardize_first(train_X, train_Y, train_Yvar)
        if train_X.shape[-2] > 0:
            self._observe(train_X, train_Y, train_Yvar, 1.0)
        warn_of_scaling(inputs, self._standardized(train_Y.double()), covar_module is not None)

    def _projected(self, inputs: Tensor) -> Tensor:
        return inputs

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

    # --- memory -----------------------------------------------------------------------------------

    @torch.no_grad()
    def _take(self, data: Observations) -> None:
        if data.sign < 0:
            raise UnsupportedError(
                "LocalGP cannot retract: an observation may have been dropped already. Build it "
                "anew, or take a model whose memory subtracts (WISKI, OSGPR)."
            )
        memory, kernel, rows = self._memory, frozen(self.covar_module), Rows.of(data)
        touched = torch.zeros(self._router.max_models, dtype=torch.bool)
        for start in range(0, len(rows), min(ROWS, self.max_size)):
            part = rows[slice(start, start + min(ROWS, self.max_size))]
            models = self._router.models_for(part.X, memory, kernel, self._num_outputs)
            memory = memory.with_room(int(models.max()) + 1).with_rows(part, models)
            touched[models.unique().cpu()] = True
        self._memory = memory.counting(rows)
        self._touched = self._touched | touched
        self._refresh_fixed_noise()

    def _set_memory(self, memory: LocalMemory) -> None:
        self._memory = memory
        self._touched = torch.zeros(self._router.max_models, dtype=torch.bool)
        self._solved: tuple[State, LocalProcess] | None = None

    def merge(self, other: Self) -> Self:
        """Add another model's local models to this one's, in place.

        Each joins the one of this model's whose centre is most like its own, as an observation
        would, or stays one of its own. A model that gets too full drops the oldest, its own first.

        Raises:
            UnsupportedError: Another class, shape, transform, or a model that supposes data.
        """
        check_mergeable(self, other)
        self._check_not_supposed("merge")
        other._check_not_supposed("merge")
        self._merge(other._memory.map_targets(shifted_targets(other._shift - self._shift)))
        self._refresh_fixed_noise()
        return self

    @torch.no_grad()
    def _merge(self, theirs: LocalMemory) -> None:
        memory, kernel = self._memory, frozen(self.covar_module)
        for number in range(len(theirs.entered)):
            rows = theirs.by_age(number)[slice(-self.max_size, None)]
            centre = theirs.centres[..., number, :].unsqueeze(-2)
            model = self._router.models_for(centre, memory, kernel, self._num_outputs)
            models = torch.where(rows.weight > 0.0, model, -1)
            memory = memory.with_room(int(models.max()) + 1).with_rows(rows, models)
        totals = memory.totals + theirs.totals
        self._set_memory(LocalMemory(memory.rows, memory.entered, totals))

    def clear(self) -> Self:
        """Drop all observations and local models; hyperparameters and standardisation stay.

        Raises:
            UnsupportedError: The model supposes data.
        """
        self._check_not_supposed("clear")
        batch, dim = self._memory.entered.shape[1:], self._memory.rows.X.shape[-1]
        device = self._memory.entered.device
        self._set_memory(LocalMemory.empty(batch, self.max_size, dim, device))
        return self

    # --- posterior --------------------------------------------------------------------------------

    def process(self, X: Tensor | None = None) -> PosteriorProcess:
        """The posterior as a process; see :class:`StreamingGP`. Models that changed are solved."""
        if X is not None:
            check_finite("X", X)
        if self._supposed is not None:
            return self._supposed
        state = self._state()
        stale = self._solved is None or not is_same(state, self._solved[0])
        if self._solved is None or stale or bool(self._touched.any()):
            former = None if stale or self._solved is None else self._solved[1]
            self._solved = state, self._solve(former)
            self._touched = torch.zeros_like(self._touched)
        return self._solved[1]

    def _state(self) -> State:
        """Of all that the experts depend on beside the memory."""
        names = ["covar_module", "mean_module", "outcome_transform"]
        if isinstance(self.likelihood, GaussianLikelihood):
            names.append("likelihood")
        modules = (self._modules.get(name) for name in names)
        return tuple(t for module in modules if module is not None for t in state_of(module))

    @torch.no_grad()
    def _solve(self, former: LocalProcess | None) -> LocalProcess:
        """All models anew, or those that changed since the former process."""
        memory = self._memory
        if former is None or len(former.experts.X) < len(memory.entered):
            kernel, numbers = frozen(self.covar_module), torch.arange(len(memory.entered))
        else:
            kernel, numbers = former.kernel, self._touched.nonzero().squeeze(-1)
        numbers = numbers.to(memory.entered.device)
        experts = self._experts(kernel, numbers)
        if former is not None and len(numbers) < len(memory.entered):
            experts = former.experts.with_models(numbers, experts)
        mean = self._prior_mean().unsqueeze(-1).clone()
        return LocalProcess(kernel, self._num_outputs, mean, experts, self.nearest)

    def _experts(self, kernel: Kernel, numbers: Tensor) -> Experts:
        memory = self._memory
        rows = memory.rows.map(lambda store: store[numbers])
        residual, variance = self._residuals(rows)
        K = stacked_kernel(kernel, rows.X, rows.X, self._num_outputs)
        whitener = whitener_of(K, rows.weight / variance)
        answers = (whitener @ residual.unsqueeze(-1)).squeeze(-1)
        alive = memory.alive.movedim(0, -1)
        return Experts(memory.rows.X, memory.centres, alive, whitener, answers)

    def _residuals(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Standardised outcomes less the prior mean, and noise variances."""
        outcomes, variance = self._as_outcomes(rows.targets, rows.noise, rows.known)
        return outcomes - self._prior_mean().unsqueeze(-1), variance

    # --- hyperparameters --------------------------------------------------------------------------

    def _log_marginal_likelihood(self) -> Tensor:
        return self._learning_objective()

    def _learning_objective(self) -> Tensor:
        """Sum over the local models, each observation's likelihood to the power of its weight."""
        rows, outputs = self._memory.rows, self._num_outputs
        K = in_double(
            self.covar_module, lambda kernel: stacked_kernel(kernel, rows.X, rows.X, outputs)
        )
        residual, variance = self._residuals(rows)
        factor, root = factor_of(K, rows.weight / variance)
        white = solve_lower(factor, (root * residual).unsqueeze(-1)).squeeze(-1)
        logs = rows.weight * (2.0 * math.pi * variance).log()
        each = -0.5 * (logs + white.square()) - factor.diagonal(dim1=-2, dim2=-1).log()
        return each.sum(-1).sum(0)


def _check(max_size: int, w_gen: float, nearest: int, max_models: int) -> None:
    for name, number in (("max_size", max_size), ("nearest", nearest), ("max_models", max_models)):
        if number < 1:
            raise ValueError(f"Expected {name} of at least 1, got {number}.")
    if not 0.0 < w_gen < 1.0:
        raise ValueError(f"Expected w_gen in (0, 1), a correlation, got {w_gen}.")
