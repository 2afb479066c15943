"""Ax's surrogate, whose models go on from one trial to the next, and the choice of their class."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from ax.core.search_space import SearchSpaceDigest
from ax.generators.torch.botorch_modular.surrogate import Surrogate, submodel_input_constructor
from ax.generators.torch.botorch_modular.utils import ModelConfig
from botorch.exceptions.errors import UnsupportedError
from botorch.exceptions.warnings import InputDataWarning
from botorch.models.model import Model
from botorch.settings import validate_input_scaling
from botorch.utils.datasets import SupervisedDataset
from torch import Tensor

from bo_stream.ax.stream import Moments, Record, Rows, Stream, learned_state, noise_floor, restore
from bo_stream.loops.models import MODELS
from bo_stream.loops.optimization.surrogate import thin
from bo_stream.models.auto.auto import AutoGP
from bo_stream.models.base import StreamingGP
from bo_stream.models.inducing.osgpr import OSGPR
from bo_stream.models.wiski.grid_model import GridModel
from bo_stream.models.wiski.wiski import WISKI

logger = logging.getLogger("bo_stream.ax")

ASKED_FOR = " (asked for)"
"""End of the name of a configuration whose model was asked for."""

OTHER_WAYS = ("stem", "covar_module")
"""Options with which a model on a grid takes any number of inputs."""

REACH = 0.5
"""How far a grid is widened on each side, in parts of the search space's width."""


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
            refit: Growth at which hyperparameters are learned anew: see ``is_due``.
            learned: Records of the metrics' former models, by name; written at each refit.
            units: Units in which the outcomes come, by metric.
            **kwargs: Arguments of Ax's ``Surrogate``, of which ``surrogate_spec`` has one model.
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
        stream = self._followed(dataset, search_space_digest, config, kind)
        if stream.refit_if_due(self.refit):
            self.learned[_name(dataset)] = Record(
                count=len(stream.rows),
                bounds=_bounds(search_space_digest),
                unit=self._unit(dataset),
                floor=self._floor(dataset),
                bounded=stream.bounded,
                values={name: v.tolist() for name, v in learned_state(stream.model).items()},
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
        if covers_a_box(config, kind):
            dataset = within_reach(dataset, digest, kind)
        names, rows = tuple(dataset.outcome_names), Rows.of(dataset, self._floor(dataset))
        stream, reason = self._streams.pop(names, None), None
        if stream is not None:
            if names not in self._submodels:
                reason = "the search space has changed"
            elif type(stream.model) is not kind:
                reason = "another model is asked for"
            else:
                reason = stream.follow(rows)
        if reason is not None:
            logger.info("%s: the model is built anew: %s.", _name(dataset), reason)
        if stream is None or reason is not None:
            stream = self._begun(rows, dataset, digest, config, kind)
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
        rows: Rows,
        like: SupervisedDataset,
        digest: SearchSpaceDigest,
        config: ModelConfig,
        kind: type[StreamingGP],
    ) -> Stream:
        """Build a model of all data, with what was learned before if it fits.

        The search space is the first box of a grid, which observations outside widen. Where some
        are far outside, a model that is not on a grid yet gets no box and never will be, unless it
        had the box before they came.
        """
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
        record = self.learned.get(_name(like))
        near = bool(reached(rows.X, digest).all())
        if record is not None and record["bounds"] == _bounds(digest):
            near = near or record.get("bounded", False)
        bounded = covers_a_box(config, kind) or (kind is AutoGP and near)
        if bounded and "bounds" not in config.model_options:
            given["bounds"] = rows.X.new_tensor(digest.bounds).mT
        with validate_input_scaling(False):  # rows may lie outside the search space
            model = kind(**given)
        stream = Stream(model, rows, bounded)
        if record is not None and restore(model, record):
            thin(model)
            same = (record["bounds"], record["unit"]) == (_bounds(digest), self._unit(like))
            stream.fitted_at = record["count"] if same else 0
        return stream

    def predict_without(
        self, name: str, gone: Tensor, X: Tensor, observation_noise: bool
    ) -> Moments | None:
        """Predict a metric given all its rows but some; see ``LeaveOutModel.predict``."""
        stream = self._streams.get((name,))
        if stream is None or len(stream.rows) != len(gone):
            return None
        return stream.predict_without(gone, X, observation_noise)


def _name(dataset: SupervisedDataset) -> str:
    return ", ".join(dataset.outcome_names)


def _bounds(digest: SearchSpaceDigest) -> list[list[float]]:
    return [list(pair) for pair in digest.bounds]


def name_of(model: type | None, default: type) -> str:
    """Return a configuration's name, which Ax stores and which tells a model that was asked for."""
    return default.__name__ if model is None else f"{model.__name__}{ASKED_FOR}"


def suited(config: ModelConfig, dim: int) -> ModelConfig:
    """Return a configuration, with :class:`OSGPR` where a default of WISKI cannot take the inputs.

    Args:
        config: Configuration of the model that was asked for, or of a default: :class:`AutoGP`,
            which takes any number, or WISKI (see ``generation_strategy``).
        dim: Number of inputs, one-hot columns counted.

    Raises:
        UnsupportedError: The model that was asked for, or the default with its options, cannot.
    """
    if config.botorch_model_class is not WISKI or config.covar_module_class is not None:
        return config
    if any(name in config.model_options for name in OTHER_WAYS):
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


def covers_a_box(config: ModelConfig, kind: type) -> bool:
    """Return whether a configuration's model has a grid over a box of the inputs themselves."""
    return issubclass(kind, GridModel) and "stem" not in config.model_options


def reached(X: Tensor, digest: SearchSpaceDigest) -> Tensor:
    """Return which inputs, ``n x d``, a grid over the search space reaches, ``n``."""
    low, high = X.new_tensor(digest.bounds).unbind(-1)
    margin = REACH * (high - low)
    return ((low - margin <= X) & (high + margin >= X)).all(-1)


def within_reach(
    dataset: SupervisedDataset, digest: SearchSpaceDigest, kind: type
) -> SupervisedDataset:
    """Return the observations of a metric that a grid takes, with a warning if there are others."""
    inside = reached(dataset.X, digest)
    if bool(inside.all()):
        return dataset
    warnings.warn(
        f"{int((~inside).sum())} observations of {_name(dataset)} are left out: they lie outside "
        f"the search space by more than {REACH:g} of its width, and a grid over them would be "
        f"large. Choose another model than {kind.__name__}, such as OSGPR, to keep them.",
        InputDataWarning,
        stacklevel=2,
    )
    return dataset.clone(mask=inside)
