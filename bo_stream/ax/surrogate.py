"""Ax's surrogate on one model that is updated, not rebuilt, with each batch of results."""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NotRequired, TypedDict, cast

import numpy as np
import torch
from ax.core.search_space import SearchSpaceDigest
from ax.generators.torch.botorch_modular.surrogate import Surrogate, submodel_input_constructor
from ax.generators.torch.botorch_modular.utils import ModelConfig
from botorch.exceptions.errors import BotorchError, UnsupportedError
from botorch.exceptions.warnings import InputDataWarning
from botorch.models.model import Model
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.settings import validate_input_scaling
from botorch.utils.datasets import SupervisedDataset
from gpytorch.constraints import Interval
from gpytorch.priors import Prior
from torch import Tensor

from bo_stream.diagnostics import leave_one_out, without
from bo_stream.diagnostics.cross_validation import retracts_exactly
from bo_stream.loops.models import MODELS, refit_is_due
from bo_stream.loops.optimization.optimizer import learn, thin
from bo_stream.models.auto.auto import AutoGP
from bo_stream.models.base import StreamingGP
from bo_stream.models.fitting import LastFit, learned_values
from bo_stream.models.inducing.osgpr import OSGPR
from bo_stream.models.outcomes.noise import NOISE_FLOOR
from bo_stream.models.wiski.grid_model import GridModel
from bo_stream.models.wiski.wiski import WISKI
from bo_stream.tensors import is_in, state_of

logger = logging.getLogger("bo_stream.ax")

ASKED_FOR = " (asked for)"
"""End of the name of a configuration whose model was given by the user; stored by Ax."""

REACH = 0.5
"""How far a grid is widened on each side, relative to the search space's width."""


