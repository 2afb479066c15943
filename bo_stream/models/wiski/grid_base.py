"""A grid model's construction, inputs and grid."""

from __future__ import annotations

import torch
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch.kernels import Kernel
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.means import Mean
from torch import Tensor

from bo_stream.bases.grid.kernel import GridKernel, kernel_factors
from bo_stream.bases.grid.mesh import Mesh, Sizes, mesh_over
from bo_stream.bases.grid.resolution import interpolation_error
from bo_stream.bases.stems import Stem
from bo_stream.models.base import StreamingGP
from bo_stream.models.caches import Solved, Whitening, Wider
from bo_stream.models.construction import (
    check_rank,
    choose_box,
    stem_box,
    stretch_lengthscale,
    warn_of_scaling,
)
from bo_stream.models.wiski import rows as row_memory
from bo_stream.models.wiski.grid_choice import GridSize, check_dim, choose_grid_size
from bo_stream.models.wiski.learning import LearningSpace, Subspace
from bo_stream.models.wiski.memory import StreamMemory
from bo_stream.models.wiski.observation_space import SolvedRows
from bo_stream.models.wiski.rows import RowMemory


class GridBase(StreamingGP):
    """A streaming Gaussian process on a grid: its parts, and where inputs lie on it."""

    _memory: RowMemory | StreamMemory
    _rows_solved: SolvedRows | None = None
    _wider: tuple[Wider, ...] = ()
    _vouches_for_grid: bool = False

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
        bounds: Tensor | None = None,
        grid_size: GridSize | None = None,
        tolerance: float = 1e-9,
        max_rank: int = 1024,
        stem: Stem | None = None,
    ) -> None:
        """Build the model and put the first observations into memory.

        Args:
            train_X: ``batch_shape x n x d``; n may be 0, which gives the prior.
            train_Y: ``batch_shape x n x m``.
            train_Yvar: Known noise variances, ``batch_shape x n x m``; NaN in a row: unknown,
                learned. Zero is raised to ``NOISE_FLOOR`` of the outcomes' variance, a positive one
                to ``LEAST_NOISE`` of it, with a warning.
            likelihood: A ``GaussianLikelihood``; default: BoTorch's with a log-normal prior, or
                fixed noise where every variance is known.
            covar_module: RBF, Matérn 1/2, 3/2, 5/2, periodic and spectral mixture kernels, scaled,
                multiplied and added as you like. A sum gives a grid to each of its parts, over that
                part's ``active_dims`` (at most four; parts may share inputs); parts on one and the
                same single input share a grid. A Matérn kernel is the product of one-dimensional
                ones here; a spectral mixture in several dimensions is gpytorch's product of
                one-dimensional mixtures. Default: BoTorch's own default, with its
                first lengthscales in parts of the box's widths.
            mean_module: ``ConstantMean`` (default) or ``ZeroMean``.
            outcome_transform: Default: ``Standardize``, learned anew from the running sums,
                exactly, whenever the model is refitted. ``Log``, ``Power`` and ``Bilog``, alone or
                chained with a final ``Standardize``, work too; others raise.
            input_transform: Any without parameters to learn; bounds that it learns come from the
                first observations. One with learnable parameters (``Warp``) raises. One that makes
                several inputs of each (``InputPerturbation``, ``AppendFeatures``) acts on what a
                posterior is asked for; observations are as they come.
            bounds: The box of the inputs, ``2 x d``, before the input transform. Default: the unit
                cube if it holds the (transformed) data, else the data's box with a margin of a
                tenth of its width on each side; in both cases with room for perturbations.
            grid_size: Nodes per dimension, one number or d, at least 4; for a sum of kernels also
                such a tuple for each grid, as :attr:`grid_size` has them. Default: by the number of
                inputs of a grid and the kernel's smoothness, see
                ``bo_stream.bases.grid.resolution``; the model then says once, after a fit, where
                its interpolation error is several times the noise variance
                (``CoarsePointsWarning``).
            tolerance: Part of the kernel's trace that may be left out; 0 keeps every eigenvector.
            max_rank: Cap on the number r of features, whatever the tolerance.
            stem: A projection of any number of (transformed) inputs to one to three, on which the
                kernel then acts; the grid covers the unit cube that it projects to. One that is
                not calibrated yet is so on train_X.

        Raises:
            BotorchTensorDimensionError: Shapes do not fit together.
            InputDataError: Wrong dtypes or devices, NaN, infinities, negative variances.
            UnsupportedError: More than four inputs of one grid; a kernel, mean, likelihood or
                transform that a stream on a grid cannot represent.
            ValueError: ``grid_size``, ``bounds``, ``tolerance`` or ``max_rank`` is out of range, or
                the grid is too large for memory (said before it is allocated).
        """
        self._begin(train_X, train_Y, train_Yvar, outcome_transform)
        self._whitening: Whitening | None = None
        self._solved: Solved | None = None
        self._learning: LearningSpace | None = None
        self._subspace: Subspace | None = None
        self._resolution_checked: tuple[Tensor, ...] | None = None
        self.tolerance, self.max_rank = check_rank(tolerance, max_rank)
        inputs = self._first_inputs(train_X, input_transform, stem)
        self._grid_dim = check_dim(inputs.shape[-1], covar_module)
        self._set_modules(self._grid_dim, train_Yvar, likelihood, covar_module, mean_module)
        box = (
            choose_box(bounds, train_X, inputs, input_transform)
            if stem is None
            else stem_box(bounds, stem)
        )
        if covar_module is None:
            stretch_lengthscale(self.covar_module, box)
        kernel = self._factors()
        self._vouches_for_grid = grid_size is None
        sizes = choose_grid_size(grid_size, kernel, self._grid_dim)
        self._memory = self._empty_memory(
            mesh_over(box, kernel.groups(self._grid_dim), sizes), train_X.device
        )
        self._basis_grid = self._memory.grid
        self._standardize_first(train_X, train_Y, train_Yvar)
        self._observe(train_X, train_Y, train_Yvar, 1.0)
        warn_of_scaling(inputs, self._standardized(train_Y.double()), covar_module is not None)

    def _empty_memory(self, grid: Mesh, device: torch.device) -> RowMemory | StreamMemory:
        """A memory of no observations, which holds rows while they are few."""
        batch, outputs = self._batch_shape, self._num_outputs
        most = row_memory.MOST_ROWS
        if most == 0 or self.max_rank < most:  # features are wanted that leave a part out
            return StreamMemory.empty(grid, batch, outputs, device)
        return RowMemory.empty(grid, batch, outputs, device, most)

    def _factors(self) -> GridKernel:
        factors = kernel_factors(self.covar_module, self._grid_dim)
        return factors.for_single_output() if self.num_outputs == 1 else factors

    @property
    def bounds(self) -> Tensor:
        """The box that the grid covers, ``2 x d``, in transformed inputs.

        Models built with these bounds and this :attr:`grid_size` share its nodes, up to the
        rounding of the dtype; not so those with grids over common inputs that have grown.
        """
        return self._memory.grid.bounds.to(self.train_targets)

    @property
    def grid_size(self) -> tuple[int, ...] | Sizes:
        """Nodes per dimension (of each grid of a sum), one beyond the box at each end included."""
        return self._memory.grid.size

    def interpolation_error(self) -> float:
        """Bound on the error of the interpolated kernel, in parts of the prior variance."""
        return interpolation_error(self._factors(), self._memory.grid)

    def _set_memory(self, memory: RowMemory | StreamMemory) -> None:
        self._memory = memory
        self._basis_grid = memory.grid
        self._whitening = self._solved = self._learning = self._subspace = None
        self._rows_solved, self._wider = None, ()
