"""The first trials of an experiment, and which search comes after them.

:class:`EnoughTrials` ends them on any search space, :class:`PoolStart` proposes them from a pool,
and :class:`RegionSuits` decides whether a region is searched.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from ax.adapter.transforms.cast import Cast
from ax.adapter.transforms.remove_fixed import RemoveFixed
from ax.core.arm import Arm
from ax.core.data import Data
from ax.core.experiment import Experiment
from ax.core.generator_run import GeneratorRun
from ax.core.observation import ObservationFeatures
from ax.core.parameter import ChoiceParameter
from ax.core.search_space import SearchSpace
from ax.core.trial_status import TrialStatus
from ax.core.types import TParameterization
from ax.generation_strategy.external_generation_node import ExternalGenerationNode
from ax.generation_strategy.generation_node import GenerationNode
from ax.generation_strategy.transition_criterion import TransitionCriterion
from botorch.exceptions.errors import UnsupportedError
from botorch.exceptions.warnings import InputDataWarning
from torch.quasirandom import SobolEngine

from bo_stream.ax.pool import Tables, check_enough, input_transforms, pool_named
from bo_stream.ax.surrogate import suited
from bo_stream.ax.transforms import how_to_report
from bo_stream.models.base import StreamingGP

logger = logging.getLogger("bo_stream.ax")

SEARCHES = ("box", "region")
"""Names of the searches: of the whole space, or of a trust region in it."""

MOST_IN_WHOLE_SPACE = 10
"""Most parameters of which the whole space is searched unless a region is named."""

_WITHOUT_OUTCOME = (TrialStatus.FAILED, TrialStatus.ABANDONED)


def why_not_a_region(experiment: Experiment) -> str | None:
    """Return the reason why an experiment's search cannot be of a region; None: it can."""
    space, config = experiment.search_space, experiment.optimization_config
    parameters = space.parameters.items()
    unordered = [n for n, p in parameters if isinstance(p, ChoiceParameter) and not p.is_ordered]
    others = [n for n, p in parameters if p.is_fidelity or getattr(p, "is_task", False)]
    if space.is_hierarchical:
        return "the search space is hierarchical"
    if unordered:
        return f"there are unordered choices, {', '.join(unordered)}"
    if others:
        return f"there are fidelity or task parameters, {', '.join(others)}"
    if any(constraint.is_equality for constraint in space.parameter_constraints):
        return "there is an equality constraint of parameters"
    if config is None:
        return "there is no objective"
    if not config.objective.is_single_objective or config.is_bope_problem:
        return "the objective is not one metric"
    if config.outcome_constraints:
        return "there are constraints of outcomes"
    return None


def is_for_region(experiment: Experiment, named: bool) -> bool:
    """Return whether the search is of a region: if it is named, in any number of parameters."""
    many = named or len(experiment.search_space.tunable_parameters) > MOST_IN_WHOLE_SPACE
    return many and why_not_a_region(experiment) is None


class RegionSuits(TransitionCriterion):
    """A criterion met where a region is searched, or where it is not.

    A region is searched in more than ``MOST_IN_WHOLE_SPACE`` parameters that have an order, for one
    objective without constraints of outcomes.
    """

    def __init__(self, transition_to: str, suits: bool = True, named: bool = False) -> None:
        """Choose what is met.

        Args:
            transition_to: Name of the node that takes over.
            suits: Whether it does where a region is searched, or where it is not.
            named: Whether the user has named the region: then any number of parameters will do.
        """
        super().__init__(transition_to)
        self.suits, self.named = suits, named
        self._said = ""

    def is_met(self, experiment: Experiment, curr_node: GenerationNode) -> bool:
        """Return whether the next node may take over.

        Overrides ``TransitionCriterion.is_met``, which is abstract.

        Raises:
            UnsupportedError: The user has named the region, and it does not suit.
        """
        count = len(experiment.search_space.tunable_parameters)
        reason = why_not_a_region(experiment)
        if self.named and reason is not None:
            raise UnsupportedError(
                f"A region cannot be searched here: {reason}. Leave search='region' out."
            )
        many = self.named or count > MOST_IN_WHOLE_SPACE
        kind = "a region" if reason is None else f"the whole space, as {reason}"
        if many and self.suits and kind != self._said:
            self._said = kind
            logger.info("%d parameters: the search is of %s.", count, kind)
        return (many and reason is None) == self.suits


