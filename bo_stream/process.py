"""Posteriors as processes: joint and single moments at any inputs, conditioned and selected."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator import LinearOperator, to_linear_operator
from linear_operator.operators import BlockDiagLinearOperator, DiagLinearOperator
from torch import Tensor

from bo_stream.bases.inducing import Basis
from bo_stream.linalg import (
    DowndatedRootOperator,
    LazyCovariance,
    row_product,
    safe_cholesky,
    solve_lower,
    stack_columns,
    stack_rows,
)
from bo_stream.tensors import zip_tensors
from bo_stream.weights import WeightPosterior

DENSE_LIMIT = 512
"""Up to this many points a joint posterior has a dense covariance, beyond it a lazy one."""

ROWS = 2048
"""Points whose features :meth:`PosteriorProcess.marginals` has in memory at a time."""


class PosteriorProcess(ABC):
    """Gaussian process with a mean, a covariance, and the process given further observations.

    Law: ``condition`` of ``condition`` is ``condition`` on both; conditioning on the process's own
    mean leaves the mean and never adds variance.
    """

    @abstractmethod
    def at(self, X: Tensor) -> Points:
        """Evaluate the basis once at ``... x n x d`` inputs, for the methods below."""

    @abstractmethod
    def mean_at(self, points: Points) -> Tensor:
        """Compute the mean, ``... x m x n``."""

    @abstractmethod
    def cross_covariance(self, points: Points, others: Points) -> Tensor:
        """Compute the covariance between two sets of points, ``... x m x n x n'``."""

    @abstractmethod
    def variance_at(self, points: Points) -> Tensor:
        """Compute the marginal variances, ``... x m x n``, without an n x n matrix."""

    def joint_at(self, points: Points) -> Joint:
        """Compute the joint distribution in factors; unless overridden all of it is residual."""
        mean = self.mean_at(points)
        nothing = torch.zeros_like(mean).unsqueeze(-1)[..., :0]
        residual = Residual(
            lambda: self.cross_covariance(points, points), lambda: self.variance_at(points)
        )
        return Joint(mean, nothing, nothing, residual)

    def mean(self, X: Tensor) -> Tensor:
        """Compute the mean at ``... x n x d`` inputs, ``... x m x n``. Cost O(n r)."""
        return self.mean_at(self.at(X))

    def covariance(self, X: Tensor, X2: Tensor | None = None) -> Tensor:
        """Compute the covariance, ``... x m x n x n'``. Cost O(n r² + n n' r)."""
        points = self.at(X)
        return self.cross_covariance(points, points if X2 is None else self.at(X2))

    def variance(self, X: Tensor) -> Tensor:
        """Compute the marginal variances, ``... x m x n``. Cost O(n r²)."""
        return self.variance_at(self.at(X))

    def marginals(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the mean and the marginal variances, ``... x m x n`` each. Cost O(n r²).

        One evaluation of the basis; the features of ``ROWS`` points are in memory at a time.
        """
        parts = (self.at(rows) for rows in X.split(ROWS, -2))
        means, variances = zip(
            *((self.mean_at(p), self.variance_at(p)) for p in parts), strict=True
        )
        return torch.cat(means, -1), torch.cat(variances, -1)

    def joint(self, X: Tensor) -> Joint:
        """Compute the joint distribution of ``... x n x d`` inputs in factors."""
        return self.joint_at(self.at(X))

    def condition(self, X: Tensor, Y: Tensor, noise: Tensor) -> ConditionedProcess:
        """Return the process given observations Y at X; this process stays as it is.

        Cost O(q) cross-covariances and one q x q factor; differentiable in X, Y and noise. Equal to
        online variational conditioning (Maddox et al. 2021), and where the basis has no residual
        covariance to adding the observations' statistics.

        Args:
            X: ``... x q x d``.
            Y: ``... x m x q``, leading dimensions broadcast against X.
            noise: Variances, broadcastable to ``... x m x q``.
        """
        points = self.at(X)
        covariance = self.cross_covariance(points, points)
        own = torch.diag_embed(noise.expand(*noise.shape[:-1], covariance.shape[-1]))
        factor = safe_cholesky(covariance + own, is_new=True)
        innovation = solve_lower(factor, (Y - self.mean_at(points)).unsqueeze(-1))
        new = ConditionedProcess(self, points, factor, innovation)
        return self._joined(new) if isinstance(self, ConditionedProcess) else new


@dataclass(frozen=True)
class WeightSpaceProcess(PosteriorProcess):
    """Process ``f(x) = prior_mean + z(x)ᵀ w + residual`` with weights ``w ~ N(mean, S Sᵀ)``.

    Attributes:
        basis: Whitened features and the residual covariance.
        weights: Posterior over the weights w.
        prior_mean: Constant prior mean, ``... x m x 1``.
    """

    basis: Basis
    weights: WeightPosterior
    prior_mean: Tensor

    def at(self, X: Tensor) -> Points:
        """Evaluate the features once. Cost O(n r²)."""
        features = self.basis.features(X)
        return Points(X, features, self.weights.base.row_product(features))

    def mean_at(self, points: Points) -> Tensor:
        """Compute ``prior_mean + z mean``."""
        mean = row_product(points.prior, self.weights.base_mean)
        if self.weights.observed:
            mean = mean + row_product(points.posterior, self.weights.shift)
        return self.prior_mean + mean.squeeze(-1)

    def cross_covariance(self, points: Points, others: Points) -> Tensor:
        """Compute ``z S Sᵀ z'ᵀ + residual``."""
        covariance = row_product(points.posterior, others.posterior.mT)
        if self.weights.observed:
            downdate = self._downdate(points)
            theirs = downdate if others is points else self._downdate(others)
            covariance = covariance - row_product(downdate, theirs.mT)
        if not self.basis.has_residual:
            return covariance
        residual = self.basis.residual_covariance(points.X, others.X, points.prior, others.prior)
        return covariance if residual is None else covariance + residual

    def explained_variance_at(self, points: Points) -> Tensor:
        """Compute ``|z S|²``, ``... x m x n``: the weights' part of the marginal variances."""
        variance = points.posterior.square().sum(-1)
        if self.weights.observed:
            variance = variance - self._downdate(points).square().sum(-1)
        return variance

    def variance_at(self, points: Points) -> Tensor:
        """Compute ``|z S|² + residual``."""
        variance = self.explained_variance_at(points)
        residual = self.basis.residual_variance(points.X, points.prior)
        return variance if residual is None else variance + residual

    def joint_at(self, points: Points) -> Joint:
        """Compute the joint distribution, with root ``z S₀``."""
        basis: Any = self.basis
        X, z, residual = points.X, points.prior, None
        if basis.has_residual:
            residual = Residual(
                lambda: basis.residual_covariance(X, X, z, z), lambda: basis.residual_variance(X, z)
            )
        return Joint(self.mean_at(points), points.posterior, self._downdate(points), residual)

    def _downdate(self, points: Points) -> Tensor:
        if not self.weights.observed:
            return points.posterior[..., :0]
        return row_product(points.posterior, self.weights.downdate)


@dataclass(frozen=True)
class ConditionedProcess(PosteriorProcess):
    """Process given q hypothetical observations; the base is shared, never copied.

    Attributes:
        base: The process before.
        points: The q inputs of the observations.
        factor: Cholesky factor of their noisy covariance, ``... x m x q x q``.
        whitened_innovation: ``factor⁻¹ (Y − mean)``, ``... x m x q x 1``.
    """

    base: PosteriorProcess
    points: Points
    factor: Tensor
    whitened_innovation: Tensor

    @property
    def batch_shape(self) -> torch.Size:
        """Leading dimensions of the mean at unbatched inputs, before m."""
        return self.whitened_innovation.shape[:-3]

    def _joined(self, new: ConditionedProcess) -> ConditionedProcess:
        """Join the observations of this process and new ones given them: all condition the base.

        So a chain of fantasies costs as much as one. The factor of all is
        ``[[factor, 0], [cross, new factor]]``, where ``cross`` is :meth:`_downdate` of the new
        points.
        """
        cross = self._downdate(new.points)
        above = cross.new_zeros(*cross.shape[:-2], cross.shape[-1], cross.shape[-2])
        top, bottom = stack_columns(self.factor, above), stack_columns(cross, new.factor)
        return ConditionedProcess(
            self.base,
            zip_tensors(stack_rows, self.points, new.points),
            stack_rows(top, bottom),
            stack_rows(self.whitened_innovation, new.whitened_innovation),
        )

    def at(self, X: Tensor) -> Points:
        """Evaluate the base's features."""
        return self.base.at(X)

    def _downdate(self, points: Points) -> Tensor:
        """Compute ``cov(points, observed) factor⁻ᵀ``, ``... x m x n x q``."""
        cross = self.base.cross_covariance(self.points, points)
        return solve_lower(self.factor, cross).mT

    def mean_at(self, points: Points) -> Tensor:
        """Add the regression on the innovation to the base's mean."""
        gain = row_product(self._downdate(points), self.whitened_innovation)
        return self.base.mean_at(points) + gain.squeeze(-1)

    def cross_covariance(self, points: Points, others: Points) -> Tensor:
        """Subtract the explained covariance from the base's."""
        downdate = self._downdate(points)
        theirs = downdate if others is points else self._downdate(others)
        return self.base.cross_covariance(points, others) - row_product(downdate, theirs.mT)

    def variance_at(self, points: Points) -> Tensor:
        """Subtract the explained variance from the base's."""
        return self.base.variance_at(points) - self._downdate(points).square().sum(-1)

    def joint_at(self, points: Points) -> Joint:
        """Append a downdate to the base's factors."""
        base = self.base.joint_at(points)
        own = self._downdate(points)
        mean = base.mean + row_product(own, self.whitened_innovation).squeeze(-1)
        return Joint(mean, base.root, stack_columns(base.downdate, own), base.residual)


@dataclass(frozen=True)
class SelectedProcess(PosteriorProcess):
    """Process of some of the outputs of another.

    Attributes:
        base: The process of all outputs.
        outputs: Positions of the selected outputs.
    """

    base: PosteriorProcess
    outputs: tuple[int, ...]

    def at(self, X: Tensor) -> Points:
        """Evaluate the base's features."""
        return self.base.at(X)

    def mean_at(self, points: Points) -> Tensor:
        """Select from the base's mean."""
        return self.base.mean_at(points)[..., list(self.outputs), :]

    def cross_covariance(self, points: Points, others: Points) -> Tensor:
        """Select from the base's covariance."""
        return self.base.cross_covariance(points, others)[..., list(self.outputs), :, :]

    def variance_at(self, points: Points) -> Tensor:
        """Select from the base's variances."""
        return self.base.variance_at(points)[..., list(self.outputs), :]

    def joint_at(self, points: Points) -> Joint:
        """Select from the base's joint distribution."""
        return self.base.joint_at(points).select(self.outputs)


@dataclass(frozen=True)
class Points:
    """Inputs with their basis features, evaluated once and used for mean and covariances.

    Attributes:
        X: ``... x n x d``.
        prior: Whitened prior features z, ``... x m x n x r``.
        posterior: ``z S₀`` with S₀ as a :class:`WeightPosterior` has it, ``... x m x n x r``.
    """

    X: Tensor
    prior: Tensor
    posterior: Tensor


@dataclass(frozen=True)
class Joint:
    """Joint distribution of n points: mean and covariance ``Z Zᵀ − B Bᵀ + residual``.

    Attributes:
        mean: ``... x m x n``.
        root: Z, ``... x m x n x r``.
        downdate: B, ``... x m x n x q``.
        residual: Residual covariance of the basis, or None where it is zero.
    """

    mean: Tensor
    root: Tensor
    downdate: Tensor
    residual: Residual | None

    def select(self, outputs: Sequence[int]) -> Joint:
        """Select some of the outputs."""
        if list(outputs) == list(range(self.mean.shape[-2])):
            return self
        chosen = torch.tensor(list(outputs), device=self.mean.device)
        return self._map(lambda tensor, after: tensor.index_select(-1 - after, chosen))

    def distribution(
        self, offset: Tensor, scale: Tensor, noise: Tensor | None, dtype: torch.dtype
    ) -> MultivariateNormal:
        """Return the normal ``offset + scale · joint``, with noise on the joint's diagonal.

        Args:
            offset: ``... x m x 1``.
            scale: Shaped as offset.
            noise: Variances, broadcastable to ``... x m x n``, or None.
            dtype: Type of the normal's tensors.
        """
        joint, several = self, self.mean.shape[-2] > 1
        if not several:
            joint = self._map(lambda tensor, after: tensor.squeeze(-1 - after))
            offset, scale = offset.squeeze(-2), scale.squeeze(-2)
            noise = None if noise is None else noise.squeeze(-2)
        mean = (offset + scale * joint.mean).to(dtype)
        shape = mean.shape
        if shape[-1] > DENSE_LIMIT:
            covariance = _lazy_covariance(joint, scale, noise, shape, dtype)
        else:
            dense = joint.covariance()
            if noise is not None:
                dense = dense + torch.diag_embed(noise.expand(*noise.shape[:-1], shape[-1]))
            scaled = (dense * scale.square().unsqueeze(-1)).to(dtype)
            covariance = to_linear_operator(scaled.expand(*shape, shape[-1]))
        normal = MultivariateNormal(mean, covariance)
        return IndependentOutputs.of(normal) if several else normal

    def _map(self, rule: Callable[[Tensor, int], Tensor]) -> Joint:
        """Apply a rule to each tensor; it takes the tensor and its number of dimensions after m."""
        mean, root, downdate = rule(self.mean, 1), rule(self.root, 2), rule(self.downdate, 2)
        if (rest := self.residual) is None:
            return Joint(mean, root, downdate, None)
        residual = Residual(lambda: rule(rest.covariance(), 2), lambda: rule(rest.variance(), 1))
        return Joint(mean, root, downdate, residual)

    def covariance(self) -> Tensor:
        """Compute the dense covariance, ``... x m x n x n``."""
        covariance = row_product(self.root, self.root.mT)
        if self.downdate.shape[-1] > 0:
            covariance = covariance - row_product(self.downdate, self.downdate.mT)
        return covariance if self.residual is None else covariance + self.residual.covariance()


@dataclass(frozen=True)
class Residual:
    """Covariance outside the factors of a :class:`Joint`, evaluated when it is needed.

    Attributes:
        covariance: Evaluates ``... x m x n x n``.
        variance: Evaluates its diagonal, ``... x m x n``, at less cost.
    """

    covariance: Callable[[], Tensor]
    variance: Callable[[], Tensor]


def _lazy_covariance(
    joint: Joint, scale: Tensor, noise: Tensor | None, shape: torch.Size, dtype: torch.dtype
) -> LinearOperator:
    """Return ``scale² · (covariance + noise)``, ``shape x n``, without n x n numbers."""
    factor, square = scale.unsqueeze(-1), scale.square()
    rest = residual = joint.residual
    lazy: LinearOperator | None = None
    is_rootless = rest is not None and joint.root.shape[-1] == 0
    if rest is not None and is_rootless:  # covariance and variance are evaluated as a whole
        explained = joint.downdate.square().sum(-1)
        residual = Residual(joint.covariance, lambda: rest.variance() - explained)
    if residual is not None:
        like = torch.zeros(shape, dtype=dtype, device=joint.mean.device)
        lazy = LazyCovariance(
            like,
            lambda: residual.covariance() * square.unsqueeze(-1),
            lambda: residual.variance() * square,
        )
    if lazy is None or not is_rootless:
        root: LinearOperator = DowndatedRootOperator(
            (joint.root * factor).to(dtype), (joint.downdate * factor).to(dtype)
        ).expand(*shape, shape[-1])
        lazy = root if lazy is None else root + lazy
    if noise is None:
        return lazy
    return lazy + DiagLinearOperator((noise * square).expand(shape).to(dtype))


class IndependentOutputs(MultitaskMultivariateNormal):
    """Joint distribution of independent outputs, with one block of the covariance an output.

    BoTorch's own models have this layout, and its cached roots (qLogNEI, qLogNEHVI) rely on it.
    gpytorch's ``log_prob`` takes the values in another order than the covariance, ours does not.
    """

    @classmethod
    def of(cls, outputs: MultivariateNormal) -> Self:
        """Join a batch ``... x m`` of normal distributions over n points, one an output."""
        blocks = BlockDiagLinearOperator(outputs.lazy_covariance_matrix)
        return cls(outputs.mean.mT, blocks, interleaved=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """Compute the log density of ``... x n x m`` values."""
        ordered = value if self._interleaved else value.mT
        return MultivariateNormal.log_prob(self, ordered.reshape(*value.shape[:-2], -1))


def leave_one_out(
    outcomes: Tensor, mean: Tensor, variance: Tensor, noise: Tensor, least_share: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Compute mean and variance at each observation given all other observations.

    With posterior variance v, noise variance s and ``share = (s − v) / s``, the variance without
    the observation y is ``v / share``, and the mean ``y − (y − mean) / share``.

    Args:
        outcomes: Observed outcomes y, ``...``.
        mean: Posterior mean there, given all.
        variance: Posterior variance v there, given all.
        noise: Noise variances s of the observations.
        least_share: Least share; smaller ones are raised to it.
    """
    share = (1.0 - variance / noise).clamp_min(least_share)
    return outcomes - (outcomes - mean) / share, variance / share


# --- baseline points that are evaluated once, as BoTorch caches the root of ``X_baseline`` -------


@dataclass(frozen=True)
class CachedBaseline:
    """Evaluated points of a process, some before all other points and the rest after them.

    Attributes:
        X: The points as given by the user, ``... x k x d``.
        leading: Number of points that come first.
        process: The process that was evaluated.
        points: The evaluated inputs.
        mean: ``... x m x k``.
        covariance: ``... x m x k x k``.
    """

    X: Tensor
    leading: int
    process: PosteriorProcess
    points: Points
    mean: Tensor
    covariance: Tensor

    @classmethod
    @torch.no_grad()
    def of(
        cls, X: Tensor, leading: int, process: PosteriorProcess, inputs: Tensor
    ) -> CachedBaseline:
        """Evaluate points X, which the process takes as ``inputs``. Cost O(k r² + k² r)."""
        points = process.at(inputs)
        covariance = process.cross_covariance(points, points)
        return cls(X.detach(), leading, process, points, process.mean_at(points), covariance)

    def surround(self, X: Tensor) -> bool:
        """Return whether ``... x n x d`` points begin and end with these, with others between."""
        if X.shape[-2] <= self.X.shape[-2] or X.dim() < self.X.dim():
            return False
        trailing = self.X.shape[-2] - self.leading
        before, after = X[..., : self.leading, :], X[..., X.shape[-2] - trailing :, :]
        first, last = self.X.split([self.leading, trailing], dim=-2)
        return bool((before == first).all() and (after == last).all())

    def joint(self, inputs: Tensor) -> Joint:
        """Compute the joint distribution of ``... x n x d`` inputs that begin and end with these.

        Cost O(q r² + k q r) for each batch of q others, and O((k + q)²) to write it down.
        Differentiable in the others only.
        """
        each = self.mean.shape[-1] // max(self.X.shape[-2], 1)  # a model may make several of one X
        leading = self.leading * each
        trailing = self.mean.shape[-1] - leading
        end = inputs.shape[-2] - trailing
        others = self.process.at(inputs[..., leading:end, :])

        def in_order(values: Tensor) -> Tensor:
            """Put columns of these and then of the others in the order of all."""
            if trailing == 0:
                return values
            before, after, between = values.split([leading, trailing, end - leading], -1)
            return torch.cat((before, between, after), -1)

        def covariance() -> Tensor:
            cross = self.process.cross_covariance(others, self.points)
            own = self.process.cross_covariance(others, others)
            whole = stack_rows(stack_columns(self.covariance, cross.mT), stack_columns(cross, own))
            return in_order(in_order(whole).mT).mT

        def variance() -> Tensor:
            known = self.covariance.diagonal(dim1=-2, dim2=-1)
            return in_order(stack_columns(known, self.process.variance_at(others)))

        means = in_order(stack_columns(self.mean, self.process.mean_at(others)))
        empty = means.new_zeros(*means.shape, 0)
        return Joint(means, empty, empty, Residual(covariance, variance))


def arrangements(first: Tensor | None, last: Tensor | None) -> list[tuple[Tensor, int]]:
    """List the points that may be cached, with how many of them come before the others.

    All together, then the points of each side alone, for a caller who changes the other side:
    ``first`` before the others, ``... x k x d``, and ``last`` after them, ``... x k' x d``.
    """
    sides = [] if first is None else [(first, first.shape[-2])]
    sides += [] if last is None else [(last, 0)]
    if first is None or last is None:
        return sides
    return [(torch.cat((first, last), -2), first.shape[-2]), *sides]
