"""Acquisition functions for Ax, over boxes and over lists of candidates.

:class:`StreamAcquisition` ranks the observed points by posterior mean, O(n). The best of them are
the baseline of noisy criteria, the first few of these start points of the search. The integrated
variance is of one metric, over points in the user's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from ax.core.search_space import SearchSpaceDigest
from ax.exceptions.core import UnsupportedError as AxUnsupportedError
from ax.generators.torch.botorch_modular.acquisition import Acquisition
from ax.generators.torch.botorch_modular.surrogate import Surrogate
from ax.generators.torch.utils import _get_X_pending_and_observed
from ax.generators.torch_base import TorchOptConfig
from botorch.acquisition.acquisition import AcquisitionFunction, OneShotAcquisitionFunction
from botorch.acquisition.active_learning import qNegIntegratedPosteriorVariance
from botorch.acquisition.monte_carlo import SampleReducingMCAcquisitionFunction
from botorch.acquisition.multi_objective.base import MultiObjectiveMCAcquisitionFunction
from botorch.acquisition.multioutput_acquisition import MultiOutputAcquisitionFunction
from botorch.exceptions.errors import UnsupportedError
from botorch.models.model import Model, ModelList
from botorch.models.model_list_gp_regression import ModelListGP
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.sampling.normal import SobolQMCNormalSampler
from botorch.utils.multi_objective.pareto import is_non_dominated
from botorch.utils.sampling import draw_sobol_samples, manual_seed
from torch import Tensor

from bo_stream.acquisition import FeatureNIPV, PoolSelector, evaluate_known_points_once
from bo_stream.acquisition.feature_nipv import in_weight_space
from bo_stream.ax.pool import CANDIDATE, MC_POINTS, POOL, Pool, check_enough
from bo_stream.bases.grid.interpolation import GridBasis
from bo_stream.errors import check_whole
from bo_stream.loops.run import predict_mean
from bo_stream.models.base import StreamingGP

BASELINE = 100
"""Largest number of observed points that an acquisition function compares with."""

INCUMBENTS = 5
"""Number of the best observed points near which a search starts."""

CHUNK = {"init_batch_limit": 128}
"""Starting points evaluated at once; Ax's 32 take twice the time."""

_ONCE = {"retry_on_optimization_warning": False}
"""A search of many starts is not repeated because the line search of one ended by rounding. BoTorch
does repeat it and warns: 18 and 40 times in a noisy campaign of 65 trials, ours and Ax's default.
"""

NEAREST, FARTHEST = 1e-3, 0.3
"""Standard deviations of the points near a leader, in widths of the search space."""

INTEGRATED = (FeatureNIPV, qNegIntegratedPosteriorVariance)
"""Acquisition functions that average a variance over points."""

NUM_MC_POINTS = 256
"""Number of points that the variance is averaged over where none are given."""

OTHERS = (OneShotAcquisitionFunction, MultiOutputAcquisitionFunction, *INTEGRATED)
"""Searched from points of their own, by another search, or not for the best outcome."""

_ROWS_AT_ONCE = 4096
"""Number of points that a model which does not stream predicts at once."""


