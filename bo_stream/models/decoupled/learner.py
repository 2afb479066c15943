"""Steps of a decoupled model: [Cheng2017, algorithm 1]."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from gpytorch import Module
from torch import Tensor
from torch.nn import Parameter

from bo_stream.bases.inducing import InducingFunctions
from bo_stream.likelihoods.outcome_model import OutcomeModel
from bo_stream.likelihoods.sites import ExpectedLogProb, Sites, local_sites
from bo_stream.linalg import safe_cholesky
from bo_stream.models.decoupled.collapse import Growth, with_eigenfunctions
from bo_stream.models.decoupled.posterior import (
    DecoupledMemory,
    DecoupledPosterior,
    DirectCovariance,
    Draw,
    Expanded,
    HybridCovariance,
    Moments,
    SpectralCovariance,
    drawn_columns,
)
from bo_stream.models.inference import Prior
from bo_stream.models.stochastic.budget import ConstrainedAdam
from bo_stream.models.stochastic.replay import generator_at
from bo_stream.tensors import map_tensors, read_at_once, read_expected

_RENEWED = 10
"""Steps after which eigenfunctions are computed again: the kernel has moved."""

INPUTS = 4
"""Inputs that eigenfunctions are computed from, for each value that they combine."""

_APART = 2**31
"""Between the random numbers of a step and those of such inputs."""

_CAPS = 2**33
"""The same, of growing to the caps."""

_SETTLING = 0.25
"""Part of a training, its last one, in which rates fall to zero if it is to settle."""


@dataclass(frozen=True)
class DecoupledSchedule:
    """Sizes and rates of a step.

    Attributes:
        batch_size: Observations of a minibatch; None: 1024, or as many as there are.
        columns: Most columns of K_α that it visits.
        learning_rate: Of Adam, at first.
        natural_rate: Of natural-gradient steps of β's weights, at first.
        mean_rate: Of Newton steps of the mean's coefficients, at first; None: they move by Adam.
        mean_points: Whether α's points move by Adam.
        seed: Of minibatches and columns.
    """

    batch_size: int | None
    columns: int
    learning_rate: float
    natural_rate: float
    mean_rate: float | None
    mean_points: bool
    seed: int

    def size(self, held: int) -> int:
        """Return the size of a minibatch."""
        return min(1024, held) if self.batch_size is None else self.batch_size


class DecoupledLearner:
    """Memory and hyperparameters of a decoupled model, copied, that steps move; a ``Trainable``."""

    def __init__(
        self,
        memory: DecoupledMemory,
        prior: Prior,
        growth: Growth,
        schedule: DecoupledSchedule,
        growing: bool,
    ) -> None:
        """Begin where the memory stands; if growing, minibatches become basis functions."""
        self.hyper, self.prior = prior.copied(), prior
        self.learning_rate, self.num_data = schedule.learning_rate, float(memory.replay.count)
        self._growth, self._schedule, self._growing = growth, schedule, growing
        self._collective, self._pace = memory.replay.collective, 1.0
        named = self.hyper.named_parameters()
        self._names = tuple(name for name, p in named if p.requires_grad)
        self._begin(memory)

    def settle(self, part: float) -> None:
        """Set what all rates are multiplied by where some part in [0, 1) of a training is done.

        1 at first; in its last quarter it falls linearly to zero.
        """
        self._pace = min(1.0, (1.0 - part) / _SETTLING)

    def _begin(self, memory: DecoupledMemory) -> None:
        self._memory, rate, self.num_steps = memory, self.learning_rate, memory.steps
        moments = memory.hyper_moments if memory.hyper_names == self._names else None
        self._hyper_adam = ConstrainedAdam(self.hyper, self.hyper.moving, rate, moments)
        self._set_posterior(memory.posterior, memory.variational_moments)

    def _set_posterior(self, posterior: DecoupledPosterior, moments: Moments | None) -> None:
        """Go on from a posterior, whose parameters have Adam's moments as far as these go."""
        self._memory = replace(self._memory, posterior=posterior)
        schedule, by_adam = self._schedule, self._schedule.mean_rate is None
        moved = VariationalParameters(posterior, by_adam, schedule.mean_points, self._memory.unit)
        parameters = list(moved.parameters())
        if moments is not None:  # of as many functions or fewer: further ones have none yet
            moments = deepcopy(moments)
            for i, parameter in enumerate(parameters):
                state = moments["state"].get(i, {})
                for name in state.keys() - {"step"}:
                    wide = state[name].new_zeros(parameter.shape)
                    wide[tuple(slice(0, size) for size in state[name].shape)] = state[name]
                    state[name] = wide
        self._parameters = moved
        self._variational_adam = ConstrainedAdam(moved, parameters, schedule.learning_rate, moments)

    @property
    def memory(self) -> DecoupledMemory:
        """The memory as it is now."""
        return replace(
            self._memory,
            hyper_names=self._names,
            hyper_moments=self._hyper_adam.moments(),
            variational_moments=self._variational_adam.moments(),
        )

    @property
    def is_valid(self) -> bool:
        """Whether all that steps move is finite, and positive where it has to be."""
        finite = list[Tensor]()
        map_tensors(self._memory.posterior, lambda t: finite.append(t.isfinite().all()) or t)  # type: ignore[func-returns-value]
        return bool(torch.stack(finite).all()) and self.hyper.are_valid

    def learned_state(self) -> tuple[DecoupledMemory, list[Tensor]]:
        """Return the memory, which is a value, and copies of the hyperparameters."""
        return self.memory, [p.detach().clone() for p in self.hyper.parameters()]

    @torch.no_grad()
    def restore(self, state: tuple[DecoupledMemory, list[Tensor]]) -> None:
        """Go back to a state, which stays as it is."""
        memory, values = state
        for parameter, value in zip(self.hyper.parameters(), values, strict=True):
            parameter.copy_(value)
        self._begin(memory)

    @torch.no_grad()
    def grow(self, X: Tensor) -> bool:
        """Let inputs become further basis functions, up to the caps.

        Returns:
            Whether eigenfunctions were computed again: more of the mean's can be combined.
        """
        before = self._memory.posterior
        m = before.coefficients.shape[-2]
        grown = self._growth.grown(before, X, self.hyper.covar_module, m)
        if grown is not before:
            self._set_posterior(grown, self._variational_adam.moments())
        more = len(grown.beta) < min(self._growth.span, len(grown.alpha))
        if more:
            self._renew()
        return more

    def grow_to_the_caps(self) -> None:
        """Let observations become basis functions, as many as there are room for and inputs."""
        growth = self._growth
        if growth.finished(self._memory.posterior):
            return
        generator = generator_at(self._schedule.seed, _CAPS + self.num_steps)
        replay = self._memory.replay
        size = min(INPUTS * growth.mean, replay.held)
        data = replay.whole_sample(size, generator, self.prior)
        order = torch.randperm(len(data), generator=generator).to(data.X.device)
        for rows in order.split(2 * growth.step):
            self.grow(data.X[..., rows, :])

    @torch.no_grad()
    def _renew(self) -> None:
        """Let the covariance's functions be the kernel's eigenfunctions again, if they are such."""
        if not isinstance(self._memory.posterior.covariance, SpectralCovariance):
            return
        replay, growth = self._memory.replay, self._growth
        if replay.held == 0 or growth.span == 0:
            return
        generator = generator_at(self._schedule.seed, _APART + self.num_steps)
        some = replay.sample(min(INPUTS * growth.span, replay.held), generator, self.prior)
        now = Expanded.of(self._parameters.posterior(), self.hyper)
        sizes = growth.span, growth.covariance
        renewed = with_eigenfunctions(now, some.X, *sizes, self._collective)
        self._set_posterior(renewed, self._variational_adam.moments())

    def take_step(self) -> float:
        """Draw, grow, and move everything once. Cost as of the draw and its gradients.

        One process alone waits once for its device: for the bound, and with it for the success of
        factorisations, before anything is moved.
        """
        if not self._collective.is_alone:
            return self._step()
        before = self._memory, self._parameters, self._variational_adam

        def undo() -> None:
            self._memory, self._parameters, self._variational_adam = before

        return read_at_once(self._step, undo)

    @torch.enable_grad()
    def _step(self) -> float:
        schedule, replay, collective = self._schedule, self._memory.replay, self._collective
        generator = generator_at(schedule.seed, self.num_steps)
        size = schedule.size(replay.held)
        places = replay.places(size, generator)
        data = replay.in_units(replay.at(places), self.prior)
        renewed = False
        if self._growing:
            order = torch.randperm(size, generator=generator)
            inputs = data.X
            if not self._growth.finished(self._memory.posterior):
                order = order.to(data.X.device, non_blocking=True)
                inputs = replay.completed(data, places).X[..., order, :]
            renewed = self.grow(inputs)
        # the best posterior's combine more functions than a step should
        wide = len(self._memory.posterior.beta) > self._growth.span
        if (wide or self.num_steps % _RENEWED == 0) and not renewed:
            self._renew()
        now = Expanded.of(self._parameters.posterior(), self.hyper)
        index = drawn_columns(now.posterior, schedule.columns, generator)
        expected = OutcomeModel(self.hyper.likelihood, now.outputs).expected_log_prob(data.targets)
        draw = Draw.of(now, data.X, expected, replay.count / size, index, collective)
        # [Cheng2017, section 4]
        decay = self._pace * (1.0 / (1.0 + 0.1 * self.num_steps**0.5))
        mean_rate = None if schedule.mean_rate is None else schedule.mean_rate * decay
        posterior = natural_step(draw, expected, schedule.natural_rate * decay, mean_rate)
        value = read_expected(collective.sum(draw.value.detach()).sum())
        log_prior = collective.share * self.hyper.log_prior()
        objective = (draw.value.sum() + log_prior) / replay.count
        optimisers = self._hyper_adam, self._variational_adam
        for adam in optimisers:
            adam.clear()
        if objective.requires_grad:
            (-objective).backward()
            for adam in optimisers:
                adam.set_rate(schedule.learning_rate * decay)
                adam.step(collective)
        self.num_steps += 1
        posterior = self._parameters.moved(posterior)
        self._memory = replace(self._memory, posterior=posterior, steps=self.num_steps)
        return value