class StreamSurrogate(Surrogate):
    """A surrogate of Ax that stores each metric's model, and gives it only new observations.

    A row that is in the data and not in the model is put in, a row that is in the model and no
    longer in the data is taken out; so the order of arrival does not matter. Where a model cannot
    follow, the search space has changed or options are other ones, it is built again from all data,
    with the previous hyperparameters, and the log ``bo_stream.ax`` has the reason. Models that are
    no :class:`StreamingGP`, and models that cross-validation builds where rows cannot be left out,
    are left to Ax.
    """

    def __init__(
        self,
        *args: Any,
        refit: float | None = None,
        learned: dict[str, RefitRecord] | None = None,
        units: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Start without a model.

        Args:
            *args: Arguments of Ax's ``Surrogate``.
            refit: Growth at which hyperparameters are learned again: see ``refit_is_due``.
            learned: Records of the metrics' previous models, by name; written at each refit.
            units: Units of the outcomes, by metric.
            **kwargs: Arguments of Ax's ``Surrogate``; its ``surrogate_spec`` has one model.
        """
        super().__init__(*args, **kwargs)
        self.refit = refit
        self.learned = {} if learned is None else learned
        self.units = {} if units is None else units
        self._streams: dict[tuple[str, ...], Stream] = {}

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
        names, bounds = tuple(dataset.outcome_names), list(map(list, search_space_digest.bounds))
        name = ", ".join(names)
        # a grid over a box of the inputs themselves
        covers_box = issubclass(kind, GridModel) and "stem" not in config.model_options
        if covers_box:
            dataset = within_reach(dataset, search_space_digest, kind)
        unit, record = self.units.get(name, 1.0), self.learned.get(name)
        same_unit = record is not None and record["unit"] == unit
        floor = record["floor"] if record is not None and same_unit else noise_floor(dataset)
        rows = DataRows.of(dataset, floor)
        stream, reason = self._streams.pop(names, None), None
        if stream is not None:
            if names not in self._submodels:
                reason = "the search space has changed"
            elif type(stream.model) is not kind:
                reason = "another model is asked for"
            else:
                reason = stream.follow(rows)
        if reason is not None:
            logger.info("%s: the model is built again: %s.", name, reason)
        if stream is None or reason is not None:
            same_box = record is not None and record["bounds"] == bounds
            near = bool(reached(rows.X, search_space_digest).all())
            near = near or (record is not None and same_box and record.get("bounded", False))
            bounded = covers_box or (kind is AutoGP and near)
            model = self._built(rows, dataset, search_space_digest, config, bounded)
            stream = Stream(model, rows, bounded)
            if record is not None and restore(model, record):
                thin(model)
                stream.fitted_at = record["count"] if same_box and same_unit else 0
        self._streams[names] = stream
        count = len(rows)
        if refit_is_due(count, stream.fitted_at, self.refit):
            learn(stream.model)
            stream.fitted_at = count
            self.learned[name] = record = RefitRecord(
                count=count,
                bounds=bounds,
                unit=unit,
                floor=floor,
                bounded=stream.bounded,
                values={key: v.tolist() for key, v in learned_state(stream.model).items()},
            )
            last = stream.model._last_fit
            if last is not None:
                record["raced"], known = last.raced, last.scales or {}
                if not math.isnan(last.loss):
                    record["loss"] = last.loss
                record["scales"] = {key: v.tolist() for key, v in known.items()}
        return stream.model

    def _built(
        self,
        rows: DataRows,
        like: SupervisedDataset,
        digest: SearchSpaceDigest,
        config: ModelConfig,
        bounded: bool,
    ) -> StreamingGP:
        """Build a model of all data, which may get the bounds of the search space.

        The search space is the first box of a grid, which observations outside widen. Where some
        are far outside, a model that is not on a grid yet gets no box and never moves to a grid,
        unless it had the box before they came.
        """
        kind = cast(type[StreamingGP], config.botorch_model_class)
        given = submodel_input_constructor(
            kind,
            model_config=config,
            dataset=SupervisedDataset(
                rows.X,
                rows.Y,
                Yvar=rows.known_noise,
                feature_names=like.feature_names,
                outcome_names=like.outcome_names,
            ),
            search_space_digest=digest,
            surrogate=self,
        )
        if bounded and "bounds" not in config.model_options:
            given["bounds"] = rows.X.new_tensor(digest.bounds).mT
        with validate_input_scaling(False):  # rows may lie outside the search space
            return kind(**given)

    def predict_without(
        self, name: str, gone: Tensor, X: Tensor, observation_noise: bool
    ) -> Moments | None:
        """Predict a metric given all its rows except some; see ``LeaveOutModel.predict``."""
        stream = self._streams.get((name,))
        if stream is None or len(stream.rows) != len(gone):
            return None
        known = stream.left_out
        if known is None or known.rows is not stream.rows or not is_in(stream.model, known.state):
            known = stream.left_out = LeaveOutModel(stream.model, stream.rows)
        return known.predict(gone, X, observation_noise)


def suited(config: ModelConfig, dim: int) -> ModelConfig:
    """Return a configuration, with :class:`OSGPR` where a default of WISKI cannot take the inputs.

    Args:
        config: Configuration of the model given by the user, or of a default: :class:`AutoGP`,
            which takes any number of inputs, or WISKI (see ``generation_strategy``).
        dim: Number of inputs, one-hot columns counted.

    Raises:
        UnsupportedError: The model given by the user, or the default with its options, cannot.
    """
    if config.botorch_model_class is not WISKI or config.covar_module_class is not None:
        return config
    if not {"stem", "covar_module"}.isdisjoint(config.model_options):  # any number of inputs
        return config
    kind: type[StreamingGP] = WISKI
    most = cast(int, MODELS["wiski"].most_inputs)
    if dim > most:
        if config.name is not None and config.name.endswith(ASKED_FOR):
            raise UnsupportedError(
                f"The parameters are {dim} inputs and a grid takes {most}: pass model=OSGPR, or a "
                "model of WISKI's kind with a projection to few inputs (stem)."
            )
        logger.info("The parameters are %d inputs, WISKI takes %d: OSGPR is used.", dim, most)
        kind = OSGPR
    unknown = sorted(set(config.model_options) - set(inspect.signature(kind).parameters))
    if unknown:
        raise UnsupportedError(
            f"The parameters are {dim} inputs, for which the default model is {kind.__name__}, and "
            f"it does not take the model_options {', '.join(unknown)}: leave them out, or pass "
            "model as well."
        )
    return replace(config, botorch_model_class=kind)


def reached(X: Tensor, digest: SearchSpaceDigest) -> Tensor:
    """Return which inputs, ``n x d``, a grid over the search space reaches, ``n``."""
    low, high = X.new_tensor(digest.bounds).unbind(-1)
    margin = REACH * (high - low)
    return ((low - margin <= X) & (high + margin >= X)).all(-1)


def within_reach(
    dataset: SupervisedDataset, digest: SearchSpaceDigest, kind: type
) -> SupervisedDataset:
    """Return the observations of a metric within reach of a grid, and warn of the others."""
    inside = reached(dataset.X, digest)
    if bool(inside.all()):
        return dataset
    warnings.warn(
        f"{int((~inside).sum())} observations of {', '.join(dataset.outcome_names)} are left out: "
        f"they lie outside the search space by more than {REACH:g} of its width, and a grid over "
        f"them would be large. Choose another model than {kind.__name__}, such as OSGPR, to keep "
        "them.",
        InputDataWarning,
        stacklevel=2,
    )
    return dataset.clone(mask=inside)


# --- a metric's model that goes on from one trial to the next ------------------------------------
# A :class:`Stream` is the model with the rows in its memory, a :class:`RefitRecord` its
# hyperparameters for the next model, in this process or another. A :class:`LeaveOutModel` predicts
# rows without them, for cross-validation.


Moments = tuple[Tensor, Tensor]
"""Means and variances."""


@dataclass(frozen=True)
class DataRows:
    """Observations of an experiment; rows of equal values are equal, from any trials.

    Attributes:
        X: Inputs, ``n x d``.
        Y: Outcomes, ``n x m``.
        Yvar: Noise variances, ``n x m``; NaN: unknown.
    """

    X: Tensor
    Y: Tensor
    Yvar: Tensor

    @classmethod
    def of(cls, data: SupervisedDataset, floor: float) -> DataRows:
        """Take the observations of a data set, with known noise variances raised to a floor."""
        unknown = torch.full_like(data.Y, torch.nan)
        return cls(data.X, data.Y, unknown if data.Yvar is None else data.Yvar.clamp_min(floor))

    def __len__(self) -> int:
        """Return the number n of observations."""
        return len(self.X)

    def __getitem__(self, index: list[int] | Tensor) -> DataRows:
        """Return some observations, by indices or a mask."""
        return DataRows(self.X[index], self.Y[index], self.Yvar[index])

    @property
    def known_noise(self) -> Tensor | None:
        """Return the noise variances, or None where none is known."""
        return None if bool(self.Yvar.isnan().all()) else self.Yvar

    @cached_property
    def keys(self) -> list[bytes]:
        """Return each row's values as bytes; the sign of a NaN or of a zero does not count.

        They are cached: the rows of the data at one trial are the rows of the model at the next.
        """
        values = torch.cat((self.X, self.Y, self.Yvar), -1).detach().cpu().double() + 0.0
        array = np.ascontiguousarray(torch.where(values.isnan(), torch.nan, values).numpy())
        return [row.tobytes() for row in array]

    def without(self, others: DataRows) -> DataRows:
        """Remove for each other row one equal to it, if there is one. Cost O(n)."""
        removed, left = Counter(others.keys), []
        for i, key in enumerate(self.keys):
            if removed[key] > 0:
                removed[key] -= 1
            else:
                left.append(i)
        return self[left]


def noise_floor(data: SupervisedDataset) -> float:
    """Return the value to raise known noise variances of zero to, by a stream's first observations.

    It is ten times a model's own least value. So a model that is built of more data does not raise
    them further, and equals one that has followed the stream.
    """
    variance = float(data.Y.var(correction=0))
    return 10.0 * NOISE_FLOOR * (variance if variance > 0.0 else 1.0)


@dataclass
class Stream:
    """A model and the rows in its memory.

    Attributes:
        model: The model, changed in place.
        rows: The rows in its memory.
        bounded: Whether it was built with the bounds of the search space.
        fitted_at: Number of observations at the last refit; 0: none yet.
        left_out: Its last predictions without some rows; None: none yet.
    """

    model: StreamingGP
    rows: DataRows
    bounded: bool
    fitted_at: int = 0
    left_out: LeaveOutModel | None = None

    def follow(self, wanted: DataRows) -> str | None:
        """Bring the model to the rows that it should have, or return why this is not possible.

        A model that refuses an observation is left with some of them: it must be built again then.
        """
        fresh, gone = wanted.without(self.rows), self.rows.without(wanted)
        if len(gone) > 0 and len(gone) >= len(self.rows):
            return "none of its observations is left"
        if len(gone) > 0 and not retracts_exactly(self.model):
            name = type(self.model).__name__
            return f"{len(gone)} observations are gone, and {name} cannot take them out"
        try:
            if len(fresh) > 0:
                self.model.update(fresh.X, fresh.Y, fresh.known_noise)
            if len(gone) > 0:
                self.model.retract(gone.X, gone.Y, gone.known_noise)
        except BotorchError as error:
            return f"the model refused them: {error}"
        self.rows = wanted
        return None


class RefitRecord(TypedDict):
    """Hyperparameters and standardisation after a refit, as Ax stores them with a generator run.

    Attributes:
        count: Number of observations at that refit.
        bounds: Bounds of the search space then.
        unit: Unit in which the model had the outcomes.
        floor: Value that known noise variances are raised to.
        bounded: Whether the model was given the bounds; not in records of older versions.
        values: Learned values, as nested lists by name in ``state_dict``.
        raced, scales, loss: Of the model's :class:`LastFit`, scales as nested lists; not in records
            of older versions.
    """

    count: int
    bounds: list[list[float]]
    unit: float
    floor: float
    bounded: NotRequired[bool]
    values: dict[str, Any]
    raced: NotRequired[float]
    scales: NotRequired[dict[str, Any]]
    loss: NotRequired[float]


def restore(model: StreamingGP, record: RefitRecord) -> bool:
    """Load a record into a new model; return False if its state has other names or shapes."""
    state, stored = learned_state(model), record["values"]
    if stored.keys() != state.keys():
        return False
    values = {name: value.new_tensor(stored[name]) for name, value in state.items()}
    if any(values[name].shape != value.shape for name, value in state.items()):
        return False
    model.load_state_dict({**model.state_dict(), **values})
    if "raced" in record:
        scales = {
            name: torch.tensor(v, dtype=torch.float64) for name, v in record["scales"].items()
        }
        ended = scales or None, record["raced"], record.get("loss", math.nan)
        model._last_fit = LastFit(learned_values(model), *ended)
    return True


def learned_state(model: StreamingGP) -> dict[str, Tensor]:
    """Return a model's state without values given by the search space, bounds and priors."""
    modules = model.named_modules()
    constants = [f"{name}." for name, part in modules if isinstance(part, Interval | Prior)]
    given = ("input_transform.", *constants)
    return {name: v for name, v in model.state_dict().items() if not name.startswith(given)}


class LeaveOutModel:
    """A model and the rows in its memory, any of which can be left out in closed form.

    Attributes:
        model: The model, which is not changed.
        rows: All rows in its memory.
        state: State of the model for which the closed form holds.
    """

    def __init__(self, model: StreamingGP, rows: DataRows) -> None:
        """Take a model in its present state."""
        self.model, self.rows, self.state = model, rows, state_of(model)

    def predict(self, gone: Tensor, X: Tensor, observation_noise: bool) -> Moments | None:
        """Predict points given all rows except some.

        Args:
            gone: Whether a row is left out, ``n``.
            X: Points, ``t x d``.
            observation_noise: Whether variances are of outcomes.

        Returns:
            Means and variances, ``t`` each; None: the model cannot say, or no row would be left.
        """
        if bool(gone.all()):
            return None
        try:
            is_one = int(gone.sum()) == 1 and torch.equal(X, self.rows.X[gone])
            if is_one and not observation_noise:
                mean, variance = self._each
                return mean[gone], variance[gone]
            rows = self.rows[gone]
            with torch.no_grad():
                model = without(self._complete, rows.X, rows.Y, rows.known_noise)
                posterior = model.posterior(X.unsqueeze(-2), observation_noise=observation_noise)
                return moments(posterior)
        except BotorchError:
            return None

    @cached_property
    def _complete(self) -> StreamingGP:
        """Return the model, or one at the same points that forgets no row. Cost O(n M²)."""
        model, rows = self.model, self.rows
        if not isinstance(model, OSGPR) or len(rows) <= model.window:
            return model
        fresh = deepcopy(model)
        fresh.allocator, fresh.window = None, len(rows)
        return fresh.clear().update(rows.X, rows.Y, rows.known_noise)

    @cached_property
    def _each(self) -> Moments:
        """Predict each row given all others. Cost O(n r²)."""
        rows = self.rows
        result = leave_one_out(self._complete, rows.X, rows.Y, rows.known_noise, False)
        return moments(result.posterior)


def moments(posterior: object) -> Moments:
    """Return a posterior's means and variances, flattened."""
    known = cast(GPyTorchPosterior, posterior)
    return known.mean.flatten(), known.variance.flatten()
