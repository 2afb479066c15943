"""A grid model's posterior and marginal likelihood, from its statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from bo_stream.bases.grid.interpolation import GridBasis, grid_basis
from bo_stream.bases.grid.mesh import Mesh
from bo_stream.bases.grid.sensitivity import prior_covariance
from bo_stream.models.caches import WIDER_GRIDS, Solved, Whitening, Wider
from bo_stream.models.checks import check_finite
from bo_stream.models.construction import (
    observed_inputs,
)
from bo_stream.models.objective import (
    batch_log_marginal_likelihood,
    dense_log_marginal_likelihood,
    differentiable_log_marginal_likelihood,
    subspace_log_marginal_likelihood,
)
from bo_stream.models.outcomes.noise import NOISE_FLOOR
from bo_stream.models.wiski.grid_base import GridBase
from bo_stream.models.wiski.learning import LearningSpace
from bo_stream.models.wiski.observation_space import (
    GridPrior,
    ObservationSpaceProcess,
    SolvedRows,
    Told,
)
from bo_stream.models.wiski.resolution import (
    warn_of_coarse_grid,
    warn_of_resolution,
    warn_of_truncation,
)
from bo_stream.models.wiski.rows import RowMemory
from bo_stream.process.process import ConditionedProcess, PosteriorProcess, WeightSpaceProcess
from bo_stream.tensors import State, is_in, keeps_tensors, state_of
from bo_stream.weights import solve

_LARGEST_TOLERANCE = 0.5


class GridPosterior(GridBase):
    """A grid model that predicts, and says how likely its hyperparameters are."""

    @keeps_tensors
    def process(self, X: Tensor | None = None) -> PosteriorProcess:
        """The posterior as a process; see :class:`StreamingGP`. Solved once, then kept.

        In the space of the observations while the memory holds these as rows, else in the weights
        of the kernel's features.

        Args:
            X: Transformed inputs that the process must take. Outside the bounds they are predicted
                from a wider grid, whose kernel is the same, with features of its own; what the
                model predicts inside the bounds stays as it is.
        """
        return self._process_for(X, lambda model: model._present_process())

    @keeps_tensors
    def feature_process(self, X: Tensor | None = None) -> PosteriorProcess:
        """The posterior as a process in the weights of the kernel's features, however many rows.

        For acquisition in feature space. A model that supposes data has one process only.

        Args:
            X: As for :meth:`process`.
        """
        return self._process_for(X, lambda model: model._present_feature_process())

    def _process_for(
        self, X: Tensor | None, present: Callable[[GridPosterior], PosteriorProcess]
    ) -> PosteriorProcess:
        if X is not None:
            check_finite("X", X)
        if self._supposed is not None:
            self._check_inside(X)
            return self._supposed
        if X is not None and not self._basis_grid.contains(X):
            return self._process_past(X, present)
        return present(self)

    def _present_process(self) -> PosteriorProcess:
        rows = self._memory
        if not isinstance(rows, RowMemory):
            return self._present_feature_process()
        if self._rows_solved is None or not is_in(self, self._rows_solved.state):
            self._rows_solved = SolvedRows(state_of(self), self._solve_rows(rows))
        return self._rows_solved.process

    def _present_feature_process(self) -> PosteriorProcess:
        if self._solved is None or not is_in(self, self._solved.state):
            self._solved = self._solve(state_of(self))
        return self._solved.process

    def _supposing(self, process: PosteriorProcess) -> Self:
        model = super()._supposing(process)
        model._basis_grid = _grid_of(process) or self._basis_grid
        return model

    def _process_past(
        self, X: Tensor, present: Callable[[GridPosterior], PosteriorProcess]
    ) -> PosteriorProcess:
        """The process on a wider grid that holds X, kept beside that on the memory's own grid."""
        grid = self._memory.grid_past(X)
        kept = next((wider for wider in self._wider if wider.grid == grid), Wider(grid))
        model = self._shallow_copy()
        model._basis_grid, model._wider = grid, ()
        model._whitening, model._solved = kept.whitening, kept.solved
        model._rows_solved = kept.rows_solved
        process = present(model)
        others = tuple(wider for wider in self._wider if wider.grid != grid)
        latest = Wider(grid, model._whitening, model._solved, model._rows_solved)
        self._wider = (*others, latest)[-WIDER_GRIDS:]
        return process

    def _check_inside(self, X: Tensor | None) -> None:
        if X is not None and not self._basis_grid.contains(X):
            raise InputDataError(
                "X lies outside the bounds of a model that supposes data, whose grid cannot grow. "
                f"Build the model with wider bounds than {self._basis_grid.bounds.tolist()}."
            )

    @torch.no_grad()
    def _solve_rows(self, memory: RowMemory) -> ObservationSpaceProcess:
        outcomes, noise = self._outcomes_of(memory)
        mean = self._prior.mean.unsqueeze(-1).clone()
        kernel = self._factors().detached()
        prior = GridPrior(kernel, self._basis_grid, mean, self.tolerance, self.max_rank)
        told = Told(memory.rows.X, outcomes - mean, noise)
        process, jitter = ObservationSpaceProcess.of(prior, told)
        if jitter > 0.0:
            self.log_event("jitter on the observations' covariance", len(memory.rows), jitter)
        return process

    def _outcomes_of(self, memory: RowMemory) -> tuple[Tensor, Tensor]:
        rows = memory.rows
        return self._prior.standardized(rows)

    @torch.no_grad()
    def _solve(self, state: State) -> Solved:
        whitening = self._current_whitening()
        evidence = self._prior.evidence(whitening.memory)
        prior_mean = self._prior.mean.unsqueeze(-1).clone()
        return Solved(state, WeightSpaceProcess(whitening.basis, solve(evidence), prior_mean))

    @torch.no_grad()
    def _current_whitening(self) -> Whitening:
        if self._whitening is None or not is_in(self.covar_module, self._whitening.state):
            basis = self._present_basis()
            warn_of_truncation(basis, self.max_rank)
            self._whitening = Whitening(
                state_of(self.covar_module), basis, self._memory.whitened(basis)
            )
        self._whitening = self._whitening.settled()
        return self._whitening

    @torch.no_grad()
    def _present_basis(self) -> GridBasis:
        return grid_basis(
            self._basis_grid, self._factors(), self._output_batch, self.tolerance, self.max_rank
        )

    def truncate(self, left_out: float) -> Self:
        """Keep only as many features as the noise level asks for, at the present hyperparameters.

        Sets ``tolerance``; the memory stays whole, so a later call undoes it. A posterior from few
        observations that are held as rows is exact all the same. With 1e-4 a posterior
        on 500 noisy outcomes in 3-D had half the features, its mean was off by 0.001 of its
        standard deviation and its variance by 0.2 %.

        Args:
            left_out: Prior variance that may be left out, in parts of the noise variance.

        Raises:
            ValueError: It is not in [0, 1).
            UnsupportedError: The model supposes data.
        """
        self._check_not_supposed("truncate")
        if not 0.0 <= left_out < 1.0:
            raise ValueError(f"Expected left_out in [0, 1), got {left_out}.")
        self.tolerance = self._share_of_noise(left_out)
        self._set_memory(self._memory)
        return self

    @torch.no_grad()
    def _share_of_noise(self, left_out: float) -> float:
        """``left_out`` of the noise variance in parts of the prior variance, the least one."""
        return min(left_out * self._typical_noise(), _LARGEST_TOLERANCE)

    @torch.no_grad()
    def _typical_noise(self) -> float:
        """Noise variance in parts of the prior variance, the least one of the outputs.

        Of known noise variances the harmonic mean counts: precise observations tell small
        differences apart however imprecise others are.
        """
        noise, known = self.noise_level(), self._memory.typical_known_noise()
        if known is not None:
            precise = (known / self.outcome_scale().square()).clamp_min(NOISE_FLOOR)
            noise = noise.minimum(precise)
        if self._units.floor.any_zero:
            noise = noise.minimum(self._prior.zero_noise.clamp_min(NOISE_FLOOR))
        return float((noise / self._factors().scale()).min())

    @torch.no_grad()
    def solved_gram(self) -> Tensor:
        """What the observations add to the identity in the matrix that a posterior solves.

        ``Φᵀ N⁻¹ Φ`` of the whitened features at the present hyperparameters, ``batch_shape x m x r
        x r``: the precision of the weights is ``I`` more.
        """
        memory = self._current_whitening().memory
        return self._prior.evidence(memory).gram

    @property
    def rank(self) -> int:
        """Number r of features at the present hyperparameters."""
        return self._current_whitening().basis.rank

    @property
    def dropped(self) -> float:
        """Part of the kernel's trace that the r features leave out."""
        return self._current_whitening().basis.dropped

    def _log_marginal_likelihood(self) -> Tensor:
        if isinstance(self._memory, RowMemory):
            return self._rows_log_marginal_likelihood(self._memory)
        whitening = self._current_whitening()
        return differentiable_log_marginal_likelihood(
            self._prior.noise_groups(whitening.memory),
            self._prior.target_map(),
            whitening.basis,
            self._factors(),
        )

    def _rows_log_marginal_likelihood(self, memory: RowMemory) -> Tensor:
        outcomes, noise = self._outcomes_of(memory)
        covariance = memory.covariance(self._factors())
        return dense_log_marginal_likelihood(
            covariance.expand(*outcomes.shape, outcomes.shape[-1]),
            outcomes - self._prior.mean.unsqueeze(-1),
            noise,
        )

    def batch_log_marginal_likelihood(
        self, X: Tensor, Y: Tensor, Yvar: Tensor | None = None, recalibrate: bool = False
    ) -> Tensor:
        """That of these observations instead of those in memory.

        Differentiable in the hyperparameters and in the stem; exact where no feature is left out.
        Cost O(n r² + r³). Shaped as :meth:`log_marginal_likelihood`.

        Args:
            X: ``batch_shape x n x d``.
            Y: ``batch_shape x n x m``.
            Yvar: Known noise variances shaped as Y; NaN: unknown.
            recalibrate: Calibrate the stem on X, as part of what is differentiated.
        """
        self._check_observations(X, Y, Yvar)
        outcomes, noise = self._prior.standardized(self._measured(Y, Yvar))
        coordinates = self._differentiable_inputs(X, recalibrate).double()
        basis = self._present_basis()
        return self._from_per_output(
            batch_log_marginal_likelihood(
                basis.features(coordinates),
                outcomes - self._prior.mean.unsqueeze(-1),
                noise,
                basis,
                self._factors(),
            )
        )

    def _differentiable_inputs(self, X: Tensor, recalibrate: bool) -> Tensor:
        stem = self._stem
        if stem is None or not recalibrate:
            return self.hypothetical_inputs(X)
        return stem.calibrated_forward(observed_inputs(X, self._input_transform))

    def _learning_objective(self) -> Tensor:
        if isinstance(self._memory, RowMemory):
            return self._rows_log_marginal_likelihood(self._memory)
        factors, noise = self._factors(), self.noise_level()
        if self._learning is None or not self._learning.holds(factors, noise):
            self._learning = LearningSpace.around(
                factors, noise, self._memory, self.tolerance, self.max_rank
            )
        space = self._learning
        return subspace_log_marginal_likelihood(
            space.rooted(self._prior.noise_groups(space.memory, space.left_out(factors))),
            self._prior.target_map(),
            prior_covariance(space.basis, factors),
        )

    def _finish_refit(self) -> None:
        """Check the grid against the new kernel."""
        self._warn_of_resolution()

    def _warn_of_resolution(self) -> None:
        checked = self._resolution_checked
        if checked is None or not is_in(self.covar_module, checked):
            self._resolution_checked = state_of(self.covar_module)
            if not warn_of_resolution(self._factors(), self._memory.grid):
                self._warn_of_coarse_grid()

    def _warn_of_coarse_grid(self) -> None:
        """Once, if the grid's size is the default."""
        if self._vouches_for_grid and self.num_observations > 0:
            told = warn_of_coarse_grid(self._factors(), self._memory.grid, self._typical_noise())
            self._vouches_for_grid = not told


def _grid_of(process: PosteriorProcess) -> Mesh | None:
    """The grid of a process, before it was conditioned; None: it is of no grid.

    Args:
        process: Of a grid model.
    """
    if isinstance(process, ConditionedProcess):
        return _grid_of(process.base)
    if isinstance(process, ObservationSpaceProcess):
        return process.prior.mesh
    basis = process.basis if isinstance(process, WeightSpaceProcess) else None
    return basis.grid if isinstance(basis, GridBasis) else None