class EnoughTrials(TransitionCriterion):
    """A criterion met by enough trials, and a report of each metric that is optimised.

    Failed and abandoned trials do not count, as in Ax's default strategy. Candidates that the node
    has proposed and that are no trials yet do count: so a batch ends exactly at the threshold. As
    long as some metric of the objectives and constraints has no finite outcome, the node goes on.
    """

    def __init__(self, transition_to: str, threshold: int | None = None) -> None:
        """Set when it is met.

        Args:
            transition_to: Name of the node that takes over.
            threshold: Number of trials; None: twice the number p of parameters in up to 20, else
                the larger of 40 and p, which leaves more of a few hundred trials to a region.
        """
        super().__init__(transition_to)
        self.threshold = threshold

    def is_met(self, experiment: Experiment, curr_node: GenerationNode) -> bool:
        """Return whether the next node takes over.

        Overrides ``TransitionCriterion.is_met``, which is abstract. Before the first trial it
        checks the next node's models. Cost O(n).

        Raises:
            UnsupportedError: Before the first trial: a model cannot take the parameters, which are
                too many for a grid, or of which one is a fidelity.
        """
        strategy = curr_node.generation_strategy
        if not experiment.trials:
            specs = strategy.nodes_by_name[self.transition_to].generator_specs
            surrogates = [spec.generator_kwargs.get("surrogate_spec") for spec in specs]
            space = experiment.search_space
            fidelities = [name for name, each in space.parameters.items() if each.is_fidelity]
            for config in (each for spec in surrogates if spec for each in spec.model_configs):
                kind = config.botorch_model_class
                if fidelities and kind is not None and issubclass(kind, StreamingGP):
                    raise UnsupportedError(
                        f"{kind.__name__} takes no fidelity parameters, got "
                        f"{', '.join(fidelities)}. Leave is_fidelity out, and pass its value as "
                        "one of fixed_parameters where it is given."
                    )
                suited(config, len(input_transforms(space)[1].parameters))
        statuses = experiment.trial_indices_by_status
        counted = len(experiment.trials) - sum(len(statuses[each]) for each in _WITHOUT_OUTCOME)
        known = experiment.arms_by_signature
        proposed = sum(
            run._generation_node_name == curr_node.name
            and any(arm.signature not in known for arm in run.arms)
            for run in strategy._generator_runs
        )
        threshold = self.threshold
        if threshold is None:
            parameters = len(experiment.search_space.tunable_parameters)
            threshold = min(2 * parameters, max(40, parameters))
        if counted + proposed < threshold:
            return False
        config, frame = experiment.optimization_config, experiment.lookup_data().df
        silent = [] if config is None else sorted(config.metric_names)
        if not frame.empty:
            finite = set(frame["metric_name"][np.isfinite(frame["mean"].to_numpy(dtype=float))])
            silent = [name for name in silent if name not in finite]
        if silent and statuses[TrialStatus.COMPLETED]:
            warnings.warn(
                f"No completed trial has reported a finite {', '.join(silent)}, and no model can "
                f"be built without: the next trials are quasi-random. {how_to_report(silent)}",
                InputDataWarning,
                stacklevel=2,
            )
        return not silent


@dataclass(init=False)
class PoolStart(ExternalGenerationNode):
    """A node of Ax that proposes the untried candidates of a pool nearest to Sobol points.

    So they fill the pool's box. The k-th proposal belongs to the k-th Sobol point, and k counts the
    experiment's parameterizations: a reloaded experiment goes on with the same ones.

    Attributes:
        pool: Name of the pool.
        trials: Number of trials that the experiment has before the next node takes over.
        next_node: Name of that node.
        seed: Seed of the Sobol points.
    """

    pool: str
    trials: int
    next_node: str
    seed: int

    def __init__(self, pool: str, trials: int, next_node: str, seed: int) -> None:
        """Make a node; see the class."""
        super().__init__(
            name="PoolStart",
            should_deduplicate=False,
            transition_criteria=[EnoughTrials(next_node, trials)],
        )
        self.pool, self.trials, self.next_node, self.seed = pool, trials, next_node, seed
        self._tables = Tables()
        self._had: list[TParameterization] = []
        self._fixed: TParameterization = {}
        self._space: SearchSpace | None = None
        self._inputs = torch.empty(0, 0)

    def update_generator_state(self, experiment: Experiment, data: Data) -> None:
        """Note the parameterizations of the experiment.

        Overrides ``ExternalGenerationNode.update_generator_state``, which is abstract.
        """
        space = experiment.search_space
        transforms, _ = input_transforms(space)
        self._space = space
        self._inputs = self._tables.get(pool_named(self.pool), space, transforms).X
        self._had = [arm.parameters for arm in experiment.arms_by_signature.values()]

    def get_next_candidate(self, pending_parameters: list[TParameterization]) -> TParameterization:
        """Return the untried candidate nearest to the next Sobol point.

        Overrides ``ExternalGenerationNode.get_next_candidate``, which is abstract.

        Raises:
            SearchSpaceExhausted: None is left.
        """
        pool = pool_named(self.pool)
        had = [*self._had, *pending_parameters]
        untried = pool.untried(had)
        for name, value in self._fixed.items():
            if name in pool.frame:
                untried &= (pool.frame[name] == value).to_numpy()
        check_enough(1, int(untried.sum()), pool, bool(self._fixed))
        rows = torch.from_numpy(np.flatnonzero(untried))
        count = len({Arm(parameters=each).signature for each in had})
        X = self._inputs
        low, high = X.amin(0), X.amax(0)
        sobol = SobolEngine(X.shape[-1], scramble=True, seed=self.seed).fast_forward(count)
        target = low + (high - low) * sobol.draw(1, dtype=X.dtype)
        scale = (high - low).clamp_min(torch.finfo(X.dtype).tiny)
        nearest = int(((X[rows] - target) / scale).square().sum(-1).argmin())
        features = [ObservationFeatures(pool.parameters_at(int(rows[nearest])))]
        # add the parameters that the search space fixes or derives, and cast each to its type
        for transform in (RemoveFixed(search_space=self._space), Cast(search_space=self._space)):
            features = transform.untransform_observation_features(features)
        return features[0].parameters

    def _gen(self, *args: Any, **given: Any) -> GeneratorRun:
        """Propose candidates.

        Overrides ``ExternalGenerationNode._gen``, which drops the parameters that are fixed for
        these trials.
        """
        fixed: ObservationFeatures | None = given.get("fixed_features")
        self._fixed = {} if fixed is None else fixed.parameters
        return super()._gen(*args, **given)
