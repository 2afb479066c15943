"""Bases that grow, and the optimal posterior on them in closed form."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import islice

import torch
from botorch.exceptions.errors import ModelFittingError
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.bases.inducing import InducingFunctions, equal_rows
from bo_stream.collective import ALONE, Collective
from bo_stream.errors import check_whole
from bo_stream.likelihoods.sites import ExpectedLogProb, local_sites
from bo_stream.linalg import cholesky_with_nugget, identity, safe_cholesky, solve_lower
from bo_stream.models.decoupled.posterior import (
    NUGGET,
    DecoupledPosterior,
    Expanded,
    HybridCovariance,
    SpectralCovariance,
    bound_terms,
)
from bo_stream.models.inference import Hyperparameters, Prior
from bo_stream.models.stochastic.budget import constrained_parameters, linear_in, maximise
from bo_stream.models.stochastic.replay import Replay
from bo_stream.models.stochastic.training import NUMERICAL_ERRORS, Bar, Training, agreed

_RIDGE = 1e-6
"""Noise of the values that are combined, in parts of their variance, when eigenfunctions are
computed: where values say almost the same, their differences are left out of the combinations.
"""


@torch.no_grad()
def with_eigenfunctions(
    now: Expanded, X: Tensor, span: int, most: int, collective: Collective = ALONE
) -> DecoupledPosterior:
    """Fit a posterior's covariance functions to the kernel as it is now; the mean stays.

    They are at most M_β combinations of the first S = ``span`` functions of α, for inputs that are
    distributed as X, ``... x n x d``, of all processes. What the data have said of the functions
    before says the same of those that are in their span, and nothing yet of the others. Cost
    O(n S (d + S) + S³).
    """
    before, kernel, m = now.posterior, now.kernel, now.outputs
    beta = before.alpha.rows(slice(0, span))
    root = cholesky_with_nugget(beta.with_functions(kernel, beta, m), _RIDGE, is_new=True)
    features = solve_lower(root, beta.with_values(kernel, X, m))
    gram = collective.sum(features @ features.mT)
    covariance = _leading(root, gram, most)
    basis = covariance.basis(kernel, beta, m)
    coefficients = now.coefficients.clone()
    if isinstance(before.covariance, SpectralCovariance) and len(before.beta) > 0:
        # values that each feature is made of
        own = solve_lower(now.basis.factor, before.covariance.combination.mT).mT
        coefficients[..., : own.shape[-2]] += (own @ now.remaining).squeeze(-1)
        overlap = basis.whitened(beta.with_functions(kernel, before.beta, m) @ own).mT
        covariance = replace(covariance, gram=overlap @ before.covariance.gram @ overlap.mT)
    after = replace(before, beta=beta, covariance=covariance).with_expansion(
        coefficients, kernel, m
    )
    return _of_the_mean(replace(now, posterior=after), covariance)


def _of_the_mean(now: Expanded, covariance: SpectralCovariance) -> DecoupledPosterior:
    """Set the weights' mean to what k(x, α) a makes of them, which adds nothing to the mean."""
    explained = now.explained
    moment = explained + covariance.gram @ explained
    return replace(now.posterior, covariance=replace(covariance, moment=moment))


def _leading(root: Tensor, gram: Tensor, most: int) -> SpectralCovariance:
    """Combine S values, given whitened, for most of the variance; nothing is known of these yet."""
    _, directions = torch.linalg.eigh(gram)
    chosen = directions[..., max(gram.shape[-1] - most, 0) :].flip(-1)
    combination = torch.linalg.solve_triangular(root.mT, chosen, upper=True)
    none = chosen.new_zeros(*chosen.shape[:-2], chosen.shape[-1], 1)
    return SpectralCovariance(none, none @ none.mT, combination)


