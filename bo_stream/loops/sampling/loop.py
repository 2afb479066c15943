"""Active sampling: choose where to look, look, learn, and again, at the same cost each time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

import torch
from botorch.posteriors.gpytorch import GPyTorchPosterior
from torch import Tensor

from bo_stream.acquisition import PoolSelector, mean_path
from bo_stream.acquisition.sites import sites
from bo_stream.acquisition.weight_space import (
    anywhere,
    in_weight_space,
    lives_in_features,
    weight_space,
)
from bo_stream.loops.datasets import Survey
from bo_stream.loops.models import KERNELS, build_model
from bo_stream.loops.sampling.outliers import ONE_IN, deviations_from_prediction, leave_outliers_out
from bo_stream.loops.sampling.settings import Settings, Strategy
from bo_stream.models.base import StreamingGP
from bo_stream.models.refit import relearn
from bo_stream.models.wiski.observation_space import ObservationSpaceProcess
from bo_stream.process.process import ConditionedProcess, PosteriorProcess


@torch.no_grad()
def predict(model: StreamingGP, X: Tensor) -> tuple[Tensor, Tensor]:
    """Marginal means and variances of the function at ``n x d`` inputs, ``n`` each, float64.

    As ``model.posterior(X)``, for one output and an affine outcome transform. In feature space,
    where a model has all of its process there: on a grid O(n 4^d) and one quadratic form, without
    n x r features.
    """
    inputs = model.transform_inputs(X).double()
    process = model.process(inputs)
    if _in_features_only(process, inputs):
        mean, variance = _in_features(process, inputs)
    else:
        mean, variance = (value[0] for value in process.marginals(inputs))
    first = cast(GPyTorchPosterior, model.posterior(X[:1])).mean.double().squeeze()
    scale = model.outcome_scale().squeeze()
    return first + scale * (mean - mean[0]), scale.square() * variance.clamp_min(0.0)


def _in_features_only(process: PosteriorProcess, inputs: Tensor) -> bool:
    """Whether a process is kept in the weights of its features, rather than of few rows."""
    base = process.base if isinstance(process, ConditionedProcess) else process
    return in_weight_space(process, inputs) and not isinstance(base, ObservationSpaceProcess)


def _in_features(process: PosteriorProcess, inputs: Tensor) -> tuple[Tensor, Tensor]:
    space = weight_space(process, inputs)
    points = sites(space.basis, inputs)
    mean = points.linear(space.weights.mean)[0, 0]
    return mean, points.quadratic(space.weights.covariance().unsqueeze(0))[0, 0]


@torch.no_grad()
def predict_mean(model: StreamingGP, X: Tensor) -> Tensor:
    """The means alone, ``n``. Cost O(n r) where the process is all in its features."""
    if _in_features_only(model.process(), anywhere(model)):
        return mean_path(model)(X).squeeze(-1)
    return predict(model, X)[0].to(X)


_HALF_WIDTH_95 = 1.959963984540054


@dataclass(frozen=True)
class Score:
    """Predictions of held-out outcomes, scored.

    Attributes:
        observations: How many there were.
        rmse: Root of the mean squared error of the mean, in units of the target.
        rmse_sd: The same in units of the target's standard deviation over the held-out points.
        nll: Mean negative log density of an outcome, noise included, in nats.
        coverage: Share of outcomes in their 95 % interval, noise included.
    """

    observations: int
    rmse: float
    rmse_sd: float
    nll: float
    coverage: float


@torch.no_grad()
def score(model: StreamingGP, X: Tensor, Y: Tensor) -> Score:
    """Score a single-output model.

    Args:
        model: See :func:`predict`.
        X: Held-out inputs, ``n x d``.
        Y: Held-out outcomes, ``n x 1``.
    """
    mean, variance = predict(model, X)
    noise = model.noise_at(model.transform_inputs(X).double()).squeeze(-2)
    variance = variance + noise * model.outcome_scale().square().squeeze()
    error = Y.double().squeeze(-1) - mean
    rmse = float(error.square().mean().sqrt())
    density = 0.5 * (error.square() / variance + variance.log() + math.log(2.0 * math.pi))
    inside = error.abs() <= _HALF_WIDTH_95 * variance.sqrt()
    return Score(
        round(model.num_observations),
        rmse,
        rmse / float(Y.double().std()),
        float(density.mean()),
        float(inside.double().mean()),
    )


SOME_POINTS = 512
"""Test inputs that stand for all of them."""


class ChoiceRule(Protocol):
    """Chooses the next points."""

    def choose(self, q: int, picks: Sequence[int]) -> list[int]:
        """Choose q positions in the pool that are not among the picks."""


class LeastIntegratedVariance:
    """Greedily those that leave the least posterior variance, averaged over the test inputs.

    Over ``SOME_POINTS`` of them, which are in random order, where the model needs the covariance of
    each with every candidate.

    Source: qNIPV over a pool, as in the WISKI paper's malaria study. A function of model and picks:
    what the selector keeps between choices saves time only.
    """

    def __init__(self, survey: Survey, model: StreamingGP) -> None:
        """The model is the one that goes on learning."""
        points = survey.test_X if lives_in_features(model) else survey.test_X[:SOME_POINTS]
        self._selector = PoolSelector(model, survey.pool_X, points)

    def choose(self, q: int, picks: Sequence[int]) -> list[int]:
        """See :class:`bo_stream.acquisition.PoolSelector`."""
        chosen: list[int] = self._selector.select(q, exclude=torch.tensor(picks)).tolist()
        return chosen


class InRandomOrder:
    """The next ones of the pool, whose order is random."""

    def choose(self, q: int, picks: Sequence[int]) -> list[int]:
        """The first q positions after the picks."""
        return list(range(len(picks), len(picks) + q))


def choice_rule(strategy: Strategy, survey: Survey, model: StreamingGP) -> ChoiceRule:
    """The rule of this name."""
    return InRandomOrder() if strategy == "random" else LeastIntegratedVariance(survey, model)


@dataclass
class SamplingState:
    """All that a run has done so far; with survey and settings it determines the next choice.

    Attributes:
        model: Has seen the picks, but for the outliers.
        picks: Positions in the pool, in the order of choice, the initial points first.
        curve: Scores so far.
        refits: Numbers of observations at which the hyperparameters were learned.
        outliers: Places in ``picks``, in order, of those that the model is without: outliers at the
            last refit, and later ones that wait for the next.
    """

    model: StreamingGP
    picks: list[int]
    curve: list[Score] = field(default_factory=list)
    refits: list[int] = field(default_factory=list)
    outliers: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """What one step did.

    Attributes:
        number: 0 for the start, then counted from 1.
        observations: After it, outliers among them.
        chosen: Positions in the pool.
        refitted: Whether hyperparameters were learned.
        score: Of the model after it, where it was scored.
    """

    number: int
    observations: int
    chosen: tuple[int, ...]
    refitted: bool
    score: Score | None


class ActiveSampling:
    """The loop over a survey: q points at a time, chosen by a strategy, put into a model.

    Deterministic: randomness is in the survey's order alone, so a state that was saved and loaded
    goes on to the same choices. A step costs the same at the end as at the beginning, refits and
    scores aside; refits come at geometrically growing numbers of observations, and leave outliers
    out of the model (``Settings.outliers``).

    Example:
        >>> settings = Settings(steps=100).resolved(*data.X.shape)
        >>> for step in ActiveSampling(Survey.of(data, settings), settings).run():
        ...     print(step.number, step.score)
    """

    def __init__(
        self, survey: Survey, settings: Settings, state: SamplingState | None = None
    ) -> None:
        """Begin a run, or go on with one.

        Args:
            survey: Made with the same settings.
            settings: Resolved ones.
            state: Of an earlier run with the same survey and settings, maybe with fewer steps.
        """
        self.survey = survey
        self.settings = settings
        self.state = _first_state(survey, settings) if state is None else state
        self._rule = choice_rule(settings.strategy, survey, self.state.model)

    @property
    def observations(self) -> int:
        """Points chosen so far, the initial ones among them."""
        return len(self.state.picks)

    @property
    def steps_done(self) -> int:
        """Steps after the start."""
        return (self.observations - self.settings.initial) // self.settings.q

    @property
    def progress(self) -> int:
        """Grows by one or more with each :meth:`advance`."""
        return self.observations + bool(self.state.curve)

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return bool(self.state.curve) and self.steps_done >= (self.settings.steps or 0)

    def run(self) -> Iterator[Step]:
        """Do the steps that are left, yielding each once it is whole."""
        while not self.finished:
            yield self.advance()

    def advance(self) -> Step:
        """Do the start, if that is still to be done, or else one step."""
        return self._step() if self.state.curve else self._start()

    def _start(self) -> Step:
        self._refit()
        return Step(0, self.observations, tuple(self.state.picks), True, self._score())

    def _step(self) -> Step:
        """Choose q points, observe them, update, and refit and score where due."""
        chosen = self._rule.choose(self.settings.q, self.state.picks)
        waiting = self._surprising(chosen)
        self._update([pick for i, pick in enumerate(chosen) if i not in waiting])
        self.state.outliers.extend(self.observations + i for i in waiting)
        self.state.picks.extend(chosen)
        refitted = self._refit_due()
        if refitted:
            self._refit()
        scored = self._score() if self._score_due() else None
        return Step(self.steps_done, self.observations, tuple(chosen), refitted, scored)

    def _update(self, picks: list[int]) -> None:
        if picks:
            self.state.model.update(self.survey.pool_X[picks], self.survey.pool_Y[picks])

    def _surprising(self, chosen: list[int]) -> list[int]:
        """Places in ``chosen`` of outcomes so far from the prediction that they wait for a refit.

        The refit learns from them too before it finds out whether they are outliers.
        """
        threshold, most = self.settings.outliers, self.observations // ONE_IN
        room = most - len(self.state.outliers)
        if not threshold or room <= 0:
            return []
        X, Y = self.survey.pool_X[chosen], self.survey.pool_Y[chosen]
        far = deviations_from_prediction(self.state.model, X, Y) > threshold
        return [i for i, is_far in enumerate(far.tolist()) if is_far][:room]

    def _refit_due(self) -> bool:
        growth = self.settings.refit
        return growth > 0.0 and self.observations >= growth * self.state.refits[-1]

    def _refit(self) -> None:
        state, threshold = self.state, self.settings.outliers
        self._take_in_what_waits()
        relearn(state.model)
        if threshold:
            X, Y = self.survey.pool_X[state.picks], self.survey.pool_Y[state.picks]
            state.outliers = leave_outliers_out(state.model, X, Y, state.outliers, threshold)
        state.refits.append(self.observations)

    def _take_in_what_waits(self) -> None:
        state = self.state
        last = state.refits[-1] if state.refits else 0
        self._update([state.picks[place] for place in state.outliers if place >= last])
        state.outliers = [place for place in state.outliers if place < last]

    def _score_due(self) -> bool:
        done = self.steps_done
        return done % (self.settings.score_every or 1) == 0 or done == self.settings.steps

    def _score(self) -> Score:
        self.state.curve.append(self.score_now())
        return self.state.curve[-1]

    def score_now(self) -> Score:
        """Score the model as it is, without a trace in the curve."""
        scored = score(self.state.model, self.survey.test_X, self.survey.test_Y)
        return replace(scored, observations=self.observations)

    def picked_rows(self) -> list[int]:
        """Rows of the data that were chosen, in order."""
        rows: list[int] = self.survey.pool_rows[self.state.picks].tolist()
        return rows

    def outlying_rows(self) -> list[int]:
        """Those of :meth:`picked_rows` that the model is without, in order."""
        rows = self.picked_rows()
        return [rows[i] for i in self.state.outliers]


def _first_state(survey: Survey, settings: Settings) -> SamplingState:
    first = list(range(settings.initial))
    dim = survey.pool_X.shape[-1]
    model = build_model(
        settings.model,
        settings.model_options,
        survey.pool_X[first],
        survey.pool_Y[first],
        KERNELS[settings.kernel](dim).to(survey.pool_X),
        settings.grid,
    )
    return SamplingState(model, first)
