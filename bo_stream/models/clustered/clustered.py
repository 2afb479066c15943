"""Gaussian process regression on clustered data: stable, without jitter, in float32 if wanted."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Self, get_args

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch.kernels import Kernel
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.means import Mean
from torch import Tensor

from bo_stream.allocation.cover_tree import CoverTree
from bo_stream.bases.inducing import differentiable_matrix
from bo_stream.errors import check_one_of, check_whole
from bo_stream.models.base import StreamingGP, keeps_tensors
from bo_stream.models.clustered.inference import (
    ClusterInference,
    ClusterMemory,
    Solver,
    clustered_kl_divergence,
    precisions,
    stochastic_objective,
)
from bo_stream.models.clustered.solver import ConjugateGradients
from bo_stream.models.inference import InferenceOption

MAX_CENTRES = 1024
"""Most centres where the model chooses its resolution."""

SOLVERS = (*get_args(Solver), None)

FINEST = 1e-4
"""Resolution by default, in parts of the diagonal of the box of the first inputs."""


class ClusteredGP(StreamingGP):
    """The exact posterior for inputs moved to the centres of their clusters, for any kernel.

    A cover tree places centres at most ``resolution`` from every input and more than ``resolution``
    apart; a cluster's observations act as their mean with a noise of Λ, that of one over their
    number. [Terenin2024, section 3.3]

    - Memory: sums of each of M clusters, and their tree: O(M). Data are not kept,
      but for the latest inputs in ``train_inputs``. What is solved takes O(M²).
    - Update: O(n log M + M) for n observations. The next posterior conditions the last one on few
      of them (O(M²) each), else it solves again: O(M³), or O(M²) an iteration by conjugate
      gradients.
    - A fantasy: O(q M) cross-covariances and one q x q factor. It is not moved to a centre.
    - Exact: the posterior of the moved inputs, whatever came in which batches, with its marginal
      likelihood and gradients; kernel, noise level, mean and standardisation may change at any
      time. Retraction, unless a centre nearer to the observation has been added since, or clusters
      have been joined.
    - Approximate: inputs are up to ``resolution`` from where they act; where that has been doubled,
      up to twice as far. Conjugate gradients stop at a relative residual.
    - Numerically: all that is solved is no smaller than the identity, whatever the kernel. Its
      condition number is about the number of observations in reach of a lengthscale, over the noise
      in parts of the prior variance: no jitter is needed below 10¹⁵, in float32 below 10⁶, beyond
      which the model solves in float64.
    - ``merge`` unites the trees: the other's centres become centres, those within the resolution of
      one of this model's give their clusters to it. Exact where they coincide with it; else those
      clusters are moved twice, with a :class:`ProjectionWarning`.
    - When: many observations in few dimensions, and a fit that must not fail, in float32 too.

    Example:
        >>> model = ClusteredGP(train_X, train_Y)
        >>> fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        >>> model.update(new_X, new_Y).posterior(test_X).mean
    """

    _memory: ClusterMemory
    _inference: ClusterInference
    arithmetic = InferenceOption[torch.dtype](fixed=True)
    max_centres = InferenceOption[int | None](fixed=True)

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
        resolution: float | None = None,
        tree: CoverTree | None = None,
        solver: Solver | None = None,
        cg_tolerance: float | None = None,
        arithmetic: torch.dtype = torch.float64,
        max_centres: int = MAX_CENTRES,
    ) -> None:
        """Build the model and put the first observations into memory.

        Args:
            train_X: First inputs, ``batch_shape x n x d``; n may be 0.
            train_Y: First outcomes, ``batch_shape x n x m``.
            train_Yvar: Known noise variances, shaped as train_Y; NaN in a row: unknown.
            likelihood: As for :class:`~bo_stream.WISKI`.
            covar_module: Any of gpytorch's kernels, as for :class:`~bo_stream.OSGPR`.
            mean_module: ``ConstantMean`` (default) or ``ZeroMean``.
            outcome_transform: As for :class:`~bo_stream.WISKI`; default ``Standardize``.
            input_transform: Any, as for :class:`~bo_stream.OSGPR`.
            resolution: Largest distance of an input from its cluster's centre, in units of
                transformed inputs. Centres are shared by batch elements and outputs. Default:
                ``FINEST`` (1e-4) of the diagonal of the first inputs' box, at which every input
                that is not nearer than this to another has a centre of its own, so that the model
                is about the exact GP; it is doubled whenever there are more than ``max_centres``.
            tree: Instead of ``resolution``: a tree, empty or of points in units of transformed
                inputs. It is copied.
            solver: ``"cholesky"`` or ``"cg"`` (preconditioned conjugate gradients). Default: the
                first for up to ``CHOLESKY_CENTRES`` centres.
            cg_tolerance: Relative residual at which conjugate gradients stop. Default: 1e-10, in
                float32 1e-5.
            arithmetic: float64 or float32, in which centres, their covariances and whatever is
                solved are kept; sums over observations always are in float64. In float32
                a fit's line search may stall near the optimum. Where a bound on the condition
                number is above ``FLOAT32_LIMIT``, about 10⁶, float32 would lose the variances in
                rounding: the model then solves in float64 and warns once.
            max_centres: Largest number of centres where neither ``resolution`` nor ``tree`` is
                given. A doubling of the resolution joins clusters as :meth:`resolve` does. Where
                moves of inputs change the process by more than the noise, at a given resolution
                too, the model says so once, at the first posterior, after a fit or in the stream
                (``CoarsePointsWarning``).

        Raises:
            ValueError: A bad option, or more centres than memory can hold; and all errors that
                :class:`~bo_stream.OSGPR` raises.
        """
        self._begin(train_X, train_Y, train_Yvar, outcome_transform)
        inputs = self._set_inputs_and_modules(
            train_X, train_Yvar, input_transform, likelihood, covar_module, mean_module
        )
        check_one_of("solver", solver, SOLVERS)
        if cg_tolerance is not None and not 0.0 < cg_tolerance < 1.0:
            raise ValueError(f"Expected cg_tolerance in (0, 1), got {cg_tolerance}.")
        check_one_of("arithmetic", arithmetic, (torch.float64, torch.float32))
        max_centres = check_whole("max_centres", max_centres)
        chooses = resolution is None and tree is None
        self._inference = ClusterInference(
            solver, cg_tolerance, arithmetic, max_centres if chooses else None
        )
        like = inputs[..., :0, :].reshape(0, inputs.shape[-1]).to(arithmetic)
        if isinstance(tree, CoverTree):
            tree = tree.to(like).insert(like)
        elif tree is not None:
            raise UnsupportedError(
                f"Expected tree to be a CoverTree or None, got {type(tree).__name__}. A number is "
                "the resolution."
            )
        else:
            if resolution is None:  # of the box of the inputs; of 1 where that has no extent
                rows, extent = inputs.flatten(0, -2), 1.0
                if len(rows) > 0:
                    extent = float(torch.linalg.vector_norm(rows.amax(0) - rows.amin(0))) or 1.0
                resolution = FINEST * extent
            tree = CoverTree(resolution)
        self._memory = ClusterMemory.empty(tree, like, self._output_batch)
        self._take_first(train_X, train_Y, train_Yvar, inputs, covar_module is not None)

    @property
    def solver(self) -> Solver | None:
        """How the system at the centres is solved; None: by their number."""
        return self._inference.solver

    @solver.setter
    def solver(self, solver: Solver | None) -> None:
        check_one_of("solver", solver, SOLVERS)
        self._inference = replace(self._inference, solver=solver)
        self._cache = None

    @property
    def centres(self) -> Tensor:
        """Centres of the clusters, ``M x d``, in transformed inputs: a copy."""
        return self._memory.centres.to(self.train_targets, copy=True)

    @property
    def cluster_sizes(self) -> Tensor:
        """Observations in each cluster, ``batch_shape x M``; not whole after :meth:`forget`."""
        return self._memory.sizes.squeeze(-1).clone()

    @property
    def resolution(self) -> float:
        """Largest distance of a new input from its cluster's centre."""
        return self._memory.tree.resolution

    def cluster_precision(self) -> Tensor:
        """Sums of the precisions of each cluster's observations, ``batch_shape x m x M``."""
        return precisions(self._memory, self.prior)

    @keeps_tensors
    def resolve(self, resolution: float) -> Self:
        """Change the resolution, in place, for what is in memory as far as that is possible.

        Levels of the tree differ by factors of two: the coarsest that is fine enough is taken.
        Coarser: clusters join, exactly as if their inputs were moved twice. Finer: clusters stay as
        they are; observations from now on get centres closer by.

        Raises:
            ValueError: The resolution is not positive and finite.
            UnsupportedError: The model is conditioned on hypothetical data.
        """
        self._check_not_conditioned("resolve")
        if not (math.isfinite(resolution) and resolution > 0.0):
            raise ValueError(f"Expected resolution to be positive and finite, got {resolution}.")
        self._set_memory(self._memory.at_resolution(resolution))
        return self

    @torch.no_grad()
    def kl_divergence(self) -> Tensor:
        """Return the divergence of the posterior from the prior, ``batch_shape (x m if m > 1)``.

        Cost O(M³). [Terenin2024, eq. 24]
        """
        memory, prior = self._memory, self.prior
        _, _, K = self._inference.frozen_prior(memory, prior)
        evidence = prior.evidence(memory.statistics)
        return self._from_per_output(clustered_kl_divergence(evidence, K))

    def stochastic_objective(
        self,
        probes: int = 10,
        batch_size: int = 1000,
        generator: torch.Generator | None = None,
        tolerance: float | None = None,
    ) -> Tensor:
        """Return a number whose gradient estimates the log marginal likelihood's without bias.

        Its value is not the likelihood's. Cost O(M²) for each iteration of conjugate gradients, for
        the probes together, whatever the model's own solver. [Terenin2024, appendix B.2]

        Args:
            probes: Number of Hutchinson's probes.
            batch_size: Number of centres whose rows are visited.
            generator: Of the probes and the rows, on the CPU.
            tolerance: Relative residual at which conjugate gradients stop; the model's if omitted.

        Returns:
            ``batch_shape x m``, without m if that is 1.

        Raises:
            ValueError: A number is not positive.
        """
        probes = check_whole("probes", probes)
        batch_size = check_whole("batch_size", batch_size)
        memory, prior, inference = self._memory, self.prior, self._inference
        _, Z, K = inference.frozen_prior(memory, prior)
        if len(Z) == 0:
            return self.log_marginal_likelihood()
        coins = torch.randint(0, 2, (*K.shape[:-1], probes), generator=generator)
        rows = torch.randperm(len(Z), generator=generator)[:batch_size]
        objective = stochastic_objective(
            prior.noise_groups(memory.statistics),
            prior.target_map(),
            K,
            lambda index: differentiable_matrix(prior.kernel, Z[index], Z, prior.num_outputs),
            partial(ConjugateGradients.of, tolerance=tolerance or inference.cg_tolerance),
            2.0 * coins.to(K) - 1.0,
            rows.to(K.device),
        )
        return self._from_per_output(objective)
