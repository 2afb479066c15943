"""The first trials of an experiment on a pool."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
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
from ax.core.search_space import SearchSpace
from ax.core.trial_status import TrialStatus
from ax.core.types import TParameterization
from ax.generation_strategy.external_generation_node import ExternalGenerationNode
from ax.generation_strategy.generation_node import GenerationNode
from ax.generation_strategy.transition_criterion import TransitionCriterion
from botorch.exceptions.warnings import InputDataWarning
from torch import Tensor
from torch.quasirandom import SobolEngine

from bo_stream.ax.model_choice import suited
from bo_stream.ax.pool import Pool, pool_named
from bo_stream.ax.pool_acquisition import check_enough
from bo_stream.ax.tables import Tables, input_transforms, num_inputs

WITHOUT_OUTCOME = (TrialStatus.FAILED, TrialStatus.ABANDONED)


class EnoughTrials(TransitionCriterion):
    """Met by enough trials, of which some has reported each metric that is optimised.

    Failed and abandoned trials do not count, as in Ax's default strategy. Candidates that the node
    has proposed and that are no trials yet do count: so a batch ends exactly at the threshold. As
    long as some metric of the objectives and constraints has no finite outcome, the node goes on.
    """

    def __init__(self, threshold: int, transition_to: str) -> None:
        """See the class.

        Args:
            threshold: Number of trials.
            transition_to: Name of the node that takes over.
        """
        super().__init__(transition_to)
        self.threshold = threshold

    def is_met(self, experiment: Experiment, curr_node: GenerationNode) -> bool:
        """Whether the next node takes over.

        Raises:
            UnsupportedError: Before the first trial: the model cannot take the parameters.
        """
        if not experiment.trials:
            _check_model(
                experiment, curr_node.generation_strategy.nodes_by_name[self.transition_to]
            )
        if _trials(experiment) + _proposed(experiment, curr_node) < self.threshold:
            return False
        silent = unreported(experiment)
        if silent and experiment.trial_indices_by_status[TrialStatus.COMPLETED]:
            _warn_of(silent)
        return not silent


def unreported(experiment: Experiment) -> list[str]:
    """Metrics of the objectives and constraints without any finite outcome. Cost O(n)."""
    config = experiment.optimization_config
    if config is None:
        return []
    frame = experiment.lookup_data().df
    if frame.empty:
        return sorted(config.metric_names)
    finite: Any = frame[np.isfinite(frame["mean"].to_numpy(dtype=float))]
    return sorted(config.metric_names - set(finite["metric_name"]))


def _check_model(experiment: Experiment, node: GenerationNode) -> None:
    """Choose a node's model as it will be chosen when there are data."""
    dim = num_inputs(experiment.search_space)
    for spec in node.generator_specs:
        surrogate = spec.generator_kwargs.get("surrogate_spec")
        for config in [] if surrogate is None else surrogate.model_configs:
            suited(config, dim)


def _warn_of(silent: list[str]) -> None:
    values = ", ".join(f"{name!r}: ..." for name in silent)
    warnings.warn(
        f"No completed trial has reported a finite {', '.join(silent)}, and no model can be built "
        f"without: the next trials are quasi-random. Report by client.complete_trial(index, "
        f"{{{values}}}), or see that the metrics that should fetch them do.",
        InputDataWarning,
        stacklevel=2,
    )


def _trials(experiment: Experiment) -> int:
    left_out = sum(len(experiment.trial_indices_by_status[status]) for status in WITHOUT_OUTCOME)
    return len(experiment.trials) - left_out


def _proposed(experiment: Experiment, node: GenerationNode) -> int:
    """Number of the node's candidates that are no trials yet."""
    known = experiment.arms_by_signature
    runs = node.generation_strategy._generator_runs
    return sum(
        run._generation_node_name == node.name
        and any(arm.signature not in known for arm in run.arms)
        for run in runs
    )


