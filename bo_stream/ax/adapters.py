"""Ax's adapters for streaming models.

An adapter of Ax stands between an experiment and a generator: it transforms data on the way in and
candidates on the way out.
"""

from __future__ import annotations

import itertools
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from typing import Any, cast
from zlib import crc32

import numpy as np
import pandas as pd
import torch
from ax.adapter.adapter_utils import transform_callback
from ax.adapter.base import Adapter, GenResults
from ax.adapter.data_utils import ExperimentData
from ax.adapter.random import RandomAdapter
from ax.adapter.registry import Cont_X_trans, Generators
from ax.adapter.transforms.cast import Cast
from ax.adapter.transforms.fill_missing_parameters import FillMissingParameters
from ax.adapter.transforms.standardize_y import StandardizeY
from ax.adapter.transforms.winsorize import Winsorize
from ax.core.arm import Arm
from ax.core.experiment import Experiment
from ax.core.generator_run import GeneratorRun
from ax.core.observation import ObservationFeatures
from ax.core.optimization_config import OptimizationConfig
from ax.core.parameter import DerivedParameter, ParameterType, RangeParameter
from ax.core.search_space import SearchSpace
from ax.core.trial_status import TrialStatus
from ax.core.types import TParameterization
from ax.exceptions.core import (
    SearchSpaceExhausted,
    UnsupportedError,
    UserInputError,
)
from ax.generators.random.sobol import SobolGenerator
from ax.generators.torch.botorch_modular.generator import BoTorchGenerator
from ax.generators.types import TConfig
from ax.utils.common.constants import Keys
from ax.utils.common.random import with_rng_seed
from botorch.exceptions.warnings import InputDataWarning
from torch import Tensor

from bo_stream.acquisition import FeatureNIPV, PoolSelector
from bo_stream.ax.acquisition import CHOICES, INTEGRATED, NUM_MC_POINTS, Choices, check_options
from bo_stream.ax.cross_validation import CrossValidatingAdapter
from bo_stream.ax.initialization import is_for_region
from bo_stream.ax.pool import (
    MC_POINTS,
    POOL,
    Pool,
    Table,
    Tables,
    pool_named,
)
from bo_stream.ax.transforms import FiniteOutcomes
from bo_stream.errors import plain
from bo_stream.models.base import StreamingGP

Pending = dict[str, list[ObservationFeatures]]

_REMEMBERED = 64
"""Failed points that are taken as pending, the latest ones; a joint sample has one value each."""


class AvoidsFailures(Adapter):
    """An adapter that takes failed points as pending ones.

    Ax forgets them. Without other outcomes, a deterministic model then proposes a failed point
    again for ever. A criterion expects outcomes at pending points, so that neither they nor their
    neighbourhood are worth much.
    """

    def gen(  # Ax leaves out the arguments that the signature does not name
        self,
        n: int,
        search_space: SearchSpace | None = None,
        optimization_config: OptimizationConfig | None = None,
        pending_observations: Pending | None = None,
        fixed_features: ObservationFeatures | None = None,
        model_gen_options: TConfig | None = None,
    ) -> GeneratorRun:
        """Generate candidates; overrides ``Adapter.gen`` to add failed points to pending ones.

        Raises:
            UserInputError: A parameter is fixed at a value outside of the search space.
        """
        pending, space = pending_observations or {}, self._search_space
        fixed_features = fixed_in(space if search_space is None else search_space, fixed_features)
        failed = [arm for arm in self.failed if space.check_membership(arm.parameters)]
        latest = failed[-_REMEMBERED:]
        if latest:  # each metric has its own, which the transforms change in place
            pending = {
                metric: [*pending.get(metric, []), *map(ObservationFeatures.from_arm, latest)]
                for metric in {*self._experiment.metrics, *pending}
            }
        return super().gen(
            n, search_space, optimization_config, pending, fixed_features, model_gen_options
        )

    @property
    def failed(self) -> list[Arm]:
        """Return distinct arms without an outcome to be expected.

        First the arms of failed trials that no other trial has evaluated, in order of the trials,
        then arms with an infinite outcome of a metric that is optimised. Ax names equal points
        alike.
        """
        experiment, config = self._experiment, self._optimization_config
        indices = sorted(experiment.trial_indices_by_status[TrialStatus.FAILED])
        failed = {arm.name: arm for index in indices for arm in experiment.trials[index].arms}
        if failed:
            for trial in experiment.trials_by_status[TrialStatus.COMPLETED]:
                for arm in trial.arms:
                    failed.pop(arm.name, None)
        infinite, finite = set(), self.transforms.get(FiniteOutcomes.__name__)
        if config is not None and isinstance(finite, FiniteOutcomes):
            needed = config.metric_names
            infinite = {arm for _, arm, metric in finite.set_aside if metric in needed}
        return [*failed.values(), *(experiment.arms_by_name[name] for name in sorted(infinite))]


