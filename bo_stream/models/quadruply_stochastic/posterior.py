"""The posterior of a model of very many basis functions, and what observations add to it."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.bases.inducing import frozen
from bo_stream.bases.sampled import SampledBasis
from bo_stream.models.base import StreamingGP
from bo_stream.models.memory import Observations
from bo_stream.models.quadruply_stochastic.choice import Layout
from bo_stream.models.quadruply_stochastic.function_process import (
    Augmentation,
    FunctionProcess,
    WeightMoments,
)
from bo_stream.models.quadruply_stochastic.memory import Progress, QuadrupleMemory
from bo_stream.models.quadruply_stochastic.sampled_gradient import measured_scale
from bo_stream.models.quadruply_stochastic.site_noise import site_noise
from bo_stream.models.quadruply_stochastic.weight_posterior import ChevronPosterior, proposition_1
from bo_stream.models.stochastic.replay import Batch
from bo_stream.process.process import PosteriorProcess
from bo_stream.tensors import State

_FIRST_ROWS = 64
"""Inputs at which functions are squared for a first guess."""


@dataclass(frozen=True)
class KeptProcess:
    """The posterior process at one state of all hyperparameters.

    Attributes:
        state: Of the model.
        process: The posterior.
    """

    state: State
    process: PosteriorProcess


class QuadruplePosterior(StreamingGP):
    """Weights of functions as a normal distribution, for any basis and likelihood."""

    _memory: QuadrupleMemory
    arithmetic: torch.dtype
    columns: int

    @abstractmethod
    def _first_precisions(self, basis: SampledBasis) -> Tensor | None:
        """Of functions that are new, ``m x p``, where each has its own; else None."""

    @abstractmethod
    def _learn_from_new(self) -> None:
        """Take steps after observations came."""

    # --- the posterior ------------------------------------------------------------------------

    def _basis(self, kernel: Kernel) -> SampledBasis:
        return self._memory.layout.basis(kernel, self._memory.progress.precisions)

    @torch.no_grad()
    def _solve(self, state: State) -> KeptProcess:
        kernel = frozen(self.covar_module)
        process = self._process_of(kernel, self._prior.mean.clone())
        if process.basis.is_diagonal:
            return KeptProcess(state, process)
        noise = site_noise(self.likelihood).double().clone().unsqueeze(-1)
        extra = Augmentation(kernel, self._num_outputs, noise)
        return KeptProcess(state, replace(process, augmentation=extra))

    def _process_of(self, kernel: Kernel, prior_mean: Tensor) -> FunctionProcess:
        """With a copy of the weights, differentiable in the kernel and the prior mean, ``m``."""
        basis = self._basis(kernel)
        return FunctionProcess(basis, self._moments(basis), prior_mean.unsqueeze(-1))

    @torch.no_grad()
    def _moments(self, basis: SampledBasis) -> WeightMoments:
        posterior = self._memory.progress.posterior
        index = torch.arange(posterior.size, device=posterior.coefficients.device)
        scale = self._diagonal(basis, index)
        if scale is None:
            scale = posterior.log_scale.exp()
        scale = scale * (index >= posterior.columns)
        columns = posterior.dense_columns(index)
        return WeightMoments(columns[..., 0].clone(), columns[..., 1:].clone(), scale)

    def _diagonal(self, basis: SampledBasis, index: Tensor) -> Tensor | None:
        memory = self._memory
        count = float(memory.replay.count)
        return measured_scale(memory.progress.posterior, basis, index, count, self.likelihood)

    # --- memory -------------------------------------------------------------------------------

    def _set_memory(self, memory: QuadrupleMemory) -> None:
        self._memory = memory
        self._solved = None

    def _take(self, data: Observations) -> None:
        if data.sign < 0:
            raise UnsupportedError(
                f"{type(self).__name__} cannot retract: its weights have learned from the "
                "observation. Build it anew, or take a model whose memory subtracts (OSGPR, WISKI)."
            )
        before = self._memory
        memory = before.after(Batch(data.X, data.targets.mT))
        try:
            self._set_memory(self._grown(memory, data.X))
            self._learn_from_new()
        except BaseException:
            self._set_memory(before)
            raise

    def _grown(self, memory: QuadrupleMemory, X: Tensor) -> QuadrupleMemory:
        """With functions for new inputs, whose weights are as in the prior."""
        return self._filled(replace(memory, layout=memory.layout.grown(X)), X)

    def _anew(self, memory: QuadrupleMemory, X: Tensor) -> QuadrupleMemory:
        """With all weights as in the prior, no steps taken."""
        return self._filled(replace(memory, progress=self._empty(X)), X)

    def _empty(self, like: Tensor) -> Progress:
        """Of no weights yet."""
        like = like.new_empty(0, dtype=self.arithmetic)
        outputs, measured = self._num_outputs, self._prior.is_gaussian
        return Progress.start(ChevronPosterior.empty(outputs, self.columns, measured, like))

    @torch.no_grad()
    def _filled(self, memory: QuadrupleMemory, X: Tensor) -> QuadrupleMemory:
        """With weights for functions that have none. Cost O(p) for p of them, once."""
        layout, size = memory.layout, memory.progress.posterior.size
        if layout.size == size:
            return memory
        first = self._first_weights(layout.since(size), X, float(memory.replay.count))
        progress = memory.progress.grown(first)
        control = progress.control
        if control is not None:  # the new weights are 0: its values stay
            basis = layout.basis(control.basis.kernel, progress.precisions)
            progress.control = replace(control, basis=basis)
        return replace(memory, progress=progress)

    def _first_weights(self, layout: Layout, X: Tensor, count: float) -> Progress:
        """Mean 0, and the scales of Proposition 1, or those of the prior."""
        kernel, like = frozen(self.covar_module), X.new_empty(0, dtype=self.arithmetic)
        precisions = self._first_precisions(layout.basis(kernel, None))
        basis = layout.basis(kernel, precisions)
        index = torch.arange(basis.size, device=X.device)
        wide = torch.ones(self._num_outputs, 1, dtype=torch.float64, device=X.device)
        scale = wide * basis.precision_diagonal(index).rsqrt()
        squares = None
        if self._prior.is_gaussian:
            squares = wide * basis.mean_squares(X[:_FIRST_ROWS])
            precision, noise = basis.precision_diagonal(index), self.noise_level()
            scale = proposition_1(squares, precision, count, noise)
        coefficients = like.new_zeros(*scale.shape, 1 + self.columns)
        posterior = ChevronPosterior(
            coefficients, scale.log().to(like), None if squares is None else squares.to(like)
        )
        return Progress.start(posterior, None if precisions is None else precisions.to(like))

    def merge(self, other: Self) -> Self:
        """Refused: weights that learned from different data cannot be added.

        Raises:
            UnsupportedError: Always.
        """
        self._targets_of(other)
        raise UnsupportedError(
            f"{type(self).__name__} cannot merge: weights that learned from different data cannot "
            "be added. Update one model with the other's data, or take OSGPR or WISKI."
        )
