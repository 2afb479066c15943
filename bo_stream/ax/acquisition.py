"""Ax's acquisition with a baseline of a fixed size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from ax.core.search_space import SearchSpaceDigest
from ax.generators.torch.botorch_modular.acquisition import Acquisition
from ax.generators.torch.botorch_modular.surrogate import Surrogate
from ax.generators.torch.utils import _get_X_pending_and_observed
from ax.generators.torch_base import TorchOptConfig
from botorch.acquisition.acquisition import AcquisitionFunction, OneShotAcquisitionFunction
from botorch.acquisition.multioutput_acquisition import MultiOutputAcquisitionFunction
from botorch.generation.sampling import SamplingStrategy
from botorch.models.model import Model, ModelList
from botorch.models.model_list_gp_regression import ModelListGP
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.utils.multi_objective.pareto import is_non_dominated
from botorch.utils.sampling import draw_sobol_samples, manual_seed
from torch import Tensor

from bo_stream.acquisition import evaluate_known_points_once
from bo_stream.ax.nipv import (
    INTEGRATED,
    chosen_metric,
    integrated_variance,
    model_of_metric,
)
from bo_stream.loops.predictions import predict_mean
from bo_stream.models.base import StreamingGP

ROWS_AT_ONCE = 4096
"""Points that another model predicts at once."""


@torch.no_grad()
def predicted_means(model: Model, X: Tensor) -> Tensor:
    """Posterior means, ``n x d -> n x m``; of streaming models O(r) a point.

    Args:
        model: Of m outputs, or a list of models.
        X: As the model takes them.
    """
    if isinstance(model, ModelList | ModelListGP):
        return torch.cat([predicted_means(cast(Model, part), X) for part in model.models], -1)
    if isinstance(model, StreamingGP) and model.num_outputs == 1:
        return predict_mean(model, X).unsqueeze(-1)
    return torch.cat([_marginal_means(model, chunk) for chunk in X.split(ROWS_AT_ONCE)])


def _marginal_means(model: Model, X: Tensor) -> Tensor:
    posterior = cast(GPyTorchPosterior, model.posterior(X.unsqueeze(-2)))
    return posterior.mean.squeeze(-2)


def best_observed(
    surrogate: Surrogate, digest: SearchSpaceDigest, config: TorchOptConfig
) -> Tensor | None:
    """The observed point of the best posterior mean, ``d``, or None where none is feasible.

    Args:
        surrogate: The fitted models.
        digest: Bounds of the search space.
        config: One objective, outcome constraints, constraints on parameters.
    """
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


CHUNK = {"init_batch_limit": 128}
"""How many of these the acquisition function is given at once; Ax's 32 take twice the time."""

ONCE = {"retry_on_optimization_warning": False}
"""A search of many starts is not repeated because the line search of one ended by rounding. BoTorch
does repeat it and warns: 18 and 40 times in a noisy campaign of 65 trials, ours and Ax's default.
"""

NEAREST, FARTHEST = 1e-3, 0.3
"""Standard deviations of the points near a leader, in widths of the search space."""

OTHERS = (OneShotAcquisitionFunction, MultiOutputAcquisitionFunction, *INTEGRATED)
"""Searched from points of their own, by another search, or not for the best outcome."""

Generator = Callable[[int, int, int | None], Tensor]


def with_starts(options: dict[str, Any], bounds: Tensor, leaders: Tensor) -> dict[str, Any]:
    """Options of ``optimize_acqf`` by which half of the starting points are near the leaders.

    Where the observed points leave little to gain, the maximum of an acquisition function is a
    narrow peak beside the best of them. Random points miss it: of eight searches among 27 points of
    Hartmann-6 by 1,024 of them, four to five end at a corner instead, and none with these.

    Args:
        options: As a user gave them; they hold.
        bounds: Of the search space, ``2 x d``.
        leaders: The best of the observed points, ``k x d``.
    """
    inner = {**CHUNK, **options.get("options", {})}
    return {**ONCE, **options, "options": inner, "generator": near_and_far(bounds, leaders)}


