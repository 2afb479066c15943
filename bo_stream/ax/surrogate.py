"""Ax's surrogate, whose models go on from one trial to the next."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from ax.core.search_space import SearchSpaceDigest
from ax.generators.torch.botorch_modular.surrogate import (
    Surrogate,
    SurrogateSpec,
    submodel_input_constructor,
)
from ax.generators.torch.botorch_modular.utils import ModelConfig
from botorch.exceptions.errors import BotorchError
from botorch.models.model import Model
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.settings import validate_input_scaling
from botorch.utils.datasets import SupervisedDataset
from torch import Tensor

from bo_stream.ax.model_choice import Record, covers_a_box, restore, suited, values_of, within_reach
from bo_stream.ax.rows import Difference, Rows, difference, noise_floor
from bo_stream.diagnostics import leave_one_out, without
from bo_stream.loops.refits import FEW_PER_INPUT, learn, thin
from bo_stream.models.base import StreamingGP
from bo_stream.models.inducing.osgpr import OSGPR
from bo_stream.models.refit import Hyperparameters, learned_values
from bo_stream.models.wiski.grid_gp import GridGP
from bo_stream.tensors import State, is_in, state_of

Moments = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LeftOut:
    """A model and the rows in its memory, any of which can be left out.

    Attributes:
        model: Stays as it is.
        rows: All that it has.
        state: Of the model's hyperparameters, for which the closed form holds.
    """

    model: StreamingGP
    rows: Rows
    state: State

    @classmethod
    def of(cls, model: StreamingGP, rows: Rows) -> LeftOut:
        """Of a model as it is now."""
        return cls(model, rows, state_of(model))

    def is_of(self, model: StreamingGP, rows: Rows) -> bool:
        """Whether it is of this model with these rows, as they are now."""
        same = self.model is model and self.rows is rows
        return same and is_in(model, self.state)

    def predict(self, gone: Tensor, X: Tensor, observation_noise: bool) -> Moments | None:
        """Means and variances at X, ``t`` each, given all rows but some; None: it cannot say.

        Args:
            gone: Whether a row is left out, ``n``.
            X: ``t x d``.
            observation_noise: Whether variances are of outcomes.
        """
        if bool(gone.all()):
            return None  # no model has no data
        try:
            if self._is_one(gone, X) and not observation_noise:
                mean, variance = self._each
                return mean[gone], variance[gone]
            return self._without(gone, X, observation_noise)
        except BotorchError:
            return None

    def _is_one(self, gone: Tensor, X: Tensor) -> bool:
        return int(gone.sum()) == 1 and torch.equal(X, self.rows.X[gone])

    @cached_property
    def _told(self) -> StreamingGP:
        """The model, or one in whose window all the rows are, at the same points."""
        model = self.model
        if not isinstance(model, OSGPR) or len(self.rows) <= model.window:
            return model
        return with_all_rows(model, self.rows)

    @cached_property
    def _each(self) -> Moments:
        """Each row, given all others. Cost O(n r²)."""
        rows = self.rows
        found = leave_one_out(self._told, rows.X, rows.Y, rows.known_noise, False)
        return _moments(found.posterior)

    @torch.no_grad()
    def _without(self, gone: Tensor, X: Tensor, observation_noise: bool) -> Moments:
        rows = Rows(self.rows.X[gone], self.rows.Y[gone], self.rows.Yvar[gone])
        model = without(self._told, rows.X, rows.Y, rows.known_noise)
        return _moments(model.posterior(X.unsqueeze(-2), observation_noise=observation_noise))


def with_all_rows(model: OSGPR, rows: Rows) -> OSGPR:
    """A model of the same points and hyperparameters that forgets no row. Cost O(n M²)."""
    fresh = deepcopy(model)
    fresh.allocator = None
    fresh.window = len(rows)
    return fresh.clear().update(rows.X, rows.Y, rows.known_noise)


def _moments(posterior: object) -> Moments:
    known = cast(GPyTorchPosterior, posterior)
    return known.mean.flatten(), known.variance.flatten()


REFIT = 1.3
"""Growth of the data beyond ``OFTEN`` at which hyperparameters are learned anew."""

OFTEN = 100
"""Number of observations up to which they are learned at every trial, as in Ax."""


@dataclass
class Stream:
    """A model and what is in its memory.

    Attributes:
        model: Changed in place.
        rows: What is in its memory.
        defaults: The hyperparameters that it was built with.
        fitted_at: Number of observations at the last refit; 0: none yet.
    """

    model: StreamingGP
    rows: Rows
    defaults: Hyperparameters
    fitted_at: int = 0

    def follow(self, wanted: Rows) -> str | None:
        """Put in what is new and take out what is gone; else why that cannot be done.

        A model that refuses an observation is left with some of them: it must be built anew then.

        Args:
            wanted: All rows that it should have.
        """
        change = difference(self.rows, wanted)
        obstacle = self._obstacle(change)
        if obstacle is None:
            try:
                self._apply(change)
            except BotorchError as error:
                return f"the model refused them: {error}"
            self.rows = wanted
        return obstacle

    def _obstacle(self, change: Difference) -> str | None:
        if len(change.gone) == 0:
            return None
        if len(change.gone) >= len(self.rows):
            return "none of its observations is left"
        if not isinstance(self.model, GridGP):
            name = type(self.model).__name__
            return f"{len(change.gone)} observations are gone, and {name} cannot take them out"
        return None

    def _apply(self, change: Difference) -> None:
        if len(change.fresh) > 0:
            self.model.update(change.fresh.X, change.fresh.Y, change.fresh.known_noise)
        if len(change.gone) > 0:
            self.model.retract(change.gone.X, change.gone.Y, change.gone.known_noise)

    def refit_if_due(self, growth: float | None) -> bool:
        """Learn hyperparameters if the observations have grown by enough; whether they had.

        Args:
            growth: See :func:`is_due`.
        """
        count = len(self.rows)
        if not is_due(count, self.fitted_at, growth):
            return False
        learn(self.model, self._further_starts(growth))
        self.fitted_at = count
        return True

    def _further_starts(self, growth: float | None) -> Sequence[Hyperparameters]:
        """The defaults, where few observations may have led astray, and not at every trial."""
        count, before = len(self.rows), self.fitted_at
        few = count <= FEW_PER_INPUT * self.rows.X.shape[-1]
        if before == 0 or not few:
            return []
        is_thorough = growth is not None or _powers(count) > _powers(before)
        return [self.defaults] if is_thorough else []


def is_due(count: int, fitted_at: int, growth: float | None) -> bool:
    """Whether hyperparameters are to be learned anew.

    Args:
        count: Number of observations.
        fitted_at: That at the last refit; 0: none yet.
        growth: Factor by which the observations must have grown; 0: learn once; None: whenever
            there is another one up to ``OFTEN`` of them, then whenever those beyond have grown by
            ``REFIT``.
    """
    if fitted_at == 0:
        return True
    if growth is not None:
        return growth > 0.0 and count >= growth * fitted_at
    return count > fitted_at and (count <= OFTEN or count - OFTEN >= REFIT * (fitted_at - OFTEN))


def _powers(count: int) -> int:
    """How many times one observation has grown by ``REFIT``."""
    return math.floor(math.log(count) / math.log(REFIT))


logger = logging.getLogger("bo_stream.ax")


class StreamSurrogate(Surrogate):
    """Keeps each metric's model between generations, and gives it new observations only.

    A row that is in the data and not in the model is put in, one that is in the model and no
    longer in the data is taken out; so the order of arrival does not matter. A model that cannot
    follow, a changed search space and other options build it anew from all data, with the former
    hyperparameters, and the log ``bo_stream.ax`` says why. Models that are no :class:`StreamingGP`,
    and those that cross-validation builds where rows cannot be left out, go Ax's way.
    """

    def __init__(
        self,
        surrogate_spec: SurrogateSpec | None = None,
        refit_on_cv: bool = False,
        metric_to_best_model_config: Mapping[str, ModelConfig] | None = None,
        warm_start_refit: bool = True,
        refit: float | None = None,
        learned: dict[str, Record] | None = None,
        units: dict[str, float] | None = None,
    ) -> None:
        """Begin without a model.

        Args:
            surrogate_spec: Ax's specification, of one model.
            refit_on_cv: As in Ax.
            metric_to_best_model_config: As in Ax.
            warm_start_refit: As in Ax.
            refit: When hyperparameters are learned anew: see :func:`is_due`.
            learned: What former models of the metrics have learned, by name; written at each refit.
            units: In which the outcomes come, by metric.
        """
        configs = None if metric_to_best_model_config is None else dict(metric_to_best_model_config)
        super().__init__(
            surrogate_spec=surrogate_spec,
            refit_on_cv=refit_on_cv,
            metric_to_best_model_config=configs,
            warm_start_refit=warm_start_refit,
        )
        self.refit = refit
        self.learned = {} if learned is None else learned
        self.units = {} if units is None else units
        self._streams: dict[tuple[str, ...], Stream] = {}
        self._left_out: dict[str, LeftOut] = {}

    def _serialize_attributes_as_kwargs(self) -> dict[str, Any]:
        return {**super()._serialize_attributes_as_kwargs(), "refit": self.refit}

    def _construct_model(
        self,
        dataset: SupervisedDataset,
        search_space_digest: SearchSpaceDigest,
        model_config: ModelConfig,
        state_dict: Mapping[str, Tensor] | None,
        refit: bool,
    ) -> Model:
        config = suited(model_config, len(dataset.feature_names))
        kind = config.botorch_model_class
        if state_dict is not None or kind is None or not issubclass(kind, StreamingGP):
            return super()._construct_model(
                dataset=dataset,
                search_space_digest=search_space_digest,
                model_config=config,
                state_dict=state_dict,
                refit=refit,
            )
        stream = self._followed(dataset, search_space_digest, config, kind)
        if stream.refit_if_due(self.refit):
            self.learned[_name(dataset)] = Record(
                count=len(stream.rows),
                bounds=_bounds(search_space_digest),
                unit=self._unit(dataset),
                floor=self._floor(dataset),
                values=values_of(stream.model),
            )
        return stream.model

    def _followed(
        self,
        dataset: SupervisedDataset,
        digest: SearchSpaceDigest,
        config: ModelConfig,
        kind: type[StreamingGP],
    ) -> Stream:
        """The metric's model with the data in it."""
        dataset = within_reach(dataset, digest.bounds, config, kind)
        names, rows = tuple(dataset.outcome_names), Rows.of(dataset, self._floor(dataset))
        stream = self._streams.pop(names, None)
        reason = self._obstacle(names, stream, kind)
        if stream is not None and reason is None:
            reason = stream.follow(rows)
        if stream is None or reason is not None:
            if reason is not None:
                logger.info("%s: the model is built anew: %s.", ", ".join(names), reason)
            stream = self._begun(rows.as_dataset(dataset), digest, config, kind)
        self._streams[names] = stream
        return stream

    def _floor(self, dataset: SupervisedDataset) -> float:
        record = self.learned.get(_name(dataset))
        if record is None or record["unit"] != self._unit(dataset):
            return noise_floor(dataset)
        return record["floor"]

    def _unit(self, dataset: SupervisedDataset) -> float:
        return self.units.get(_name(dataset), 1.0)

    def _obstacle(
        self, names: tuple[str, ...], stream: Stream | None, kind: type[StreamingGP]
    ) -> str | None:
        if stream is None:
            return None
        if names not in self._submodels:
            return "the search space has changed"
        if type(stream.model) is not kind:
            return "another model is asked for"
        return None

    def _begun(
        self,
        dataset: SupervisedDataset,
        digest: SearchSpaceDigest,
        config: ModelConfig,
        kind: type[StreamingGP],
    ) -> Stream:
        """A model of all data, with what was learned before if it fits."""
        given = submodel_input_constructor(
            kind,
            model_config=config,
            dataset=dataset,
            search_space_digest=digest,
            surrogate=self,
        )
        with validate_input_scaling(False):  # rows may lie outside the search space
            model = kind(**given, **_box(dataset, digest, config, kind))
        stream = Stream(model, Rows.of(dataset, 0.0), learned_values(model))
        record = self.learned.get(_name(dataset))
        if record is not None and restore(model, record):
            thin(model)
            same = (record["bounds"], record["unit"]) == (_bounds(digest), self._unit(dataset))
            stream.fitted_at = record["count"] if same else 0
        return stream

    def predict_without(
        self, name: str, gone: Tensor, X: Tensor, observation_noise: bool = False
    ) -> Moments | None:
        """A metric's means and variances, given all its rows but some; see :class:`LeftOut`.

        Args:
            name: Of the metric.
            gone: Whether a row of its training data is left out, ``n``.
            X: ``t x d``.
            observation_noise: Whether variances are of outcomes.
        """
        stream = self._streams.get((name,))
        if stream is None or len(stream.rows) != len(gone):
            return None
        left_out = self._left_out.get(name)
        if left_out is None or not left_out.is_of(stream.model, stream.rows):
            left_out = LeftOut.of(stream.model, stream.rows)
            self._left_out[name] = left_out
        return left_out.predict(gone, X, observation_noise)


def _box(
    dataset: SupervisedDataset, digest: SearchSpaceDigest, config: ModelConfig, kind: type
) -> dict[str, Tensor]:
    """The search space as a grid's first box: observations outside widen it."""
    if not covers_a_box(config, kind) or "bounds" in config.model_options:
        return {}
    return {"bounds": dataset.X.new_tensor(digest.bounds).mT}


def _name(dataset: SupervisedDataset) -> str:
    return ", ".join(dataset.outcome_names)


def _bounds(digest: SearchSpaceDigest) -> list[list[float]]:
    return [list(pair) for pair in digest.bounds]
