"""Gaussian process regression on clustered data: stable, without jitter, in float32 if wanted."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Literal, Self

import torch
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch.kernels import Kernel
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.means import Mean
from torch import Tensor

from bo_stream.allocation.cover_tree import CoverTree
from bo_stream.bases.inducing import frozen, kernel_matrix
from bo_stream.linalg import check_memory
from bo_stream.models.centre_solver import (
    CentreSolver,
    CholeskySolver,
    ConjugateGradients,
    RootEvidence,
)
from bo_stream.models.cluster_cache import SolvedClusters
from bo_stream.models.cluster_likelihood import (
    Probes,
    clustered_kl_divergence,
    clustered_log_marginal_likelihood,
    stochastic_objective,
)
from bo_stream.models.cluster_memory import ClusterMemory
from bo_stream.models.clustered_process import ClusteredProcess
from bo_stream.models.compatibility import check_mergeable
from bo_stream.models.construction import warn_of_scaling
from bo_stream.models.inducing_prior import differentiable_matrix
from bo_stream.models.marginal_likelihood import combine
from bo_stream.models.memory import Observations
from bo_stream.models.projection_warning import ProjectionWarning
from bo_stream.models.remembering_gp import RememberingGP, shifted_targets
from bo_stream.models.validation import check_finite
from bo_stream.models.warning_level import users_stack_level
from bo_stream.module_state import is_same, state_of
from bo_stream.process import PosteriorProcess
from bo_stream.weights import GaussianEvidence

Solver = Literal["cholesky", "cg"]

CHOLESKY_CENTRES = 4000
"""Up to this many centres are solved by a Cholesky factor unless told otherwise."""

MEMORY_LIMIT_GIB = 4.0
"""Of all matrices over the centres together."""


class ClusteredGP(RememberingGP):
    """The exact posterior for inputs moved to the centres of their clusters, for any kernel.

    A cover tree places centres at most ``resolution`` from every input and more than ``resolution``
    apart; a cluster's observations act as their mean with a noise of Λ, that of one over their
    number. (Terenin et al., 2024, section 3.3)

    - Memory: sums of each of M clusters, and their tree: O(M). Data are not kept. What is solved
      takes O(M²).
    - Update: O(n log M + M) for n observations. The next posterior conditions the last one on few
      of them (O(M²) each), else it solves anew: O(M³), or O(M²) an iteration by conjugate
      gradients.
    - A fantasy: O(q M) cross-covariances and one q x q factor. It is not moved to a centre.
    - Exact: the posterior of the moved inputs, whatever came in which batches, with its marginal
      likelihood and gradients; noise level, mean and standardisation may change at any time.
    - Approximate: inputs are up to ``resolution`` from where they act. Conjugate gradients stop at
      a relative residual.
    - Numerically: all that is solved is no smaller than the identity, so that no jitter is needed;
      the condition number grows with the observations in reach of a lengthscale over the noise.
    - When: many observations in few dimensions, and a fit that must not fail, in float32 too.

    Example:
        >>> model = ClusteredGP(train_X, train_Y, resolution=0.05)
        >>> fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        >>> model.update(new_X, new_Y).posterior(test_X).mean
    """

    _memory: ClusterMemory

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
        resolution: float = 0.1,
        tree: CoverTree | None = None,
        solver: Solver | None = None,
        cg_tolerance: float | None = None,
        arithmetic: torch.dtype = torch.float64,
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
            resolution: Largest distance of an input from its cluster's centre, in units of
                transformed inputs. Centres are shared by batch elements and outputs.
            tree: Instead of ``resolution``: a tree, empty or of points in units of transformed
                inputs. It is copied.
            solver: ``"cholesky"`` or ``"cg"`` (preconditioned conjugate gradients). Default: the
                first for up to ``CHOLESKY_CENTRES`` centres.
            cg_tolerance: Relative residual at which conjugate gradients stop. Default: 1e-10, in
                float32 1e-5.
            arithmetic: float64 or float32, in which centres, their covariances and whatever is
                solved are kept; sums over observations always are in float64.

        Raises:
            BotorchTensorDimensionError: Shapes do not fit together.
            InputDataError: Wrong dtypes or devices, NaN, infinities, negative variances.
            UnsupportedError: A mean, likelihood or transform that a stream cannot represent.
            ValueError: A bad option, or more centres than memory can hold.
        """
        self._begin(train_X, train_Y, train_Yvar, outcome_transform)
        inputs = self._first_inputs(train_X, input_transform)
        self._set_modules(inputs.shape[-1], train_Yvar, likelihood, covar_module, mean_module)
        self.solver, self.cg_tolerance = _checked_solver(solver, cg_tolerance)
        self.arithmetic = _checked_dtype(arithmetic)
        self._solved: SolvedClusters | None = None
        like = inputs[..., :0, :].reshape(0, inputs.shape[-1]).to(arithmetic)
        tree = CoverTree(resolution) if tree is None else tree.to(like).insert(like)
        self._memory = ClusterMemory.empty(tree, like, self._output_batch)
        self._standardize_first(train_X, train_Y, train_Yvar)
        if train_X.shape[-2] > 0:
            self._observe(train_X, train_Y, train_Yvar, 1.0)
        warn_of_scaling(inputs, self._standardized(train_Y.double()), covar_module is not None)

    def _projected(self, inputs: Tensor) -> Tensor:
        return inputs

    @property
    def centres(self) -> Tensor:
        """Of the clusters, ``M x d``, in transformed inputs."""
        return self._memory.centres.to(self.train_targets)

    @property
    def cluster_sizes(self) -> Tensor:
        """Observations in each cluster, ``batch_shape x M``; not whole after :meth:`forget`."""
        return self._memory.sizes.squeeze(-1)

    @property
    def resolution(self) -> float:
        """Largest distance of a new input from its cluster's centre."""
        return self._memory.tree.resolution

    def process(self, X: Tensor | None = None) -> PosteriorProcess:
        """The posterior as a process; see :class:`StreamingGP`. Solved once, then kept."""
        if X is not None:
            check_finite("X", X)
        if self._supposed is not None:
            return self._supposed
        state = state_of(self)
        if self._solved is None or not is_same(state, self._solved.state):
            base = self._solve()
            self._solved = SolvedClusters(state, base, base)
        return self._solved.process

    @torch.no_grad()
    def _solve(self) -> ClusteredProcess:
        Z, kernel = self._memory.centres, frozen(self.covar_module, self.arithmetic)
        scaled = RootEvidence.of(self._evidence(), self.arithmetic)
        solver = self._solver_for(scaled.system(kernel_matrix(kernel, Z, Z, self._num_outputs)))
        return ClusteredProcess(
            kernel,
            Z,
            self._num_outputs,
            scaled.root.mT,
            solver.solve(scaled.target),
            solver,
            self._prior_mean().unsqueeze(-1).clone(),
        )

    def _evidence(self) -> GaussianEvidence:
        return combine(self._noise_groups(self._memory.statistics), self._residual())

    def _solver_for(self, Q: Tensor) -> CentreSolver:
        if self._method(Q.shape[-1]) == "cholesky":
            return CholeskySolver.of(Q)
        return ConjugateGradients.of(Q, self.cg_tolerance)

    def _method(self, centres: int) -> Solver:
        if centres == 0:
            return "cholesky"
        return self.solver or ("cholesky" if centres <= CHOLESKY_CENTRES else "cg")

    @torch.no_grad()
    def _take(self, data: Observations) -> None:
        X = data.X.to(self._memory.centres)
        points = X.flatten(0, -2)
        memory = self._memory.covering(points) if data.sign > 0 else self._memory
        self._check_size(memory)
        clusters = memory.tree.assign(points).view(X.shape[:-1])
        memory = memory.after(data, clusters)
        self._solved = self._solved_after(data, memory.centres[clusters])
        self._memory = memory
        self._refresh_fixed_noise()

    def _check_size(self, memory: ClusterMemory) -> None:
        M = len(memory.centres)
        matrices = 3 if self._method(M) == "cholesky" else 2
        check_memory(
            f"Solving for {M:,} centres at a resolution of {memory.tree.resolution:g}",
            math.prod(self._output_batch) * matrices * M * M,
            MEMORY_LIMIT_GIB,
            "Take a coarser resolution.",
            self.arithmetic,
        )

    def _solved_after(self, data: Observations, X: Tensor) -> SolvedClusters | None:
        solved = self._solved
        if solved is None or data.sign < 0 or not solved.can_take(X.shape[-2]):
            return None
        if not is_same(state_of(self), solved.state):
            return None
        return solved.after(X, *self._as_outcomes(data.targets, data.noise, data.known))

    def _set_memory(self, memory: ClusterMemory) -> None:
        self._memory, self._solved = memory, None

    def merge(self, other: Self) -> Self:
        """Add another model's memory to this one's, in place; hyperparameters stay as they are.

        The trees are united: the other's centres become centres, those within the resolution of
        one of this model's give their clusters to it. Exact where they coincide with it; else those
        clusters are moved twice, with a :class:`ProjectionWarning`.

        Raises:
            UnsupportedError: Another class, shape, transform, or a model that supposes data.
            ValueError: More centres than memory can hold.
        """
        check_mergeable(self, other)
        self._check_not_supposed("merge")
        other._check_not_supposed("merge")
        matrix = shifted_targets(other._shift - self._shift)
        memory, exact = self._memory.joined(other._memory.map_targets(matrix))
        self._check_size(memory)
        if not exact:
            warnings.warn(
                "merge moves clusters of the other model to this one's nearest centres, for they "
                "are not the same: an approximation. Give both the same tree.",
                ProjectionWarning,
                stacklevel=users_stack_level(),
            )
        self._set_memory(memory)
        self._refresh_fixed_noise()
        return self

    def resolve(self, resolution: float) -> Self:
        """Change the resolution, in place, for what is in memory as far as that is possible.

        Levels of the tree differ by factors of two: the coarsest that is fine enough is taken.
        Coarser: clusters join, their sums are added, and the posterior is exactly that of inputs
        moved twice, to their old and to their new centre. Finer: clusters stay exactly as they are;
        observations from now on get centres closer by.

        Raises:
            ValueError: The resolution is not positive and finite.
            UnsupportedError: The model supposes data.
        """
        self._check_not_supposed("resolve")
        if not (math.isfinite(resolution) and resolution > 0.0):
            raise ValueError(f"Expected resolution to be positive and finite, got {resolution}.")
        self._set_memory(self._memory.at_resolution(resolution))
        return self

    def clear(self) -> Self:
        """Drop all observations; hyperparameters, centres and standardisation stay.

        Raises:
            UnsupportedError: The model supposes data.
        """
        self._check_not_supposed("clear")
        memory = self._memory
        self._set_memory(ClusterMemory.empty(memory.tree, memory.centres, self._output_batch))
        return self

    def _log_marginal_likelihood(self) -> Tensor:
        return self._learning_objective()

    def _learning_objective(self) -> Tensor:
        """Of all observations at their centres, exact. Cost O(M³), whatever the solver."""
        Z = self._memory.centres
        prior = differentiable_matrix(self.covar_module, Z, Z, self._num_outputs)
        groups = self._noise_groups(self._memory.statistics)
        return clustered_log_marginal_likelihood(groups, self._residual(), prior)

    @torch.no_grad()
    def kl_divergence(self) -> Tensor:
        """From the prior to the posterior, ``batch_shape x m``, without m if that is 1.

        Cost O(M³). [Terenin2024, eq. 24]
        """
        Z, kernel = self._memory.centres, frozen(self.covar_module, self.arithmetic)
        prior = kernel_matrix(kernel, Z, Z, self._num_outputs)
        return self._from_per_output(clustered_kl_divergence(self._evidence(), prior))

    def stochastic_objective(
        self, probes: int = 10, batch_size: int = 1000, generator: torch.Generator | None = None
    ) -> Tensor:
        """A number whose gradient is an unbiased estimate of the log marginal likelihood's.

        Its value is not the likelihood's. Unbiased up to the solver's tolerance. Cost O(M²) for
        each iteration of conjugate gradients, for the probes together, whatever the model's own
        solver; the kernel is differentiated in ``batch_size`` rows. [Terenin2024, appendix B.2]

        Args:
            probes: Number of Hutchinson's probes.
            batch_size: Number of centres whose rows are visited.
            generator: Of the probes and the rows, on the CPU.

        Returns:
            ``batch_shape x m``, without m if that is 1.
        """
        Z, kernel = self._memory.centres, frozen(self.covar_module, self.arithmetic)
        like = self._memory.statistics.learned.gram.to(self.arithmetic)
        rows = partial(_rows, self.covar_module, Z, self._num_outputs)
        objective = stochastic_objective(
            self._noise_groups(self._memory.statistics),
            self._residual(),
            kernel_matrix(kernel, Z, Z, self._num_outputs),
            rows,
            partial(ConjugateGradients.of, tolerance=self.cg_tolerance),
            Probes.draw(like, probes, batch_size, generator),
        )
        return self._from_per_output(objective)


def _rows(kernel: Kernel, Z: Tensor, outputs: int, index: Tensor) -> Tensor:
    return differentiable_matrix(kernel, Z[index], Z, outputs)


def _checked_solver(
    solver: Solver | None, tolerance: float | None
) -> tuple[Solver | None, float | None]:
    if solver not in ("cholesky", "cg", None):
        raise ValueError(f'Expected solver to be "cholesky", "cg" or None, got {solver!r}.')
    if tolerance is not None and not 0.0 < tolerance < 1.0:
        raise ValueError(f"Expected cg_tolerance in (0, 1), got {tolerance}.")
    return solver, tolerance


def _checked_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype not in (torch.float64, torch.float32):
        raise ValueError(f"Expected arithmetic to be torch.float64 or torch.float32, got {dtype}.")
    return dtype
