"""Steps of a quadruply stochastic model: draw data and functions, estimate the bound, move."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

from bo_stream.bases.spectral import PointBasis
from bo_stream.likelihoods.outcome_model import OutcomeModel
from bo_stream.linalg import safe_cholesky
from bo_stream.models.inference import Hyperparameters, Prior
from bo_stream.models.quadruply_stochastic.memory import (
    Progress,
    QuadruplyStochasticMemory,
    Schedule,
    Slice,
)
from bo_stream.models.stochastic.budget import ConstrainedAdam
from bo_stream.models.stochastic.replay import generator_at

COVARIANCE_RATE = 0.1
"""Rate of the dense columns of C, relative to that of the mean."""

BATCH_SIZE = 500
"""Observations of a step where the user does not say."""

FUNCTIONS = 20_000
"""Functions of a draw where the user does not say."""

DETERMINED = 4096
"""Up to this many functions the determinant of an S that is not diagonal is computed."""

LARGEST = 1e8
"""Precision of a weight that is zero."""

_TINY = 1e-20

Data = tuple[Tensor, Tensor]
"""Transformed inputs and outcomes of a minibatch, ``b x d`` and ``m x b``."""


class Steps:
    """A learner that steps move, for :func:`~bo_stream.models.stochastic.training.train`.

    Attributes:
        progress: Weights and the optimisers' state, moved in place.
        hyper: Hyperparameters, moved in place.
        num_data: Number n of all data.
        num_steps: Taken so far.
        learning_rate: AdaGrad's, of the first step.
        functions: Number m̃ of functions of a draw.
        rows: Number of observations of a minibatch, of all processes together.
    """

    def __init__(
        self,
        memory: QuadruplyStochasticMemory,
        hyper: Hyperparameters,
        prior: Prior,
        schedule: Schedule,
        learns: bool,
        exact: bool,
    ) -> None:
        """Go on from a memory, whose progress is moved in place.

        Args:
            memory: Where to begin.
            hyper: In float64.
            prior: Of the model, by which a data set's rows are transformed.
            schedule: How to step.
            learns: Whether hyperparameters are learned too.
            exact: Whether bounds include ``log |S|`` where S is not diagonal.
        """
        self.hyper, self.num_data = hyper, float(memory.replay.count)
        self.learning_rate, self._schedule = schedule.learning_rate, schedule
        self._layout, self._replay, self.prior = memory.layout, memory.replay, prior
        self._collective = memory.replay.collective
        self._parameters = hyper.moving if learns and schedule.hyper_rate > 0.0 else []
        self._is_gaussian = isinstance(hyper.likelihood, GaussianLikelihood)
        self.functions = drawn_functions(schedule, memory.progress.coefficients.shape[1])
        size = schedule.batch_size
        self.rows = min(BATCH_SIZE, memory.replay.held) if size is None else size
        self._begin(memory.progress)
        self._log_precision = None
        if isinstance(self._basis, PointBasis):
            like = memory.progress.coefficients
            zero = torch.zeros(1, dtype=torch.float64, device=like.device)
            self._log_precision = log_precision(self._basis).detach() if exact else zero

    def _begin(self, progress: Progress) -> None:
        self.progress, self.num_steps = progress, progress.steps
        self._basis = self._layout.basis(self.hyper.covar_module, progress.precisions)
        self._adam = None
        if self._parameters:
            rate = self._schedule.hyper_rate
            self._adam = ConstrainedAdam(self.hyper, self._parameters, rate, progress.moments)

    @property
    def is_valid(self) -> bool:
        """Whether all that steps move is finite, and positive where it has to be. Cost O(p)."""
        progress = self.progress
        moved = progress.coefficients, progress.log_scale, progress.mean_squares
        finite = torch.stack([t.isfinite().all() for t in moved if t is not None])
        return bool(finite.all()) and self.hyper.are_valid

    def learned_state(self) -> tuple[Progress, dict[str, Any]]:
        """Copy all that steps change. Cost O(p)."""
        progress = replace(self.progress.clone(), moments=self.moments)
        return progress, deepcopy(self.hyper.state_dict())

    def restore(self, state: tuple[Progress, dict[str, Any]]) -> None:
        """Go back to a state, which stays as it is."""
        progress, hyper = state
        self.hyper.load_state_dict(hyper)
        self._begin(progress.clone())

    @property
    def moments(self) -> dict[str, Any] | None:
        """A copy of Adam's, or those that it began with where no hyperparameter is learned."""
        return self.progress.moments if self._adam is None else self._adam.moments()

    def take_step(self) -> float:
        """Draw, estimate the bound, and move what was drawn.

        Cost O((ñ + n̄) m̃ (d + k)), whatever the numbers of data and of functions.
        """
        progress, schedule = self.progress, self._schedule
        generator = generator_at(schedule.seed, progress.steps)
        data = self.data(generator)
        decay = 0.5 ** (progress.steps / schedule.half_life)
        thawed = progress.steps >= schedule.freeze_steps
        learns = self._adam is not None and thawed
        drawn = self.draw(data, generator, learns)
        with torch.enable_grad():
            value = self.value(drawn, data, learns).sum()
            if self._adam is not None and thawed:
                self._adam.set_rate(schedule.hyper_rate * decay)
                log_prior = self._collective.share * self.hyper.log_prior()
                self._adam.ascend(value + log_prior, self._collective)
            else:
                (-value).backward()
        squares = [one.squares.detach() for one in drawn]
        value, gradient, squares = self._summed(value, SampledGradient.of(drawn), squares)
        self._move(drawn, gradient, schedule.learning_rate * decay)
        self._measure(drawn, squares, thawed)
        progress.steps = self.num_steps = self.num_steps + 1
        return float(value)

    def _summed(
        self, value: Tensor, gradient: SampledGradient, squares: list[Tensor]
    ) -> tuple[Tensor, SampledGradient, list[Tensor]]:
        """Sum a step's results over the processes, each of which has those of its rows."""
        value, slopes = value.detach(), (gradient.coefficients, gradient.log_scale)
        if self._collective.is_alone:
            return value, gradient, squares
        value, first, second, *squares = self._collective.sums([value, *slopes, *squares])
        return value, replace(gradient, coefficients=first, log_scale=second), squares

    # --- what a step draws --------------------------------------------------------------------

    def data(self, generator: torch.Generator) -> Data:
        """Draw a minibatch: this process's rows of it."""
        schedule = self._schedule
        rows = self._replay.sample(self.rows, generator, self.prior)
        return rows.X.to(schedule.arithmetic), rows.Y.mT.to(schedule.arithmetic)

    def draw(self, data: Data, generator: torch.Generator, learns: bool) -> list[DrawnFunctions]:
        """Draw and evaluate functions twice, independently, or once where no product needs two.

        Differentiable in the hyperparameters if these learn. Cost O((b + s) k (d + columns)) for k
        functions.
        """
        like = self.progress.coefficients
        size, once = like.shape[1], not self._is_gaussian and self._log_precision is None
        twice = self.functions < size and not once
        draws = [draw(self.functions, size, generator) for _ in range(1 + twice)]
        control = self.progress.control if twice and self._is_gaussian else None
        drawn = []
        for on_host, share in draws:
            index = on_host.to(like.device, non_blocking=True)
            with torch.set_grad_enabled(learns):
                functions = self._basis.functions(data[0], index).to(data[0])
                squares = functions.square().sum(-2)
                precision = self._basis.precision_diagonal(index).to(like)
            support = None if control is None else control.functions(index)
            own = self.progress.drawn(index, precision, self.num_data, self.hyper.likelihood)
            evaluated = functions, squares, support, precision
            weight = share.to(like.dtype).to(like.device, non_blocking=True)
            drawn.append(DrawnFunctions(on_host, index, weight, *evaluated, *own))
        return drawn

    # --- estimates of the bound ---------------------------------------------------------------

    def sampled(self, data: Data, generator: torch.Generator) -> tuple[Tensor, SampledGradient]:
        """Draw the bound, ``m``, and its gradient in the weights, both without bias."""
        drawn = self.draw(data, generator, learns=False)
        with torch.enable_grad():
            value = self.value(drawn, data, learns=False)
            (-value.sum()).backward()
        value, gradient, _ = self._summed(value, SampledGradient.of(drawn), [])
        return value, gradient

    def value(self, drawn: list[DrawnFunctions], data: Data, learns: bool) -> Tensor:
        """Estimate the bound, ``m``; for a Gaussian likelihood without bias. [Evans2020, eq. 2].

        Of several processes this one's part, which sum up to it: its rows of the minibatch, and its
        share of all else. Products of sums of independent draws; what is linear in a draw is
        averaged over both. [Evans2020, theorems 1 and 2]
        """
        targets, likelihood = data[1], self.hyper.likelihood
        with torch.set_grad_enabled(learns):
            outputs = self.progress.coefficients.shape[:1]
            mean = self.hyper.constant(outputs).unsqueeze(-1).to(targets)
            noise = likelihood.noise.reshape(-1).to(mean) if self._is_gaussian else None
        if noise is None:
            return self._of_likelihood(drawn, targets, mean)
        one, other = drawn[0], drawn[-1]
        first = one.sums(one.functions)
        second = first if other is one else other.sums(other.functions)
        residual = (targets - mean).unsqueeze(-1)
        misfit = ((first[..., :1] - residual) * (second[..., :1] - residual)).sum((-2, -1))
        dense = (first[..., 1:] * second[..., 1:]).sum((-2, -1))
        powers = [one.squares * one.weights.scale.square() * one.share for one in drawn]
        diagonal = _average([power.sum(-1) for power in powers])
        squares = self.num_data / self.rows * (misfit + dense + diagonal)
        apart, control = self._divergence(drawn), self.progress.control
        share = self._collective.share
        if control is not None and one.support is not None and other.support is not None:
            sums = one.sums(one.support), other.sums(other.support)
            squares = squares + share * control.misfit(*sums, mean.detach())
            apart = apart + 0.5 * control.penalty(*sums)
        constant = share * self.num_data * (2.0 * math.pi * noise).log()
        return -0.5 * (squares / noise + constant) - share * apart

    def _of_likelihood(self, drawn: list[DrawnFunctions], targets: Tensor, mean: Tensor) -> Tensor:
        """Estimate a bound below that for a log-concave likelihood, ``m``. [Evans2020, theorem 3].

        Corrected: ``f = φ μ + φ C ε`` with ``ε ~ N(0, I)`` is estimated by a draw, linearly and
        without bias, inside a concave function; the paper, from its eq. 5 on, scales ε by a
        variance for a standard deviation. Given the draw f is normal, and its expectation is had in
        closed form or by quadrature. Equal to the bound where all functions are drawn.
        """
        model = OutcomeModel(self.hyper.likelihood, len(self.progress.coefficients))
        expected = model.expected_log_prob(targets.double())
        one = drawn[0]
        sums = one.sums(one.functions)
        scaled = (one.weights.scale * one.share).square().unsqueeze(-1)
        variance = sums[..., 1:].square().sum(-1) + (one.functions.square() @ scaled).squeeze(-1)
        data = expected((sums[..., 0] + mean).double(), variance.double()).to(sums)
        apart = self._collective.share * self._divergence(drawn)
        return self.num_data / self.rows * data.sum(-1) - apart

    def _divergence(self, drawn: list[DrawnFunctions]) -> Tensor:
        """Estimate ``KL(q ‖ p)`` of all weights, ``m``. [Evans2020, theorems 1, 2, proposition 2].

        That is ``½ (μᵀ S μ + Σ c_rᵀ S c_r − p)`` of the dense columns c_r, and of the others what
        is linear in a draw.
        """
        determinant = self._log_precision
        if isinstance(self._basis, PointBasis):
            one, other = drawn[0], drawn[-1]
            S = self._basis.precision(one.index, other.index).to(one.share)
            first, second = (s.weights.columns * s.share.unsqueeze(-1) for s in (one, other))
            squares = (first * (S @ second)).sum((-2, -1))
        else:
            sums = [s.precision * s.weights.columns.square().sum(-1) * s.share for s in drawn]
            squares = _average([terms.sum(-1) for terms in sums])
        parts = []  # Σ s c² − 2 log c_rr, and − log s where S is diagonal
        for one in drawn:
            weights, precision = one.weights, one.precision
            terms = precision * weights.scale.square() - 2.0 * weights.log_diagonal
            terms = terms if determinant is not None else terms - precision.log()
            parts.append((terms * one.share).sum(-1))
        linear = _average(parts)
        total = 0.5 * (squares + linear - self.progress.coefficients.shape[1])
        return total if determinant is None else total - 0.5 * determinant

    # --- moves --------------------------------------------------------------------------------

    @torch.no_grad()
    def _move(self, drawn: list[DrawnFunctions], gradient: SampledGradient, rate: float) -> None:
        """Move what was drawn by AdaGrad, and the control variate after it."""
        progress, index = self.progress, gradient.index
        rates = torch.full_like(gradient.coefficients[:1, :1], COVARIANCE_RATE * rate)
        rates[..., 0] = rate
        slopes = progress.coefficient_slopes
        moves = _ascend(progress.coefficients, slopes, index, gradient.coefficients, rates)
        learned = slice(int((gradient.on_host < progress.log_scale.shape[-1]).sum()))
        scaled = index[learned]
        before, scales = progress.log_scale[:, scaled], gradient.log_scale[:, learned]
        _ascend(progress.log_scale, progress.scale_slopes, scaled, scales, rate)
        supports = [one.support for one in drawn if one.support is not None]
        if progress.control is not None and supports:
            change = progress.log_scale[:, scaled].exp() - before.exp()
            places = torch.arange(-1, moves.shape[-1] - 1, device=index.device)
            moves[:, learned] += change.unsqueeze(-1) * (scaled.unsqueeze(-1) == places)
            progress.control.follow(torch.cat(supports, -1), gradient.parts(moves))

    @torch.no_grad()
    def _measure(self, drawn: list[DrawnFunctions], squares: list[Tensor], thawed: bool) -> None:
        """Average squares of the drawn functions over about one pass through the data.

        Of functions that have precisions of their own, once thawed, these go to the bound's
        maximum; where the column is dense to ``1 / E w²``, which raises the bound and has the same
        fixed points. [Tipping2001]
        """
        progress = self.progress
        measured, precisions = progress.mean_squares, progress.precisions
        if measured is None:
            return
        visits = 1.0 + progress.steps * len(drawn[0].index) / measured.shape[-1]
        share = max(1.0 / visits, min(1.0, self.rows / self.num_data))
        for one, total in zip(drawn, squares, strict=True):
            index = one.index
            measured[:, index] += share * (total / self.rows - measured[:, index])
        if precisions is None or not thawed:
            return
        noise = self.hyper.likelihood.noise.reshape(-1, 1).to(precisions)
        for one in drawn:
            index = one.index
            moment = progress.dense_columns(index).square().sum(-1)
            single = best_precisions(moment, self.num_data * measured[:, index] / noise)
            dense = moment.clamp_min(1.0 / LARGEST).reciprocal()
            is_dense = index < progress.coefficients.shape[-1] - 1
            precisions[:, index] = torch.where(is_dense, dense, single)


