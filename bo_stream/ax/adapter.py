"""The adapters of streaming strategies."""

from __future__ import annotations

from zlib import crc32

from ax.adapter.random import RandomAdapter
from ax.adapter.registry import Cont_X_trans
from ax.core.arm import Arm
from ax.core.experiment import Experiment
from ax.core.generator_run import GeneratorRun
from ax.core.observation import ObservationFeatures
from ax.core.optimization_config import OptimizationConfig
from ax.core.search_space import SearchSpace
from ax.generators.random.sobol import SobolGenerator
from ax.generators.types import TConfig
from ax.utils.common.random import with_rng_seed

from bo_stream.ax.cross_validation import LeavesRowsOut
from bo_stream.ax.failures import AvoidsFailures, Pending
from bo_stream.ax.finite import FiniteOutcomes
from bo_stream.ax.outside import KeepsRowsOutside
from bo_stream.ax.table_adapter import BringsTables


class QuasiRandomAdapter(AvoidsFailures, RandomAdapter):
    """Ax's adapter of random generators, which draws no failed point again."""


class StreamAdapter(AvoidsFailures, KeepsRowsOutside, LeavesRowsOut, BringsTables):
    """Ax's adapter, which cross-validates in closed form, and chooses from tables.

    A search has the random numbers that belong to the experiment's state, so that one that is
    loaded from storage goes on as it would have: Ax does not store the seed of a client.
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
        """As Ax's; quasi-random points where the model asks for a failed one none the less."""
        with with_rng_seed(seed_of(self._experiment, pending_observations or {})):
            run = super().gen(
                n=n,
                search_space=search_space,
                optimization_config=optimization_config,
                pending_observations=pending_observations,
                fixed_features=fixed_features,
                model_gen_options=model_gen_options,
            )
            failed = {arm.signature for arm in self.failed}
            if all(arm.signature not in failed for arm in run.arms):
                return run
            return self._quasi_random().gen(
                n=n,
                search_space=search_space,
                pending_observations=pending_observations,
                fixed_features=fixed_features,
            )

    @property
    def failed(self) -> list[Arm]:
        """Those of failed trials, and those whose outcome is set aside."""
        config, finite = self._optimization_config, self.transforms.get(FiniteOutcomes.__name__)
        if config is None or not isinstance(finite, FiniteOutcomes):
            return super().failed
        needed, arms = config.metric_names, self._experiment.arms_by_name
        names = {arm for _, arm, metric in finite.set_aside if metric in needed}
        return [*super().failed, *(arms[name] for name in sorted(names))]

    def _quasi_random(self) -> QuasiRandomAdapter:
        return QuasiRandomAdapter(
            experiment=self._experiment,
            generator=SobolGenerator(init_position=len(self._experiment.trials)),
            search_space=self._search_space,
            transforms=Cont_X_trans,
        )


def seed_of(experiment: Experiment, pending: Pending) -> int | None:
    """Seed of the next search; None before any candidate has been proposed.

    The first proposed point stands for the experiment. It was drawn with the client's seed.

    Args:
        experiment: With its trials.
        pending: Points without outcomes, some of which may be no trials yet.
    """
    proposed = (
        arm.parameters
        for trial in experiment.trials.values()
        for run in trial.generator_runs
        if run._generation_node_name is not None
        for arm in run.arms
    )
    first = next(proposed, None)
    if first is None:
        return None
    waiting = max((len(points) for points in pending.values()), default=0)
    return crc32(repr(sorted(first.items())).encode()) + len(experiment.trials) + waiting