def near_and_far(bounds: Tensor, leaders: Tensor) -> Generator:
    """What draws ``n x q x d`` points: half of a Sobol sequence, half near the leaders.

    Each of the latter is a leader with normal noise, of a standard deviation whose logarithm is
    uniform between ``NEAREST`` and ``FARTHEST``, moved to the nearest point of the box.

    Args:
        bounds: Of the box, ``2 x d``.
        leaders: ``k x d``, k > 0.
    """
    low, high = bounds = bounds.cpu()
    leaders = leaders.cpu().to(bounds)

    def draw(n: int, q: int, seed: int | None) -> Tensor:
        far = draw_sobol_samples(bounds, n - n // 2, q, seed=seed)
        with manual_seed(seed):
            chosen = leaders[torch.randint(len(leaders), (n // 2, q))]
            exponent = torch.rand(n // 2, q, 1, dtype=bounds.dtype)
            noise = torch.randn(chosen.shape, dtype=bounds.dtype)
        scale = NEAREST * (FARTHEST / NEAREST) ** exponent
        near = chosen + scale * (high - low) * noise
        return torch.cat((far, torch.clamp(near, low, high)))

    return draw


def takes_starts(acqf: AcquisitionFunction, digest: SearchSpaceDigest) -> bool:
    """Whether ``optimize_acqf`` searches for the best outcome, so that leaders are of use to it.

    Args:
        acqf: To be maximised.
        digest: Of the search space.
    """
    return not (digest.ordinal_features or digest.categorical_features or isinstance(acqf, OTHERS))


MC_POINTS = "mc_points"
"""Option of an acquisition, set by the adapter at each trial: points as the model takes them."""

BASELINE = 100
"""Observed points that an acquisition function compares with."""

LEADERS = 5
"""As many of the best observed points are near starts of a search."""


class StreamAcquisition(Acquisition):
    """Ax's acquisition, in which noisy criteria compare with the most promising points only.

    ``qLogNoisyExpectedImprovement`` and its kind draw joint samples at the baseline, O(n³) at all
    observed points. Here it is the best ``BASELINE`` of them by posterior mean, O(n) to find: those
    that no other dominates first, then the best of each objective; a point whose means break an
    outcome constraint comes after all that do not. A search starts near the first of them, too.

    Attributes:
        config: What it was made for.
        best: The feasible observed point of the best posterior mean, ``d``, on the CPU, or None.
        leaders: The first of the baseline, at most ``LEADERS x d``, or None.
    """

    config: TorchOptConfig | None = None
    best: Tensor | None = None
    leaders: Tensor | None = None

    def _update_objective_thresholds(self, torch_opt_config: TorchOptConfig) -> None:
        """Thin the baseline, which Ax has just found, before anything is done with it."""
        self.config = torch_opt_config
        if self.X_observed is not None:
            self._rank(self.X_observed)
        super()._update_objective_thresholds(torch_opt_config)

    def _rank(self, X: Tensor) -> None:
        """Find the best of the observed points, ``n x d``, and keep ``BASELINE`` of them."""
        weights, constraints = self._objective_weights, self._outcome_constraints
        chosen, self.best = ranked(self._model, X, weights, constraints)
        self.leaders = chosen[:LEADERS]
        if len(X) > BASELINE:
            self.X_observed = chosen

    def optimize(
        self,
        n: int,
        search_space_digest: SearchSpaceDigest,
        inequality_constraints: list[tuple[Tensor, Tensor, float]] | None = None,
        equality_constraints: list[tuple[Tensor, Tensor, float]] | None = None,
        fixed_features: dict[int, float] | None = None,
        rounding_func: Callable[[Tensor], Tensor] | None = None,
        optimizer_options: dict[str, Any] | None = None,
        candidate_set: Tensor | None = None,
        sampling_strategy: SamplingStrategy | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As Ax's; see :func:`with_starts`. Linear constraints have Ax's own starts."""
        options, digest = optimizer_options or {}, search_space_digest
        free = not (inequality_constraints or equality_constraints)
        if free and self.leaders is not None and takes_starts(self.acqf, digest):
            bounds = self.leaders.new_tensor(digest.bounds).mT
            options = with_starts(options, bounds, self.leaders)
        return super().optimize(
            n=n,
            search_space_digest=digest,
            inequality_constraints=inequality_constraints,
            equality_constraints=equality_constraints,
            fixed_features=fixed_features,
            rounding_func=rounding_func,
            optimizer_options=options,
            candidate_set=candidate_set,
            sampling_strategy=sampling_strategy,
        )

    def _construct_botorch_acquisition(
        self,
        botorch_acqf_class: type[AcquisitionFunction],
        botorch_acqf_options: dict[str, Any],
        model: Model,
    ) -> AcquisitionFunction:
        """As Ax's; a baseline is evaluated once, an integrated variance is of one metric."""
        if not issubclass(botorch_acqf_class, INTEGRATED):
            acqf = super()._construct_botorch_acquisition(
                botorch_acqf_class, botorch_acqf_options, model
            )
            return evaluate_known_points_once(acqf)
        metrics, given = self.surrogate.outcomes, botorch_acqf_options.get("metric")
        chosen = chosen_metric(botorch_acqf_class, given, metrics, self._objectives)
        return integrated_variance(
            botorch_acqf_class,
            model_of_metric(self.surrogate.model, metrics, chosen),
            self.search_space_digest.bounds,
            self.options.get(MC_POINTS),
            self.X_pending,
        )

    @property
    def _objectives(self) -> list[str]:
        """Names of the metrics that are optimised."""
        used = (self._full_objective_weights != 0.0).any(0).tolist()
        return [
            name for name, is_used in zip(self.surrogate.outcomes, used, strict=True) if is_used
        ]


def ranked(
    model: Model, X: Tensor, weights: Tensor, constraints: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor | None]:
    """The ``BASELINE`` most promising of observed points, and the best one if it is feasible.

    Args:
        model: Of m outcomes.
        X: ``n x d``.
        weights: Of the outcomes in k objectives, ``k x m``.
        constraints: See :func:`violation_of`.

    Returns:
        At most ``BASELINE x d``, and ``d`` on the CPU or None.
    """
    means = predicted_means(model, X)
    violation = violation_of(means, constraints)
    values = means @ weights.to(means).mT
    chosen = most_promising(values, violation, min(BASELINE, len(X)))
    first = chosen[0]
    return X[chosen], X[first].cpu() if bool(violation[first] == 0.0) else None


def most_promising(values: Tensor, violation: Tensor, count: int) -> Tensor:
    """Indices of points, the best first; see :class:`StreamAcquisition`. Cost O(n log n) and more.

    Args:
        values: Objectives, all to be maximised, ``n x k``.
        violation: Of constraints, ``n``; 0: none.
        count: How many points, at most n.
    """
    feasible = violation == 0.0
    ranks = values.argsort(0, descending=True).argsort(0).amin(-1)
    ranks[feasible & _non_dominated(values, feasible)] = -1
    least = violation.argsort().argsort()
    order = torch.where(feasible, ranks, len(values) + least)
    return order.argsort(stable=True)[:count]


def violation_of(means: Tensor, constraints: tuple[Tensor, Tensor] | None) -> Tensor:
    """By how much outcomes break ``A f <= b``, ``n``; 0: not at all.

    Args:
        means: ``n x m``.
        constraints: A, ``k x m``, and b, ``k x 1``.
    """
    if constraints is None:
        return means.new_zeros(len(means))
    A, b = (part.to(means) for part in constraints)
    return (means @ A.mT - b.mT).clamp_min(0.0).sum(-1)


def _non_dominated(values: Tensor, feasible: Tensor) -> Tensor:
    best = torch.zeros_like(feasible)
    best[feasible] = is_non_dominated(values[feasible])
    return best
