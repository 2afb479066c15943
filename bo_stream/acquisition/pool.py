"""Greedy batches of candidates from a pool, chosen for the integrated posterior variance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError, UnsupportedError
from torch import Tensor

from bo_stream.acquisition.criteria import FeatureSites, sites
from bo_stream.acquisition.feature_nipv import (
    PointMeasure,
    box_of,
    check_scalar,
    in_weight_space,
    listed_inputs,
    variance_factors,
    weight_space,
)
from bo_stream.models.base import StreamingGP
from bo_stream.models.checks import check_finite
from bo_stream.observation_space import ObservationSpaceProcess
from bo_stream.process import Points, PosteriorProcess
from bo_stream.tensors import none_set, read_expected
from bo_stream.weights import WeightPosterior

TIE = 1e-10
"""Gains that differ from the largest by this fraction tie with it; the lowest index is picked."""

_AGREEMENT = 1e-10
"""Frobenius norm of a difference, per square root of the rank r, that counts as rounding error."""

_SPARE = 8
_PROBES = 4

_ROWS = 4096

_BLOCK = 1024
"""Candidates whose covariances with all points are computed at a time."""

Site = int | Tensor
"""Index of a candidate; of shape ``1`` where it is on a device, which nothing then waits for."""


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
            chosen either, and the others are chosen as if the model had observed them.

    Returns:
        Indices into ``pool``, in the order of picking, ``q``.

    Raises:
        BotorchTensorDimensionError: Shapes do not fit together.
        InputDataError: Values that are not finite, costs that are not positive, indices out of
            range, inputs too far outside the model's bounds.
        UnsupportedError: A model with a batch shape, with several outputs and no posterior
            transform, or with a likelihood of labels or counts.
        ValueError: q is less than one, or more than the candidates that are left.
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
    forms. For a model with a residual they always are: O(N M r), and O(N (M + r)) for each pick;
    but the gains of an exact model of n observations stay cached if it observed the chosen points:
    O(N n² + N M n) the first time, O(N (M + n)) for each pick.

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
        if len(model.batch_shape) > 0:
            raise UnsupportedError(
                "Expected a model without batch shape to choose one batch of candidates, got one "
                f"of batch shape {tuple(model.batch_shape)}: that of its data, or of hypothetical "
                "observations that it is conditioned on."
            )
        check_scalar(model, posterior_transform)
        self._model = model
        self._pool = listed_inputs(model, "pool", pool)
        points = listed_inputs(model, "mc_points", mc_points)
        self._measure = PointMeasure(points, torch.full_like(points[:, 0], 1.0 / len(points)))
        self._corners = box_of(torch.cat((box_of(self._pool), self._measure.corners)))
        self._posterior_transform = posterior_transform
        self._observations = 0.0
        self._known: tuple[Gains, Gains] | None = None  # before and after the last choice
        # of an exact model: posterior before the last choice, its points and noise, gains after it
        self._exact: tuple[ObservationSpaceProcess, Tensor, Tensor, VarianceGains] | None = None

    def __len__(self) -> int:
        """Return the number N of candidates."""
        return self._pool.shape[0]

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
        for candidate in waiting:
            gains = gains.observing(candidate, noise[:, candidate, None])
        chosen: list[Tensor] = []
        for _ in range(q):
            worth = (factors * gains.value(noise)).sum(0) / costs
            worth = worth.masked_fill(~available, -torch.inf)
            largest = worth.max()
            tied = worth >= largest - TIE * largest.abs()
            pick = tied.to(torch.uint8).argmax(0, keepdim=True)  # an index that is not read
            chosen.append(pick)
            available = available.index_fill(0, pick, False)
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
                    return gains
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


@dataclass(frozen=True)
class Gains:
    """Reductions of the integrated variance ``tr(G Σ)`` by each of N candidates.

    An observation with noise σ² at z takes ``Σ z zᵀ Σ / (zᵀ Σ z + σ²)`` from Σ, hence
    ``zᵀ Σ G Σ z / (zᵀ Σ z + σ²)`` from the integrated variance.

    Attributes:
        sites: The candidates.
        gram: G, ``m x r x r``.
        covariance: Σ.
        numerator: ``zᵀ Σ G Σ z``, ``m x N``.
        variance: ``zᵀ Σ z``, ``m x N``.
    """

    sites: FeatureSites
    gram: Tensor
    covariance: WeightCovariance
    numerator: Tensor
    variance: Tensor

    @classmethod
    def of(cls, sites: FeatureSites, gram: Tensor, weights: WeightPosterior) -> Gains:
        """Compute all gains. Cost O(r³) and two quadratic forms at all candidates."""
        covariance = weights.covariance()
        forms = torch.stack((covariance @ gram @ covariance, covariance))
        numerator, variance = sites.quadratic(forms)
        return cls(sites, gram, WeightCovariance.of(weights), numerator, variance)

    def value(self, noise: Tensor) -> Tensor:
        """Return the reduction per output, ``m x N``, for noise variances ``m x N``."""
        return self.numerator.clamp_min(0.0) / (self.variance.clamp_min(0.0) + noise)

    def observing(self, site: Site, noise: Tensor) -> Gains:
        """Return the gains after an observation at a candidate, with noise variance ``m x 1``.

        A rank-one change: cost O(r²) and two functions at all candidates.
        """
        feature = self.sites.basis.features(_row(self.sites.X, site)).mT
        image = self.covariance.times(feature)
        total = (feature * image).sum(-2) + noise
        direction = image / total.sqrt().unsqueeze(-1)
        downdate = torch.cat((self.covariance.downdate, direction), -1)
        covariance = replace(self.covariance, downdate=downdate)
        return self.changed(direction, torch.ones_like(total), covariance)

    def changed(self, directions: Tensor, amounts: Tensor, covariance: WeightCovariance) -> Gains:
        """Return the gains after a change of rank k. Cost O(k r²) and 2k functions.

        ``zᵀ Σ' G Σ' z`` and ``zᵀ Σ' z`` for the covariance ``Σ' = Σ − U diag(λ) Uᵀ``, multiplied
        out.
        """
        integrated = self.gram @ directions
        columns = torch.cat((directions, self.covariance.times(integrated)), -1)
        own, cross = self.sites.linear(columns).chunk(2, dim=-2)
        weighted = own * amounts.unsqueeze(-1)
        inner = directions.mT @ integrated
        return replace(
            self,
            covariance=covariance,
            numerator=self.numerator - (weighted * (2.0 * cross - inner @ weighted)).sum(-2),
            variance=self.variance - (weighted * own).sum(-2),
        )


def _row(values: Tensor, site: Site) -> Tensor:
    """Select a row, ``... x N x k -> ... x 1 x k``."""
    if isinstance(site, int):
        return values[..., site : site + 1, :]
    return values.index_select(-2, site)


@dataclass(frozen=True)
class WeightCovariance:
    """A covariance ``Σ − V Vᵀ`` of weights, never formed.

    Attributes:
        weights: Posterior with covariance Σ, ``m x r x r``.
        downdate: V, ``m x r x k``.
    """

    weights: WeightPosterior
    downdate: Tensor

    @classmethod
    def of(cls, weights: WeightPosterior) -> WeightCovariance:
        """Return Σ alone."""
        return cls(weights, weights.downdate[..., :0])

    def times(self, columns: Tensor) -> Tensor:
        """Multiply by columns, ``m x r x k``. Cost O(k r²)."""
        explained = columns.mT @ self.downdate @ self.downdate.mT
        return self.weights.covariance_times(columns) - explained.mT


def same(
    old: WeightCovariance, new: WeightCovariance, change: tuple[Tensor, Tensor] | None = None
) -> bool:
    """Tell whether two covariances agree to rounding but for the change between them, if given.

    By random probes: the mean square of their images is the squared norm. Cost O(r²).
    """
    probes = _columns(old.downdate, _PROBES, seed=1)
    images = old.times(probes) - new.times(probes)
    if change is not None:
        directions, amounts = change
        images = images - directions @ (amounts.unsqueeze(-1) * (directions.mT @ probes))
    return bool(images.square().mean() <= _AGREEMENT**2)


def low_rank_change(
    old: WeightCovariance, new: WeightCovariance, rank: int
) -> tuple[Tensor, Tensor] | None:
    """Find the change ``− U diag(λ) Uᵀ`` of a covariance, None where its rank is much larger.

    U is ``m x r x k``, and λ, ``m x k``, positive where the variance becomes smaller. A randomised
    range finder and a check with fresh probes; exact to rounding. Cost O(r² rank). Source: Halko,
    Martinsson and Tropp (2011), algorithms 4.1 and 5.3.
    """
    width = rank + _SPARE
    if 4 * width > old.downdate.shape[-2]:
        return None
    columns = _columns(old.downdate, width, seed=2)
    basis = torch.linalg.qr(old.times(columns) - new.times(columns)).Q
    inner = basis.mT @ (old.times(basis) - new.times(basis))
    amounts, vectors = torch.linalg.eigh(0.5 * (inner + inner.mT))
    change = basis @ vectors, amounts
    return change if same(old, new, change) else None


def _columns(like: Tensor, count: int, seed: int) -> Tensor:
    """Draw standard normal columns, ``r x count``, equal at every call."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randn(like.shape[-2], count, generator=generator, dtype=like.dtype)
    return columns.to(like.device)


