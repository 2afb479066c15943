"""Ax's surrogate, whose models go on from one trial to the next.

:class:`StreamSurrogate` keeps a :class:`Stream` for each metric, a model and the rows in its
memory; a :class:`Record` of what a model has learned, for its successors, in this process or
another; and, for cross-validation, a :class:`LeaveOutModel`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict, cast

import torch
from ax.core.search_space import SearchSpaceDigest
from ax.generators.torch.botorch_modular.surrogate import Surrogate, submodel_input_constructor
from ax.generators.torch.botorch_modular.utils import ModelConfig
from botorch.exceptions.errors import BotorchError
from botorch.models.model import Model
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.settings import validate_input_scaling
from botorch.utils.datasets import SupervisedDataset
from gpytorch.constraints import Interval
from gpytorch.priors import Prior
from torch import Tensor

from bo_stream.ax.model_choice import covers_a_box, suited, within_reach
from bo_stream.ax.rows import Difference, Rows, difference, noise_floor
from bo_stream.diagnostics import leave_one_out, without
from bo_stream.loops.optimization.surrogate import FEW_PER_INPUT, learn, thin
from bo_stream.models.base import StreamingGP
from bo_stream.models.fitting import Hyperparameters, learned_values
from bo_stream.models.inducing.osgpr import OSGPR
from bo_stream.models.wiski.grid_model import GridModel
from bo_stream.tensors import State, is_in, state_of

Moments = tuple[Tensor, Tensor]
"""Means and variances."""

logger = logging.getLogger("bo_stream.ax")

REFIT = 1.3
"""Growth of the data beyond ``OFTEN`` at which hyperparameters are learned anew."""

OFTEN = 100
"""Number of observations up to which they are learned at every trial, as in Ax."""


class StreamSurrogate(Surrogate):
    """A surrogate of Ax that keeps each metric's model, and gives it only new observations.

    A row that is in the data and not in the model is put in, one that is in the model and no
    longer in the data is taken out; so the order of arrival does not matter. A model that cannot
    follow, a changed search space and other options build it anew from all data, with the former
    hyperparameters, and the log ``bo_stream.ax`` says why. Models that are no :class:`StreamingGP`,
    and those that cross-validation builds where rows cannot be left out, are left to Ax.
    """

    def __init__(
        self,
        *args: Any,
        refit: float | None = None,
        learned: dict[str, Record] | None = None,
        units: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Begin without a model.

        Args:
            *args: Arguments of Ax's ``Surrogate``.
            refit: Growth at which hyperparameters are learned anew: see :func:`is_due`.
            learned: Records of the metrics' former models, by name; written at each refit.
            units: Units in which the outcomes come, by metric.
            **kwargs: Arguments of Ax's ``Surrogate``, of which ``surrogate_spec`` has one model.
        """
        super().__init__(*args, **kwargs)
        self.refit = refit
        self.learned = {} if learned is None else learned
        self.units = {} if units is None else units
        self._streams: dict[tuple[str, ...], Stream] = {}
        self._left_out: dict[str, LeaveOutModel] = {}

    def _serialize_attributes_as_kwargs(self) -> dict[str, Any]:
        """Return the arguments that make a copy of the surrogate for a fold.

        Overrides ``Surrogate._serialize_attributes_as_kwargs`` to add ``refit``.
        """
        return {**super()._serialize_attributes_as_kwargs(), "refit": self.refit}

    def _construct_model(
        self,
        dataset: SupervisedDataset,
        search_space_digest: SearchSpaceDigest,
        model_config: ModelConfig,
        state_dict: Mapping[str, Tensor] | None,
        refit: bool,
    ) -> Model:
        """Bring a metric's model to the data.

        Overrides ``Surrogate._construct_model``, which builds and fits a model from all data
        whenever there is a new row.
        """
        config = suited(model_config, len(dataset.feature_names))
        kind = config.botorch_model_class
        if state_dict is not None or kind is None or not issubclass(kind, StreamingGP):
            return super()._construct_model(dataset, search_space_digest, config, state_dict, refit)
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
        """Return the stream of a metric with the data in its model."""
        dataset = within_reach(dataset, digest.bounds, config, kind)
        names, rows = tuple(dataset.outcome_names), Rows.of(dataset, self._floor(dataset))
        stream, reason = self._streams.pop(names, None), None
        if stream is not None:
            if names not in self._submodels:
                reason = "the search space has changed"
            elif type(stream.model) is not kind:
                reason = "another model is asked for"
            else:
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

    def _begun(
        self,
        dataset: SupervisedDataset,
        digest: SearchSpaceDigest,
        config: ModelConfig,
        kind: type[StreamingGP],
    ) -> Stream:
        """Build a model of all data, with what was learned before if it fits.

        The search space is the first box of a grid, which observations outside widen.
        """
        given = submodel_input_constructor(
            kind, model_config=config, dataset=dataset, search_space_digest=digest, surrogate=self
        )
        if covers_a_box(config, kind) and "bounds" not in config.model_options:
            given["bounds"] = dataset.X.new_tensor(digest.bounds).mT
        with validate_input_scaling(False):  # rows may lie outside the search space
            model = kind(**given)
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
        """Predict a metric given all its rows but some, in closed form; see :class:`LeaveOutModel`.

        Args:
            name: Name of the metric.
            gone: Whether a row of its training data is left out, ``n``.
            X: Points, ``t x d``.
            observation_noise: Whether variances are of outcomes.

        Returns:
            Means and variances, ``t`` each; None: the model cannot say, or no row would be left.
        """
        stream = self._streams.get((name,))
        if stream is None or len(stream.rows) != len(gone):
            return None
        left_out = self._left_out.get(name)
        if left_out is None or not left_out.is_of(stream.model, stream.rows):
            left_out = self._left_out[name] = LeaveOutModel.of(stream.model, stream.rows)
        return left_out.predict(gone, X, observation_noise)


