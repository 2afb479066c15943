"""Greedy batches of candidates from a pool, chosen for the integrated posterior variance."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError, UnsupportedError
from torch import Tensor
from torch.nn import ModuleList

from bo_stream.acquisition.criteria import sites
from bo_stream.acquisition.feature_nipv import (
    PointMeasure,
    box_of,
    check_scalar,
    in_weight_space,
    listed_inputs,
    variance_factors,
    weight_space,
)
from bo_stream.acquisition.gains import (
    Gains,
    VarianceGains,
    WeightCovariance,
    Worth,
    low_rank_change,
    same,
)
from bo_stream.errors import as_whole
from bo_stream.models.base import StreamingGP
from bo_stream.models.checks import check_finite, check_instance
from bo_stream.observation_space import ObservationSpaceProcess
from bo_stream.process import PosteriorProcess
from bo_stream.tensors import is_in, none_set, read_expected, state_of

_ROWS = 4096


def select_from_pool(
    model: StreamingGP,
    pool: Tensor,
    q: int,
    mc_points: Tensor,
    exclude: Tensor | None = None,
    costs: Tensor | None = None,
    posterior_transform: PosteriorTransform | None = None,
    pending: Tensor | None = None,
) -> Tensor:
    """Choose q of N candidates, one after the other, that reduce the mean posterior variance most.

    Each pick has the largest gain, ``zᵀ Σ G Σ z / (zᵀ Σ z + noise)`` (per cost, if given), in the
    variance that remains after the previous picks: greedy qNIPV. For repeated choices from the same
    pool use one :class:`PoolSelector`.

    Args:
        model: Any without batch shape. Cheapest is one whose basis leaves no residual, such as
            ``WISKI``; for others the covariances of all candidates with all points are stored,
            O(N M) numbers, so that some hundred ``mc_points`` are better than many thousand.
        pool: Candidates, ``N x d``.
        q: How many to choose; all different.
        mc_points: Points over which the variance is averaged, ``M x d``.
        exclude: Candidates not to choose: a boolean mask, ``N``, or indices, ``n``.
        costs: Positive cost of each candidate, ``N``: picks then have the largest gain per cost.
        posterior_transform: A ``ScalarizedPosteriorTransform``, required for several outputs.
        pending: Candidates that were requested and are not observed yet, as ``exclude``: not
            chosen either, and the others are chosen as if the model had observed them. Those that
            are excluded too count as observed before.

    Returns:
        Indices into ``pool``, in the order of picking, ``q``.

    Raises:
        BotorchTensorDimensionError: Shapes do not fit together.
        InputDataError: Values that are not finite, costs that are not positive, indices out of
            range, inputs too far outside the model's bounds.
        UnsupportedError: A model that is none of this package's, with a batch shape, with several
            outputs and no posterior transform, or with a likelihood of labels or counts.
        ValueError: q is no whole number, less than one, or more than the candidates that are left.
    """
    selector = PoolSelector(model, pool, mc_points, posterior_transform)
    return selector.select(q, exclude, costs, pending)


class PoolSelector:
    """Repeated greedy choices from one pool, for a model that goes on learning.

    For a model whose basis leaves no residual neither N x N nor N x M nor N x r numbers are formed;
    for a pool on a grid the memory is the candidates' interpolation weights, O(4^d N).

    Between choices the gains of all candidates are cached. A choice after k new observations with
    the same hyperparameters changes them by rank k: O(k r²) and 2k functions at the candidates,
    none if the chosen candidates were observed. Each pick costs O(r²) and two functions. Any other
    change of the model (a refit, a growing grid) has them computed again: O(r³) and two quadratic
    forms. For a model with a residual they always are: O(N M r), then for each pick O(N (M + r));
    on the host, where N M is large, O(N r) for bounds of the gains, and O(M) for each candidate
    whose gain may be the largest. But the gains of an exact model of n observations stay cached if
    it observed the chosen points: O(N n² + N M n) the first time.

    With an outcome transform other than ``Standardize`` the variance is of the transformed outcome.

    Example:
        >>> selector = PoolSelector(model, pool, mc_points)
        >>> picks = selector.select(q=6, exclude=already_observed)
    """

    def __init__(
        self,
        model: StreamingGP,
        pool: Tensor,
        mc_points: Tensor,
        posterior_transform: PosteriorTransform | None = None,
    ) -> None:
        """Check and transform the inputs; arguments and errors as :func:`select_from_pool`."""
        check_instance("model", model, StreamingGP, "AutoGP(X, Y)")
        check_no_batch(model.batch_shape)
        check_scalar(model, posterior_transform)
        self._model = model
        self._posterior_transform = posterior_transform
        self._observations = 0.0
        self._transform(pool, mc_points)
        # to be transformed again where that moves
        self._given = (pool.clone(), mc_points.clone()) if len(self._transforms) > 0 else None

    def __len__(self) -> int:
        """Return the number N of candidates."""
        return self._pool.shape[0]

    def _transform(self, pool: Tensor, mc_points: Tensor) -> None:
        """Take the inputs as the model's input transform and stem have them now; drop all gains."""
        pool = listed_inputs(self._model, "pool", pool)
        points = listed_inputs(self._model, "mc_points", mc_points)
        read_expected()
        self._pool, self._state = pool, state_of(self._transforms)
        self._measure = PointMeasure(points, torch.full_like(points[:, 0], 1.0 / len(points)))
        self._corners = box_of(torch.cat((box_of(pool), self._measure.corners)))
        self._known: tuple[Gains, Gains] | None = None  # before and after the last choice
        # of an exact model: posterior before the last choice, its points and noise, gains after it
        self._exact: tuple[ObservationSpaceProcess, Tensor, Tensor, VarianceGains] | None = None

    @property
    def _transforms(self) -> ModuleList:
        found = map(self._model._modules.get, ("input_transform", "stem"))
        return ModuleList(each for each in found if each is not None)

    @torch.no_grad()
    def select(
        self,
        q: int,
        exclude: Tensor | None = None,
        costs: Tensor | None = None,
        pending: Tensor | None = None,
    ) -> Tensor:
        """Choose q candidates for the model as it is now, which is not changed.

        Arguments, result and errors as :func:`select_from_pool`.
        """
        return self._model._read_once(partial(self._select, q, exclude, costs, pending))

    def _select(
        self, q: int, exclude: Tensor | None, costs: Tensor | None, pending: Tensor | None
    ) -> Tensor:
        if self._given is not None and not is_in(self._transforms, self._state):
            self._transform(*self._given)
        waiting: list[int] = []
        if pending is not None and pending.numel() > 0:
            index = checked_indices("pending", pending, self._pool)
            excluded = checked_indices("exclude", exclude, self._pool)
            left = index[~torch.isin(index, excluded)].unique()
            waiting, exclude = left.tolist(), torch.cat((excluded, left))
        available = available_candidates(exclude, self._pool, q)
        if costs is None:
            costs = self._pool.new_ones(len(self))
        if costs.shape != (len(self),):
            raise BotorchTensorDimensionError(
                f"Expected costs of shape `{len(self)}`, one for each candidate of pool, got "
                f"{tuple(costs.shape)}."
            )
        check_finite("costs", costs)
        if not none_set(costs <= 0):
            raise InputDataError(
                f"Expected costs to be positive, got {int((costs <= 0).sum())} that are not. Use "
                "exclude for candidates that cannot be chosen."
            )
        costs = costs.to(self._pool)

        process = self._model.process(self._corners)
        before = gains = self._gains_now(process)
        parts = self._pool.double().split(_ROWS)
        noise = torch.cat(
            [self._model.noise_at(part).double().expand(-1, len(part)) for part in parts], -1
        )
        factors = variance_factors(self._model, self._posterior_transform).unsqueeze(-1)
        worth = Worth(noise, factors, costs, available)
        for candidate in waiting:
            gains = gains.observing(candidate, noise[:, candidate, None])
        chosen: list[Tensor] = []
        for _ in range(q):
            pick, gains = gains.best(worth)
            chosen.append(pick)
            worth = worth.without(pick)
            gains = gains.observing(pick, noise.index_select(-1, pick))
        picks = torch.cat(chosen)
        read_expected()  # what the selector caches would not be undone
        if isinstance(before, Gains) and isinstance(gains, Gains):
            self._known = before, gains
        if isinstance(before, VarianceGains) and isinstance(gains, VarianceGains):
            self._exact = None
            if isinstance(process, ObservationSpaceProcess) and not waiting:
                self._exact = process, self._pool[picks].double(), noise[:, picks], gains
        return picks

    def _gains_now(self, process: PosteriorProcess) -> Gains | VarianceGains:
        """Return the gains under the model's present posterior, a process.

        In weight space from the gains of the last choice where that is cheaper: they are the gains
        before that choice, the gains after it if it was observed, or differ from the gains before
        it by a change of as low a rank as there were observations since.
        """
        if isinstance(process, ObservationSpaceProcess) and process.prior.has_residual:
            if self._exact is not None:  # has the model observed that choice and nothing else?
                former, X, noise, gains = self._exact
                n, observed = former.told.X.shape[-2], process.told
                if (
                    process.prior is former.prior
                    and observed.X.shape[-2] == n + len(X)
                    and torch.equal(observed.X[..., n:, :].reshape(-1, *X.shape[1:]), X)
                    and torch.allclose(observed.noise[..., n:], noise, rtol=1e-9, atol=0.0)
                ):
                    return gains.folded()
            return VarianceGains.of(process, self._pool, self._measure)
        process = self._model.feature_process(self._corners)
        if not in_weight_space(process):
            return VarianceGains.of(process, self._pool, self._measure)
        space = weight_space(process)
        observations = self._model.num_observations
        rank = round(abs(observations - self._observations))
        read_expected()
        self._observations = observations
        if self._known is None or self._known[0].sites.basis is not space.basis:
            gram = self._measure.gram(space.basis)
            return Gains.of(sites(space.basis, self._pool), gram, space.weights)
        before, after = self._known
        if space.weights is before.covariance.weights:
            return before
        new = WeightCovariance.of(space.weights)
        for known in (after, before):
            if same(known.covariance, new):
                return replace(known, covariance=new)
        change = low_rank_change(before.covariance, new, rank)
        if change is None:
            return Gains.of(before.sites, before.gram, space.weights)
        return before.changed(*change, new)