@dataclass(frozen=True)
class JointGains:
    """Covariances of N candidates with M points, with a residual.

    An observation at candidate i takes ``c_ij² / (v_i + noise)`` from the variance of point j, with
    c the covariances of candidates with points and v the variances of candidates, given the
    candidates observed so far. Memory O(N (M + r)).

    Attributes:
        process: The process before any of them.
        X: Candidates in transformed inputs, ``N x d``.
        pool: The process's features at the candidates.
        weights: Weights w of the points, ``M``.
        covariance: c, ``m x N x M``.
        variance: v, ``m x N``.
        columns: L with ``L Lᵀ`` the reduction of the candidates' covariance by the k observed ones,
            ``m x N x k``.
    """

    process: PosteriorProcess
    X: Tensor
    pool: Points
    weights: Tensor
    covariance: Tensor
    variance: Tensor
    columns: Tensor

    @classmethod
    def of(cls, process: PosteriorProcess, pool: Tensor, points: PointMeasure) -> JointGains:
        """Compute the covariances under a process with r features. Cost O(N M r).

        Some candidates at a time: what a kernel computes on its way then takes little memory.
        """
        at, others = process.at(pool), process.at(points.points)
        tensors = (tensor.split(_BLOCK, -2) for tensor in (at.X, at.prior, at.posterior))
        covariance = at.X.new_empty(0)
        for i, block in enumerate(zip(*tensors, strict=True)):
            rows = process.cross_covariance(Points(*block), others)
            if i == 0:
                covariance = rows.new_empty(*rows.shape[:-2], len(pool), rows.shape[-1])
            covariance[..., i * _BLOCK : (i + 1) * _BLOCK, :] = rows
        variance = process.variance_at(at).expand(covariance.shape[:-1])
        return cls(process, pool, at, points.weights, covariance, variance, covariance[..., :0])

    def observing(self, i: int, noise: Tensor) -> JointGains:
        """Return the covariances after the i-th candidate, with noise variance ``m x 1``.

        Cost O(N (M + r + k)).
        """
        fresh = self.process.cross_covariance(self.pool, self.process.at(self.X[i : i + 1]))
        spread = (self.variance[..., i : i + 1] + noise).sqrt().unsqueeze(-1)
        column = (fresh - self.columns @ self.columns[..., i : i + 1, :].mT) / spread
        row = self.covariance[..., i : i + 1, :] / spread
        return replace(
            self,
            covariance=self.covariance - column @ row,
            variance=(self.variance - column.squeeze(-1).square()).clamp_min(0.0),
            columns=torch.cat((self.columns, column), -1),
        )