@dataclass(frozen=True)
class Growth:
    """Caps of the bases, and how fast they are reached.

    Attributes:
        mean: Most functions M_α of the mean.
        covariance: Most functions M_β of the covariance.
        step: Most functions N_Δ that a minibatch adds to each.
        span: Most functions of the mean that a spectral parametrization combines.
    """

    mean: int
    covariance: int
    step: int
    span: int

    @classmethod
    def checked(cls, mean: int, covariance: int, step: int, span: int | None) -> Growth:
        """Check numbers that a user gave.

        Raises:
            ValueError: One is negative or no whole number; a mean of fewer functions than the
                covariance; a span of fewer than the covariance or more than the mean.
        """
        mean = check_whole("num_mean", mean, 0)
        covariance = check_whole("num_covar", covariance, 0)
        span = min(4 * covariance, mean) if span is None else check_whole("num_span", span, 0)
        if mean < covariance:
            raise ValueError(
                f"Expected num_mean of at least num_covar = {covariance}, got {mean}: functions of "
                "the mean cost less than those of the covariance."
            )
        if not covariance <= span <= mean:
            raise ValueError(
                f"Expected num_span of num_covar = {covariance} to num_mean = {mean}, got {span}: "
                "the covariance's functions combine some of the mean's."
            )
        return cls(mean, covariance, check_whole("num_added", step), span)

    def finished(self, posterior: DecoupledPosterior) -> bool:
        """Say whether both caps are reached."""
        spectral = isinstance(posterior.covariance, SpectralCovariance)
        full = spectral or len(posterior.beta) >= self.covariance
        return full and len(posterior.alpha) >= self.mean

    def grown(
        self, posterior: DecoupledPosterior, X: Tensor, kernel: Kernel, outputs: int
    ) -> DecoupledPosterior:
        """Add values at inputs ``... x n x d`` as further functions, which change nothing at first.

        A direct parametrization takes the same inputs for both bases [Cheng2017, A.2]; a hybrid one
        takes others for the mean, for β has a mean of its own; a spectral one for the mean alone,
        some of which :func:`with_eigenfunctions` combines. Inputs that are points already are left.
        """
        if self.finished(posterior):
            return posterior
        if isinstance(posterior.covariance, SpectralCovariance):
            most = min(self.mean - len(posterior.alpha), self.step)
            return posterior.with_mean_values(_points(X, posterior, most))
        room = self.covariance - len(posterior.beta)
        points = _points(X, posterior, 2 * self.step)
        first = points[..., : min(room, self.step), :]
        grown = posterior.with_covariance_values(first, kernel, outputs)
        rest = points
        if isinstance(posterior.covariance, HybridCovariance):
            rest = points[..., first.shape[-2] :, :]
        more = rest[..., : min(self.mean - len(posterior.alpha), self.step), :]
        return grown.with_mean_values(more)


def _points(X: Tensor, posterior: DecoupledPosterior, most: int) -> Tensor:
    """Choose the first inputs that are not among the points, each once, ``... x m x k x d``."""
    beta, alpha = posterior.beta.points, posterior.alpha.points
    known = torch.cat((beta, alpha), -2)
    wide = X.unsqueeze(-3).expand(*known.shape[:-2], *X.shape[-2:])[..., : 2 * most, :]
    same = equal_rows(wide, wide).tril(-1).any(-1)
    there = equal_rows(wide, known).any(-1)
    old = (same | there).flatten(0, -2).any(0)
    return wide[..., torch.nonzero(~old).flatten()[:most], :]


# --- the collapsed bound of a decoupled model: its best posterior --------------------------------