MOST_LISTED = 5_000
"""Points of a finite search space up to which they are listed, to propose one of the last ones."""

FEW_LEFT = 0.1
"""Share of the points below which those left are listed: Ax would draw up to ten thousand."""


MIDDLE = "middle"
"""Option of a call: whether the user has named the region. Where there is such an option, and a
region is searched, the first trial of an experiment is the middle of the space."""


class QuasiRandomAdapter(AvoidsFailures, RandomAdapter):
    """Ax's adapter of random generators, which draws no failed point again.

    Where few points of a finite search space are left it proposes one of them.
    """

    def _gen(self, *args: Any, **given: Any) -> GenResults:
        """Generate candidates; overrides ``RandomAdapter._gen`` for the middle of the space.

        It stands for the first candidate, unless constraints of parameters forbid it. All arguments
        are named.
        """
        results = super()._gen(*args, **given)
        named = (given["model_gen_options"] or {}).get(MIDDLE)
        is_first = not self._experiment.trials and not arms_of(given["pending_observations"])
        if is_first and named is not None and is_for_region(self._experiment, named):
            space, fixed = given["search_space"], given["fixed_features"]
            middle = space.compute_naive_center() | (fixed.parameters if fixed else {})
            rounded = transform_callback(self.parameters, self.transforms)
            values = rounded(np.array([middle[name] for name in self.parameters]))
            middle = dict(zip(self.parameters, values.tolist(), strict=True))
            points = results.observation_features
            if middle in (point.parameters for point in points):  # it only comes first
                points.sort(key=lambda point: point.parameters != middle)
            elif space.check_membership(middle):
                points[0].parameters.update(middle)
        return results

    def gen(
        self,
        n: int,
        search_space: SearchSpace | None = None,
        optimization_config: OptimizationConfig | None = None,
        pending_observations: Pending | None = None,
        fixed_features: ObservationFeatures | None = None,
        model_gen_options: TConfig | None = None,
    ) -> GeneratorRun:
        """Generate candidates; overrides ``Adapter.gen`` for finite search spaces.

        Raises:
            SearchSpaceExhausted: Fewer points are left than are asked for.
            UserInputError: A parameter is fixed at a value outside of the search space.
        """
        pending: Pending = pending_observations or {}
        space = self._search_space if search_space is None else search_space
        fixed_features = fixed_in(space, fixed_features)
        fixed = {} if fixed_features is None else fixed_features.parameters
        cardinality = math.prod(
            each.cardinality()
            for name, each in space.tunable_parameters.items()
            if name not in fixed
        )
        if math.isfinite(cardinality) and not space.is_hierarchical:
            count = int(cardinality)
            known = self._experiment.arms_by_signature
            waiting = {arm.signature: arm for arm in arms_of(pending) if arm.signature not in known}
            proposed = {
                signature
                for signature, arm in (known | waiting).items()
                if space.check_membership(arm.parameters)
                and all(arm.parameters.get(name, value) == value for name, value in fixed.items())
            }
            few = FEW_LEFT * count
            total, left = count, count - len(proposed)
            points = list[Arm]()
            narrowed = bool(space.parameter_constraints) or bool(fixed)
            if count <= MOST_LISTED and (narrowed or left <= few):
                listed = points_of(space, fixed)
                points = [arm for arm in listed if arm.signature not in proposed]
                total, left = len(listed), len(points)
            if left < n:
                now = len(proposed.intersection(waiting))
                also = f", {now} of them for this call: ask for fewer" if now else ""
                where = "the search space" + (" with the fixed parameters" if fixed else "")
                raise SearchSpaceExhausted(
                    f"All {total} points of {where} have been proposed{also}. To evaluate one "
                    "again, attach a trial with its parameters."
                    if left <= 0
                    else f"{left} of {total} points of {where} are left, and {n} were asked for."
                )
            if points and left <= few:
                order = torch.randperm(left, generator=torch.Generator().manual_seed(left))
                return GeneratorRun([points[i] for i in order[:n].tolist()])
        return super().gen(
            n, search_space, optimization_config, pending, fixed_features, model_gen_options
        )


def arms_of(pending: Pending) -> list[Arm]:
    """List pending points of all metrics as arms."""
    return [Arm(each.parameters) for points in pending.values() for each in points]


