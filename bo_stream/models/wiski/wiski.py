"""WISKI: Woodbury inversion with structured kernel interpolation, for streams in few dimensions."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch.kernels import Kernel
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.means import Mean
from torch import Tensor

from bo_stream.bases.grid.kernel import GridKernel
from bo_stream.bases.grid.mesh import Mesh
from bo_stream.bases.kernels import Stem
from bo_stream.errors import check_whole
from bo_stream.likelihoods.binomial import BinomialLikelihood
from bo_stream.likelihoods.outcome_model import OutcomeModel, check_likelihood
from bo_stream.likelihoods.sites import fit_sites
from bo_stream.models.construction import (
    check_rank,
    choose_box,
    latent_kernel,
    product_kernel,
)
from bo_stream.models.inference import InferenceOption, Prior, Solved, SolvedWeights
from bo_stream.models.memory import Measured, Observations
from bo_stream.models.outcomes.likelihood import (
    WINDOW,
    check_transform,
    fit_held,
    held_bound,
    latent_columns,
    marginal,
    outcomes_of,
    with_held,
)
from bo_stream.models.wiski.cache import GridCache, GridSolution, Whitening, WithHeld
from bo_stream.models.wiski.grid_model import GridModel
from bo_stream.models.wiski.inference import GridInference
from bo_stream.models.wiski.memory import RowMemory, StreamMemory, WiskiMemory
from bo_stream.models.wiski.resolution import GridSize, check_dim
from bo_stream.observation_space import ObservationSpaceProcess
from bo_stream.process import PosteriorProcess, WeightSpaceProcess


class WISKI(GridModel):
    """A streaming Gaussian process on grids, for few inputs, or more in a sum or through a stem.

    The kernel is interpolated from a grid, ``k̃(x, x') = w(x)ᵀ K w(x')`` with K a Kronecker product
    (Stanton, Maddox, Delbridge and Wilson, 2021). Memory are the data's sufficient statistics on
    the grid, so an update costs the same whatever came before, and hyperparameters keep learning.

    - Few observations, at most 300 (and no more than grid nodes; none where ``max_rank`` is less
      than 300): stored as rows, O(n d) memory. Fits, posteriors and fantasies are those of an exact
      model with the kernel k̃, at such a model's cost; no feature is computed unless it is asked
      for, and none is left out. One observation more, or :meth:`forget`, moves all to the grid.
    - Memory: O(7^d p) for p grid nodes, fixed. Data are not kept (small updates wait to be added as
      one: at most 64 rows, and 512 in feature space), but for the latest inputs in
      ``train_inputs``.
    - Update: O(n 7^d) for n observations, and O(n r²) for the whitened statistics; the next
      posterior solves once in O(r³), r = ``rank``. Inputs outside the bounds grow the grid by whole
      cells, hyperparameters kept, to at most four times its first width per dimension.
    - Counts: a ``window`` of w rows is stored besides, in O(w d), and an update of n looks at them
      again: O((n + w) r²) once, and O(k³ + (n + w) k²) for each natural-gradient step, as many as
      five, with k the lesser of n + w and r.
    - A fantasy: O(q) cross-covariances and one q x q factor.
    - Exact: everything, given the kernel k̃ of the present hyperparameters in its r largest
      eigenvectors; updates, merges, retractions, re-standardisation, growth of the grid; gradients.
    - Approximate: k̃ itself (see :meth:`interpolation_error`), and the part ``tolerance`` of its
      trace that is left out (see :attr:`rank` and :attr:`dropped`). Sites of counts before the
      window: after 400 of at most 5 examined the mean is off that of their batch by up to 0.003 of
      a posterior's standard deviation; without a window by up to 0.8.
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
    window = InferenceOption[int]()
    _memory: WiskiMemory
    _inference: GridInference

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        train_Yvar: Tensor | None = None,
        likelihood: _GaussianLikelihoodBase | BinomialLikelihood | None = None,
        covar_module: Kernel | None = None,
        mean_module: Mean | None = None,
        outcome_transform: OutcomeTransform | _DefaultType | None = DEFAULT,
        input_transform: InputTransform | None = None,
        bounds: Tensor | None = None,
        grid_size: GridSize | None = None,
        tolerance: float = 1e-9,
        max_rank: int = 1024,
        stem: Stem | None = None,
        window: int = WINDOW,
    ) -> None:
        """Build the model and put the first observations into memory.

        Args:
            train_X: ``batch_shape x n x d``; n may be 0, which gives the prior.
            train_Y: ``batch_shape x n x m``.
            train_Yvar: Known noise variances, ``batch_shape x n x m``; NaN in a row: unknown,
                learned. Less than ``NOISE_FLOOR`` (1e-6) of the outcomes' variance is raised to it,
                with a warning: a grid's kernel is not known to more.
            likelihood: A ``GaussianLikelihood``; default: BoTorch's with a log-normal prior, or
                fixed noise where every variance is known. Or a
                :class:`~bo_stream.BinomialLikelihood`, which is copied: train_Y then has two
                columns, positives and examined, of one output, the logit of prevalence, and each
                row enters as a Gaussian observation, its *site*, as in :class:`~bo_stream.OSVGP`.
                Of the few rows that are stored all sites are found again in each update and fit: a
                stream ends where its batch ends, rows can be retracted, and a refit learns a
                concentration, too. On the grid the same holds for a ``window`` of the latest rows;
                sites of earlier ones stay as they were found, so that a stream differs a little
                from its batch. There a refit learns kernel and mean, sites fixed, and
                ``clear().update(X, Y)`` then finds the sites of all again.
            covar_module: RBF, Matérn 1/2, 3/2, 5/2, periodic and spectral mixture kernels, scaled,
                multiplied and added as you like. A sum gives a grid to each of its parts, over that
                part's ``active_dims`` (at most four; parts may share inputs); parts on one and the
                same single input share a grid. A ``MaternKernel`` of several inputs, a function of
                the distance, is replaced by a :class:`~bo_stream.ProductMatern` in a copy, with a
                ``ProductKernelWarning``; a spectral mixture in several dimensions is gpytorch's
                product of one-dimensional mixtures. Default: BoTorch's own default, with its
                first lengthscales in parts of the box's widths.
            mean_module: ``ConstantMean`` (default) or ``ZeroMean``.
            outcome_transform: Default: ``Standardize``, learned again from the running sums,
                exactly, whenever the model is refitted. ``Log``, ``Power`` and ``Bilog``, alone or
                chained with a final ``Standardize``, work too; others raise.
            input_transform: Any without parameters to learn; bounds that it learns come from the
                first observations. One with learnable parameters (``Warp``) raises. One that makes
                several inputs of each (``InputPerturbation``, ``AppendFeatures``) acts on what a
                posterior is asked for; observations are as they come.
            bounds: The box of the inputs, ``2 x d``, before the input transform. Default: the unit
                cube if it holds the (transformed) data, else the data's box with a margin of a
                tenth of its width on each side; in both cases with room for perturbations. The
                default kernel's lengthscales and their prior are relative to its sides.
            grid_size: Nodes per dimension, one number or d, at least 4; for a sum of kernels also
                such a tuple for each grid, as :attr:`grid_size` has them. Default: by the number of
                inputs of a grid and the kernel's smoothness, see
                ``bo_stream.bases.grid.kernel``; the model then says once, after a fit, where
                its interpolation error is several times the noise variance
                (``CoarsePointsWarning``).
            tolerance: Part of the kernel's trace that may be left out; 0 keeps every eigenvector.
            max_rank: Cap on the number r of features, whatever the tolerance.
            stem: A projection of any number of (transformed) inputs to one to three, on which the
                kernel then acts; the grid covers the unit cube that it projects to. One that is
                not calibrated yet is so on train_X.
            window: How many of the latest counts are stored on the grid, beside the statistics of
                earlier ones. Their sites are found again, together, in each update, retraction and
                merge, and after a refit; fantasies leave them as they are. They can be retracted,
                and move to another grid as they are; ``forget`` lets them go into the statistics.
                Without effect on Gaussian noise.

        Raises:
            BotorchTensorDimensionError: Shapes do not fit together.
            InputDataError: Wrong dtypes or devices, NaN, infinities, negative variances.
            UnsupportedError: More than four inputs of one grid; a kernel, mean, likelihood or
                transform that a stream on a grid cannot represent.
            ValueError: ``grid_size``, ``bounds``, ``tolerance`` or ``max_rank`` is out of range, or
                the grid is too large for memory (said before it is allocated).
        """
        counts = likelihood if isinstance(likelihood, BinomialLikelihood) else None
        latent_Y = latent_columns(train_Y, counts)
        if counts is not None:
            if isinstance(outcome_transform, _DefaultType):
                outcome_transform = None
            check_transform(outcome_transform, counts)
        self._begin(train_X, latent_Y, train_Yvar, outcome_transform)
        rank = check_rank(tolerance, max_rank)
        window = check_whole("window", window, least=0)
        inputs = self._first_inputs(train_X, input_transform, stem)
        covar_module = product_kernel(covar_module, inputs.shape[-1])
        dim = check_dim(inputs.shape[-1], covar_module)
        box = choose_box(bounds, train_X, inputs, input_transform, stem)
        kernel, kind = covar_module, GridInference
        if counts is not None and kernel is None:
            kernel = latent_kernel(dim, self._parameter_shape, box)
        gaussian = None if isinstance(likelihood, BinomialLikelihood) else likelihood
        self._set_modules(dim, train_Yvar, gaussian, kernel, mean_module, box)
        if counts is not None:
            check_likelihood(counts, self._parameter_shape)
            self.likelihood, kind = deepcopy(counts), SiteGridInference
            self._outcomes = outcomes_of(counts, self._outcomes.shift)
        self._inference, self._memory = kind.start(self.prior, box, grid_size, rank, train_X)
        self.window = window
        if counts is None:
            given, custom = None if bounds is None else box, covar_module is not None
            self._take_first(train_X, train_Y, train_Yvar, inputs, custom, given)
            return
        self._standardize_first(train_X, latent_Y, train_Yvar)
        self._observe(train_X, train_Y, train_Yvar, 1.0)


