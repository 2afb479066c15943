"""The collapsed bound of a decoupled model: its best posterior, and L-BFGS on hyperparameters."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from botorch.exceptions.errors import ModelFittingError
from torch import Tensor

from bo_stream.bases.functions import InducingFunctions
from bo_stream.likelihoods.sites import ExpectedLogProb, local_sites
from bo_stream.linalg import cholesky_with_nugget, safe_cholesky, solve_lower
from bo_stream.models.decoupled.bound import Expanded, Marginals, bound_terms
from bo_stream.models.decoupled.growth import with_best_functions, without_functions
from bo_stream.models.decoupled.posterior import (
    NUGGET,
    DecoupledPosterior,
    HybridCovariance,
    SpectralCovariance,
)
from bo_stream.models.prior import Hyperparameters
from bo_stream.models.stochastic.optimisers import constrained_parameters, maximise
from bo_stream.models.stochastic.training import NUMERICAL_ERRORS, Bar, Training


@torch.no_grad()
def optimum(
    now: Expanded,
    batches: Iterable[tuple[Tensor, ExpectedLogProb]],
    weight: float,
    rank: int | None = None,
) -> DecoupledPosterior:
    """Find the mean and, if β's weights have one, the covariance that maximise the bound.

    For a Gaussian likelihood: normal equations of the mean's functions, and the weights' precision
    ``I + Σ p z zᵀ``. For another the same of its sites, a Newton step. A direct parametrization's
    covariance stays. Cost O(n (M_α + M_β)² + M_α³), and memory O(M_α²).

    Args:
        now: The posterior with its kernel.
        batches: Inputs with the likelihood of their outcomes, all of them.
        weight: Of their sum.
        rank: Functions of a spectral covariance, which are computed anew in the span of all of α;
            None: they stay, as they must where the likelihood is not Gaussian.
    """
    seeks = rank is not None and isinstance(now.posterior.covariance, SpectralCovariance)
    if seeks:
        now = replace(now, posterior=without_functions(now.posterior))
    before, kernel, m = now.posterior, now.kernel, now.outputs
    whole = _Functions.of(now)
    root = cholesky_with_nugget(whole.covariance(now), NUGGET)
    total = _Sums(root.new_zeros(root.shape), root.new_zeros(*root.shape[:-1], 1), None)
    for X, expected in batches:
        there = now.at(X)
        features = solve_lower(root, whole.at(now, X, there))
        total = total.plus(now, there, expected, features)
    precision = _one_plus(weight * total.gram)
    weights = torch.cholesky_solve(weight * total.pull, safe_cholesky(precision))
    c = torch.linalg.solve_triangular(root.mT, weights, upper=True).squeeze(-1)
    after = before.with_expansion(c[..., : len(before.alpha)], kernel, m)
    if seeks and rank is not None:
        gram = weight * total.gram
        return with_best_functions(replace(now, posterior=after), root, gram, rank)
    if not isinstance(before.covariance, HybridCovariance) or total.covariance is None:
        return after
    v = replace(now, posterior=after).explained
    if whole.beta is not None:
        v = v + now.basis.factor.mT @ c[..., len(before.alpha) :].unsqueeze(-1)
    gram = weight * total.covariance
    covariance = replace(before.covariance, moment=v + gram @ v, gram=gram)
    return replace(after, covariance=covariance)


@dataclass(frozen=True)
class _Functions:
    """The functions of the mean: α, and β unless it combines some of α or has no mean."""

    alpha: InducingFunctions
    beta: InducingFunctions | None

    @classmethod
    def of(cls, now: Expanded) -> _Functions:
        p = now.posterior
        apart = isinstance(p.covariance, HybridCovariance) and not isinstance(
            p.covariance, SpectralCovariance
        )
        return cls(p.alpha, p.beta if apart else None)

    def covariance(self, now: Expanded) -> Tensor:
        """Compute the functions' covariance, ``... x m x M x M``."""
        alpha, kernel, m = self.alpha, now.kernel, now.outputs
        own = alpha.with_functions(kernel, alpha, m)
        if self.beta is None:
            return own
        cross = alpha.with_functions(kernel, self.beta, m)
        upper = torch.cat((own, cross), -1)
        return torch.cat(
            (upper, torch.cat((cross.mT, self.beta.with_functions(kernel, self.beta, m)), -1)), -2
        )

    def at(self, now: Expanded, X: Tensor, there: Marginals) -> Tensor:
        """Evaluate at inputs where α's part is known already, ``... x m x M x n``."""
        if self.beta is None:
            return there.cross
        return torch.cat((there.cross, self.beta.with_values(now.kernel, X, now.outputs)), -2)