@torch.no_grad()
def optimum(
    now: Expanded,
    batches: Iterable[tuple[Tensor, ExpectedLogProb]],
    weight: float,
    rank: int | None = None,
    collective: Collective = ALONE,
) -> DecoupledPosterior:
    """Find the mean and, if β's weights have one, the covariance that maximise the bound.

    For a Gaussian likelihood: normal equations of the mean's functions, and the weights' precision
    ``I + Σ p z zᵀ``. For another the same of its sites, a Newton step. A direct parametrization's
    covariance stays. Cost O(n (M_α + M_β)² + M_α³), and memory O(M_α²).

    Args:
        now: The posterior with its kernel.
        batches: Inputs with the likelihood of their outcomes, all of them.
        weight: Of their sum.
        rank: Functions of a spectral covariance, which become the leading eigenfunctions of what
            all data say of α; None: they stay, as they must where the likelihood is not Gaussian.
        collective: Processes of which each has some of the batches.
    """
    if not isinstance(now.posterior.covariance, SpectralCovariance):
        rank = None
    if rank is not None:  # the mean is k(x, α) a alone
        bare, a = now.posterior, now.posterior.coefficients
        none, square = a.new_zeros(*a.shape[:-1], 0, 1), a.new_zeros(*a.shape[:-1], 0, 0)
        none_known = SpectralCovariance(none, square, square)
        bare = replace(bare, beta=bare.alpha.rows(slice(0, 0)), covariance=none_known)
        now = replace(now, posterior=bare)
    before, kernel, m = now.posterior, now.kernel, now.outputs
    mixed = isinstance(before.covariance, HybridCovariance)
    apart = mixed and not isinstance(before.covariance, SpectralCovariance)
    beta = before.beta if apart else None  # functions of the mean beside α
    covariance = before.alpha.with_functions(kernel, before.alpha, m)
    if beta is not None:
        cross, others = (f.with_functions(kernel, beta, m) for f in (before.alpha, beta))
        covariance = torch.cat(
            (torch.cat((covariance, cross), -1), torch.cat((cross.mT, others), -1)), -2
        )
    root = cholesky_with_nugget(covariance, NUGGET)
    gram, pull, seen = map(collective.sum, _sums(now, batches, beta, root))
    weights = torch.cholesky_solve(weight * pull, safe_cholesky(weight * gram + identity(gram)))
    c = torch.linalg.solve_triangular(root.mT, weights, upper=True).squeeze(-1)
    after = before.with_expansion(c[..., : len(before.alpha)], kernel, m)
    if rank is not None:
        best = _leading(root, weight * gram, rank)
        seen = best.basis(kernel, after.alpha, m).whitened(root)
        best = replace(best, gram=seen.mT @ (weight * gram) @ seen)
        after = replace(after, beta=after.alpha, covariance=best)
        return _of_the_mean(replace(now, posterior=after), best)
    if not isinstance(before.covariance, HybridCovariance):
        return after
    v = replace(now, posterior=after).explained
    if beta is not None:
        v = v + now.basis.factor.mT @ c[..., len(before.alpha) :].unsqueeze(-1)
    gram = weight * seen
    moved = replace(before.covariance, moment=v + gram @ v, gram=gram)
    return replace(after, covariance=moved)