class VariationalParameters(Module):
    """Variational parameters that move by Adam; points in units of the inputs' variation."""

    def __init__(
        self, posterior: DecoupledPosterior, coefficients: bool, mean_points: bool, unit: float
    ) -> None:
        """Copy those that move: the mean's coefficients and points only if asked for.

        Points are in units of what inputs vary by: a step is relative to it.
        """
        super().__init__()
        self._posterior, self._unit = posterior, unit
        self._tied = isinstance(posterior.covariance, SpectralCovariance)
        chosen = {} if self._tied else {"beta": posterior.beta}
        if mean_points:
            chosen["alpha"] = posterior.alpha
        moved = dict[str, Tensor]()
        for name, functions in chosen.items():
            moved[f"{name}_points"] = functions.points / unit
            if functions.log_factors is not None:
                moved[f"{name}_factors"] = functions.log_factors
        if isinstance(posterior.covariance, DirectCovariance):
            moved["root"] = posterior.covariance.root
        if coefficients:
            moved["coefficients"] = posterior.coefficients
        for name, value in moved.items():
            self.register_parameter(name, Parameter(value.detach().clone()))

    def posterior(self) -> DecoupledPosterior:
        """Return the posterior with these in it, differentiable in them."""
        p, own = self._posterior, dict(self.named_parameters())
        covariance = p.covariance
        if isinstance(covariance, DirectCovariance):
            covariance = replace(covariance, root=own["root"])
        bases = {"alpha": p.alpha, "beta": p.beta}
        for name in bases:
            if (points := own.get(f"{name}_points")) is not None:
                bases[name] = InducingFunctions(points * self._unit, own.get(f"{name}_factors"))
        alpha, beta = bases["alpha"], bases["beta"]
        if self._tied:
            beta = alpha.rows(slice(0, len(beta)))
        return replace(
            p,
            alpha=alpha,
            beta=beta,
            coefficients=own.get("coefficients", p.coefficients),
            covariance=covariance,
        )

    def moved(self, posterior: DecoupledPosterior) -> DecoupledPosterior:
        """Put these as they are now into a posterior whose other tensors have moved."""
        self._posterior = posterior
        return map_tensors(self.posterior(), lambda tensor: tensor.detach().clone())


