"""WISKI: Woodbury inversion with structured kernel interpolation, for streams in few dimensions."""

from __future__ import annotations

from typing import Self

import torch
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch.kernels import Kernel
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.means import Mean
from torch import Tensor

from bo_stream.bases.grid.mesh import Sizes
from bo_stream.bases.grid.resolution import interpolation_error
from bo_stream.bases.stems import Stem
from bo_stream.models.base import StreamingGP
from bo_stream.models.construction import (
    check_rank,
    choose_box,
    stretch_lengthscale,
    warn_of_scaling,
)
from bo_stream.models.inference import InferenceOption
from bo_stream.models.wiski.cache import Whitening
from bo_stream.models.wiski.inference import GridInference, Memory
from bo_stream.models.wiski.resolution import GridSize, check_dim
from bo_stream.tensors import keeps_tensors


class WISKI(StreamingGP):
    """A streaming Gaussian process on grids, for few inputs, or more in a sum or through a stem.

    The kernel is interpolated from a grid, ``k̃(x, x') = w(x)ᵀ K w(x')`` with K a Kronecker product
    (Stanton, Maddox, Delbridge and Wilson, 2021). Memory are the data's sufficient statistics on
    the grid, so an update costs the same whatever came before, and hyperparameters keep learning.

    - Few observations, at most 300 (and no more than grid nodes; none where ``max_rank`` is less
      than 300): held as rows, O(n d) memory. Fits, posteriors and fantasies are those of an exact
      model with the kernel k̃, at such a model's cost; no feature is computed unless it is asked
      for, and none is left out. One observation more, or :meth:`forget`, moves all to the grid.
    - Memory: O(7^d p) for p grid nodes, fixed. Data are not kept (small updates wait, at most 512
      rows in feature space, to be added as one), but for the latest inputs in ``train_inputs``.
    - Update: O(n 7^d) for n observations, and O(n r²) for the whitened statistics; the next
      posterior solves once in O(r³), r = ``rank``. Inputs outside the bounds grow the grid by whole
      cells, hyperparameters kept, to at most four times its first width per dimension.
    - A fantasy: O(q) cross-covariances and one q x q factor.
    - Exact: everything, given the kernel k̃ of the present hyperparameters in its r largest
      eigenvectors; updates, merges, retractions, re-standardisation, growth of the grid; gradients.
    - Approximate: k̃ itself (see :meth:`interpolation_error`), and the part ``tolerance`` of its
      trace that is left out (see :attr:`rank` and :attr:`dropped`).
    - Learned: hyperparameters, in as many of the features as the noise level asks for (the rest
      counts as white noise), kept while the kernel moves little; the gradient of that
      objective is exact. That of :meth:`log_marginal_likelihood` is exact where nothing is left
      out.
    - When: thousands to millions of observations in one to four inputs. More inputs: a kernel that
      is a sum over groups of at most four, each on a grid of its own with one joint posterior
      (memory O(p p') for each pair of grids besides); a projection of the inputs, ``stem``; or
      ``botorch.models.SingleTaskGP`` while exact inference is affordable.

    Example:
        >>> model = WISKI(train_X, train_Y, bounds=torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
        >>> fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        >>> model.update(new_X, new_Y).posterior(test_X).mean
        >>> parts = [ScaleKernel(RBFKernel(active_dims=(i,))) for i in range(10)]
        >>> additive = WISKI(ten_inputs, train_Y, covar_module=AdditiveKernel(*parts))
    """

    tolerance = InferenceOption[float]()
    max_rank = InferenceOption[int]()
    _memory: Memory
    _inference: GridInference

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
        rank = check_rank(tolerance, max_rank)
        inputs = self._first_inputs(train_X, input_transform, stem)
        dim = check_dim(inputs.shape[-1], covar_module)
        self._set_modules(dim, train_Yvar, likelihood, covar_module, mean_module)
        box = choose_box(bounds, train_X, inputs, input_transform, stem)
        if covar_module is None:
            stretch_lengthscale(self.covar_module, box)
        self._inference, self._memory = GridInference.start(
            self._prior, box, grid_size, rank, train_X
        )
        self._standardize_first(train_X, train_Y, train_Yvar)
        self._observe(train_X, train_Y, train_Yvar, 1.0)
        warn_of_scaling(inputs, self._standardized(train_Y.double()), covar_module is not None)

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
        return interpolation_error(self._inference.kernel(self._prior), self._memory.grid)

    @property
    def rank(self) -> int:
        """Number r of features at the present hyperparameters."""
        return self._whitened().basis.rank

    @property
    def dropped(self) -> float:
        """Part of the kernel's trace that the r features leave out."""
        return self._whitened().basis.dropped

    @torch.no_grad()
    def solved_gram(self) -> Tensor:
        """Return what the observations add to the identity in the matrix that a posterior solves.

        ``Φᵀ N⁻¹ Φ`` of the whitened features at the present hyperparameters, ``batch_shape x m x r
        x r``: the precision of the weights is ``I`` more.
        """
        return self._prior.evidence(self._whitened().memory).gram

    def _whitened(self) -> Whitening:
        whitening, self._cache = self._inference.whitened(self._memory, self._cache, self._prior)
        return whitening

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
        self._inference = self._inference.truncated(left_out, self._memory, self._prior)
        self._set_memory(self._memory)
        return self

    @keeps_tensors
    def refine(self, grid_size: GridSize) -> Self:
        """Move to a finer (or coarser) grid over the same box, hyperparameters kept.

        Observations that are still held as rows move to the new grid, exactly. Of others, what is
        observed from now on has the new grid's interpolation error, and the posterior is
        exactly that of the new grid's kernel with the past observations interpolated twice (from
        the new grid to the old nodes, from those to the data), whose statistics stay on the old
        grid. So the past keeps the old grid's error, and memory and the cost of a refit grow by
        one grid per call. Once there are observations on both grids, ``retract`` is refused, for
        it is not kept which is where.

        Args:
            grid_size: Nodes per dimension, one number or d, at least 4; for a sum of kernels also
                such a tuple for each grid.

        Raises:
            ValueError: The size is out of range or too large for memory.
            UnsupportedError: The model supposes data.
        """
        self._check_not_supposed("refine")
        self._inference, memory = self._inference.refined(self._memory, grid_size, self._prior)
        self._set_memory(memory)
        return self

    def batch_log_marginal_likelihood(
        self, X: Tensor, Y: Tensor, Yvar: Tensor | None = None, recalibrate: bool = False
    ) -> Tensor:
        """Return the likelihood of these observations instead of those in memory.

        Differentiable in the hyperparameters and in the stem; exact where no feature is left out.
        Cost O(n r² + r³). Shaped as :meth:`log_marginal_likelihood`.

        Args:
            X: ``batch_shape x n x d``.
            Y: ``batch_shape x n x m``.
            Yvar: Known noise variances shaped as Y; NaN: unknown.
            recalibrate: Calibrate the stem on X, as part of what is differentiated.
        """
        self._units.checked(self._prior, X, Y, Yvar, "batch_log_marginal_likelihood")
        inputs = self.calibrated_inputs(X) if recalibrate else self.hypothetical_inputs(X)
        value = self._inference.batch_log_marginal_likelihood(
            self._memory.grid, inputs, self._measured(Y, Yvar), self._prior
        )
        return self._from_per_output(value)

    def reproject(self, X: Tensor, Y: Tensor, former: Tensor, Yvar: Tensor | None = None) -> Self:
        """Replace observations by themselves as the stem projects them now.

        Exact: equal to a memory that they had entered by the present stem.

        Args:
            X: ``n x d``, observed before.
            Y: ``n x m``.
            former: Their coordinates when they entered, ``n x k``: what :meth:`coordinates` was.
            Yvar: Known noise variances shaped as Y; NaN: unknown.

        Raises:
            BotorchTensorDimensionError: ``former`` has another shape.
            InputDataError: As :meth:`update`, and more observations than are in memory.
            UnsupportedError: There are observations on several grids, after :meth:`refine`.
        """
        old, new = self._reprojected(X, Y, former, Yvar)
        self._memory, self._cache = self._inference.replaced(
            self._memory, self._cache, old, new, self._prior
        )
        self._refresh_fixed_noise()
        return self