class StreamAcquisition(Acquisition):
    """An acquisition of Ax in which noisy criteria compare with the most promising points only.

    ``qLogNoisyExpectedImprovement`` and its kind draw joint samples at the baseline, O(n³) at all
    observed points. Here it is the best ``BASELINE`` of them by posterior mean, O(n) to find: those
    that no other dominates first, then the best of each objective; a point whose means break an
    outcome constraint comes after all that do not. A search starts near the first of them, too.

    Attributes:
        config: The configuration that it was made for.
        best: The feasible observed point of the best posterior mean, ``d``, on the CPU, or None.
        incumbents: The first of the baseline, at most ``INCUMBENTS x d``, or None.
    """

    config: TorchOptConfig | None = None
    best: Tensor | None = None
    incumbents: Tensor | None = None

    def _update_objective_thresholds(self, torch_opt_config: TorchOptConfig) -> None:
        """Thin the baseline before anything is done with it.

        Overrides ``Acquisition._update_objective_thresholds``, the first step after Ax has selected
        the observed points.
        """
        self.config = torch_opt_config
        if self.X_observed is not None:
            weights, constraints = self._objective_weights, self._outcome_constraints
            chosen, self.best = ranked(self._model, self.X_observed, weights, constraints)
            self.incumbents = chosen[:INCUMBENTS]
            if len(self.X_observed) > BASELINE:
                self.X_observed = chosen
        super()._update_objective_thresholds(torch_opt_config)

    def optimize(  # type: ignore[override]  # as Ax calls it
        self, n: int, search_space_digest: SearchSpaceDigest, **given: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Search for n candidates; overrides ``Acquisition.optimize`` to start near incumbents.

        See :func:`with_starts`. Searches with linear constraints have Ax's own starts.
        """
        digest, leaders = search_space_digest, self.incumbents
        free = not (given.get("inequality_constraints") or given.get("equality_constraints"))
        choices = digest.ordinal_features or digest.categorical_features
        if leaders is not None and free and not choices and not isinstance(self.acqf, OTHERS):
            options = given.get("optimizer_options") or {}
            bounds = leaders.new_tensor(digest.bounds).mT
            given["optimizer_options"] = with_starts(options, bounds, leaders)
        return super().optimize(n, digest, **given)

    def _construct_botorch_acquisition(
        self,
        botorch_acqf_class: type[AcquisitionFunction],
        botorch_acqf_options: dict[str, Any],
        model: Model,
    ) -> AcquisitionFunction:
        """Construct an acquisition function of BoTorch.

        Overrides ``Acquisition._construct_botorch_acquisition``: a baseline is evaluated once, and
        an integrated variance is of one metric, by default of the only objective's, and in closed
        form where the model allows it.

        Raises:
            UnsupportedError: There are several objectives, and no metric is named.
            ValueError: No such metric.
        """
        kind, options = botorch_acqf_class, botorch_acqf_options
        if not issubclass(kind, INTEGRATED):
            acqf = super()._construct_botorch_acquisition(kind, options, model)
            return evaluate_known_points_once(acqf)
        metrics, model, given = self.surrogate.outcomes, self.surrogate.model, options.get("metric")
        if given is None:
            used = (self._full_objective_weights != 0.0).any(0).tolist()
            objectives = [name for name, is_used in zip(metrics, used, strict=True) if is_used]
            if len(objectives) != 1:
                raise UnsupportedError(
                    f"{kind.__name__} is about the variance of one metric, and the objectives are "
                    f"of {', '.join(objectives)}. Name one, as in "
                    f"acquisition_options={{'metric': {objectives[0]!r}}}."
                )
            (given,) = objectives
        if given not in metrics:
            raise ValueError(f"Expected metric to be one of {', '.join(metrics)}, got {given!r}.")
        index = metrics.index(given)
        if isinstance(model, ModelList | ModelListGP):
            model = cast(Model, model.models[index])
        elif model.num_outputs > 1:
            model = model.subset_output([index])
        bounds, points = self.search_space_digest.bounds, self.options.get(MC_POINTS)
        return integrated_variance(kind, model, bounds, points, self.X_pending)


def with_starts(options: dict[str, Any], bounds: Tensor, incumbents: Tensor) -> dict[str, Any]:
    """Return a user's options of ``optimize_acqf``, with half of its starts near incumbents.

    Where the observed points leave little to gain, the maximum of an acquisition function is a
    narrow peak near the best of them. Random points miss it: of eight searches among 27 points of
    Hartmann-6 by 1,024 of them, four to five end at a corner instead, and none with these starts.
    See :func:`near_and_far`.
    """
    inner = {**CHUNK, **options.get("options", {})}
    return {**_ONCE, **options, "options": inner, "generator": near_and_far(bounds, incumbents)}


def near_and_far(bounds: Tensor, incumbents: Tensor) -> Callable[[int, int, int | None], Tensor]:
    """Return a function that draws ``n x q x d`` points of a box, ``2 x d``.

    Half are Sobol points. Each of the others is one of the incumbents, ``k x d``, with normal
    noise, of a standard deviation whose logarithm is uniform between ``NEAREST`` and ``FARTHEST``,
    moved to the nearest point of the box.
    """
    low, high = bounds = bounds.cpu()
    incumbents = incumbents.cpu().to(bounds)

    def draw(n: int, q: int, seed: int | None) -> Tensor:
        far = draw_sobol_samples(bounds, n - n // 2, q, seed=seed)
        with manual_seed(seed):
            chosen = incumbents[torch.randint(len(incumbents), (n // 2, q))]
            exponent = torch.rand(n // 2, q, 1, dtype=bounds.dtype)
            noise = torch.randn(chosen.shape, dtype=bounds.dtype)
        scale = NEAREST * (FARTHEST / NEAREST) ** exponent
        near = chosen + scale * (high - low) * noise
        return torch.cat((far, torch.clamp(near, low, high)))

    return draw


def integrated_variance(
    kind: type[AcquisitionFunction],
    model: Model,
    bounds: list[tuple[float, float]],
    mc_points: Tensor | None,
    X_pending: Tensor | None,
) -> AcquisitionFunction:
    """Make a :class:`FeatureNIPV` where the model allows one, else BoTorch's, which is equal.

    The average is over ``mc_points``, ``N x d``, or without any over the box of the bounds.
    """
    box = torch.as_tensor(bounds, dtype=torch.float64).mT
    in_closed_form = issubclass(kind, FeatureNIPV)
    if in_closed_form and isinstance(model, StreamingGP) and in_weight_space(model.process()):
        like = model.train_targets
        if mc_points is not None:
            return FeatureNIPV(model, mc_points.to(like), X_pending=X_pending)
        basis = getattr(model.feature_process(), "basis", None) if model.maps_boxes else None
        if isinstance(basis, GridBasis):  # integrated over a box in closed form
            return FeatureNIPV(model, bounds=box.to(like), X_pending=X_pending)
    if mc_points is None:  # the same at each trial
        mc_points = draw_sobol_samples(box, n=NUM_MC_POINTS, q=1, seed=0).squeeze(-2)
    return qNegIntegratedPosteriorVariance(model, mc_points, X_pending=X_pending)


def check_options(kind: type[AcquisitionFunction], options: dict[str, Any]) -> None:
    """Check the names of options of an integrated variance.

    Raises:
        ValueError: One is unknown, both points and their number are given, or the number is below
            1.
    """
    known = (MC_POINTS, "num_mc_points", "metric")
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(
            f"Expected options of {kind.__name__} among {', '.join(known)}, got "
            f"{', '.join(unknown)}."
        )
    if options.get(MC_POINTS) is not None and options.get("num_mc_points") is not None:
        raise ValueError("Expected one of mc_points and num_mc_points, got both.")
    check_whole("num_mc_points", options.get("num_mc_points", 1), 1)


def best_observed(
    surrogate: Surrogate, digest: SearchSpaceDigest, config: TorchOptConfig
) -> Tensor | None:
    """Return the observed point of the best posterior mean, ``d``; None: none is feasible."""
    _, X = _get_X_pending_and_observed(
        Xs=surrogate.Xs,
        objective_weights=config.objective_weights,
        bounds=digest.bounds,
        outcome_constraints=config.outcome_constraints,
        linear_constraints=config.linear_constraints,
        fixed_features=config.fixed_features,
    )
    if X is None:
        return None
    return ranked(surrogate.model, X, config.objective_weights, config.outcome_constraints)[1]


def ranked(
    model: Model, X: Tensor, weights: Tensor, constraints: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor | None]:
    """Return the ``BASELINE`` most promising of observed points, and the best if it is feasible.

    ``X`` is ``n x d``, and ``weights``, of m outcomes in k objectives, ``k x m``. The best point is
    on the CPU.
    """
    means = _predicted_means(model, X)
    violation = violation_of(means, constraints)
    chosen = most_promising(means @ weights.to(means).mT, violation)[:BASELINE]
    first = chosen[0]
    return X[chosen], X[first].cpu() if bool(violation[first] == 0.0) else None


def most_promising(values: Tensor, violation: Tensor) -> Tensor:
    """Return the order of points, the best first, by objectives to be maximised, ``n x k``.

    See :class:`StreamAcquisition`; for ``violation``, ``n``, see :func:`violation_of`.
    """
    feasible = violation == 0.0
    best = torch.zeros_like(feasible)
    best[feasible] = is_non_dominated(values[feasible])
    ranks = values.argsort(0, descending=True).argsort(0).amin(-1)
    ranks[best] = -1
    least = violation.argsort().argsort()
    return torch.where(feasible, ranks, len(values) + least).argsort(stable=True)


def violation_of(means: Tensor, constraints: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return by how much outcomes, ``n x m``, break ``A f <= b``, ``k x 1``; 0: not at all."""
    if constraints is None:
        return means.new_zeros(len(means))
    A, b = (part.to(means) for part in constraints)
    return (means @ A.mT - b.mT).clamp_min(0.0).sum(-1)


@torch.no_grad()
def _predicted_means(model: Model, X: Tensor) -> Tensor:
    """Return posterior means, ``n x d -> n x m``; cost O(r) a point for streaming models."""
    if isinstance(model, ModelList | ModelListGP):
        return torch.cat([_predicted_means(cast(Model, part), X) for part in model.models], -1)
    if isinstance(model, StreamingGP) and model.num_outputs == 1:
        return predict_mean(model, X).unsqueeze(-1)
    posteriors = (model.posterior(chunk.unsqueeze(-2)) for chunk in X.split(_ROWS_AT_ONCE))
    return torch.cat([cast(GPyTorchPosterior, each).mean.squeeze(-2) for each in posteriors])


# --- pools: the best untried candidates, chosen one after the other ------------------------------


CHOICES = "choices"
"""Option of an acquisition, set by the adapter at each trial: :class:`Choices`."""

_SAMPLED = (SampleReducingMCAcquisitionFunction, MultiObjectiveMCAcquisitionFunction)
"""Acquisition functions whose input constructors take a sampler."""

_SCREENING_SAMPLES = 32
"""Posterior samples with which most of a large pool's candidates are ruled out."""

_POOL_CHUNK = 4096
"""Candidates that are evaluated at once."""

FINALISTS = 16_384
"""Candidates that are evaluated with all samples; a pool of no more is not screened."""


class PoolAcquisition(StreamAcquisition):
    """An acquisition of Ax that proposes the best untried candidates of a pool.

    Several at once are chosen one after the other, each given the earlier ones. Integrated variance
    is minimised in closed form, by :class:`PoolSelector`; any other function is evaluated at all
    candidates, in chunks and without gradients. Where there are many, a function that samples is
    first evaluated with few samples, and with all of them at some thousand; see :func:`best_of`.

    Attributes:
        metadata: Pool and name of each of the last proposals, which Ax stores.
    """

    metadata: Sequence[dict[str, Any]] = ()

    def optimize(  # type: ignore[override]  # as Ax calls it
        self, n: int, search_space_digest: SearchSpaceDigest, **given: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose n candidates; overrides ``Acquisition.optimize``, a search of the search space.

        Constraints, rounding and options of that search have no effect.

        Raises:
            SearchSpaceExhausted: Fewer than n are left.
            UnsupportedError: Another set of candidates or a way of sampling them is given, or the
                acquisition function is for a search only.
        """
        if any(given.get(name) is not None for name in ("candidate_set", "sampling_strategy")):
            raise AxUnsupportedError(
                "Expected a pool alone to choose from, got in_sample or a sampling strategy too. "
                "Leave them out of model_gen_options."
            )
        if isinstance(self.acqf, OneShotAcquisitionFunction):
            raise AxUnsupportedError(
                f"{type(self.acqf).__name__} cannot be evaluated at single candidates of a pool. "
                "Take another acquisition function."
            )
        choices: Choices = self.options[CHOICES]
        fixed = given.get("fixed_features") or {}
        untried = choices.untried.clone()
        for column, value in fixed.items():  # up to rounding
            fitting = choices.X.new_tensor(value)
            untried &= torch.isclose(choices.X[:, column], fitting, rtol=1e-9, atol=1e-12)
        check_enough(n, int(untried.sum()), choices.pool, bool(fixed))
        if isinstance(self.acqf, INTEGRATED) and isinstance(self.acqf.model, StreamingGP):
            model, points, pending = self.acqf.model, self.options[MC_POINTS], self.X_pending
            if pending is None:
                selector = choices.selector(model, choices.X, points)
            else:
                nothing = pending.new_zeros(len(pending), 1)
                conditioned = model.condition_on_observations(pending, nothing)
                selector = PoolSelector(conditioned, choices.X, points)
            picks = selector.select(n, exclude=~untried)
        else:
            rows = untried.nonzero().squeeze(-1)
            picks = rows[best_of(self.acqf, choices.X[rows], n, self._screening)]
        pool, X = choices.pool, choices.X[picks]
        self.metadata = [{POOL: pool.name, CANDIDATE: pool.name_at(row)} for row in picks.tolist()]
        return X, self.evaluate(X.unsqueeze(-2)).detach(), X.new_ones(n)

    def _screening(self) -> AcquisitionFunction | None:
        """Make the function with few samples and nothing pending; None: it does not sample."""
        if not isinstance(self.acqf, _SAMPLED):
            return None
        ((kind, options),) = self.botorch_acqf_classes_with_options
        sampler = SobolQMCNormalSampler(torch.Size([_SCREENING_SAMPLES]), seed=0)
        cheap = {**options, "sampler": sampler, "X_pending": None}
        return self._construct_botorch_acquisition(kind, cheap, self._model)


@dataclass(frozen=True)
class Choices:
    """The candidates of a pool at a trial.

    Attributes:
        pool: The pool.
        X: Its candidates as the model's inputs, ``N x d``.
        untried: Whether no trial has had each of them, ``N`` bools.
        selector: Makes the selector of a model, ``N x d`` candidates and ``M x d`` points, or
            returns the last one for the same arguments.
    """

    pool: Pool
    X: Tensor
    untried: Tensor
    selector: Callable[[StreamingGP, Tensor, Tensor], PoolSelector]


@torch.no_grad()
def best_of(
    acqf: AcquisitionFunction,
    X: Tensor,
    n: int,
    screening: Callable[[], AcquisitionFunction | None],
) -> Tensor:
    """Choose n candidates one after the other, each the best given the earlier ones.

    Of more than ``FINALISTS`` candidates only as many are evaluated where there is a cheaper
    function: half of them the best by the cheaper one, the others drawn at random. So the choice is
    the best of all as far as the two functions agree, and in any case the best of thousands.

    Args:
        acqf: Acquisition function; takes pending points if n > 1, and its own are restored.
        X: Candidates, ``N x d``.
        n: Number of rows of X to return, at most N and ``FINALISTS``.
        screening: Makes the cheaper function; None: there is none.
    """
    cheap = screening() if len(X) > FINALISTS else None
    if cheap is None:
        return _greedy(acqf, X, n)
    order = values(cheap, X).argsort(descending=True)
    best, rest = order[: FINALISTS // 2], order[FINALISTS // 2 :]
    drawn = torch.randperm(len(rest), generator=torch.Generator().manual_seed(0))
    others = rest[drawn[: FINALISTS - len(best)].to(rest.device)]
    rows = torch.cat((best, others)).sort().values
    return rows[_greedy(acqf, X[rows], n)]


def _greedy(acqf: AcquisitionFunction, X: Tensor, n: int) -> Tensor:
    """Choose n rows of X one after the other, with the chosen ones pending."""
    if n == 1:  # also of a function that takes no pending points
        return values(acqf, X).argmax(keepdim=True)
    picks = X.new_empty(0, dtype=torch.long)
    pending = acqf.X_pending
    try:
        for _ in range(n):
            worth = values(acqf, X)
            worth[picks] = -torch.inf
            picks = torch.cat((picks, worth.argmax(keepdim=True)))
            acqf.set_X_pending(X[picks] if pending is None else torch.cat((pending, X[picks])))
    finally:
        acqf.set_X_pending(pending)
    return picks


@torch.no_grad()
def values(acqf: AcquisitionFunction, X: Tensor) -> Tensor:
    """Evaluate an acquisition function at single candidates, ``N x d -> N``."""
    return torch.cat([acqf(chunk.unsqueeze(-2)) for chunk in X.split(_POOL_CHUNK)])
