"""WISKI: Woodbury inversion with structured kernel interpolation, for streams in few dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Self

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform, Standardize
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.means import ConstantMean, Mean
from gpytorch.models.gp import GP
from torch import Tensor
from torch.nn import Module

from bo_stream.bases.grid import Grid
from bo_stream.bases.interpolation import InterpolationBasis, interpolation_basis
from bo_stream.bases.kernel_factors import KernelFactors, kernel_factors
from bo_stream.bases.kernel_sensitivity import prior_covariance
from bo_stream.bases.resolution import interpolation_error
from bo_stream.models.caches import WHITENED_ROWS, Solved, Whitening, is_same, state_of
from bo_stream.models.compatibility import check_mergeable
from bo_stream.models.construction import (
    check_dim,
    check_first_observations,
    check_mean,
    check_outputs,
    check_rank,
    checked_projection,
    choose_box,
    choose_grid_size,
    choose_likelihood,
    first_projected,
    first_totals,
    first_transformed,
    observed_inputs,
    reference_outcome,
    stem_box,
    warn_of_scaling,
)
from bo_stream.models.known_noise import NOISE_FLOOR, known_noise
from bo_stream.models.learning import LearningSpace
from bo_stream.models.marginal_likelihood import (
    NoiseGroup,
    batch_log_marginal_likelihood,
    combine,
    differentiable_log_marginal_likelihood,
    subspace_log_marginal_likelihood,
)
from bo_stream.models.memory import Observations, WhitenedMemory
from bo_stream.models.resolution_warning import warn_of_resolution
from bo_stream.models.stems import Stem
from bo_stream.models.stream_memory import StreamMemory
from bo_stream.models.streaming_gp import StreamingGP
from bo_stream.models.validation import check_finite, check_observations
from bo_stream.process import PosteriorProcess, WeightSpaceProcess
from bo_stream.weights import solve


class WISKI(StreamingGP):
    """A streaming Gaussian process on a grid, for one to four inputs, or more through a stem.

    The kernel is interpolated from a grid, ``k̃(x, x') = w(x)ᵀ K w(x')`` with K a Kronecker product
    (Stanton, Maddox, Delbridge and Wilson, 2021). Memory are the data's sufficient statistics on
    the grid, so an update costs the same whatever came before, and hyperparameters keep learning.

    - Memory: O(7^d p) for p grid nodes, fixed. Data are not kept (small updates wait, at most 512
      rows in feature space, to be added as one).
    - Update: O(n 7^d) for n observations, and O(n r²) for the whitened statistics; the next
      posterior solves once in O(r³), r = ``rank``.
    - A fantasy: O(q) cross-covariances and one q x q factor.
    - Exact: everything, given the kernel k̃ of the present hyperparameters in its r largest
      eigenvectors; updates, merges, retractions, re-standardisation, growth of the grid; gradients.
    - Approximate: k̃ itself (see :meth:`interpolation_error`), and the part ``tolerance`` of its
      trace that is left out (see :attr:`rank` and :attr:`dropped`).
    - Learned: hyperparameters, in as many of the features as the noise level asks for (the rest
      counts as white noise), kept while the kernel moves little; the gradient of that
      objective is exact. That of :meth:`log_marginal_likelihood` is exact where nothing is left
      out.
    - When: thousands to millions of observations in one to four inputs. More inputs:
      ``botorch.models.SingleTaskGP`` while exact inference is affordable, or a projection of the
      inputs to at most four.

    Example:
        >>> model = WISKI(train_X, train_Y, bounds=torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
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
        bounds: Tensor | None = None,
        grid_size: int | Sequence[int] | None = None,
        tolerance: float = 1e-9,
        max_rank: int = 1024,
        stem: Stem | None = None,
    ) -> None:
        """Build the model and put the first observations into memory.

        Args:
            train_X: ``batch_shape x n x d``; n may be 0, which gives the prior.
            train_Y: ``batch_shape x n x m``.
            train_Yvar: Known noise variances, ``batch_shape x n x m``; NaN in a row: unknown,
                learned. Zero is raised to ``NOISE_FLOOR`` of the first outcomes' variance, with a
                warning.
            likelihood: A ``GaussianLikelihood``; default: BoTorch's with a log-normal prior, or
                fixed noise where every variance is known.
            covar_module: RBF, Matérn 1/2, 3/2, 5/2, periodic and spectral mixture kernels, scaled
                and multiplied as you like, and sums of those that act on one and the same input
                dimension. A Matérn kernel is the product of one-dimensional ones here; a spectral
                mixture in several dimensions is gpytorch's product of one-dimensional mixtures.
                Default: BoTorch's own default.
            mean_module: ``ConstantMean`` (default) or ``ZeroMean``.
            outcome_transform: Default: ``Standardize``, learned anew from the running sums,
                exactly, whenever the model is refitted. ``Log``, ``Power`` and ``Bilog``, alone or
                chained with a final ``Standardize``, work too; others raise.
            input_transform: Any without parameters to learn; bounds that it learns come from the
                first observations. One with learnable parameters (``Warp``) raises.
            bounds: The box of the inputs, ``2 x d``, before the input transform. Default: the unit
                cube if it holds the (transformed) data, else the data's box with a margin of a
                tenth of its width on each side.
            grid_size: Nodes per dimension, one number or d, at least 4. Default: by d and the
                kernel's smoothness, see ``bo_stream.bases.resolution``.
            tolerance: Part of the kernel's trace that may be left out; 0 keeps every eigenvector.
            max_rank: Cap on the number r of features, whatever the tolerance.
            stem: A projection of any number of (transformed) inputs to one to three, on which the
                kernel then acts; the grid covers the unit cube that it projects to. One that is
                not calibrated yet is so on train_X.

        Raises:
            BotorchTensorDimensionError: Shapes do not fit together.
            InputDataError: Wrong dtypes or devices, NaN, infinities, negative variances.
            UnsupportedError: More than four inputs; a kernel, mean, likelihood or transform that a
                stream on a grid cannot represent.
            ValueError: ``grid_size``, ``bounds``, ``tolerance`` or ``max_rank`` is out of range, or
                the grid is too large for memory (said before it is allocated).
        """
        check_first_observations(train_X, train_Y, train_Yvar)
        GP.__init__(self)
        self._supposed: PosteriorProcess | None = None
        self._whitening: Whitening | None = None
        self._solved: Solved | None = None
        self._learning: LearningSpace | None = None
        self._resolution_checked: tuple[Tensor, ...] | None = None
        self._num_outputs = train_Y.shape[-1]
        self._batch_shape = train_X.shape[:-2]
        self.tolerance, self.max_rank = check_rank(tolerance, max_rank)
        if isinstance(outcome_transform, _DefaultType):
            outcome_transform = Standardize(m=self._num_outputs, batch_shape=self._batch_shape)
        if outcome_transform is not None:
            check_outputs(outcome_transform, self._num_outputs)
            self.outcome_transform = outcome_transform
        inputs = self._first_inputs(train_X, input_transform, stem)
        self._input_dim = train_X.shape[-1]
        self._grid_dim = check_dim(inputs.shape[-1])
        aug_batch = self._batch_shape + ((self._num_outputs,) if self._num_outputs > 1 else ())
        self.covar_module = (
            get_covar_module_with_dim_scaled_prior(self._grid_dim, batch_shape=aug_batch)
            if covar_module is None
            else covar_module
        )
        self.mean_module = (
            ConstantMean(batch_shape=aug_batch) if mean_module is None else mean_module
        )
        self.likelihood = choose_likelihood(likelihood, train_Yvar, aug_batch)
        check_mean(self.mean_module)
        box = (
            choose_box(bounds, inputs, input_transform) if stem is None else stem_box(bounds, stem)
        )
        size = choose_grid_size(grid_size, self._factors(), self._grid_dim)
        targets, _ = self._outcomes.to_targets(train_Y, train_Yvar)
        self._shift = reference_outcome(targets)
        self._memory = StreamMemory.empty(
            Grid.over(box, size), self._batch_shape, self._num_outputs, train_X.device
        )
        self._basis_grid = self._memory.grid
        self.to(train_X)
        self._standardize_by(first_totals(targets, self._shift))
        self._noise_floor = NOISE_FLOOR * self.outcome_scale().square()
        self._observe(train_X, train_Y, train_Yvar, 1.0)
        warn_of_scaling(inputs, self._standardized(train_Y.double()), covar_module is not None)

    def _first_inputs(
        self, X: Tensor, transform: InputTransform | None, stem: Stem | None
    ) -> Tensor:
        if transform is not None:
            self.input_transform = transform
            X = first_transformed(X, transform)
        if stem is None:
            return X
        self.stem = stem
        return first_projected(X, stem)

    def transform_inputs(self, X: Tensor, input_transform: Module | None = None) -> Tensor:
        """Inputs as the grid takes them: transformed, then projected by the stem, differentiable.

        Args:
            X: ``... x d``.
            input_transform: Instead of the model's own.
        """
        inputs: Tensor = super().transform_inputs(X, input_transform)
        stem = self._stem
        return inputs if stem is None else stem(inputs)

    @property
    def _stem(self) -> Stem | None:
        stem: Any = self._modules.get("stem")
        return stem

    def _supposing(self, process: PosteriorProcess) -> Self:
        model = super()._supposing(process)
        if self._stem is not None and self._supposed is None:
            model.stem = deepcopy(self._stem)  # this one's may go on learning
        return model

    @property
    def maps_boxes(self) -> bool:
        """Whether a box of inputs is a box in the grid."""
        return self._stem is None

    # --- memory -------------------------------------------------------------------------------

    def update(self, X: Tensor, Y: Tensor, Yvar: Tensor | None = None) -> Self:
        """Put n observations into memory, in place. Cost O(n (7^d + r²)), whatever came before.

        Inputs outside the bounds grow the grid by whole cells, hyperparameters kept, to at most
        ``MAX_GROWTH`` times its first width per dimension. Bad input raises and changes nothing.

        Args:
            X: ``batch_shape x n x d``; n = 0 changes nothing.
            Y: ``batch_shape x n x m``.
            Yvar: Known noise variances shaped as Y; NaN: unknown.

        Raises:
            BotorchTensorDimensionError: Shapes do not fit the model.
            InputDataError: Dtype, device, NaN, infinity, negative variance, inputs too far outside.
            UnsupportedError: The model supposes data.
            ValueError: The grown grid is too large for memory.
        """
        return self._changed("update", X, Y, Yvar, 1.0)

    def retract(self, X: Tensor, Y: Tensor, Yvar: Tensor | None = None) -> Self:
        """Take observations out of memory: undoes :meth:`update` with the same arguments.

        Args and errors as there; also InputDataError if more are taken out than are in.
        """
        return self._changed("retract", X, Y, Yvar, -1.0)

    def _changed(self, verb: str, X: Tensor, Y: Tensor, Yvar: Tensor | None, sign: float) -> Self:
        self._check_not_supposed(verb)
        self._check_observations(X, Y, Yvar)
        if sign < 0:
            self._check_retractable(X)
        if X.shape[-2] > 0:
            self._observe(X, Y, Yvar, sign)
        return self

    def _check_retractable(self, X: Tensor) -> None:
        if X.shape[-2] > self.num_observations + 0.5:
            raise InputDataError(
                f"Expected X to hold at most the {self.num_observations:g} observations in "
                f"memory, got {X.shape[-2]}. Retract only what was given to update."
            )

    def _check_observations(self, X: Tensor, Y: Tensor, Yvar: Tensor | None) -> None:
        check_observations(
            X,
            Y,
            Yvar,
            dim=self._input_dim,
            outputs=self.num_outputs,
            batch_shape=self.batch_shape,
            like=self.train_targets,
        )

    def _observe(self, X: Tensor, Y: Tensor, Yvar: Tensor | None, sign: float) -> None:
        self._take(self._observations(X, Y, Yvar, sign))

    def _take(self, data: Observations) -> None:
        self._make_room(data.X)
        memory = self._memory.with_room_for(data)
        whitening, solved = self._caches_after(data)
        memory.observe(data)
        self._memory, self._whitening, self._solved = memory, whitening, solved
        self._learning = None
        self._refresh_fixed_noise()

    @torch.no_grad()
    def _caches_after(self, data: Observations) -> tuple[Whitening | None, Solved | None]:
        whitening, solved = self._whitening, self._solved
        if whitening is None or data.X.shape[-2] > WHITENED_ROWS:
            return None, None
        features = whitening.basis.features(data.X)
        after = whitening.after(data, features)
        if solved is None or not solved.can_take(data, whitening.basis):
            return after, None
        if not is_same(state_of(self), solved.state):
            return after, None
        return after, solved.after(
            features, *self._as_outcomes(data.targets, data.noise, data.known)
        )

    def _as_outcomes(self, targets: Tensor, noise: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Outcomes and actual noise variances in transformed units, ``batch x m x n`` each."""
        offset, scale = (t.unsqueeze(-1) for t in self._outcomes.offset_and_scale(self._shift))
        outcomes = (targets + self._shift.unsqueeze(-1) - offset) / scale
        variances = noise / scale.square()
        if not isinstance(self.likelihood, GaussianLikelihood):
            return outcomes, variances
        return outcomes, torch.where(known, variances, self.noise_level().unsqueeze(-1))

    @torch.no_grad()
    def standardized(
        self, X: Tensor, Y: Tensor, Yvar: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Outcomes and noise variances as the process has them, ``batch x m x n`` each, float64.

        Args:
            X: ``batch_shape x n x d``.
            Y: ``batch_shape x n x m``.
            Yvar: Known noise variances shaped as Y; NaN: unknown.
        """
        self._check_observations(X, Y, Yvar)
        return self._as_outcomes(*self._measured(Y, Yvar))

    def _observations(self, X: Tensor, Y: Tensor, Yvar: Tensor | None, sign: float) -> Observations:
        targets, noise, known = self._measured(Y, Yvar)
        return Observations(self.coordinates(X).to(torch.float64), targets, noise, known, sign)

    def _measured(self, Y: Tensor, Yvar: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Targets less the shift, noise variances, and where these are known."""
        targets, variances = self._outcomes.to_targets(Y.detach(), Yvar)
        check_finite("Y after its outcome transform", targets)
        shifted = targets.to(torch.float64).mT - self._shift.unsqueeze(-1)
        learns = isinstance(self.likelihood, GaussianLikelihood)
        return shifted, *known_noise(shifted, variances, self._noise_floor, learns)

    def _make_room(self, X: Tensor) -> None:
        """Grow the grid, exactly, so that its box holds transformed inputs."""
        memory = self._memory.covering(X)
        if memory is not self._memory:
            self._set_memory(memory)

    def merge(self, other: Self) -> Self:
        """Add another model's memory to this one's, in place; hyperparameters stay as they are.

        Exact: equal to one stream of both models' data. Grids that share their nodes are joined; a
        different grid is kept beside this one, its observations interpolated from its own nodes.

        Raises:
            UnsupportedError: Another class, shape, transform, or a model that supposes data.
        """
        check_mergeable(self, other)
        self._check_not_supposed("merge")
        other._check_not_supposed("merge")
        matrix = _shifted_targets(other._shift - self._shift)
        self._set_memory(
            self._memory.absorb(other._memory.map(lambda s: s.map_targets(matrix).scale(1.0)))
        )
        self._refresh_fixed_noise()
        return self

    def _set_memory(self, memory: StreamMemory) -> None:
        self._memory = memory
        self._basis_grid = memory.grid
        self._whitening = self._solved = self._learning = None

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
        """
        self._check_not_supposed("reproject")
        self._check_observations(X, Y, Yvar)
        self._check_retractable(X)
        if former.shape != (*X.shape[:-1], self._grid_dim):
            raise BotorchTensorDimensionError(
                f"Expected former of shape `{tuple(X.shape[:-1])} x {self._grid_dim}`, the "
                f"coordinates of X, got {tuple(former.shape)}."
            )
        new = self._observations(X, Y, Yvar, 1.0)
        self._take(replace(new, X=checked_projection(former.to(new.X)), sign=-1.0))
        self._take(new)
        return self

    @torch.no_grad()
    def coordinates(self, X: Tensor) -> Tensor:
        """Where observations at X enter the grid now, ``... x d -> ... x k``, without gradients."""
        inputs = observed_inputs(X, self._input_transform).detach()
        stem = self._stem
        return inputs if stem is None else checked_projection(stem(inputs))

    def forget(self, factor: float) -> Self:
        """Let every past observation count ``factor`` times: exponential forgetting.

        Args:
            factor: In (0, 1].

        Raises:
            ValueError: The factor is out of range.
            UnsupportedError: The model supposes data.
        """
        self._check_not_supposed("forget")
        if not 0.0 < factor <= 1.0:
            raise ValueError(f"Expected factor in (0, 1], got {factor}.")
        self._set_memory(self._memory.map(lambda s: s.scale(factor)))
        return self

    def clear(self) -> Self:
        """Drop all observations; hyperparameters, stem and standardisation stay.

        Raises:
            UnsupportedError: The model supposes data.
        """
        self._check_not_supposed("clear")
        memory = self._memory
        self._set_memory(
            StreamMemory.empty(
                memory.grid, self._batch_shape, self._num_outputs, memory.counts.device
            )
        )
        return self

    def refine(self, grid_size: int | Sequence[int]) -> Self:
        """Move to a finer (or coarser) grid over the same box, hyperparameters kept.

        What is observed from now on has the new grid's interpolation error. The posterior is
        exactly that of the new grid's kernel with the past observations interpolated twice (from
        the new grid to the old nodes, from those to the data), whose statistics stay on the old
        grid. So the past keeps the old grid's error, and memory and the cost of a refit grow by
        one grid per call.

        Args:
            grid_size: Nodes per dimension, one number or d, at least 4.

        Raises:
            ValueError: The size is out of range or too large for memory.
            UnsupportedError: The model supposes data.
        """
        self._check_not_supposed("refine")
        sizes = choose_grid_size(grid_size, self._factors(), self._grid_dim)
        self._set_memory(self._memory.refined(Grid.over(self._memory.grid.bounds, sizes)))
        return self

    def _prepare_refit(self) -> None:
        self._standardize_by(self._memory.totals)
        self._refresh_fixed_noise()

    def _standardize_by(self, totals: Tensor) -> None:
        """Learn the standardisation, in a copy: models that suppose data keep their own."""
        if "outcome_transform" in self._modules:
            self.outcome_transform = deepcopy(self.outcome_transform)
        self._outcomes.learn(totals, self._shift)

    def _counts(self) -> Tensor:
        return self._memory.counts

    def _refresh_fixed_noise(self) -> None:
        """Keep a fixed-noise likelihood at the mean known variance, for BoTorch's fantasies."""
        if isinstance(self.likelihood, FixedNoiseGaussianLikelihood):
            level = self._from_per_output(self._mean_known_noise()).unsqueeze(-1)
            self.likelihood.noise_covar.noise = level.to(self._dtype)

    def _mean_known_noise(self) -> Tensor:
        scale = self.outcome_scale()
        mean = self._memory.mean_known_noise()
        if mean is None:
            return torch.full_like(scale, NOISE_FLOOR)
        return (mean / scale.square()).clamp_min(NOISE_FLOOR)

    def _select_memory(self, outputs: list[int]) -> None:
        self._set_memory(self._memory.select(outputs))
        self._shift = self._shift[..., outputs]
        self._noise_floor = self._noise_floor[..., outputs]

    # --- posterior ----------------------------------------------------------------------------

    def process(self, X: Tensor | None = None) -> PosteriorProcess:
        """The posterior as a process; see :class:`StreamingGP`. Solved once, then kept.

        Args:
            X: Transformed inputs that the process must take. Outside the bounds they are predicted
                from a wider grid, whose kernel is the same; the memory stays as it is.
        """
        if X is not None:
            check_finite("X", X)
        if self._supposed is not None:
            self._check_inside(X)
            return self._supposed
        if X is not None:
            self._widen_basis(X)
        state = state_of(self)
        if self._solved is None or not is_same(state, self._solved.state):
            self._solved = Solved(state, self._solve())
        return self._solved.process

    def _widen_basis(self, X: Tensor) -> None:
        if not self._basis_grid.contains(X):
            self._basis_grid = self._memory.widened(self._basis_grid, X)
            self._whitening = self._solved = None

    def _check_inside(self, X: Tensor | None) -> None:
        if X is not None and not self._basis_grid.contains(X):
            raise InputDataError(
                "X lies outside the bounds of a model that supposes data, whose grid cannot grow. "
                f"Build the model with wider bounds than {self.bounds.tolist()}."
            )

    @torch.no_grad()
    def _solve(self) -> WeightSpaceProcess:
        whitening = self._current_whitening()
        evidence = combine(self._noise_groups(whitening.memory), self._residual())
        prior_mean = self._prior_mean().unsqueeze(-1).clone()
        return WeightSpaceProcess(whitening.basis, solve(evidence), prior_mean)

    @torch.no_grad()
    def _current_whitening(self) -> Whitening:
        state = state_of(self.covar_module)
        if self._whitening is None or not is_same(state, self._whitening.state):
            basis = self._present_basis()
            self._whitening = Whitening(state, basis, self._memory.whitened(basis))
        self._whitening = self._whitening.settled()
        return self._whitening

    @torch.no_grad()
    def _present_basis(self) -> InterpolationBasis:
        batch = torch.Size((*self.batch_shape, self.num_outputs))
        return interpolation_basis(
            self._factors(), self._basis_grid, batch, self.tolerance, self.max_rank
        )

    def _factors(self) -> KernelFactors:
        factors = kernel_factors(self.covar_module, self._grid_dim)
        return factors.for_single_output() if self.num_outputs == 1 else factors

    def _noise_groups(
        self, memory: WhitenedMemory, left_out: Tensor | float = 0.0
    ) -> list[NoiseGroup]:
        groups = []
        if isinstance(self.likelihood, GaussianLikelihood):
            groups.append(NoiseGroup(memory.learned, self.noise_level() + left_out))
        if memory.known is not None:
            groups.append(NoiseGroup(memory.known, self.outcome_scale().square().reciprocal()))
        return groups or [NoiseGroup(memory.learned, torch.ones_like(self.outcome_scale()))]

    def noise_level(self) -> Tensor:
        """The learned noise variance, or the mean of the known ones, ``batch_shape x m``."""
        if isinstance(self.likelihood, GaussianLikelihood):
            return self._per_output(self.likelihood.noise.squeeze(-1))
        return self._mean_known_noise()

    def _prior_mean(self) -> Tensor:
        if isinstance(self.mean_module, ConstantMean):
            return self._per_output(self.mean_module.constant)
        return torch.zeros_like(self._counts())

    def _residual(self) -> Tensor:
        """``[Y, 1] @ residual`` are the standardised outcomes less the prior mean."""
        offset, scale = self._outcomes.offset_and_scale(self._counts())
        constant = (self._shift - offset) / scale - self._prior_mean()
        return torch.stack((scale.reciprocal().expand_as(constant), constant), -1).unsqueeze(-1)

    def _log_marginal_likelihood(self) -> Tensor:
        whitening = self._current_whitening()
        return differentiable_log_marginal_likelihood(
            self._noise_groups(whitening.memory),
            self._residual(),
            whitening.basis,
            self._factors(),
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
        outcomes, noise = self._as_outcomes(*self._measured(Y, Yvar))
        coordinates = self._differentiable_inputs(X, recalibrate).to(torch.float64)
        basis = self._present_basis()
        return self._from_per_output(
            batch_log_marginal_likelihood(
                basis.features(coordinates),
                outcomes - self._prior_mean().unsqueeze(-1),
                noise,
                basis,
                self._factors(),
            )
        )

    def _differentiable_inputs(self, X: Tensor, recalibrate: bool) -> Tensor:
        stem = self._stem
        if stem is None or not recalibrate:
            return self.transform_inputs(X)
        return stem.calibrated_forward(observed_inputs(X, self._input_transform))

    def _learning_objective(self) -> Tensor:
        factors, noise = self._factors(), self.noise_level()
        if self._learning is None or not self._learning.holds(factors, noise):
            self._learning = LearningSpace.around(
                factors, noise, self._memory, self.tolerance, self.max_rank
            )
        return subspace_log_marginal_likelihood(
            self._noise_groups(self._learning.memory, self._learning.left_out(factors)),
            self._residual(),
            prior_covariance(self._learning.basis, factors),
        )

    # --- what the grid is ---------------------------------------------------------------------

    @property
    def bounds(self) -> Tensor:
        """The box that the grid covers, ``2 x d``, in transformed inputs."""
        return self._memory.grid.bounds.to(self.train_targets)

    @property
    def grid_size(self) -> tuple[int, ...]:
        """Nodes per dimension, among them one beyond the box at each end."""
        return self._memory.grid.size

    @property
    def rank(self) -> int:
        """Number r of features at the present hyperparameters."""
        return self._current_whitening().basis.rank

    @property
    def dropped(self) -> float:
        """Part of the kernel's trace that the r features leave out."""
        return self._current_whitening().basis.dropped

    def interpolation_error(self) -> float:
        """Bound on the error of the interpolated kernel, in parts of the prior variance."""
        return interpolation_error(self._factors(), self._memory.grid)

    def train(self, mode: bool = True) -> Self:
        """Training mode begins a refit; leaving it checks the grid against the new kernel."""
        was_training = self.training
        super().train(mode)
        if was_training and not mode and self._supposed is None:
            self._warn_of_resolution()
        return self

    def _warn_of_resolution(self) -> None:
        state = state_of(self.covar_module)
        if self._resolution_checked is None or not is_same(state, self._resolution_checked):
            self._resolution_checked = state
            warn_of_resolution(self._factors(), self._memory.grid)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the memory along to another device; it stays in float64."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = fn(torch.empty(0, dtype=self._dtype, device=self._shift.device)).device
        if device != self._shift.device:
            self._shift = self._shift.to(device)
            self._noise_floor = self._noise_floor.to(device)
            self._set_memory(self._memory.to(device))
        return self


def _shifted_targets(shift: Tensor) -> Tensor:
    """The map of target columns [Y, 1] to [Y + shift, 1], ``... x m x 2 x 2``."""
    matrix = torch.eye(2, dtype=shift.dtype, device=shift.device).repeat(*shift.shape, 1, 1)
    matrix[..., 1, 0] = shift
    return matrix