@dataclass(frozen=True)
class _Sums:
    """Sums over the data visited so far.

    Attributes:
        gram: ``Σ p φ φᵀ`` of the mean's whitened functions, ``... x m x M x M``.
        pull: ``Σ s φ``, ``... x m x M x 1``.
        covariance: ``Σ p z zᵀ`` of β's features; None before any data.
    """

    gram: Tensor
    pull: Tensor
    covariance: Tensor | None

    def plus(
        self, now: Expanded, there: Marginals, expected: ExpectedLogProb, features: Tensor
    ) -> _Sums:
        """Add a batch, whose marginals and whitened functions are given."""
        sites, _ = local_sites(expected, there.mean.detach(), there.variance.detach())
        z, precision = there.features, sites.precision
        shift = sites.shift - precision * now.constant.unsqueeze(-1)
        covariance = z.mT @ (precision.unsqueeze(-1) * z)
        return _Sums(
            self.gram + (features * precision.unsqueeze(-2)) @ features.mT,
            self.pull + features @ shift.unsqueeze(-1),
            covariance if self.covariance is None else self.covariance + covariance,
        )


def _one_plus(gram: Tensor) -> Tensor:
    return gram + torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)


def between(
    before: DecoupledPosterior, after: DecoupledPosterior, share: float
) -> DecoupledPosterior:
    """Go some of the way from one posterior of the same functions to another.

    Args:
        before: The one.
        after: The other.
        share: Of the way, in [0, 1].
    """
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

Batches = Callable[[Hyperparameters], Iterator[tuple[Tensor, ExpectedLogProb]]]
"""All data, with the likelihood that hyperparameters give them."""


@dataclass(frozen=True)
class CollapsedBound:
    """The bound at the posterior that is best given hyperparameters, as a function of these.

    Its gradient is that of the bound at this posterior as it is: the bound is stationary in it. So
    nothing is differentiated through a factor of K_α. [Titsias2009, in the bases of Cheng2017]

    Attributes:
        functions: A posterior, whose functions and shapes count.
        batches: The data.
        weight: Of their sum.
        count: Observations that they stand for.
        rank: Number M_β of a spectral covariance's functions.
    """

    functions: DecoupledPosterior
    batches: Batches
    weight: float
    count: int
    rank: int

    def at(self, hyper: Hyperparameters, learned: list[Tensor]) -> Valued:
        """Evaluate the bound. Cost O(n (M_α + M_β)² + M_α³), and memory O(M_α²).

        Args:
            hyper: In float64.
            learned: Tensors of theirs to find the gradient in.
        """
        with torch.no_grad():
            now = Expanded.of(self.functions, hyper)
            best = optimum(now, self.batches(hyper), self.weight, self.rank)
        prior = hyper.log_prior()
        value, gradient = prior.detach(), _gradient(prior, learned)
        terms = bound_terms(self.batches(hyper), self.weight)
        while some := list(islice(terms, _TERMS)):
            now = Expanded.of(best, hyper)
            part = torch.stack([term(now).sum() for term in some]).sum()
            value = value + part.detach()
            gradient = [a + b for a, b in zip(gradient, _gradient(part, learned), strict=True)]
        return Valued(value / self.count, [g / self.count for g in gradient], best)


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


@dataclass(frozen=True)
class Collapsed:
    """The best that a maximisation has seen.

    Attributes:
        hyper: Hyperparameters.
        posterior: The best one for them.
        training: What was done; a step is an evaluation.
    """

    hyper: Hyperparameters
    posterior: DecoupledPosterior
    training: Training