def _ascend(
    values: Tensor, slopes: Tensor, index: Tensor, gradient: Tensor, rate: Tensor | float
) -> Tensor:
    """Move some numbers up a gradient by AdaGrad, in place; return by how much.

    Each, ``m x p ...``, moves along its gradient over the root of its sum of squared slopes so far.
    Numbers whose gradient is not among those given, ``m x k ...`` at k distinct places, stay, and
    so do their sums: a step costs what it moves. [Duchi2011; Evans2020, section 2.4]
    """
    squares = slopes.index_select(1, index) + gradient.square()
    slopes.index_copy_(1, index, squares)
    moves = rate * gradient / (squares + _TINY).sqrt()
    values.index_add_(1, index, moves)
    return moves


def drawn_functions(schedule: Schedule, size: int) -> int:
    """Return how many functions are drawn of so many."""
    return min(FUNCTIONS if schedule.functions is None else schedule.functions, size)


def draw(count: int, of: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw one at random from each of ``count`` equal strata of a line of ``of``. Cost O(count).

    Strata may cut one in two: it is then drawn up to twice, and its weight says so. All for ``count
    = of``. Returns distinct indices in order, and how many each stands for, in float64, both on the
    CPU, as the generator is: ``Σ weight · a[index]`` is on average ``Σ a``.
    """
    if count == of:
        return torch.arange(of), torch.ones(of, dtype=torch.float64)
    places = torch.rand(count, dtype=torch.float64, generator=generator)
    places = (places + torch.arange(count)) * (of / count)
    drawn = places.long().clamp_max(of - 1)
    index, counts = torch.unique_consecutive(drawn, return_counts=True)
    weight = counts.to(torch.float64) * (of / count)
    return index, weight


@dataclass(frozen=True)
class DrawnFunctions:
    """A draw of functions at a minibatch, and their weights.

    Attributes:
        on_host: Which functions, ``k``, in order, on the CPU.
        index: The same, on the device.
        share: How many each stands for, ``k``.
        functions: At the data, ``m x b x k``.
        squares: Sums of their squares over the data, ``m x k``.
        support: At support points, ``m x s x k``, or None without any.
        precision: Diagonal of S, ``m x k``, or with 1 for m.
        coefficients: ``m x k x (1 + columns)``, with a gradient after a backward pass.
        log_scale: What is learned of the diagonal of C, ``m x k``, likewise.
        weights: Made of these.
    """

    on_host: Tensor
    index: Tensor
    share: Tensor
    functions: Tensor
    squares: Tensor
    support: Tensor | None
    precision: Tensor
    coefficients: Tensor
    log_scale: Tensor
    weights: Slice

    def sums(self, functions: Tensor) -> Tensor:
        """Estimate ``φ μ`` and ``φ c_r`` of the dense columns, ``m x b x (1 + columns)``."""
        return functions @ (self.weights.columns * self.share.unsqueeze(-1))


def _average(estimates: list[Tensor]) -> Tensor:
    """Average the estimates of one draw or two."""
    return estimates[0] if len(estimates) == 1 else 0.5 * (estimates[0] + estimates[1])


@dataclass(frozen=True)
class SampledGradient:
    """Gradient of the bound in the weights of the functions drawn; of others it is 0.

    Attributes:
        on_host: Which, distinct and in order, on the CPU.
        index: The same, on the device.
        coefficients: ``m x k x (1 + columns)``.
        log_scale: ``m x k``.
        places: Of each function of two draws, one after the other, among them; None of one draw.
        times: That each was drawn; None of one draw.
    """

    on_host: Tensor
    index: Tensor
    coefficients: Tensor
    log_scale: Tensor
    places: Tensor | None
    times: Tensor | None

    @classmethod
    def of(cls, drawn: list[DrawnFunctions]) -> SampledGradient:
        """Collect the gradients of a loss, the bound's negative, in what was drawn."""
        on_host, index, places, times = drawn[0].on_host, drawn[0].index, None, None
        if len(drawn) > 1:
            together = torch.cat([one.on_host for one in drawn])
            on_host, *others = torch.unique(together, return_inverse=True, return_counts=True)
            index, places, times = (
                each.to(index.device, non_blocking=True) for each in (on_host, *others)
            )
        leaves = [one.coefficients for one in drawn], [one.log_scale for one in drawn]
        coefficients, log_scale = (_descents(part, places, len(index)) for part in leaves)
        columns = torch.arange(coefficients.shape[-1] - 1, device=index.device)
        coefficients[..., 1:] *= index.unsqueeze(-1) > columns  # above: no parameters
        return cls(on_host, index, coefficients, log_scale, places, times)

    def parts(self, whole: Tensor) -> Tensor:
        """Share what is had once for each among the draws: its parts sum up to it."""
        if self.places is None or self.times is None:
            return whole
        return (whole / self.times[:, None])[:, self.places]


def _descents(leaves: list[Tensor], places: Tensor | None, size: int) -> Tensor:
    """Sum the negative gradients that the draws have for each function, ``m x k ...``."""
    slopes = [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]
    if places is None:
        return -slopes[0]
    whole = torch.cat(slopes, 1)
    return -whole.new_zeros(len(whole), size, *whole.shape[2:]).index_add_(1, places, whole)


def best_precisions(moment: Tensor, sharpness: Tensor) -> Tensor:
    """Compute the best prior precisions of weights with Proposition 1's variances, ``m x k``.

    The bound's maximum in s with ``c² = 1 / (h + s)``: ``s² + h s = h / e``, of e, the squared mean
    with the variance that the dense columns bring, and h, what the data say, ``|φ|² / σ²``.
    """
    tiny = LARGEST**-2
    root = (sharpness.square() + 4.0 * sharpness / moment.clamp_min(tiny)).sqrt()
    return (2.0 * sharpness / moment.clamp_min(tiny) / (sharpness + root)).clamp_max(LARGEST)


def log_precision(basis: PointBasis) -> Tensor:
    """Compute ``log |S|``, ``m``. Cost O(p³).

    Beyond ``DETERMINED`` functions 0: bounds are then too small by half of it, which is a constant.
    """
    index = torch.arange(basis.size)
    if basis.size > DETERMINED:
        return basis.precision_diagonal(index[:1]).new_zeros(1)
    factor = safe_cholesky(basis.precision(index, index))
    return 2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