@dataclass(frozen=True)
class VarianceGains:
    """Reductions of the mean variance at M points by each of N candidates, with a residual.

    ``Σ_j w_j c_ij² / (v_i + noise)``: c are the covariances of candidates with points and v the
    variances of candidates, given the k that were observed so far: ``c = C − A R``, which is never
    formed. With the i-th row less ``a_i r`` the sums become
    ``Σ_j w_j c_ij² − 2 a_i Σ_j w_j c_ij r_j + a_i² Σ_j w_j r_j²``: the
    N x M numbers are read once for each candidate observed. Memory O(N (M + r + k)).

    Attributes:
        joint: Covariances C with the points and variances, before any candidate.
        variance: v, ``m x N``.
        numerator: ``Σ_j w_j c_ij²``, ``m x N``.
        columns: A, ``m x N x k``; ``A Aᵀ`` is the reduction of the candidates' covariance.
        rows: R, ``m x k x M``.
    """

    joint: JointGains
    variance: Tensor
    numerator: Tensor
    columns: Tensor
    rows: Tensor

    @classmethod
    def of(cls, process: PosteriorProcess, pool: Tensor, points: PointMeasure) -> VarianceGains:
        """Compute the gains under a process; cost as :meth:`JointGains.of`."""
        joint = JointGains.of(process, pool, points)
        blocks = joint.covariance.split(_BLOCK, -2)
        numerator = torch.cat([block.square() @ joint.weights for block in blocks], -1)
        none = joint.covariance[..., :0, :]
        return cls(joint, joint.variance, numerator, joint.columns, none)

    def value(self, noise: Tensor) -> Tensor:
        """Return the gains, ``m x N``, for noise variances ``m x N``."""
        return self.numerator.clamp_min(0.0) / (self.variance.clamp_min(0.0) + noise)

    def observing(self, site: Site, noise: Tensor) -> VarianceGains:
        """Return the gains after an observation at a candidate, with noise variance ``m x 1``.

        Cost O(N (M + r + k)).
        """
        joint, own = self.joint, _row(self.columns, site)
        variance = _row(self.variance.unsqueeze(-1), site)
        spread = (variance.clamp_min(0.0) + noise.unsqueeze(-1)).sqrt()
        fresh = joint.process.cross_covariance(joint.pool, joint.process.at(_row(joint.X, site)))
        column = (fresh - self.columns @ own.mT) / spread
        row = (_row(joint.covariance, site) - own @ self.rows) / spread
        weighted = (row * joint.weights).mT
        along = joint.covariance @ weighted - self.columns @ (self.rows @ weighted)
        change = column * (2.0 * along - column * (row @ weighted))
        return replace(
            self,
            variance=self.variance - column.squeeze(-1).square(),
            numerator=self.numerator - change.squeeze(-1),
            columns=torch.cat((self.columns, column), -1),
            rows=torch.cat((self.rows, row), -2),
        )


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
        ValueError: q is less than one, or more than the candidates that are left.
    """
    available = torch.ones(len(pool), dtype=torch.bool, device=pool.device)
    if exclude is not None and exclude.numel() > 0:
        available[checked_indices("exclude", exclude, pool)] = False
    if q < 1 or not none_set(available.sum() < q):
        left = int(available.sum())
        raise ValueError(
            f"Expected q from 1 to the {left} candidate(s) of pool that are not excluded, got {q}."
        )
    return available


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