_DAMPING = 1e-5
"""Of a block of the mean's Hessian, relative to its mean diagonal."""

_ROUNDING = 1e-6
"""The same, relative to the prior variance: what the remainder of a kernel may be wrong by."""


@torch.no_grad()
def natural_step(
    draw: Draw, expected: ExpectedLogProb, rate: float, mean_rate: float | None
) -> DecoupledPosterior:
    """Step towards what a minibatch asks for, by rates in (0, 1].

    β's weights move along the natural gradient (Hensman et al., 2013; for any likelihood Khan and
    Lin, 2017). The mean's coefficients move by a Newton step in the block J of the draw's columns,
    or stay without a rate: the gradient there needs no others of K_α, and is exact but for the
    minibatch.
    """
    there, posterior = draw.there, map_tensors(draw.expanded.posterior, torch.detach)
    sites, _ = local_sites(expected, there.mean.detach(), there.variance.detach())
    covariance = posterior.covariance
    if isinstance(covariance, HybridCovariance):  # mix natural parameters with the minibatch's
        z, (v, _) = there.features.detach(), draw.expanded.weights
        others = there.mean.detach() - (z @ v.detach()).squeeze(-1)  # the mean without weights
        weighted = draw.weight * z * sites.precision.unsqueeze(-1)
        pull = draw.weight * (sites.shift - sites.precision * others)
        moment, gram = map(draw.collective.sum, (z.mT @ pull.unsqueeze(-1), z.mT @ weighted))
        moment = torch.lerp(covariance.moment, moment, rate)
        gram = torch.lerp(covariance.gram, gram, rate)
        posterior = replace(posterior, covariance=replace(covariance, moment=moment, gram=gram))
    if mean_rate is None or len(draw.columns.index) == 0:
        return posterior
    return replace(posterior, coefficients=_moved_coefficients(draw, posterior, sites, mean_rate))