def _name(dataset: SupervisedDataset) -> str:
    return ", ".join(dataset.outcome_names)


def _bounds(digest: SearchSpaceDigest) -> list[list[float]]:
    return [list(pair) for pair in digest.bounds]


@dataclass
class Stream:
    """A model and the rows in its memory.

    Attributes:
        model: The model, changed in place.
        rows: The rows in its memory.
        defaults: The hyperparameters that it was built with.
        fitted_at: Number of observations at the last refit; 0: none yet.
    """

    model: StreamingGP
    rows: Rows
    defaults: Hyperparameters
    fitted_at: int = 0

    def follow(self, wanted: Rows) -> str | None:
        """Bring the model to the rows that it should have, or return why that cannot be done.

        A model that refuses an observation is left with some of them: it must be built anew then.
        """
        change = difference(self.rows, wanted)
        obstacle = self._obstacle(change)
        if obstacle is not None:
            return obstacle
        fresh, gone = change.fresh, change.gone
        try:
            if len(fresh) > 0:
                self.model.update(fresh.X, fresh.Y, fresh.known_noise)
            if len(gone) > 0:
                self.model.retract(gone.X, gone.Y, gone.known_noise)
        except BotorchError as error:
            return f"the model refused them: {error}"
        self.rows = wanted
        return None

    def _obstacle(self, change: Difference) -> str | None:
        if len(change.gone) == 0:
            return None
        if len(change.gone) >= len(self.rows):
            return "none of its observations is left"
        if not isinstance(self.model, GridModel):
            name = type(self.model).__name__
            return f"{len(change.gone)} observations are gone, and {name} cannot take them out"
        return None

    def refit_if_due(self, growth: float | None) -> bool:
        """Learn hyperparameters if that :func:`is_due`; return whether it was."""
        count = len(self.rows)
        if not is_due(count, self.fitted_at, growth):
            return False
        learn(self.model, self._further_starts(growth))
        self.fitted_at = count
        return True

    def _further_starts(self, growth: float | None) -> Sequence[Hyperparameters]:
        """Return the defaults where few observations may have led astray, not at every trial."""
        count, before = len(self.rows), self.fitted_at
        few = count <= FEW_PER_INPUT * self.rows.X.shape[-1]
        if before == 0 or not few:
            return []
        is_thorough = growth is not None or _powers(count) > _powers(before)
        return [self.defaults] if is_thorough else []


