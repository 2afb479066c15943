"""When the first trials are done and models take over."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from ax.core.experiment import Experiment
from ax.core.trial_status import TrialStatus
from ax.generation_strategy.generation_node import GenerationNode
from ax.generation_strategy.transition_criterion import TransitionCriterion
from botorch.exceptions.warnings import InputDataWarning

from bo_stream.ax.model_choice import suited
from bo_stream.ax.tables import num_inputs

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
