"""The models on a grid: what each of them does besides the verbs of all models."""

from __future__ import annotations

from abc import ABC
from dataclasses import replace
from typing import Any, Self

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError
from torch import Tensor

from bo_stream.bases.grid import kernel
from bo_stream.bases.grid.mesh import Sizes
from bo_stream.models.base import StreamingGP, keeps_tensors
from bo_stream.models.construction import checked_projection, observed_inputs
from bo_stream.models.wiski.cache import Whitening
from bo_stream.models.wiski.inference import Part
from bo_stream.models.wiski.resolution import GridSize


class GridModel(StreamingGP, ABC):
    """A streaming Gaussian process whose kernel is interpolated from a grid.

    Abstract; see :class:`~bo_stream.WISKI` for the notation.
    """

    @property
    def bounds(self) -> Tensor:
        """Return the box that the grid covers, ``2 x d``, in transformed inputs.

        Models built with these bounds and this ``grid_size`` share its nodes, up to the rounding of
        the dtype; not so those with grids over common inputs that have grown.
        """
        box: Tensor = self._memory.grid.bounds
        return box.to(self.train_targets)

    @property
    def grid_size(self) -> tuple[int, ...] | Sizes:
        """Return nodes per dimension (of each grid of a sum), one beyond each of its ends too."""
        size: tuple[int, ...] | Sizes = self._memory.grid.size
        return size

    def interpolation_error(self) -> float:
        """Bound the error of the interpolated kernel, in parts of the prior variance."""
        inference, memory, _ = self._process_part()
        return kernel.interpolation_error(inference.kernel(self.prior), memory.grid)

    def _whitened(self) -> Whitening:
        inference, memory, cache = self._process_part()
        whitening, cache = inference.whitened(memory, cache, self.prior)
        self._set_process_part(inference, memory, cache)
        return whitening

    @property
    def rank(self) -> int:
        """Count the r features at the present hyperparameters."""
        return self._whitened().basis.rank

    @property
    def dropped(self) -> float:
        """Return the part of the kernel's trace that the r features leave out."""
        return self._whitened().basis.dropped

    @torch.no_grad()
    def solved_gram(self) -> Tensor:
        """Return what the observations add to the identity in the matrix that a posterior solves.

        ``Φᵀ N⁻¹ Φ`` of the whitened features at the present hyperparameters, ``batch_shape x m x r
        x r``: the precision of the weights is ``I`` more.
        """
        return self.prior.evidence(self._whitened().memory).gram

    @keeps_tensors
    def truncate(self, left_out: float) -> Self:
        """Keep only as many features as the noise level asks for, at the present hyperparameters.

        Sets ``tolerance``; the memory stays whole, so a later call undoes it. A posterior from few
        observations that are stored as rows is exact all the same. With 1e-4 a posterior on 500
        noisy outcomes in 3-D had half the features, its mean was off by 0.001 of its standard
        deviation and its variance by 0.2 %.

        Args:
            left_out: Prior variance that may be left out, in parts of the noise variance.

        Raises:
            ValueError: It is not in [0, 1).
            UnsupportedError: The model is conditioned on hypothetical data.
        """
        self._check_not_conditioned("truncate")
        inference, memory, _ = self._process_part()
        self._set_process_part(inference.truncated(left_out, memory, self.prior), memory, None)
        self._cache = None
        return self

    @keeps_tensors
    def refine(self, grid_size: GridSize) -> Self:
        """Move to a finer (or coarser) grid over the same box, hyperparameters kept.

        Observations that are still stored as rows move to the new grid, exactly. Of others, what is
        observed from now on has the new grid's interpolation error, and the posterior is exactly
        that of the new grid's kernel with the past observations interpolated twice (from the new
        grid to the old nodes, from those to the data), whose statistics stay on the old grid. So
        the past keeps the old grid's error, and memory and the cost of a refit grow by one grid per
        call. Once there are observations on both grids, ``retract`` is refused, for it is not kept
        which is where.

        Args:
            grid_size: Nodes per dimension, one number or d, at least 4; for a sum of kernels also
                such a tuple for each grid.

        Raises:
            ValueError: The size is out of range or too large for memory.
            UnsupportedError: The model is conditioned on hypothetical data.
        """
        self._check_not_conditioned("refine")
        inference, memory, _ = self._process_part()
        self._set_process_part(*inference.refined(memory, grid_size, self.prior), None)
        self._cache = None
        return self

    def batch_log_marginal_likelihood(
        self, X: Tensor, Y: Tensor, Yvar: Tensor | None = None, recalibrate: bool = False
    ) -> Tensor:
        """Return the likelihood of these observations instead of those in memory.

        Differentiable in the hyperparameters and in the stem; exact where no feature is left out.
        Cost O(n r² + r³), or O(n² r + n³) for n < r. Shaped as ``log_marginal_likelihood``; that of
        the mean where noise has a model.

        Args:
            X: ``batch_shape x n x d``.
            Y: ``batch_shape x n x m``, or labels.
            Yvar: Known noise variances shaped as Y; NaN: unknown.
            recalibrate: Calibrate the stem on X, as part of what is differentiated.
        """
        Y, Yvar, _ = self._outcomes.checked(self, X, Y, Yvar, "batch_log_marginal_likelihood")
        if recalibrate and "stem" in self._modules:
            observed = observed_inputs(X, getattr(self, "input_transform", None))
            inputs = self.stem.calibrated_forward(observed)
        else:
            inputs = self.observation_inputs(X)
        inference, memory, _ = self._process_part()
        value = inference.batch_log_marginal_likelihood(
            memory.grid, inputs, self._measured(Y, Yvar), self.prior
        )
        return self._from_per_output(value)

    def reproject(self, X: Tensor, Y: Tensor, former: Tensor, Yvar: Tensor | None = None) -> Self:
        """Replace observations by themselves as the stem projects them now.

        Exact, unless ``forget`` was called since they came: equal to a memory that they had entered
        by the present stem.

        Args:
            X: ``n x d``, observed before.
            Y: ``n x m``, or labels.
            former: Their coordinates when they entered, ``n x k``: what ``coordinates`` was.
            Yvar: Known noise variances shaped as Y; NaN: unknown.

        Raises:
            BotorchTensorDimensionError: ``former`` has another shape.
            InputDataError: As ``update``, and more observations than are in memory.
            UnsupportedError: There are observations on several grids, after ``refine``; or the
                model is conditioned on hypothetical data.
        """
        self._check_not_conditioned("reproject")
        Y, Yvar, _ = self._outcomes.checked(self, X, Y, Yvar, "reproject")
        self._check_retractable(X)
        if former.shape != (*X.shape[:-1], self._process_dim):
            raise BotorchTensorDimensionError(
                f"Expected former of shape `{tuple(X.shape[:-1])} x {self._process_dim}`, the "
                f"coordinates of X, got {tuple(former.shape)}."
            )
        new, has_stem = self._observations(X, Y, Yvar, 1.0), "stem" in self._modules
        former = former.to(new.X)
        old = replace(new, X=checked_projection(former) if has_stem else former, sign=-1.0)
        inference, memory, cache = self._process_part()
        self._set_process_part(inference, *inference.replaced(memory, cache, old, new, self.prior))
        self._refresh_fixed_noise()
        return self

    def _process_part(self) -> Part:
        """Return inference, memory and cache of the process, without those of its noise."""
        inference: Any = self._inference
        part: Part = inference.part(self._memory, self._cache)
        return part

    def _set_process_part(self, *part: *Part) -> None:
        """Replace inference, memory and cache of the process."""
        inference: Any = self._inference
        changed = inference.with_part(part, self._memory, self._cache)
        self._inference, self._memory, self._cache = changed