@dataclass(init=False)
class PoolStart(ExternalGenerationNode):
    """Proposes the untried candidates nearest to Sobol points, so that they fill the pool's box.

    The k-th proposal belongs to the k-th Sobol point, and k counts the experiment's
    parameterizations: a reloaded experiment goes on with the same ones.

    Attributes:
        pool: Name of the pool.
        trials: How many the experiment has before the next node takes over.
        next_node: Its name.
        seed: Of the Sobol points.
    """

    pool: str
    trials: int
    next_node: str
    seed: int

    def __init__(self, pool: str, trials: int, next_node: str, seed: int) -> None:
        """See the class."""
        super().__init__(
            name="PoolStart",
            should_deduplicate=False,
            transition_criteria=[EnoughTrials(trials, transition_to=next_node)],
        )
        self.pool, self.trials, self.next_node, self.seed = pool, trials, next_node, seed
        self._tables = Tables()
        self._had: list[TParameterization] = []
        self._fixed: TParameterization = {}
        self._space: SearchSpace | None = None
        self._inputs = torch.empty(0, 0)

    def update_generator_state(self, experiment: Experiment, data: Data) -> None:
        """See which candidates the experiment has had."""
        space = experiment.search_space
        table = self._tables.get(pool_named(self.pool), space, lambda: input_transforms(space))
        self._space, self._inputs = space, table.X
        self._had = [arm.parameters for arm in experiment.arms_by_signature.values()]

    def get_next_candidate(self, pending_parameters: list[TParameterization]) -> TParameterization:
        """The untried candidate nearest to the next Sobol point.

        Raises:
            SearchSpaceExhausted: None is left.
        """
        pool = pool_named(self.pool)
        had = [*self._had, *pending_parameters]
        untried = self._untried(pool, had)
        check_enough(1, int(untried.sum()), pool, bool(self._fixed))
        rows = untried.nonzero().squeeze(-1)
        count = len({Arm(parameters=each).signature for each in had})
        return completed(pool.parameters_at(int(rows[self._nearest(rows, count)])), self._space)

    def _gen(  # type: ignore[override]
        self,
        experiment: Experiment,
        data: Data | None = None,
        n: int | None = None,
        pending_observations: dict[str, list[ObservationFeatures]] | None = None,
        **generator_gen_kwargs: Any,
    ) -> GeneratorRun:
        """As Ax's; remembers which parameters are fixed for these trials."""
        fixed: ObservationFeatures | None = generator_gen_kwargs.get("fixed_features")
        self._fixed = {} if fixed is None else fixed.parameters
        return super()._gen(experiment, data, n, pending_observations, **generator_gen_kwargs)

    def _untried(self, pool: Pool, had: Iterable[TParameterization]) -> Tensor:
        rows = pool.rows(list(had))
        untried = np.ones(len(pool), dtype=bool)
        untried[rows[rows >= 0]] = False
        for name, value in self._fixed.items():
            if name in pool.frame:
                untried &= (pool.frame[name] == value).to_numpy()
        return torch.from_numpy(untried)

    def _nearest(self, rows: Tensor, count: int) -> int:
        """Place among rows of the nearest to a Sobol point in the pool's box."""
        X = self._inputs
        low, high = X.amin(0), X.amax(0)
        sobol = SobolEngine(X.shape[-1], scramble=True, seed=self.seed).fast_forward(count)
        target = low + (high - low) * sobol.draw(1, dtype=X.dtype)
        scale = (high - low).clamp_min(torch.finfo(X.dtype).tiny)
        return int(((X[rows] - target) / scale).square().sum(-1).argmin())


def completed(parameters: TParameterization, space: SearchSpace | None) -> TParameterization:
    """With the parameters that a search space fixes or derives, each of its type."""
    features = [ObservationFeatures(parameters=dict(parameters))]
    for transform in (RemoveFixed(search_space=space), Cast(search_space=space)):
        features = transform.untransform_observation_features(features)
    return features[0].parameters