def maximise_collapsed(
    bound: CollapsedBound,
    hyper: Hyperparameters,
    evaluations: int,
    seconds: float | None,
    *,
    progress: bool,
) -> Collapsed:
    """Move hyperparameters that require gradients up the bound by L-BFGS.

    Ends early where no direction leads up, or where a bound beyond the first is not finite or a
    matrix cannot be factorised.

    Args:
        bound: To maximise.
        hyper: In float64; moved in place.
        evaluations: Most values of the bound, each of which takes all data; at least one is taken.
        seconds: Begin no evaluation after so many.
        progress: Whether to draw a bar on a terminal.

    Raises:
        ModelFittingError: The first value is not finite.
    """
    search = _Search(bound, hyper, evaluations, seconds)
    with Bar(progress) as bar:
        try:
            search.first(bar)
            if search.moved:
                maximise(lambda: search.value(bar), search.moved, evaluations)
        except _Enough:
            pass
    return search.result()


class _Enough(Exception):
    """A limit was reached, or the bound can be followed no further."""


@dataclass(frozen=True)
class _Best:
    bound: float
    state: dict[str, Any]
    posterior: DecoupledPosterior


class _Search:
    """A maximisation under way."""

    def __init__(
        self,
        bound: CollapsedBound,
        hyper: Hyperparameters,
        evaluations: int,
        seconds: float | None,
    ) -> None:
        self._bound, self._hyper = bound, hyper
        self._evaluations, self._seconds = evaluations, math.inf if seconds is None else seconds
        self._coordinates = constrained_parameters(hyper, hyper.moving)
        self._began, self._trace = time.monotonic(), list[tuple[int, float]]()
        self._known: Valued | None = None
        self._best = _Best(-math.inf, {}, bound.functions)

    @property
    def moved(self) -> list[Tensor]:
        return [coordinate.moved for coordinate in self._coordinates]

    def first(self, bar: Bar) -> None:
        """Evaluate where it begins, without which there is no posterior to keep."""
        found = self._evaluated(bar)
        if not bool(found.bound.isfinite()):
            raise ModelFittingError(
                f"The bound is {float(found.bound)} with the hyperparameters that the model has, "
                "which stay. Expected a finite one: set others, or call fit first."
            )
        self._known = found

    def value(self, bar: Bar) -> Tensor:
        """Return the bound, differentiable once in what is moved."""
        found, self._known = self._known, None
        if found is None:
            found = self._next(bar)
        total = found.bound.clone()
        for coordinate, gradient in zip(self._coordinates, found.gradient, strict=True):
            step = coordinate.moved - coordinate.moved.detach()
            total = total + (coordinate.slope(gradient) * step).sum()
        return total

    def _next(self, bar: Bar) -> Valued:
        spent = time.monotonic() - self._began
        if len(self._trace) >= self._evaluations or spent >= self._seconds:
            raise _Enough
        with torch.no_grad():
            for coordinate in self._coordinates:
                coordinate.after()
        try:
            found = self._evaluated(bar)
        except NUMERICAL_ERRORS as error:
            raise _Enough from error
        if not bool(found.bound.isfinite()):
            raise _Enough
        return found

    def _evaluated(self, bar: Bar) -> Valued:
        learned: list[Tensor] = [coordinate.parameter for coordinate in self._coordinates]
        found = self._bound.at(self._hyper, learned)
        bound = float(found.bound) * self._bound.count
        self._trace.append((len(self._trace) + 1, bound))
        if bound > self._best.bound:
            self._best = _Best(bound, deepcopy(self._hyper.state_dict()), found.posterior)
        done = len(self._trace)
        bar.show(done / self._evaluations, done, self._best.bound)
        return found

    def result(self) -> Collapsed:
        """Return the best that was seen."""
        self._hyper.load_state_dict(self._best.state)
        spent = time.monotonic() - self._began
        training = Training(len(self._trace), spent, tuple(self._trace))
        return Collapsed(self._hyper, self._best.posterior, training)


def _gradient(value: Tensor, learned: list[Tensor]) -> list[Tensor]:
    """Differentiate a value; zero in what it does not depend on."""
    if not learned or not value.requires_grad:
        return [torch.zeros_like(tensor) for tensor in learned]
    found = torch.autograd.grad(value, learned, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(learned, found, strict=True)]