def _moved_coefficients(
    draw: Draw, posterior: DecoupledPosterior, sites: Sites, rate: float
) -> Tensor:
    """Take a damped Newton step in the block J: ``a_J − rate H_JJ⁻¹ g_J``.

    The data's part of H is that of the minibatch and of as many of α, which are inputs too: of the
    minibatch alone it would be of one accident with g, and steps would end where ``H⁻¹ g`` is zero
    on average instead of g. Cost O(b c² + c³ + c M_α + b S M_β).
    """
    columns, there = draw.columns, draw.there
    block = columns.cross[..., columns.index, :]
    slopes = _less(there.cross[..., columns.index, :], columns.features, there.features)
    slope = sites.shift - sites.precision * there.mean.detach()
    gradient = columns.slopes.detach().unsqueeze(-1)
    gradient = gradient - draw.weight * draw.collective.sum(slopes @ slope.unsqueeze(-1))
    hessian = _less(block, columns.features, columns.features)
    hessian = hessian + _curvature(draw, slopes, sites.precision)
    means = (m.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True) for m in (hessian, block))
    of_hessian, of_block = means
    damping = _DAMPING * of_hessian + _ROUNDING * of_block
    hessian.diagonal(dim1=-2, dim2=-1).add_(damping)
    change = rate * torch.cholesky_solve(gradient, safe_cholesky(hessian, is_new=True)).squeeze(-1)
    if posterior.jacobi:
        expanded = draw.expanded
        scale = posterior.alpha.variance(expanded.kernel, expanded.outputs).detach()
        change = change * scale.expand_as(posterior.coefficients)[..., columns.index]
    return posterior.coefficients.index_add(-1, columns.index, -change)


def _less(covariance: Tensor, mine: Tensor | None, theirs: Tensor | None) -> Tensor:
    """Subtract what β's features explain of a covariance, ``... x c x n``, if they have a mean."""
    if mine is None or theirs is None:
        return covariance
    return covariance - mine.detach() @ theirs.detach().mT


def _curvature(draw: Draw, slopes: Tensor, precision: Tensor) -> Tensor:
    """Estimate ``Σ p k kᵀ`` over all data by a minibatch and some of α, ``... x m x c x c``."""
    collective = draw.collective
    size = collective.total(precision.shape[-1], precision.device)
    index, alpha = draw.columns.index, draw.expanded.posterior.alpha
    drawn = index.new_zeros(len(alpha)).index_fill_(0, index, 1)
    places = drawn.argsort(stable=True)[: len(alpha) - len(index)]
    others = places[:: max(-(-len(places) // size), 1)]  # evenly from first to last
    seen = collective.sum((slopes * precision.unsqueeze(-2)) @ slopes.mT)
    if len(others) > 0:
        more = _less(
            draw.columns.cross[..., others, :],
            draw.expanded.alpha_features(others),
            draw.columns.features,
        )
        mean = collective.sum(precision.sum(-1)) / size
        seen = seen + mean[..., None, None] * (more.mT @ more)
    return draw.weight * size / (size + len(others)) * seen