# --- inference on a grid for counts: each enters the statistics as a Gaussian observation --------


MOST_ROWS = 4096
"""Rows whose sites are found together; of more, later ones given those before."""


@dataclass(frozen=True)
class SiteGridInference(GridInference):
    """The posterior of a latent process whose outcomes are taken for Gaussian ones, their sites.

    While the memory holds rows, their sites are at the optimum of the bound
    ``Σ E log p(y | f) − KL(q ‖ prior)`` at the present hyperparameters, whatever the order in which
    they came. On the grid the sites of a batch and of the latest outcomes, ``window`` of them,
    maximise that bound given those before; one that leaves the window enters the statistics with
    the site that it has then, for good.
    """

    def observe(
        self,
        memory: WiskiMemory,
        cache: GridCache | None,
        data: Observations,
        prior: Prior,
        is_known: bool = False,
    ) -> tuple[WiskiMemory, GridCache | None]:
        """Find the sites of all rows that are stored, or of a batch and the window on the grid.

        Cost O(n³) a step for rows, O(n r² + r³) on the grid, beside a solve; n counts the outcomes
        in the window, too. Rows that become too many move to the grid together with the batch, as
        if they were one.

        Raises:
            UnsupportedError: Sites that depend on others are to be taken out, not of the window.
        """
        if isinstance(memory, RowMemory):
            now = (
                memory.without(data) if data.sign < 0.0 else memory.covering(data.X).observed(data)
            )
            if now is not None:
                if cache is not None:  # what was said of the grid's resolution stays with it
                    same = cache.own.grid is now.grid
                    cache = replace(GridCache.of(now), checked=cache.checked) if same else None
                return self._sited(now, prior), cache
            data = Observations.joined((replace(memory.rows, sites=None), data))
            memory = memory.covering(data.X).emptied().on_grid()
        if data.sign < 0.0:
            return self._with_window(memory, cache, with_held(memory.held, data, prior), prior)
        memory.covering(data.X)  # raises before anything is changed
        for which in torch.arange(len(data)).split(MOST_ROWS):
            rows = with_held(memory.held, data.rows(which), prior)
            memory, cache = self._with_window(memory, cache, rows, prior)
        return memory, cache

    def _sited(self, memory: RowMemory, prior: Prior) -> RowMemory:
        """Find the sites of all rows again, from those that they have. Cost O(n³) a step."""
        rows = memory.rows
        if len(rows) == 0:
            return memory
        with torch.no_grad():
            covariance = memory.covariance(self.kernel(prior))
        sites = fit_held(rows, covariance, prior).sites
        return replace(memory, rows=replace(rows, sites=sites))

    def _with_window(
        self, memory: StreamMemory, cache: GridCache | None, rows: Observations, prior: Prior
    ) -> tuple[StreamMemory, GridCache | None]:
        """Find the sites of outcomes given the statistics, and hold the latest of them.

        The others enter the statistics; what the memory had before is dropped.
        """
        before = replace(memory, held=None)
        if len(rows) == 0:
            return before, None if cache is None else cache.of_statistics()
        rows, cache = self._sites(before, cache, rows, prior)
        left = max(0, len(rows) - self.window)
        after: WiskiMemory = before.covering(rows.X)
        cache = cache.of_statistics() if after is before else None
        if left > 0:
            after, cache = super().observe(after, cache, rows.rows(slice(left)).told, prior)
        assert isinstance(after, StreamMemory)  # noqa: S101 (as before)
        held = rows.rows(slice(left, None)) if left < len(rows) else None
        return replace(after, held=held), cache

    def _sites(
        self, memory: StreamMemory, cache: GridCache | None, data: Observations, prior: Prior
    ) -> tuple[Observations, GridCache]:
        """Return outcomes with their sites given statistics, from those that they have."""
        process, cache = self.process(memory, cache, prior, data.X)
        assert isinstance(process, WeightSpaceProcess)  # noqa: S101 (statistics have no other)
        likelihood = OutcomeModel.of(prior.likelihood, prior.num_outputs)
        expected = likelihood.expected_log_prob(data.targets)
        begin = likelihood.ordinary_log_prob(data.targets)
        start = data.sites if begin is None else None
        features = process.basis.features(data.X).expand(*data.noise.shape, -1)
        rest = torch.zeros_like(data.noise)
        before = marginal(process.weights, process.prior_mean, features, rest)
        fit = fit_sites(before, expected, start=start, begin=begin)
        return replace(data, sites=fit.sites), cache

    # --- the posterior: of the statistics, then of what is stored besides ------------------------

    def process(
        self,
        memory: WiskiMemory,
        cache: GridCache | None,
        prior: Prior,
        X: Tensor | None = None,
        in_features: bool = False,
    ) -> tuple[PosteriorProcess, GridCache]:
        """Solve as any grid model, and condition on the sites of the window in O(n r² + r³)."""
        if isinstance(memory, RowMemory) or memory.held is None:
            return super().process(memory, cache, prior, X, in_features)
        held = memory.held
        before, cache = super().process(replace(memory, held=None), cache, prior, X)
        assert isinstance(before, WeightSpaceProcess)  # noqa: S101 (statistics have no other)
        whole = cache.whole(before, held)
        if whole is None:
            whole = WithHeld(before, held, _given(before, held, prior))
            cache = cache.with_whole(whole)
        return whole.process, cache

    def whitened(
        self, memory: WiskiMemory, cache: GridCache | None, prior: Prior
    ) -> tuple[Whitening, GridCache]:
        """Return the memory in features, with what it holds, and the cache that has the rest."""
        if isinstance(memory, RowMemory) or memory.held is None:
            return super().whitened(memory, cache, prior)
        before, cache = super().whitened(replace(memory, held=None), cache, prior)
        return replace(before, memory=memory.with_held(before.memory, before.basis)), cache

    def _solve(
        self, solution: GridSolution, memory: WiskiMemory, prior: Prior, in_rows: bool
    ) -> tuple[GridSolution, Solved[ObservationSpaceProcess] | SolvedWeights]:
        """Solve for rows with their sites at the hyperparameters as they are now."""
        memory = self._sited(memory, prior) if isinstance(memory, RowMemory) else memory
        return super()._solve(solution, memory, prior, in_rows)

    def merged(
        self, memory: WiskiMemory, cache: GridCache | None, other: WiskiMemory, prior: Prior
    ) -> tuple[WiskiMemory, GridCache | None]:
        """Join rows, or statistics and windows, and find the sites of all rows again."""
        if self.window > 0 and not _join_as_rows(memory, other):
            memory, other = (
                part.held_on_grid() if isinstance(part, RowMemory) else part
                for part in (memory, other)
            )
        both, cache = super().merged(memory, cache, other, prior)
        return self._renewed(both, cache, prior)

    def refitted(
        self, memory: WiskiMemory, cache: GridCache | None, prior: Prior
    ) -> tuple[WiskiMemory, GridCache]:
        """Find the sites of rows and of the window again, and check the grid for the kernel."""
        solved = None
        if cache is not None:
            solved = cache.own.rows if isinstance(memory, RowMemory) else cache.own.weights
        if solved is None or not prior.is_in(solved.state):
            memory, cache = self._renewed(memory, cache, prior)
        return super().refitted(memory, cache, prior)

    def _renewed(
        self, memory: WiskiMemory, cache: GridCache | None, prior: Prior
    ) -> tuple[WiskiMemory, GridCache | None]:
        """Find the sites of all stored rows again. Cost as of an update."""
        if isinstance(memory, RowMemory):
            return self._sited(memory, prior), cache
        if memory.held is None:
            return memory, cache
        return self._with_window(memory, cache, memory.held, prior)

    # --- learning: of what is on the grid as of any statistics, sites fixed ---------------------

    def log_marginal_likelihood_of_rows(
        self, memory: RowMemory, kernel: GridKernel, prior: Prior
    ) -> Tensor:
        """Return the bound at its optimum; see :func:`held_bound`."""
        return held_bound(memory.rows, memory.covariance(kernel), prior)

    def batch_log_marginal_likelihood(
        self, grid: Mesh, inputs: Tensor, data: Measured, prior: Prior
    ) -> NoReturn:
        """Refuse.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "batch_log_marginal_likelihood needs a Gaussian likelihood, got "
            f"{type(prior.likelihood).__name__}: use log_marginal_likelihood or log_predictive."
        )


def _given(before: WeightSpaceProcess, held: Observations, prior: Prior) -> WeightSpaceProcess:
    """Condition a process on the sites of outcomes."""
    features, weights = before.basis.features(held.X), before.weights
    outcomes, noise = prior.standardized(held.told)
    told = features, outcomes - before.prior_mean, noise
    few = len(held) < features.shape[-1]
    return replace(before, weights=weights.observe(*told) if few else weights.observe_many(*told))


def _join_as_rows(memory: WiskiMemory, other: WiskiMemory) -> bool:
    """Say whether two memories are of rows, few enough to be stored together."""
    if not isinstance(memory, RowMemory) or not isinstance(other, RowMemory):
        return False
    return len(memory.rows) + len(other.rows) <= memory.bound