def _sums(
    now: Expanded,
    batches: Iterable[tuple[Tensor, ExpectedLogProb]],
    beta: InducingFunctions | None,
    root: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum over all data, visited once.

    Returns:
        ``Σ p φ φᵀ`` and ``Σ s φ`` of the mean's functions, whitened by their root, and ``Σ p z zᵀ``
        of β's features.
    """
    gram, pull = torch.zeros_like(root), root.new_zeros(*root.shape[:-1], 1)
    seen = torch.zeros_like(now.weights[1])
    for X, expected in batches:
        there = now.at(X)
        values = there.cross
        if beta is not None:
            values = torch.cat((values, beta.with_values(now.kernel, X, now.outputs)), -2)
        features = solve_lower(root, values)
        sites, _ = local_sites(expected, there.mean.detach(), there.variance.detach())
        z, precision = there.features, sites.precision
        shift = sites.shift - precision * now.constant.unsqueeze(-1)
        gram = gram + (features * precision.unsqueeze(-2)) @ features.mT
        pull = pull + features @ shift.unsqueeze(-1)
        seen = seen + z.mT @ (precision.unsqueeze(-1) * z)
    return gram, pull, seen


def between(
    before: DecoupledPosterior, after: DecoupledPosterior, share: float
) -> DecoupledPosterior:
    """Go some share, in [0, 1], of the way between posteriors of the same functions."""
    a = torch.lerp(before.coefficients, after.coefficients, share)
    result = replace(after, coefficients=a)
    first, last = before.covariance, after.covariance
    if not isinstance(first, HybridCovariance) or not isinstance(last, HybridCovariance):
        return result
    v = torch.lerp(first.weights()[0], last.weights()[0], share)
    gram = torch.lerp(first.gram, last.gram, share)
    return replace(result, covariance=replace(last, moment=v + gram @ v, gram=gram))


_TERMS = 4
"""Parts of the bound whose gradients are taken together: more take more memory."""


@dataclass(frozen=True)
class CollapsedBound:
    """The bound at the posterior that is best given hyperparameters, as a function of these.

    Its gradient is that of the bound at this posterior as it is: the bound is stationary in it. So
    nothing is differentiated through a factor of K_α. [Titsias2009, in the bases of Cheng2017]

    Attributes:
        functions: A posterior, whose functions and shapes count.
        replay: The data.
        prior: Of the model.
        rank: Number M_β of a spectral covariance's functions.
    """

    functions: DecoupledPosterior
    replay: Replay
    prior: Prior
    rank: int

    def at(self, hyper: Hyperparameters, learned: list[Tensor]) -> Valued:
        """Evaluate the bound, and its gradient in some tensors. Cost O(n (M_α + M_β)² + M_α³).

        Memory O(M_α²); hyperparameters are in float64.
        """
        replay, collective = self.replay, self.replay.collective
        now, data = (
            Expanded.of(self.functions, hyper),
            replay.outcomes(self.prior, hyper.likelihood),
        )
        best = optimum(now, data, replay.weight, self.rank, collective)
        prior = collective.share * hyper.log_prior()
        value, gradient = prior.detach(), _gradient(prior, learned)
        data = replay.outcomes(self.prior, hyper.likelihood)
        terms = bound_terms(data, replay.weight, collective.share)
        while some := list(islice(terms, _TERMS)):
            now = Expanded.of(best, hyper)
            part = torch.stack([term(now).sum() for term in some]).sum()
            value = value + part.detach()
            gradient = [a + b for a, b in zip(gradient, _gradient(part, learned), strict=True)]
        value, *gradient = map(collective.sum, (value, *gradient))
        return Valued(value / replay.count, [g / replay.count for g in gradient], best)


@dataclass(frozen=True)
class Valued:
    """A value of the collapsed bound, with its gradient and the posterior there.

    Attributes:
        bound: Per observation, with the log prior.
        gradient: In the tensors that were asked for.
        posterior: The best one.
    """

    bound: Tensor
    gradient: list[Tensor]
    posterior: DecoupledPosterior


def maximise_collapsed(
    bound: CollapsedBound,
    hyper: Hyperparameters,
    evaluations: int,
    seconds: float | None,
    began: float,
    progress: bool,
) -> tuple[DecoupledPosterior, Training]:
    """Move hyperparameters that require gradients up the bound by L-BFGS, in place.

    Ends early where no direction leads up, or where a bound beyond the first is not finite or a
    matrix cannot be factorised. At least one value is taken. They end at the best that was seen.

    Args:
        bound: To maximise.
        hyper: Hyperparameters, of which some are learned.
        evaluations: Most values of the bound.
        seconds: Most seconds, or None.
        began: Monotonic time from which these count.
        progress: Whether to show a progress bar.

    Returns:
        The best posterior for them, and what was done; a step is an evaluation.

    Raises:
        ModelFittingError: The first value is not finite.
    """
    coordinates = constrained_parameters(hyper, hyper.moving)
    learned: list[Tensor] = [coordinate.parameter for coordinate in coordinates]
    trace: list[tuple[int, float]] = []
    highest, posterior, state = -math.inf, bound.functions, deepcopy(hyper.state_dict())

    def value() -> Tensor:
        """Return the bound, differentiable once in what is moved."""
        nonlocal highest, posterior, state
        if trace:
            spent = agreed(time.monotonic() - began, bound.replay.collective)
            if len(trace) >= evaluations or (seconds is not None and spent >= seconds):
                raise _Enough
            with torch.no_grad():
                for coordinate in coordinates:
                    coordinate.after()
        try:
            found = bound.at(hyper, learned)
        except NUMERICAL_ERRORS as error:
            if not trace:  # without a first value there is no posterior to keep
                raise
            raise _Enough from error
        whole = float(found.bound) * bound.replay.count
        trace.append((len(trace) + 1, whole))
        if not math.isfinite(whole):
            if len(trace) > 1:
                raise _Enough
            raise ModelFittingError(
                f"The bound is {float(found.bound)} with the hyperparameters that the model has, "
                "which stay. Expected a finite one: set others, or call fit first."
            )
        if whole > highest:
            highest, posterior, state = whole, found.posterior, deepcopy(hyper.state_dict())
        bar.show(len(trace) / evaluations, len(trace), highest)
        return linear_in(coordinates, found.bound, found.gradient)

    with Bar(progress) as bar, suppress(_Enough):
        if coordinates:
            maximise(value, [coordinate.moved for coordinate in coordinates], evaluations)
        else:
            value()
    hyper.load_state_dict(state)
    return posterior, Training(len(trace), time.monotonic() - began, tuple(trace))


class _Enough(Exception):
    """A limit was reached, or the bound can be followed no further."""


def _gradient(value: Tensor, learned: list[Tensor]) -> list[Tensor]:
    """Differentiate a value; zero in what it does not depend on."""
    if not learned or not value.requires_grad:
        return [torch.zeros_like(tensor) for tensor in learned]
    found = torch.autograd.grad(value, learned, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(learned, found, strict=True)]