def fixed_in(
    space: SearchSpace, features: ObservationFeatures | None
) -> ObservationFeatures | None:
    """Return fixed parameters with values of the parameters' types.

    Raises:
        UserInputError: A value is not in the search space. Ax would move some to the nearest one.
    """
    if features is None:
        return None
    values, tunable = dict(features.parameters), space.tunable_parameters
    for name, given in features.parameters.items():
        if name not in tunable:
            continue
        parameter, value = tunable[name], plain(given)
        is_nan = isinstance(value, float) and math.isnan(value)
        try:
            own = parameter.cast(value)
            is_cut = parameter.python_type in (int, bool) and own != value
            is_in = parameter.validate(own) and not (is_cut or is_nan)
        except (TypeError, ValueError, OverflowError, UnsupportedError):
            is_in = False
        if not is_in:
            raise UserInputError(
                f"Expected the fixed parameter {name} to be in {parameter.domain_repr}, of type "
                f"{parameter.python_type.__name__}, got {given!r}."
            )
        values[name] = own
    return features.clone(values)


def points_of(space: SearchSpace, fixed: Mapping[str, Any]) -> list[Arm]:
    """List all points of a finite search space that have some parameters, and keep constraints."""
    values = {
        name: [fixed[name]]
        if name in fixed
        else list(range(int(each.lower), int(each.upper) + 1))
        if isinstance(each, RangeParameter)
        else each.values
        for name, each in space.tunable_parameters.items()
    }
    points = []
    for row in itertools.product(*values.values()):
        point: TParameterization = dict(zip(values, row, strict=True))
        for name, other in space.nontunable_parameters.items():
            if isinstance(other, DerivedParameter):
                point[name] = other.compute(parameters=point)
            else:
                point[name] = other.value
        if space.check_membership(point):
            points.append(Arm(point))
    return points


class ReproducibleAdapter(AvoidsFailures, CrossValidatingAdapter, ABC):
    """An adapter whose candidates depend on the experiment's state, and repeat no other point.

    A search has random numbers that belong to that state, so that an experiment loaded from storage
    goes on as it would have: Ax does not store the seed of a client. A model that depends on the
    batches in which outcomes came (``HeteroscedasticWISKI``, ``LocalGP``, ``OSVGP``, ``QSGP``,
    ``QSRVM``, ``DecoupledGP``) is then another one, for it is given all at once.
    """

    @abstractmethod
    def _options_of_generator(self, pending: Pending) -> dict[str, Any]:
        """Return arguments for the acquisition function, besides those that Ax gives."""

    def gen(
        self,
        n: int,
        search_space: SearchSpace | None = None,
        optimization_config: OptimizationConfig | None = None,
        pending_observations: Pending | None = None,
        fixed_features: ObservationFeatures | None = None,
        model_gen_options: TConfig | None = None,
    ) -> GeneratorRun:
        """Generate candidates; overrides ``Adapter.gen`` for reproducible searches.

        Quasi-random points replace a point that failed, or that the experiment has already: Ax's
        default strategy does not propose a point twice. It searches five times before, which here
        would give the same five times.

        Raises:
            SearchSpaceExhausted: Fewer points of a finite search space are left than are asked for.
        """
        pending: Pending = pending_observations or {}
        options: dict[str, Any] = dict(model_gen_options or {})
        with with_rng_seed(seed_of(self._experiment, pending)):
            own = self._options_of_generator(pending)
            if own:
                key = Keys.AX_ACQUISITION_KWARGS.value
                options[key] = {**options.get(key, {}), **own}
            run = super().gen(
                n, search_space, optimization_config, pending, fixed_features, options
            )
            known = self._experiment.arms_by_signature_for_deduplication
            others = {arm.signature for arm in (*self.failed, *arms_of(pending))}
            if not any(arm.signature in known or arm.signature in others for arm in run.arms):
                return run
            quasi_random = QuasiRandomAdapter(
                experiment=self._experiment,
                generator=SobolGenerator(init_position=len(self._experiment.trials)),
                search_space=self._search_space,
                transforms=Cont_X_trans,
            )
            return quasi_random.gen(n, search_space, None, pending, fixed_features)