def thinned(X: Tensor, count: int) -> Tensor:
    """Choose points that stand for all: one of each of ``count`` cells of about as many points.

    Cells are cut along their longest side, as in a k-d tree; the point of a cell is the nearest to
    its mean. A mean over these points is nearer to the mean over all points than a mean over as
    many random ones: choices then fill the space evenly, and not the gaps of a draw. Cost
    O(n d log count).

    Args:
        X: ``n x d``.
        count: At least 1.

    Returns:
        Positions in ``X``, in order; all of them where there are at most ``count``.
    """
    values = X.numpy(force=True)
    cells, chosen = [(np.arange(len(X)), count)], list[np.ndarray]()
    while cells:
        rows, parts = cells.pop()
        inside = values[rows]
        if len(rows) <= parts:
            chosen.append(rows)
        elif parts == 1:
            nearest = np.square(inside - inside.mean(0)).sum(-1).argmin()
            chosen.append(rows[nearest : nearest + 1])
        else:
            cut = len(rows) * (parts // 2) // parts
            longest = np.ptp(inside, axis=0).argmax()
            rows = rows[inside[:, longest].argpartition(cut)]
            cells += [(rows[:cut], parts // 2), (rows[cut:], parts - parts // 2)]
    return torch.from_numpy(np.sort(np.concatenate(chosen))).to(X.device)


def available_candidates(exclude: Tensor | None, pool: Tensor, q: int) -> Tensor:
    """Return which of a pool's N candidates may be chosen, ``N`` bools, at least q.

    Raises:
        BotorchTensorDimensionError: A mask of another length.
        InputDataError: Indices out of range.
        ValueError: q is no whole number, less than one, or more than the candidates that are left.
    """
    available = torch.ones(len(pool), dtype=torch.bool, device=pool.device)
    if exclude is not None and exclude.numel() > 0:
        available[checked_indices("exclude", exclude, pool)] = False
    count = as_whole(q)
    if count is None or count < 1 or not none_set(available.sum() < count):
        left = int(available.sum())
        raise ValueError(
            f"Expected a whole number q from 1 to the {left} candidate(s) of pool that are not "
            f"excluded, got {q!r}."
        )
    return available


def check_no_batch(batch_shape: torch.Size) -> None:
    """Check that a model of a batch shape can choose one batch of candidates.

    Raises:
        UnsupportedError: It has elements, which would choose different ones.
    """
    if len(batch_shape) > 0:
        raise UnsupportedError(
            "Expected a model without batch shape to choose one batch of candidates, got one of "
            f"batch shape {tuple(batch_shape)}: that of its data, or of hypothetical observations "
            "that it is conditioned on."
        )


def checked_indices(name: str, given: Tensor | None, pool: Tensor) -> Tensor:
    """Return candidates that are given as a boolean mask or as indices, as indices; None: none.

    Raises:
        BotorchTensorDimensionError: A mask of another length, or no list.
        InputDataError: Indices out of range.
    """
    count, device = len(pool), pool.device
    if given is None:
        return torch.zeros(0, dtype=torch.long, device=device)
    if given.ndim != 1 or (given.dtype == torch.bool and given.shape[0] != count):
        raise BotorchTensorDimensionError(
            f"Expected {name} as a boolean mask of shape `{count}` or a list of indices, got "
            f"{given.dtype} of shape {tuple(given.shape)}."
        )
    if given.dtype == torch.bool:
        return given.nonzero().flatten().to(device)
    if given.numel() == 0:
        return given.long().to(device)
    if given.is_floating_point() or given.is_complex():
        raise InputDataError(f"Expected {name} to hold bools or indices, got {given.dtype}.")
    if bool(((given < 0) | (given >= count)).any()):  # at once: a GPU ends at a wrong index
        raise InputDataError(
            f"Expected indices from 0 to {count - 1} in {name}, got {int(given.min())} to "
            f"{int(given.max())}."
        )
    return given.long().to(device)
