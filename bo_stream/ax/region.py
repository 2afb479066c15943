"""A search of a trust region, in Ax: for spaces of many parameters.

:class:`RegionGenerator` asks a :class:`RegionSurrogate` for points, :class:`RegionAdapter` gives it
the trials of an experiment as a ledger.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, cast

import torch
from ax.adapter.data_utils import ExperimentData
from ax.core.observation import ObservationFeatures
from ax.core.optimization_config import OptimizationConfig
from ax.core.parameter import ChoiceParameter, ParameterType, RangeParameter
from ax.core.search_space import SearchSpace, SearchSpaceDigest
from ax.exceptions.core import UserInputError
from ax.generators.torch_base import TorchGenerator, TorchGenResults, TorchOptConfig
from botorch.exceptions.errors import UnsupportedError
from botorch.exceptions.warnings import InputDataWarning
from torch import Tensor
from torch.quasirandom import SobolEngine

from bo_stream.ax.adapters import Pending, ReproducibleAdapter
from bo_stream.ax.initialization import why_not_a_region
from bo_stream.ax.surrogate import moments
from bo_stream.diagnostics import leave_one_out, without
from bo_stream.errors import UsageError
from bo_stream.loops.optimization.local_model import LocalFit
from bo_stream.loops.optimization.region import Domain, input_lengthscales
from bo_stream.loops.optimization.region_search import RegionSurrogate, region_state
from bo_stream.loops.optimization.trials import (
    LARGEST,
    Ledger,
    OptimizationSettings,
    Origin,
    Status,
    Trial,
)

MOST_LEVELS = 1000
"""Most values of an integer that a search takes one by one; of more it is as good as continuous."""

ORIGIN = "origin"
"""Key in the metadata of a proposal: what it was drawn from."""

MOST_TOGETHER = 16
"""Most points that are drawn together, of which some may not be asked for."""

_SCRAMBLE = 1_000_003
"""Seed of the Sobol points of later regions: not one that a user would give to the first ones."""

_FARTHEST = -700.0
"""Least logarithm of a prediction: e to its negative is still finite."""


# --- the generator -------------------------------------------------------------------------------


class RegionGenerator(TorchGenerator):
    """A generator of Ax whose points a :class:`RegionSurrogate` chooses, in the unit cube.

    What it goes on from is what it has after the last proposal: to look at predictions in between
    changes nothing. Pending points are passed over, as each point is drawn. Ax asks for the points
    of a batch one by one: as many are drawn together as the last outcomes that came together, and
    those that are not asked for before the next outcomes are dropped.

    Attributes:
        region: State after the last proposal, as plain values; Ax stores it with each proposal.
        search: The search, which has followed the trials; None before.
        ledger: The trials, those proposed since included.
        levels: Values of inputs that have few, by position.
    """

    refit_on_cv = False

    def __init__(self, region: dict[str, Any] | None = None) -> None:
        """Begin, or go on with a state."""
        super().__init__()
        self.region: dict[str, Any] = {} if region is None else region
        self.search: RegionSurrogate | None = None
        self.ledger = Ledger()
        self.levels: Mapping[int, Tensor] = {}
        self._drawn: list[tuple[Tensor, bool, bool]] = []
        self._fixed: dict[int, float] = {}

    def _get_state(self) -> dict[str, Any]:
        """Return the state that Ax stores with each generator run, and gives to the next generator.

        Overrides ``Generator._get_state``, which returns nothing. It is the same object as long as
        the generator lives: Ax builds another generator for another one.
        """
        return {"region": self.region}

    def follow(
        self, ledger: Ledger, dim: int, maximize: bool, levels: Mapping[int, Tensor]
    ) -> None:
        """Take in all trials, from the state after the last proposal on.

        Proposals that have become no trials, of a call that failed, are forgotten.

        Args:
            ledger: Trials, with inputs in the unit cube.
            dim: Number of inputs.
            maximize: Whether large outcomes are good.
            levels: Values of inputs that have few, by position.
        """
        content = deepcopy(self.region)
        if content and content["region"]["dim"] != dim:
            content = {}  # another search space
        if content:
            content["ended"] = min(content["ended"], len(ledger))
            for keys in ("waiting", "newest", "failed", "late", "leaps"):
                content[keys] = [key for key in content.get(keys, ()) if key < len(ledger)]
        waiting = set(content.get("waiting", ()))
        over = [trial.key for trial in ledger.with_status("told", "failed")]
        batch = sum(key >= content.get("ended", 0) or key in waiting for key in over)
        # as many are drawn together as came together
        q = max(1, batch) if content else 1
        settings = OptimizationSettings(
            bounds=((0.0, 1.0),) * dim, maximize=maximize, q=q, search="region"
        )
        if content:
            self.search = RegionSurrogate(settings, region_state(content))
        else:
            self.search = RegionSurrogate(settings)
        self.ledger, self.levels, self._drawn = ledger, levels, []
        self.__dict__.pop("_each", None)
        self.search.follow(ledger)

    def gen(
        self, n: int, search_space_digest: SearchSpaceDigest, torch_opt_config: TorchOptConfig
    ) -> TorchGenResults:
        """Choose points; overrides ``TorchGenerator.gen``, which is abstract.

        Raises:
            UserInputError: No point with the fixed parameters keeps the constraints.
        """
        search, ledger, config = self._search, self.ledger, torch_opt_config
        fixed = config.fixed_features or {}
        one_value = {j: torch.tensor([value], dtype=torch.float64) for j, value in fixed.items()}
        A, b = config.linear_constraints or (None, None)
        domain = Domain({**self.levels, **one_value}, A, b)
        # the best trial's point, or any one's, keeps all constraints
        trials = ledger.with_status("told", "pending")
        known = trials[0].X if trials else (0.5,) * search.settings.dim
        if len(search.trials.with_outcome()) > 0:
            known = ledger[search.best(ledger)[0]].X
        try:
            inside = domain.nearest(torch.tensor(known, dtype=torch.float64))
        except UsageError as error:
            names = ", ".join(search_space_digest.feature_names[j] for j in sorted(fixed))
            raise UserInputError(
                "Expected the fixed parameters to leave points that keep the constraints, got "
                f"values of {names} that leave none: fix other values."
            ) from error
        search.domain = domain
        if fixed != self._fixed:
            self._fixed, self._drawn = fixed, []
        first = int(min(n, search.sobol_due(ledger)))
        chosen: list[tuple[Tensor, Origin]] = []
        if first:
            scramble = _SCRAMBLE + len(search.state.found)
            engine = SobolEngine(search.settings.dim, scramble=True, seed=scramble)
            sobol = engine.fast_forward(ledger.count_from("sobol")).draw(first, dtype=torch.float64)
            chosen += [(x, "sobol") for x in domain.admit(sobol, inside)]
        for x, _ in chosen:
            ledger.add(x.tolist(), "sobol")
        for _ in range(n - first):
            if not self._drawn:  # draw together, in random order; they are not asked for yet
                q = min(max(search.settings.q, n - len(chosen)), MOST_TOGETHER)
                before, count = search.state, len(ledger)
                points = search.propose(ledger, q, int(torch.randint(2**31 - 1, ())))
                leapt = {key - count for key in search.state.leaps[len(before.leaps) :]}
                promised, search.state = search.state.unpromising == 0, before
                order = torch.randperm(q).tolist()
                self._drawn = [(points[i], i in leapt, promised) for i in order]
            x, is_leap, promised = self._drawn.pop()
            state = search.state
            search.state = replace(
                state,
                leaps=[*state.leaps, *([len(ledger)] if is_leap else [])],
                asked=state.asked + 1,
                unpromising=0 if promised else state.unpromising + 1,
            )
            ledger.add(x.tolist(), "model")
            chosen.append((x, "model"))
        record = asdict(search.state)
        self.region.clear()
        self.region.update({**record, "found": [list(pair) for pair in record["found"]]})
        return TorchGenResults(
            points=torch.stack([x.cpu() for x, _ in chosen]),
            weights=torch.ones(n, dtype=torch.float64),
            candidate_metadata=[{ORIGIN: origin} for _, origin in chosen],
        )

    @property
    def _search(self) -> RegionSurrogate:
        if self.search is None:
            raise RuntimeError("The search has followed no trials yet: fit it first.")
        return self.search

    def best_point(
        self, search_space_digest: SearchSpaceDigest, torch_opt_config: TorchOptConfig
    ) -> Tensor | None:
        """Return the trial's point of the best posterior mean in its region; None: no outcome yet.

        Overrides ``TorchGenerator.best_point``, which returns None.
        """
        search = self._search
        if len(search.trials.with_outcome()) == 0:
            return None
        key, _ = search.best(self.ledger)
        return torch.tensor(self.ledger[key].X, dtype=torch.float64)

    # --- predictions -------------------------------------------------------------------------

    @property
    def _local(self) -> LocalFit:
        """Return the local model with the scale of its outcomes.

        Raises:
            NotImplementedError: There is none yet.
        """
        local = self._search.local
        if local is None:
            raise NotImplementedError("There is no local model yet: a region has just begun.")
        return local

    def predict(self, X: Tensor, use_posterior_predictive: bool = False) -> tuple[Tensor, Tensor]:
        """Predict by the local model, which knows little of points far from the region.

        Overrides ``TorchGenerator.predict``, which is abstract. The model's outcomes are on a
        logarithmic scale: predictions are medians, with the variance of a normal of the same
        quantiles at one standard deviation.

        Args:
            X: ``t x d``.
            use_posterior_predictive: Whether variances are of outcomes.

        Returns:
            ``t x 1`` and ``t x 1 x 1``.

        Raises:
            NotImplementedError: There is no local model yet.
        """
        model = self._local.model
        with torch.no_grad():
            posterior = model.posterior(X.unsqueeze(-2), observation_noise=use_posterior_predictive)
        mean, variance = self._in_units(*moments(posterior))
        return mean.unsqueeze(-1), variance.reshape(-1, 1, 1)

    def predict_without(
        self, name: str, gone: Tensor, X: Tensor, observation_noise: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Predict rows that are left out, given all others.

        None where there is no model, or where only some trials of a point are left out. Rows that
        are not among those of the local model are predicted by it as it is.

        Args:
            name: Of the metric.
            gone: Whether a row of the data is left out, ``n``.
            X: Inputs of these rows, ``t x d``.
            observation_noise: Whether variances are of outcomes.

        Returns:
            Mean and variance, ``t`` each.
        """
        local = self._search.local
        if local is None:
            return None
        rows, outcomes, means, variances = self._each
        is_at = (rows == X.unsqueeze(-2)).all(-1)  # t x n
        own = is_at.any(0).nonzero().flatten()
        if len(own) == 0:
            mean, covariance = self.predict(X, observation_noise)
            return mean.flatten(), covariance.flatten()
        if len(own) > int(gone.sum()):
            return None
        if len(own) == len(X) == 1:
            mean, variance = means[own], variances[own]
        else:  # trials of one point, or a fold of several
            Yvar = None if local.Yvar is None else local.Yvar[own]
            model = without(local.model, rows[own], outcomes[own], Yvar)
            mean, variance = moments(model.posterior(X.unsqueeze(-2)))
        if observation_noise:
            noise = local.noise()
            at_it = noise[is_at.int().argmax(-1)]
            variance = variance + torch.where(is_at.any(-1), at_it, noise.median())
        return self._in_units(mean, variance)

    def cross_validate(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Refuse folds that :meth:`predict_without` does not take: no model is built of a fold.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "In a region cross-validation leaves points of the present data out of the local "
            "model, with all their trials; other data, some trials of a point and refit_on_cv are "
            "not supported. Take the folds of Ax's cross_validate, once a trial was proposed."
        )

    @cached_property  # until the search follows other trials
    def _each(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the local model's rows, outcomes, and the prediction of each without it."""
        search, local, rows = self._search, self._local, self._search.state.rows
        X = search.settings.to_unit_cube([self.ledger[key].X for key in rows])
        Z = local.scale.to_scale(search.trials.Y[rows]).unsqueeze(-1).to(X)
        return X, Z, *moments(leave_one_out(local.model, X, Z, local.Yvar, False).posterior)

    def _in_units(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Transform means and variances of the model to those of outcomes, ``t`` each."""
        sign, scale = self._search.settings.sign, self._local.scale
        sd, least = variance.clamp_min(0.0).sqrt(), (_FARTHEST - scale.mean) / scale.sd
        low, middle, high = (
            torch.tensor([scale.to_outcome(z) for z in each.clamp_min(least).tolist()])
            for each in (mean - sd, mean, mean + sd)
        )
        return sign * middle.to(mean), ((high - low) / 2.0).square().to(mean)

    def feature_importances(self) -> Tensor:
        """Return the inverse lengthscales of the local model, of sum one, ``1 x 1 x d``.

        Overrides ``Generator.feature_importances``, which is abstract.
        """
        scales = input_lengthscales(self._local.model)
        if scales is None:
            raise NotImplementedError("The local model has no lengthscale for each input.")
        inverse = 1.0 / scales
        return (inverse / inverse.sum()).reshape(1, 1, -1)


# --- the adapter ---------------------------------------------------------------------------------


class RegionAdapter(ReproducibleAdapter):
    """Ax's adapter of a :class:`RegionGenerator`.

    Outcomes of trials outside of the search space are left out.
    """

    _known: tuple[SearchSpace, dict[str, tuple[float, ...]], dict[int, Tensor]] | None = None

    def _options_of_generator(self, pending: Pending) -> dict[str, Any]:
        """Return nothing: a region has no acquisition function."""
        return {}

    def _fit(
        self, search_space: SearchSpace, experiment_data: ExperimentData, **kwargs: Any
    ) -> None:
        """Let the search follow the trials.

        Overrides ``TorchAdapter._fit``, which fits a model, and passes over failed trials.

        Raises:
            UnsupportedError: A region cannot be searched any more.
        """
        reason = why_not_a_region(self._experiment)
        if reason is not None:
            raise UnsupportedError(f"A region cannot be searched any more: {reason}.")
        super()._fit(search_space, experiment_data, **kwargs)
        generator = cast(RegionGenerator, self.generator)
        maximize = not cast(OptimizationConfig, self._optimization_config).objective.minimize
        ledger = self._ledger(experiment_data)
        generator.follow(ledger, len(self.parameters), maximize, self._of_space[2])

    def _ledger(self, data: ExperimentData) -> Ledger:
        """Return all arms of all trials as a ledger: those with an outcome by it. Cost O(n)."""
        (metric,) = self.outcomes
        observed, keys = data.observation_data, ("trial_index", "arm_name")
        told, errors = (
            dict(zip(zip(*map(each.index.get_level_values, keys), strict=True), each, strict=True))
            for each in (observed[what][metric].dropna() for what in ("mean", "sem"))
        )
        X = dict(
            zip(data.arm_data.index, data.arm_data[self.parameters].to_numpy(float), strict=True)
        )
        failed, known = {arm.name for arm in self.failed}, self._of_space[1]
        ledger, too_large = Ledger(), list[int]()
        for index, trial in sorted(self._experiment.trials.items()):
            runs = trial.generator_runs
            for arm in trial.arms:
                at = (index, arm.name)
                x = tuple(X[at].tolist()) if at in X else known.get(arm.signature)
                if x is None and self._search_space.check_membership(arm.parameters):
                    features = self._in_unit_cube(dict(arm.parameters))
                    x = tuple(float(features[name]) for name in self.parameters)
                    known[arm.signature] = x
                status: Status = "withdrawn" if trial.status.is_terminal else "pending"
                Y = told.get(at)
                if Y is not None and abs(Y) <= LARGEST:
                    status = "told"
                elif Y is not None:
                    status = "failed"
                    too_large.append(index)
                elif arm.name in failed:
                    status = "failed"
                if x is None:  # outside of the search space
                    x, status = (math.nan,) * len(self.parameters), "withdrawn"
                value, error = (Y, errors.get(at)) if status == "told" else (None, None)
                variance = None if error is None else float(error) ** 2
                of_runs = [run.candidate_metadata_by_arm_signature or {} for run in runs]
                metadata = [each.get(arm.signature) or {} for each in of_runs]
                origins: Iterator[Origin] = (each[ORIGIN] for each in metadata if ORIGIN in each)
                ledger.put(
                    Trial(len(ledger), x, next(origins, "hand"), status, value, Yvar=variance)
                )
        if too_large:
            warnings.warn(
                f"Outcomes above {LARGEST:g} in size count as failures: {metric} of trial "
                f"{', '.join(map(str, too_large))}. To replace one, report it again by "
                "client.attach_data.",
                InputDataWarning,
                stacklevel=2,
            )
        return ledger

    @property
    def _of_space(self) -> tuple[SearchSpace, dict[str, tuple[float, ...]], dict[int, Tensor]]:
        """Return the search space, known inputs and levels, again where the space has changed."""
        known = self._known
        if known is None or known[0] != self._model_space:
            levels = {}
            for j, name in enumerate(self.parameters):
                parameter = self._model_space.parameters[name]
                if isinstance(parameter, ChoiceParameter):
                    raw: Iterable[Any] = parameter.values
                elif (
                    isinstance(parameter, RangeParameter)
                    and parameter.parameter_type is ParameterType.INT
                    and parameter.upper - parameter.lower < MOST_LEVELS
                ):
                    raw = range(int(parameter.lower), int(parameter.upper) + 1)
                else:  # it is continuous, or as good as that
                    continue
                unit = [float(self._in_unit_cube({name: value})[name]) for value in raw]
                levels[j] = torch.tensor(sorted(unit), dtype=torch.float64)
            known = self._known = self._model_space.clone(), {}, levels
        return known

    def _in_unit_cube(self, parameters: dict[str, Any]) -> dict[str, Any]:
        features = [ObservationFeatures(parameters)]
        for transform in self.transforms.values():
            features = transform.transform_observation_features(features)
        return features[0].parameters
