"""The adapters of streaming strategies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any
from zlib import crc32

import pandas as pd
import torch
from ax.adapter.random import RandomAdapter
from ax.adapter.registry import Cont_X_trans, Generators
from ax.adapter.torch import TorchAdapter
from ax.adapter.transforms.base import Transform
from ax.adapter.transforms.cast import Cast
from ax.adapter.transforms.fill_missing_parameters import FillMissingParameters
from ax.adapter.transforms.standardize_y import StandardizeY
from ax.adapter.transforms.winsorize import Winsorize
from ax.core.arm import Arm
from ax.core.experiment import Experiment
from ax.core.generator_run import GeneratorRun
from ax.core.observation import ObservationFeatures
from ax.core.optimization_config import OptimizationConfig
from ax.core.parameter import ParameterType, RangeParameter
from ax.core.search_space import SearchSpace
from ax.generators.random.sobol import SobolGenerator
from ax.generators.torch.botorch_modular.generator import BoTorchGenerator
from ax.generators.types import TConfig
from ax.utils.common.constants import Keys
from ax.utils.common.random import with_rng_seed
from torch import Tensor

from bo_stream.acquisition import FeatureNIPV
from bo_stream.ax.acquisition import MC_POINTS
from bo_stream.ax.cross_validation import LeavesRowsOut
from bo_stream.ax.model_choice import KeepsRowsOutside
from bo_stream.ax.nipv import INTEGRATED, NUM_MC_POINTS, check_options
from bo_stream.ax.orchestration import AvoidsFailures, Pending
from bo_stream.ax.pool import Pool, pool_named
from bo_stream.ax.pool_acquisition import CHOICES, Choices, KeptSelector
from bo_stream.ax.tables import Table, Tables
from bo_stream.ax.transforms import POOL, FiniteOutcomes


class BringsTables(TorchAdapter):
    """Gives acquisition functions the pool and the integration points that are asked for by name.

    Both are tables in the user's parameters, and transformed once. Of the pool's candidates those
    are left out that any trial of the experiment has had, whatever became of it: one that failed
    or was abandoned would be proposed again at once, as nothing was learned of it. To try one
    again, attach a trial with its parameters.
    """

    @cached_property
    def _tables(self) -> Tables:
        return Tables(self.device)

    @cached_property
    def _selector(self) -> KeptSelector:
        return KeptSelector()

    @cached_property
    def _drawn(self) -> dict[int, tuple[SearchSpace, Pool]]:
        return {}

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
        options: dict[str, Any] = dict(model_gen_options or {})
        given = options.get(Keys.AX_ACQUISITION_KWARGS.value, {})
        own = {**self._choices(pending_observations or {}), **self._mc_points()}
        if own:
            options[Keys.AX_ACQUISITION_KWARGS.value] = {**given, **own}
        return super().gen(
            n=n,
            search_space=search_space,
            optimization_config=optimization_config,
            pending_observations=pending_observations,
            fixed_features=fixed_features,
            model_gen_options=options,
        )

    def _evaluate_acquisition_function(
        self,
        observation_features: list[list[ObservationFeatures]],
        search_space: SearchSpace,
        optimization_config: OptimizationConfig,
        pending_observations: Pending | None = None,
        fixed_features: ObservationFeatures | None = None,
        acq_options: dict[str, Any] | None = None,
    ) -> list[float]:
        return super()._evaluate_acquisition_function(
            observation_features=observation_features,
            search_space=search_space,
            optimization_config=optimization_config,
            pending_observations=pending_observations,
            fixed_features=fixed_features,
            acq_options={**(acq_options or {}), **self._mc_points()},
        )

    @property
    def pool(self) -> Pool | None:
        """What candidates are chosen from, if not from the search space."""
        name = self._modular.acquisition_options.get(POOL)
        return None if name is None else pool_named(str(name))

    @property
    def _modular(self) -> BoTorchGenerator:
        generator = self.generator
        if not isinstance(generator, BoTorchGenerator):
            raise TypeError(f"Expected a BoTorchGenerator, got {type(generator).__name__}.")
        return generator

    def _choices(self, pending: Pending) -> dict[str, Any]:
        """The pool as the acquisition takes it."""
        pool = self.pool
        if pool is None:
            return {}
        table = self._table(pool)
        untried = self._untried(pool, pending)
        return {CHOICES: Choices(pool, table.X, untried, self._selector)}

    def _untried(self, pool: Pool, pending: Pending) -> Tensor:
        """Which candidates no trial has had, ``N`` bools."""
        had = [arm.parameters for arm in self._experiment.arms_by_signature.values()]
        had += [each.parameters for metric in pending.values() for each in metric]
        rows = pool.rows(had)
        untried = torch.ones(len(pool), dtype=torch.bool)
        untried[torch.from_numpy(rows[rows >= 0])] = False
        return untried.to(self.device)

    def _mc_points(self) -> dict[str, Any]:
        """Integration points as the model takes them, where some are asked for or needed."""
        generator = self._modular
        kind, options = generator._botorch_acqf_class, generator._botorch_acqf_options
        if kind is None or not issubclass(kind, INTEGRATED):
            return {}
        check_options(kind, options)
        given, count = options.get(MC_POINTS), options.get("num_mc_points")
        if isinstance(given, str):
            return {MC_POINTS: self._table(pool_named(given)).X}
        if isinstance(given, Tensor):
            return {MC_POINTS: given}
        if self.pool is not None:
            return {MC_POINTS: self._table(self.pool).some(int(count or NUM_MC_POINTS))}
        if count is None and issubclass(kind, FeatureNIPV) and self._is_box:
            return {}
        return {MC_POINTS: self._table(self._points_drawn(int(count or NUM_MC_POINTS))).X}

    @property
    def _is_box(self) -> bool:
        """Whether the search space is a box for the model too."""
        space = self._model_space
        return not space.parameter_constraints and all(
            isinstance(each, RangeParameter) and each.parameter_type is ParameterType.FLOAT
            for each in space.tunable_parameters.values()
        )

    def _points_drawn(self, count: int) -> Pool:
        """Points of the search space, of its constraints too, as Ax draws its Sobol points."""
        known = self._drawn.get(count)
        if known is None or known[0] != self._model_space:
            known = self._drawn[count] = (self._model_space.clone(), self._draw(count))
        return known[1]

    def _draw(self, count: int) -> Pool:
        sobol = Generators.SOBOL(
            experiment=self._experiment,
            search_space=self._model_space,
            seed=0,
            deduplicate=False,
        )
        run = sobol.gen(count)
        counts = zip(run.arms, run.weights, strict=True)
        rows = [arm.parameters for arm, weight in counts for _ in range(round(weight))]
        names = list(self._model_space.tunable_parameters)
        return Pool(f"{count} points of the search space", pd.DataFrame(rows)[names])

    def _table(self, pool: Pool) -> Table:
        return self._tables.get(pool, self._model_space, self._of_inputs, self.parameters)

    def _of_inputs(self) -> Sequence[Transform]:
        """The transforms of parameters; a table's values are cast already."""
        others = (Cast, FillMissingParameters, StandardizeY, Winsorize)
        return [each for each in self.transforms.values() if not isinstance(each, others)]


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
