"""Local models as a stream changes them, and the posterior that they give."""

from __future__ import annotations

from typing import Self

import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

from bo_stream.bases.inducing import frozen
from bo_stream.bases.kernels import stacked_kernel
from bo_stream.models.checks import check_finite
from bo_stream.models.local.memory import LocalMemory, Router, Rows
from bo_stream.models.local.process import Experts, LocalProcess, scaled_prior, whitener_of
from bo_stream.models.memory import Observations
from bo_stream.models.remembering_gp import RememberingGP
from bo_stream.process.process import PosteriorProcess
from bo_stream.tensors import State, is_same, keeps_tensors, state_of

ROWS = 64
"""Observations that are routed together."""


class LocalBody(RememberingGP):
    """Small exact Gaussian processes side by side: their memory and their posterior."""

    _memory: LocalMemory
    _router: Router
    _touched: Tensor
    max_size: int
    nearest: int

    def _projected(self, inputs: Tensor) -> Tensor:
        return inputs

    @torch.no_grad()
    def _take(self, data: Observations) -> None:
        if data.sign < 0:
            raise UnsupportedError(
                "LocalGP cannot retract: an observation may have been dropped already. Build it "
                "anew, or take a model whose memory subtracts (WISKI, OSGPR)."
            )
        memory, kernel, rows = self._memory, frozen(self.covar_module), Rows.of(data)
        touched = torch.zeros_like(self._touched)
        for start in range(0, len(rows), min(ROWS, self.max_size)):
            part = rows[slice(start, start + min(ROWS, self.max_size))]
            models = self._router.models_for(part.X, memory, kernel, self._num_outputs)
            memory = memory.with_room(int(models.max()) + 1).with_rows(part, models)
            touched[models.flatten()] = True
        self._memory = memory.counting(rows)
        self._touched = self._touched | touched
        self._refresh_fixed_noise()

    def _set_memory(self, memory: LocalMemory) -> None:
        self._memory = memory
        device = memory.entered.device
        self._touched = torch.zeros(self._router.max_models, dtype=torch.bool, device=device)
        self._solved: tuple[State, LocalProcess] | None = None

    @keeps_tensors
    def merge(self, other: Self) -> Self:
        """Add another model's local models to this one's, in place.

        Each joins the one of this model's whose centre is most like its own, as an observation
        would, or stays one of its own. A model that gets too full drops the oldest, its own first.

        Raises:
            UnsupportedError: Another class, shape, transform, or a model that supposes data.
        """
        matrix = self._targets_of(other)
        self._set_merged(self._merged_memory(other._memory.map_targets(matrix)), other)
        return self

    @torch.no_grad()
    def _merged_memory(self, theirs: LocalMemory) -> LocalMemory:
        memory, kernel = self._memory, frozen(self.covar_module)
        for number in range(len(theirs.entered)):
            rows = theirs.by_age(number)[slice(-self.max_size, None)]
            centre = theirs.centres[..., number, :].unsqueeze(-2)
            model = self._router.models_for(centre, memory, kernel, self._num_outputs)
            models = torch.where(rows.weight > 0.0, model, -1)
            memory = memory.with_room(int(models.max()) + 1).with_rows(rows, models)
        return LocalMemory(memory.rows, memory.entered, memory.totals + theirs.totals)

    @keeps_tensors
    def clear(self) -> Self:
        """Drop all observations and local models; hyperparameters and standardisation stay.

        Raises:
            UnsupportedError: The model supposes data.
        """
        self._begin_to_clear()
        batch, dim = self._memory.entered.shape[1:], self._memory.rows.X.shape[-1]
        device = self._memory.entered.device
        self._set_memory(LocalMemory.empty(batch, self.max_size, dim, device))
        return self

    @keeps_tensors
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
            kernel = frozen(self.covar_module)
            numbers = torch.arange(len(memory.entered), device=memory.entered.device)
        else:
            kernel, numbers = former.kernel, self._touched.nonzero().squeeze(-1)
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

    @torch.no_grad()
    def solved_gram(self) -> Tensor:
        """What the observations add to the identity in the matrices that a posterior solves.

        ``S K S`` of each local model, S the root of the noise precision, ``C x batch_shape x m x s
        x s``.
        """
        rows, kernel = self._memory.rows, frozen(self.covar_module)
        K = stacked_kernel(kernel, rows.X, rows.X, self._num_outputs)
        return scaled_prior(K, rows.weight / self._residuals(rows)[1])[0]

    def _residuals(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Standardised outcomes less the prior mean, and noise variances."""
        outcomes, variance = self._as_outcomes(rows.targets, rows.noise, rows.known)
        return outcomes - self._prior_mean().unsqueeze(-1), variance
