"""LocalGP: many small exact models, mixed into one process (Nguyen-Tuong et al., 2009)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.means import Mean
from torch import Tensor

from bo_stream.allocation.allocator import first_unlike
from bo_stream.bases.inducing import as_read, frozen, in_dtype, kernel_matrix, kernel_variance
from bo_stream.bases.kernels import stacked_correlation, stacked_kernel
from bo_stream.errors import check_whole
from bo_stream.linalg import inverse_lower, safe_cholesky, scaled_prior, solve_lower
from bo_stream.models.base import StreamingGP
from bo_stream.models.inference import Inference, InferenceOption, Prior
from bo_stream.models.memory import Memory, Observations
from bo_stream.process import Joint, Points, PosteriorProcess, Residual
from bo_stream.tensors import State, is_same, map_tensors, state_of, zip_tensors
from bo_stream.warnings import MOST_RESIDUAL, warn_of_neighbours
from bo_stream.weights import target_columns


class LocalGP(StreamingGP):
    """Small exact Gaussian processes side by side, each of the newest data near its centre.

    An observation goes to the local model whose centre (the mean of its inputs) is most like it, by
    the kernel's correlation, or begins a new one; a full model drops its oldest observation.
    Predictions are averages of the nearest models, weighted by the same correlation (Nguyen-Tuong,
    Seeger and Peters, 2008), as the marginals of one joint process that can be conditioned.
    Hyperparameters are shared. Each batch element and output has local models of its own.

    - Memory: O(C s²) for C models of s observations.
    - Update: O(n C) to find the models, O(s³) for each that took an observation.
    - A fantasy: O(q s²) for each model near, and one q x q factor.
    - Exact: while there is one model that is not full, the exact GP.
    - Approximate: a model knows nothing of the others' data; what was dropped is lost, but for the
      standardisation of the outcomes, which is of all of them. Observations stay where they were
      put when hyperparameters move; up to 64 of one update are routed by the same centres.
    - Learned: hyperparameters by the sum of the models' marginal likelihoods, of the data stored.
    - ``merge``: each local model of the other joins the one of this model whose centre is most like
      its own, as an observation would, or stays one of its own. A model that gets too full drops
      the oldest, its own first.
    - When: a baseline. Learn the hyperparameters from a first batch: while lengthscales are too
      long, all data are alike and one model keeps the newest of them.

    Example:
        >>> model = LocalGP(train_X, train_Y)
        >>> fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        >>> model.update(new_X, new_Y).posterior(test_X).mean
    """

    _memory: LocalMemory
    _inference: LocalInference
    max_size = InferenceOption[int](fixed=True)
    nearest = InferenceOption[int](fixed=True)

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
        max_size: int = 100,
        w_gen: float = 0.5,
        nearest: int = 3,
        max_models: int = 256,
    ) -> None:
        """Build the model and put the first observations into memory.

        Args:
            train_X: First inputs, ``batch_shape x n x d``; n may be 0.
            train_Y: First outcomes, ``batch_shape x n x m``.
            train_Yvar: Known noise variances, shaped as train_Y; NaN in a row: unknown. Where the
                averages of models lie several standard deviations of known noise from the outcomes,
                the model says so once (``CoarsePointsWarning``).
            likelihood: As for :class:`~bo_stream.WISKI`.
            covar_module: Any of gpytorch's kernels, as for :class:`~bo_stream.OSGPR`.
            mean_module: ``ConstantMean`` (default) or ``ZeroMean``.
            outcome_transform: As for :class:`~bo_stream.WISKI`; default ``Standardize``.
            input_transform: Any, as for :class:`~bo_stream.OSGPR`.
            max_size: Largest number s of observations of a local model.
            w_gen: Correlation with the most similar centre below which a new model begins, in (0,
                1).
            nearest: How many models predict at an input.
            max_models: Largest number of models; then the most similar one takes any observation.

        Raises:
            ValueError: A number is out of range; and all errors that :class:`~bo_stream.OSGPR`
                raises.
        """
        self._begin(train_X, train_Y, train_Yvar, outcome_transform)
        inputs = self._set_inputs_and_modules(
            train_X, train_Yvar, input_transform, likelihood, covar_module, mean_module
        )
        max_size, nearest = check_whole("max_size", max_size), check_whole("nearest", nearest)
        max_models = check_whole("max_models", max_models)
        if not 0.0 < w_gen < 1.0:
            raise ValueError(f"Expected w_gen in (0, 1), a correlation, got {w_gen}.")
        self._inference = LocalInference(w_gen, max_models, max_size, nearest)
        dim, device = inputs.shape[-1], train_X.device
        self._memory = LocalMemory.empty(self._output_batch, max_size, dim, device)
        self._take_first(train_X, train_Y, train_Yvar, inputs, covar_module is not None)

    @property
    def num_models(self) -> Tensor:
        """Number of local models, ``batch_shape x m``."""
        return self._memory.alive.sum(0)

    @property
    def centres(self) -> Tensor:
        """Mean of the inputs of each local model, ``batch_shape x m x C x d``; transformed inputs.

        Beyond :attr:`num_models` they are 0.
        """
        return self._memory.centres.to(self.train_targets)

    @torch.no_grad()
    def solved_gram(self) -> Tensor:
        """Return what the observations add to the identity in the matrices that a posterior solves.

        ``S K S`` of each local model, S the root of the noise precision, ``C x batch_shape x m x s
        x s``.
        """
        rows, prior = self._memory.rows, self.prior
        K = stacked_kernel(as_read(prior.kernel), rows.X, rows.X, prior.num_outputs)
        return scaled_prior(K, rows.weight / _centred(rows, prior)[1])[0]


@dataclass(frozen=True)
class LocalRows:
    """Observations, each output's on their own.

    Attributes:
        X: ``... x m x n x d``.
        targets: ``... x m x n``, less the memory's shift.
        noise: Known variances, ``... x m x n``, with 1 where unknown.
        known: Whether the noise is known, ``... x m x n``.
        weight: How many times each counts, ``... x m x n``; 0: it is not there.
    """

    X: Tensor
    targets: Tensor
    noise: Tensor
    known: Tensor
    weight: Tensor

    @classmethod
    def none(cls, shape: tuple[int, ...], dim: int, device: torch.device) -> LocalRows:
        """Make room for observations, ``... x m x n``."""
        zero = torch.zeros(shape, dtype=torch.float64, device=device)
        return cls(zero.new_zeros(*shape, dim), zero, zero + 1.0, zero > 0.0, zero)

    def __getitem__(self, rows: slice) -> LocalRows:
        """Select some of the observations."""
        numbers = (self.targets, self.noise, self.known, self.weight)
        return LocalRows(self.X[..., rows, :], *(each[..., rows] for each in numbers))

    def __len__(self) -> int:
        return self.targets.shape[-1]


@dataclass(frozen=True)
class LocalMemory(Memory):
    """The last s observations of each of C local models, and the sums of all there ever were.

    Each batch element and output has models of its own, the first ones of the C.

    Attributes:
        rows: ``C x batch_shape x m x s``; a model's next observation takes its oldest one's place.
            Places not taken yet have weight 0 and the input at the model's first place, since
            gpytorch centres inputs at their mean before it subtracts squares.
        entered: How many observations each model ever took, ``C x batch_shape x m``.
        totals: ``[Y, 1]ᵀ [Y, 1]`` of all observations, those forgotten for want of room among
            them, ``batch_shape x m x 2 x 2``.
    """

    rows: LocalRows
    entered: Tensor
    totals: Tensor

    @classmethod
    def empty(cls, batch: torch.Size, size: int, dim: int, device: torch.device) -> LocalMemory:
        """Make room for one model of s observations of d inputs, for ``batch_shape x m``."""
        entered = torch.zeros(1, *batch, dtype=torch.long, device=device)
        totals = torch.zeros(*batch, 2, 2, dtype=torch.float64, device=device)
        return cls(LocalRows.none((1, *batch, size), dim, device), entered, totals)

    @property
    def size(self) -> int:
        """Largest number s of observations of a model."""
        return len(self.rows)

    @property
    def alive(self) -> Tensor:
        """Which models have an observation, ``C x batch_shape x m``."""
        return self.entered > 0

    @property
    def centres(self) -> Tensor:
        """Mean of each model's inputs, ``batch_shape x m x C x d``; 0 of one that has none."""
        count = self.entered.clamp_max(self.size).unsqueeze(-1)
        total = (self.rows.X * _taken(self.entered, self.size).unsqueeze(-1)).sum(-2)
        return (total / count.clamp_min(1)).movedim(0, -2)

    def with_room(self, models: int) -> LocalMemory:
        """Make room for some models at least, in powers of two."""
        more = 2 ** (max(models, 1) - 1).bit_length() - len(self.entered)
        if more <= 0:
            return self
        shape = (more, *self.entered.shape[1:], self.size)
        room = LocalRows.none(shape, self.rows.X.shape[-1], self.entered.device)
        rows = zip_tensors(lambda a, b: torch.cat((a, b)), self.rows, room)
        entered = torch.cat((self.entered, self.entered.new_zeros(shape[:-1])))
        return replace(self, rows=rows, entered=entered)

    def with_rows(self, rows: LocalRows, model: Tensor) -> LocalMemory:
        """Add rows by age; ``totals`` stay. Cost O(size of the memory).

        ``model`` is the number of the one that takes each, ``batch_shape x m x n``; −1: none. At
        most s go to one model.
        """
        chosen = model.reshape(-1, model.shape[-1])
        each = chosen.unsqueeze(-1) == torch.arange(len(self.entered), device=model.device)
        entered = self.entered.reshape(len(self.entered), -1)
        rank = (each * (each.cumsum(-2) - 1 + entered.mT.unsqueeze(-2))).sum(-1)
        keep = chosen >= 0
        place = torch.arange(len(chosen), device=model.device).unsqueeze(-1).expand_as(chosen)
        index = (chosen[keep], place[keep], (rank % self.size)[keep])
        stored = zip_tensors(lambda a, b: _put(a, b, index, keep, self.size), self.rows, rows)
        after = (entered + each.sum(-2).mT).view_as(self.entered)
        taken = _taken(after, self.size).unsqueeze(-1)
        X = torch.where(taken, stored.X, stored.X[..., :1, :])  # see :attr:`rows`
        return replace(self, rows=replace(stored, X=X), entered=after)

    def by_age(self, model: int) -> LocalRows:
        """List the observations of a model, ``batch_shape x m x s``: empty places, then by age."""
        places = torch.arange(self.size, device=self.entered.device)
        order = (places + self.entered[model].unsqueeze(-1)) % self.size

        def in_order(store: Tensor) -> Tensor:
            index = order.unsqueeze(-1) if store[model].ndim > order.ndim else order
            return torch.take_along_dim(store[model], index, order.ndim - 1)

        return map_tensors(self.rows, in_order)

    def scale(self, factor: float) -> LocalMemory:
        """Let every observation count ``factor`` times."""
        rows = replace(self.rows, weight=self.rows.weight * factor)
        return replace(self, rows=rows, totals=self.totals * factor)

    def map_targets(self, matrix: Tensor) -> LocalMemory:
        """Turn targets into ``[Y, 1] @ matrix``, exactly."""
        factor, shift = (matrix[..., i, 0].unsqueeze(-1) for i in (0, 1))
        rows = replace(self.rows, targets=self.rows.targets * factor + shift)
        return replace(self, rows=rows, totals=matrix.mT @ self.totals @ matrix)

    def select(self, outputs: list[int]) -> LocalMemory:
        """Copy the memory of some of the outputs."""
        axis = self.entered.ndim - 1
        index = torch.tensor(outputs, device=self.entered.device)
        rows = map_tensors(self.rows, lambda store: store.index_select(axis, index))
        entered = self.entered.index_select(axis, index)
        return LocalMemory(rows, entered, self.totals[..., outputs, :, :])

    def known_sums(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Sum the known noise variances that are stored; see :meth:`Memory.known_sums`."""
        if not bool(self.rows.known.any()):
            return None
        weight, noise = self.rows.weight * self.rows.known, self.rows.noise
        total, precision, count = (
            values.sum(-1).sum(0) for values in (weight * noise, weight / noise, weight)
        )
        return total, precision, count


def _taken(entered: Tensor, size: int) -> Tensor:
    """Return which of ``size`` places hold an observation, ``... -> ... x size``."""
    return torch.arange(size, device=entered.device) < entered.unsqueeze(-1)


def _put(store: Tensor, new: Tensor, index: tuple[Tensor, ...], keep: Tensor, size: int) -> Tensor:
    """Copy ``C x ... x s (x d)`` with values of ``... x n (x d)`` put at their places."""
    changed = store.clone(memory_format=torch.contiguous_format)
    changed.view(len(store), len(keep), size, -1)[index] = new.reshape(*keep.shape, -1)[keep]
    return changed


# --- exact inference in each of some local models, blended into one process ----------------------


ROWS = 64
"""Observations that are routed together."""

CHECKED = 64
"""Observations that a posterior is compared with, at most."""

NEIGHBOURS = "neighbours"


@dataclass(frozen=True)
class LocalCache:
    """The posterior of all local models, and which of them have changed since.

    Attributes:
        state: Of all that the local models depend on besides the memory.
        process: The blended local models.
        touched: Which have taken an observation since, ``max_models``.
    """

    state: State
    process: LocalProcess
    touched: Tensor


@dataclass(frozen=True)
class LocalInference(Inference[LocalMemory, LocalCache]):
    """Local models of at most s observations, of which only those that changed are solved again.

    The options are those of :class:`~bo_stream.LocalGP`, ``max_size`` is s.
    """

    w_gen: float
    max_models: int
    max_size: int
    nearest: int

    def observe(
        self, memory: LocalMemory, cache: LocalCache | None, data: Observations, prior: Prior
    ) -> tuple[LocalMemory, LocalCache | None]:
        """Put observations into the local models whose centres are most like them."""
        if data.sign < 0:
            raise UnsupportedError(
                "LocalGP cannot retract: an observation may have been dropped already. Build it "
                "again, or take a model whose memory subtracts (WISKI, OSGPR)."
            )
        targets, kernel, step = data.targets, as_read(prior.kernel), min(ROWS, self.max_size)
        X = data.X.unsqueeze(-3).expand(*targets.shape, -1)  # the same for every output
        known = data.known.expand(targets.shape)
        rows = LocalRows(X, targets, data.noise, known, torch.ones_like(targets))
        touched = memory.entered.new_zeros(self.max_models, dtype=torch.bool)
        for start in range(0, len(rows), step):
            part = rows[slice(start, start + step)]
            models = self.models_for(part.X, memory, kernel, prior.num_outputs)
            memory = memory.with_room(int(models.max()) + 1).with_rows(part, models)
            touched[models.flatten()] = True
        if cache is not None:
            cache = replace(cache, touched=cache.touched | touched)
        columns = target_columns(targets)
        return replace(memory, totals=memory.totals + columns.mT @ columns), cache

    @torch.no_grad()
    def models_for(self, X: Tensor, memory: LocalMemory, kernel: Kernel, outputs: int) -> Tensor:
        """Return the number of the model for each of ``batch_shape x m x n x d`` inputs.

        As one after the other, but for the centres, which stay until all have entered; a number
        from ``memory.alive.sum(0)`` on is of a new model. [NguyenTuong2008, algorithm 1]
        """
        similarity = stacked_correlation(kernel, X, memory.centres, outputs)
        alive = memory.alive.movedim(0, -1)
        similarity = torch.where(alive.unsqueeze(-2), similarity, -torch.inf)
        pairs = stacked_correlation(kernel, X, X, outputs)
        batch, n = similarity.shape[:-1], X.shape[-2]
        each = zip(
            similarity.reshape(-1, n, similarity.shape[-1]),
            pairs.expand(*batch, n).reshape(-1, n, n),
            alive.sum(-1).flatten().tolist(),
            strict=True,
        )
        return torch.stack([self._chosen(*arguments) for arguments in each]).view(batch)

    def _chosen(self, similarity: Tensor, pairs: Tensor, models: int) -> Tensor:
        """Choose models for one batch element and output, ``n``."""
        best, chosen = similarity.max(-1)
        novel = (best < self.w_gen).nonzero().squeeze(-1)
        alike = pairs[novel][:, novel] >= self.w_gen
        seeds = novel[first_unlike(alike)][: self.max_models - models]
        if len(seeds) == 0:
            return chosen
        to_seeds, which = pairs[novel][:, seeds].max(-1)
        chosen[novel] = torch.where(to_seeds > best[novel], models + which, chosen[novel])
        return chosen

    def merged(
        self, memory: LocalMemory, cache: LocalCache | None, other: LocalMemory, prior: Prior
    ) -> tuple[LocalMemory, LocalCache | None]:
        """Route each local model of the other to one of these, as an observation at its centre."""
        kernel = as_read(prior.kernel)
        totals = memory.totals + other.totals
        for number in range(len(other.entered)):
            rows = other.by_age(number)[slice(-self.max_size, None)]
            centre = other.centres[..., number, :].unsqueeze(-2)
            model = self.models_for(centre, memory, kernel, prior.num_outputs)
            models = torch.where(rows.weight > 0.0, model, -1)
            memory = memory.with_room(int(models.max()) + 1).with_rows(rows, models)
        return LocalMemory(memory.rows, memory.entered, totals), None

    def cleared(self, memory: LocalMemory, prior: Prior) -> LocalMemory:
        """Drop the local models."""
        dim, device = memory.rows.X.shape[-1], memory.entered.device
        return LocalMemory.empty(memory.entered.shape[1:], self.max_size, dim, device)

    def process(
        self, memory: LocalMemory, cache: LocalCache | None, prior: Prior, X: Tensor | None = None
    ) -> tuple[PosteriorProcess, LocalCache]:
        """Solve all local models, or those that changed since they were last solved."""
        state = _state(prior)
        if cache is not None and not is_same(state, cache.state):
            cache = None
        if cache is None or bool(cache.touched.any()):
            process = self._solve(memory, cache, prior)
            if cache is None or bool(process.alive.sum() > cache.process.alive.sum()):
                _warn_of_neighbours(memory, process, prior)  # not whenever one was solved again
            unchanged = memory.entered.new_zeros(self.max_models, dtype=torch.bool)
            cache = LocalCache(state, process, unchanged)
        return cache.process, cache

    def _solve(self, memory: LocalMemory, cache: LocalCache | None, prior: Prior) -> LocalProcess:
        models = len(memory.entered)
        if cache is None or len(cache.process.X) < models:
            kernel = frozen(prior.kernel)
            numbers = torch.arange(models, device=memory.entered.device)
        else:
            kernel, numbers = cache.process.kernel, cache.touched.nonzero().squeeze(-1)
        rows = map_tensors(memory.rows, lambda store: store[numbers])
        centred, variance = _centred(rows, prior)
        K = stacked_kernel(kernel, rows.X, rows.X, prior.num_outputs)
        factor, root = factor_of(K, rows.weight / variance)
        whitener = inverse_lower(factor) * root.unsqueeze(-2)
        targets = (whitener @ centred.unsqueeze(-1)).squeeze(-1)
        if cache is not None and len(numbers) < models:
            whitener = cache.process.whitener.index_copy(0, numbers, whitener)
            targets = cache.process.targets.index_copy(0, numbers, targets)
        mean, alive = prior.mean.unsqueeze(-1).clone(), memory.alive.movedim(0, -1)
        places = (memory.rows.X, memory.centres, alive)
        return LocalProcess(
            kernel, prior.num_outputs, mean, self.nearest, *places, whitener, targets
        )

    def objective(
        self, memory: LocalMemory, cache: LocalCache | None, prior: Prior
    ) -> tuple[Tensor, LocalCache | None]:
        """Sum over the local models, each observation's likelihood to the power of its weight."""
        X, rows = memory.rows.X, memory.rows
        K = in_dtype(
            prior.kernel, torch.float64, lambda k: stacked_kernel(k, X, X, prior.num_outputs)
        )
        centred, variance = _centred(rows, prior)
        factor, root = factor_of(K, rows.weight / variance)
        white = solve_lower(factor, (root * centred).unsqueeze(-1)).squeeze(-1)
        logs = rows.weight * (2.0 * math.pi * variance).log()
        each = -0.5 * (logs + white.square()) - factor.diagonal(dim1=-2, dim2=-1).log()
        return each.sum(-1).sum(0), cache


def _state(prior: Prior) -> State:
    """Copy all that the local models depend on; a fixed noise is in the memory."""
    chain = prior.chain
    modules = [prior.kernel, prior.mean_module, *chain.fixed]
    modules += [] if chain.standardize is None else [chain.standardize]
    modules += [prior.likelihood] if isinstance(prior.likelihood, GaussianLikelihood) else []
    return tuple(tensor for module in modules for tensor in state_of(module))


def _centred(rows: LocalRows, prior: Prior) -> tuple[Tensor, Tensor]:
    """Return standardised outcomes less the prior mean, and noise variances."""
    outcomes, variance = prior.standardized(rows)
    return outcomes - prior.mean.unsqueeze(-1), variance


@torch.no_grad()
def _warn_of_neighbours(memory: LocalMemory, process: LocalProcess, prior: Prior) -> None:
    """Warn once where all noise is known, and the blended mean is far from the outcomes for it.

    At ``CHECKED`` of the observations in memory, evenly spaced. Cost O(``CHECKED`` C s²), more than
    that of an update and its posterior: for when all models are solved, or another one was begun.
    """
    model = prior.model
    if prior.inferred_noise is not None or model.training or model.has_said(NEIGHBOURS):
        return
    if not bool((memory.alive.sum(0) > 1).any()):
        return  # the exact process
    each = (*_centred(memory.rows, prior), memory.rows.weight)
    centred, variance, weight = (value.movedim(0, -2).flatten(-2) for value in each)
    X = memory.rows.X.movedim(0, -3).flatten(-3, -2)
    places = (weight > 0.0).flatten(0, -2).any(0).nonzero().squeeze(-1)
    spaced = torch.linspace(0, len(places) - 1, min(len(places), CHECKED), device=places.device)
    places = places[spaced.long()]
    columns = range(prior.num_outputs)
    mean = torch.stack(
        [process.mean_at(process.at(X[..., j, places, :]))[..., j, :] for j in columns], -2
    )
    residual = prior.mean.unsqueeze(-1) + centred[..., places] - mean
    held = (weight[..., places] > 0.0).double()
    squares = (held * residual.square() / variance[..., places]).sum(-1)
    most = float((squares / held.sum(-1).clamp_min(1.0)).max().sqrt())
    if most > MOST_RESIDUAL:
        model.says(NEIGHBOURS)
        warn_of_neighbours(most)


FAINT = 1e-12
"""Correlations with a centre below this are equal: far from all centres all models count alike."""


def factor_of(K: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
    """Compute L with ``L Lᵀ = I + S K S``, never less than the identity, and the diagonal of S.

    No noise, however small, and no two equal inputs ask for jitter. Cost O(s³) a matrix.
    """
    scaled, root = scaled_prior(K, precision)
    return safe_cholesky(scaled + torch.diag_embed(torch.ones_like(root))), root


@dataclass(frozen=True)
class LocalProcess(PosteriorProcess):
    """``f(x) = Σ √w_c(x) g_c(x)`` about the mean ``Σ w_c(x) E f_c(x)``, g_c independent.

    g_c is what model c does not know of f. So the marginals have the mean and the variance of the
    weighted models, the covariance ``Σ √(w_c(x) w_c(x')) cov_c(x, x')`` is positive semi-definite,
    and without data it is the prior where all weights agree.

    Attributes:
        kernel: In float64.
        outputs: m.
        prior_mean: ``batch_shape x m x 1``.
        nearest: How many models, the most similar ones, count at an input.
        X: Inputs of the C models, ``C x batch_shape x m x s x d``.
        centres: ``batch_shape x m x C x d``.
        alive: Whether each has observations, ``batch_shape x m x C``.
        whitener: ``L⁻¹ S``, see :func:`factor_of`, ``C x batch_shape x m x s x s``.
        targets: ``L⁻¹ S r``, r the outcomes less the prior mean, ``C x batch_shape x m x s``.
    """

    kernel: Kernel
    outputs: int
    prior_mean: Tensor
    nearest: int
    X: Tensor
    centres: Tensor
    alive: Tensor
    whitener: Tensor
    targets: Tensor

    def at(self, X: Tensor) -> Points:
        """Compute root weights and, times these, whitened covariances, ``... x m x n x (C s)``.

        Cost O(n s²) a model that counts at any input.
        """
        amplitudes = self.amplitudes(X)
        used = (amplitudes > 0.0).flatten(0, -2).any(0).nonzero().squeeze(-1)
        whitener, inputs = self.whitener[used], self.X[used]
        shape = (len(used), *(1,) * max(0, X.ndim + 2 - inputs.ndim))
        inputs = inputs.view(*shape, *inputs.shape[1:])
        cross = stacked_kernel(self.kernel, inputs, X.unsqueeze(-3), self.outputs)
        columns = whitener.view(*shape, *whitener.shape[1:]) @ cross
        columns = columns.movedim(0, -1).movedim(-3, -1) * amplitudes[..., used].unsqueeze(-1)
        room = columns.new_zeros(*amplitudes.shape, columns.shape[-1])
        return Points(X, amplitudes, room.index_copy(-2, used, columns).flatten(-2))

    def amplitudes(self, X: Tensor) -> Tensor:
        """Compute ``√w_c(x)``, ``... x n x d -> ... x m x n x C``; squares sum to 1.

        The weights are the correlations with the centres. [NguyenTuong2008, algorithm 2]
        """
        each = X.unsqueeze(-3)
        similarity = stacked_correlation(self.kernel, each, self.centres, self.outputs)
        alive = self.alive.unsqueeze(-2)
        nobody = ~alive.any(-1, keepdim=True)
        similarity = torch.where(alive | nobody, similarity.clamp_min(FAINT), 0.0)
        best = similarity.detach().topk(min(self.nearest, similarity.shape[-1]), -1).indices
        counts = torch.zeros_like(similarity, dtype=torch.bool).scatter(-1, best, True)
        counts = counts & (similarity > 0.0)
        total = torch.where(counts, similarity, 0.0).sum(-1, keepdim=True)
        return torch.where(counts, torch.where(counts, similarity / total, 1.0).sqrt(), 0.0)

    def mean_at(self, points: Points) -> Tensor:
        """Compute ``prior_mean + Σ w_c mean_c``."""
        targets = self.targets.movedim(0, -2).unsqueeze(-3)
        each = (points.posterior.unflatten(-1, targets.shape[-2:]) * targets).sum(-1)
        return self.prior_mean + (each * points.prior).sum(-1)

    def cross_covariance(self, points: Points, others: Points) -> Tensor:
        """Compute ``Σ √(w_c w_c') cov_c``."""
        known = points.posterior @ others.posterior.mT
        return self._prior_covariance(points, others) - known

    def variance_at(self, points: Points) -> Tensor:
        """Compute ``Σ w_c var_c``."""
        prior = kernel_variance(self.kernel, points.X, self.outputs)
        return prior - points.posterior.square().sum(-1)

    def joint_at(self, points: Points) -> Joint:
        """Return the prior part as a residual, less what the models know."""
        residual = Residual(
            lambda: self._prior_covariance(points, points),
            lambda: kernel_variance(self.kernel, points.X, self.outputs),
        )
        known = points.posterior
        return Joint(self.mean_at(points), known[..., :0], known, residual)

    def _prior_covariance(self, points: Points, others: Points) -> Tensor:
        prior = kernel_matrix(self.kernel, points.X, others.X, self.outputs)
        return points.prior @ others.prior.mT * prior
