"""Ax's surrogate, whose models go on from one trial to the next."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ax.core.search_space import SearchSpaceDigest
from ax.generators.torch.botorch_modular.surrogate import (
    Surrogate,
    SurrogateSpec,
    submodel_input_constructor,
)
from ax.generators.torch.botorch_modular.utils import ModelConfig
from botorch.models.model import Model
from botorch.settings import validate_input_scaling
from botorch.utils.datasets import SupervisedDataset
from torch import Tensor

from bo_stream.ax.learned import Record, restore, values_of
from bo_stream.ax.left_out import LeftOut, Moments
from bo_stream.ax.model_choice import covers_a_box, suited
from bo_stream.ax.outside import within_reach
from bo_stream.ax.rows import Rows, noise_floor
from bo_stream.ax.stream import Stream
from bo_stream.loops.refits import thin
from bo_stream.models.refit import learned_values
from bo_stream.models.streaming_gp import StreamingGP

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
