"""Points that failed are not proposed again."""

from __future__ import annotations

from ax.adapter.base import Adapter
from ax.core.arm import Arm
from ax.core.experiment import Experiment
from ax.core.generator_run import GeneratorRun
from ax.core.observation import ObservationFeatures
from ax.core.optimization_config import OptimizationConfig
from ax.core.search_space import SearchSpace
from ax.core.trial_status import TrialStatus
from ax.generators.types import TConfig

Pending = dict[str, list[ObservationFeatures]]

REMEMBERED = 64
"""Failed points that are taken as pending, the latest ones; a joint sample has one value each."""


class AvoidsFailures(Adapter):
    """Takes failed points as pending ones.

    Ax forgets them. Where nothing else has come, a deterministic model then proposes a failed point
    again for ever. As pending points they are what a criterion expects an outcome of, so that
    neither they nor their neighbourhood are worth much.
    """

    def gen(
        self,
        n: int,
        search_space: SearchSpace | None = None,
        optimization_config: OptimizationConfig | None = None,
        pending_observations: Pending | None = None,
        fixed_features: ObservationFeatures | None = None,
        model_gen_options: TConfig | None = None,
    ) -> GeneratorRun:
        """As Ax's."""
        return super().gen(
            n=n,
            search_space=search_space,
            optimization_config=optimization_config,
            pending_observations=self._with_failures(pending_observations or {}),
            fixed_features=fixed_features,
            model_gen_options=model_gen_options,
        )

    def _with_failures(self, pending: Pending) -> Pending:
        space = self._search_space
        failed = [arm for arm in self.failed if space.check_membership(arm.parameters)]
        latest = [ObservationFeatures.from_arm(arm) for arm in failed[-REMEMBERED:]]
        if not latest:
            return pending
        metrics = {*self._experiment.metrics, *pending}
        return {metric: [*pending.get(metric, []), *latest] for metric in metrics}

    @property
    def failed(self) -> list[Arm]:
        """Distinct arms of which no outcome is to be expected, in order of their trials."""
        return failed_arms(self._experiment)


def failed_arms(experiment: Experiment) -> list[Arm]:
    """Distinct arms of failed trials that no other trial has evaluated, in order of the trials.

    Ax names equal points alike.
    """
    indices = sorted(experiment.trial_indices_by_status[TrialStatus.FAILED])
    failed = {arm.name: arm for index in indices for arm in experiment.trials[index].arms}
    if failed:
        for trial in experiment.trials_by_status[TrialStatus.COMPLETED]:
            for arm in trial.arms:
                failed.pop(arm.name, None)
    return list(failed.values())