class StreamAdapter(ReproducibleAdapter):
    """Ax's adapter of BoTorch models, for models that stream and candidates from tables.

    Acquisition functions get the pool and the integration points that are requested by name. The
    pool's candidates that any trial has had are left out, failed and abandoned ones too: these
    would be proposed again at once. To try one again, attach a trial with its parameters.
    """

    _drawn: tuple[SearchSpace, Pool] | None = None

    def _options_of_generator(self, pending: Pending) -> dict[str, Any]:
        """Return the pool's candidates that are left, and the integration points."""
        own, pool = dict[str, Any](), self.pool
        if pool is not None:
            had = [arm.parameters for arm in self._experiment.arms_by_signature.values()]
            had += [each.parameters for metric in pending.values() for each in metric]
            untried = torch.from_numpy(pool.untried(had)).to(self.device)
            own[CHOICES] = Choices(pool, self._table(pool).X, untried, self._selector)
        return own | self._mc_points()

    def _evaluate_acquisition_function(self, *args: Any, **kwargs: Any) -> list[float]:
        """Evaluate an acquisition function at points.

        Overrides ``TorchAdapter._evaluate_acquisition_function`` to add the integration points.
        """
        kwargs["acq_options"] = {**(kwargs.get("acq_options") or {}), **self._mc_points()}
        return super()._evaluate_acquisition_function(*args, **kwargs)

    def _compute_in_design(
        self, search_space: SearchSpace, experiment_data: ExperimentData
    ) -> list[bool]:
        """Return which observations the model is given.

        Overrides ``Adapter._compute_in_design``, which drops observations outside the search space
        unless Ax widens the model's space, and with it the units of the inputs, so that each such
        row would build a new model. Here they stay, outside the unit cube. Observations that the
        transforms cannot take, such as another value of a choice or a negative one on a logarithmic
        scale, are left out with a warning.
        """
        arms, wide = experiment_data.arm_data, search_space.clone()
        for name, parameter in wide.parameters.items():
            if isinstance(parameter, RangeParameter) and name in arms:
                least = 0.0 if parameter.log_scale or parameter.logit_scale else -math.inf
                most = 1.0 if parameter.logit_scale else math.inf
                usable = [value for value in arms[name].dropna().tolist() if least < value < most]
                if usable:
                    parameter.update_range(
                        lower=cast(float, min(parameter.lower, *usable)),
                        upper=cast(float, max(parameter.upper, *usable)),
                    )
        wide.set_parameter_constraints([])
        taken = super()._compute_in_design(wide, experiment_data)
        if not all(taken):
            trials = arms.index.get_level_values("trial_index")
            left_out = {int(trial) for trial, is_in in zip(trials, taken, strict=True) if not is_in}
            warnings.warn(
                f"Trials {', '.join(map(str, sorted(left_out)))} are left out of the model: they "
                "lie outside the search space, in parameters or values that it cannot be widened "
                "by.",
                InputDataWarning,
                stacklevel=2,
            )
        return taken

    @property
    def pool(self) -> Pool | None:
        """Return the pool that candidates are chosen from, if not from the search space."""
        name = cast(BoTorchGenerator, self.generator).acquisition_options.get(POOL)
        return None if name is None else pool_named(str(name))

    @cached_property
    def _tables(self) -> Tables:
        return Tables(self.device)

    @cached_property  # each adapter caches its last selector
    def _selector(self) -> Callable[[StreamingGP, Tensor, Tensor], PoolSelector]:
        return lru_cache(maxsize=1)(PoolSelector)

    def _mc_points(self) -> dict[str, Any]:
        """Return integration points as an option of the acquisition, where they are needed."""
        generator = cast(BoTorchGenerator, self.generator)
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
        number, space, drawn = int(count or NUM_MC_POINTS), self._model_space, self._drawn
        is_box = not space.parameter_constraints and all(
            isinstance(each, RangeParameter) and each.parameter_type is ParameterType.FLOAT
            for each in space.tunable_parameters.values()
        )
        if count is None and issubclass(kind, FeatureNIPV) and is_box:
            return {}
        if drawn is None or drawn[0] != space or len(drawn[1]) != number:
            sobol = Generators.SOBOL(  # keeps the constraints
                experiment=self._experiment, search_space=space, seed=0, deduplicate=False
            )
            run = sobol.gen(number)
            counts = zip(run.arms, run.weights, strict=True)
            rows = [arm.parameters for arm, weight in counts for _ in range(round(weight))]
            frame = pd.DataFrame(rows)[list(space.tunable_parameters)]
            drawn = space.clone(), Pool(f"{number} points of the search space", frame)
            self._drawn = drawn
        return {MC_POINTS: self._table(drawn[1]).X}

    def _table(self, pool: Pool) -> Table:
        """Transform a pool by the transforms of parameters; a table's values are cast already."""
        others = (Cast, FillMissingParameters, StandardizeY, Winsorize)
        transforms = [each for each in self.transforms.values() if not isinstance(each, others)]
        return self._tables.get(pool, self._model_space, transforms, self.parameters)


def seed_of(experiment: Experiment, pending: Pending) -> int | None:
    """Return the seed of the next search; None before any candidate has been proposed.

    The first proposed point, which was drawn with the client's seed, stands for the experiment.
    Pending points may be no trials yet.
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