def is_due(count: int, fitted_at: int, growth: float | None) -> bool:
    """Return whether hyperparameters are to be learned anew.

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
    """Return how many times one observation has grown by ``REFIT``."""
    return math.floor(math.log(count) / math.log(REFIT))


class Record(TypedDict):
    """Hyperparameters and standardisation after a refit, as Ax stores them with a generator run.

    Attributes:
        count: Number of observations at that refit.
        bounds: Bounds of the search space then.
        unit: Unit in which the model had the outcomes.
        floor: Value that known noise variances are raised to.
        values: Nested lists by name in ``state_dict``; bounds and priors are not among them, for
            they are not learned.
    """

    count: int
    bounds: list[list[float]]
    unit: float
    floor: float
    values: dict[str, Any]


def values_of(model: StreamingGP) -> dict[str, Any]:
    """Return what a model has learned, as a record has it."""
    return {name: value.tolist() for name, value in _learned_state(model).items()}


def restore(model: StreamingGP, record: Record) -> bool:
    """Give a new model what one of the same shape had learned; return whether it has that shape."""
    state, former = _learned_state(model), record["values"]
    if former.keys() != state.keys():
        return False
    values = {
        name: torch.tensor(former[name], dtype=value.dtype, device=value.device)
        for name, value in state.items()
    }
    if any(values[name].shape != value.shape for name, value in state.items()):
        return False
    model.load_state_dict({**model.state_dict(), **values})
    return True


def _learned_state(model: StreamingGP) -> dict[str, Tensor]:
    """Return a model's state without what the search space, bounds and priors give."""
    modules = model.named_modules()
    constants = [f"{name}." for name, part in modules if isinstance(part, Interval | Prior)]
    given = ("input_transform.", *constants)
    return {name: v for name, v in model.state_dict().items() if not name.startswith(given)}


@dataclass(frozen=True)
class LeaveOutModel:
    """A model and the rows in its memory, any of which can be left out.

    Attributes:
        model: The model; stays as it is.
        rows: All rows in its memory.
        state: State of the model for which the closed form holds.
    """

    model: StreamingGP
    rows: Rows
    state: State

    @classmethod
    def of(cls, model: StreamingGP, rows: Rows) -> LeaveOutModel:
        """Take a model as it is now."""
        return cls(model, rows, state_of(model))

    def is_of(self, model: StreamingGP, rows: Rows) -> bool:
        """Return whether it is of this model with these rows, as they are now."""
        return self.model is model and self.rows is rows and is_in(model, self.state)

    def predict(self, gone: Tensor, X: Tensor, observation_noise: bool) -> Moments | None:
        """Predict points given all rows but some; see :meth:`StreamSurrogate.predict_without`."""
        if bool(gone.all()):
            return None
        try:
            is_one = int(gone.sum()) == 1 and torch.equal(X, self.rows.X[gone])
            if is_one and not observation_noise:
                mean, variance = self._each
                return mean[gone], variance[gone]
            return self._without(gone, X, observation_noise)
        except BotorchError:
            return None

    @cached_property
    def _complete(self) -> StreamingGP:
        """Return the model, or one at the same points in whose window all the rows are."""
        model = self.model
        if not isinstance(model, OSGPR) or len(self.rows) <= model.window:
            return model
        return with_all_rows(model, self.rows)

    @cached_property
    def _each(self) -> Moments:
        """Predict each row given all others. Cost O(n r²)."""
        rows = self.rows
        found = leave_one_out(self._complete, rows.X, rows.Y, rows.known_noise, False)
        return _moments(found.posterior)

    @torch.no_grad()
    def _without(self, gone: Tensor, X: Tensor, observation_noise: bool) -> Moments:
        rows = self.rows[gone]
        model = without(self._complete, rows.X, rows.Y, rows.known_noise)
        return _moments(model.posterior(X.unsqueeze(-2), observation_noise=observation_noise))


def with_all_rows(model: OSGPR, rows: Rows) -> OSGPR:
    """Return a model of the same points and hyperparameters that forgets no row. Cost O(n M²)."""
    fresh = deepcopy(model)
    fresh.allocator = None
    fresh.window = len(rows)
    return fresh.clear().update(rows.X, rows.Y, rows.known_noise)


def _moments(posterior: object) -> Moments:
    known = cast(GPyTorchPosterior, posterior)
    return known.mean.flatten(), known.variance.flatten()
