"""What Ax's JSON and SQL storage must know by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ax.core.data import Data
from ax.generators.torch.botorch_modular.acquisition import Acquisition
from ax.storage.botorch_modular_registry import CLASS_TO_REGISTRY, CLASS_TO_REVERSE_REGISTRY
from ax.storage.json_store.registry import CORE_DECODER_REGISTRY, CORE_ENCODER_REGISTRY
from ax.storage.metric_registry import CORE_METRIC_REGISTRY, register_metrics
from ax.storage.runner_registry import CORE_RUNNER_REGISTRY, register_runners
from ax.storage.transform_registry import register_transform
from ax.utils.common.serialization import SerializationMixin, serialize_init_args
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.acquisition.active_learning import qNegIntegratedPosteriorVariance
from botorch.models.model import Model

from bo_stream.acquisition import FeatureNIPV
from bo_stream.ax.acquisition import StreamAcquisition
from bo_stream.ax.candidates import ExactCandidates
from bo_stream.ax.exact_data import data_as_json
from bo_stream.ax.finite import FiniteOutcomes
from bo_stream.ax.generator import StreamGenerators
from bo_stream.ax.initialization import EnoughTrials
from bo_stream.ax.nipv import StreamNIPV
from bo_stream.ax.pool_acquisition import PoolAcquisition
from bo_stream.ax.pool_start import PoolStart
from bo_stream.ax.process_metric import ProcessMetric
from bo_stream.ax.process_runner import ProcessRunner
from bo_stream.ax.reported import ReportedMetrics
from bo_stream.ax.units import OutcomeUnits
from bo_stream.ax.winsorizing import SteadyWinsorize
from bo_stream.models.clustered import ClusteredGP
from bo_stream.models.decoupled import DecoupledGP
from bo_stream.models.heteroscedastic_wiski import HeteroscedasticWISKI
from bo_stream.models.local import LocalGP
from bo_stream.models.osgpr import OSGPR
from bo_stream.models.osvgp import OSVGP
from bo_stream.models.qsgp import QSGP
from bo_stream.models.qsrvm import QSRVM
from bo_stream.models.wiski import WISKI

STORED_MODELS = (
    WISKI,
    OSGPR,
    OSVGP,
    ClusteredGP,
    LocalGP,
    HeteroscedasticWISKI,
    DecoupledGP,
    QSGP,
    QSRVM,
)
STORED_ACQUISITIONS = (FeatureNIPV, StreamNIPV, qNegIntegratedPosteriorVariance)

_TRANSFORMS = (ExactCandidates, FiniteOutcomes, OutcomeUnits, ReportedMetrics, SteadyWinsorize)


def register() -> None:
    """Tell Ax; done when ``bo_stream.ax`` is imported, which must be before anything is loaded."""
    for model in STORED_MODELS:
        _register_class(model, Model)
    for acquisition in STORED_ACQUISITIONS:
        _register_class(acquisition, AcquisitionFunction)
    for acquisition_of_ax in (StreamAcquisition, PoolAcquisition):
        _register_class(acquisition_of_ax, Acquisition)
    for transform in _TRANSFORMS:
        register_transform(transform)
    CORE_ENCODER_REGISTRY[Data] = data_as_json
    CORE_ENCODER_REGISTRY[StreamGenerators] = _generator_as_json
    CORE_DECODER_REGISTRY[name_in_storage(StreamGenerators)] = StreamGenerators
    CORE_ENCODER_REGISTRY[PoolStart] = _start_as_json
    CORE_DECODER_REGISTRY[name_in_storage(PoolStart)] = PoolStart
    CORE_ENCODER_REGISTRY[EnoughTrials] = _criterion_as_json
    CORE_DECODER_REGISTRY[name_in_storage(EnoughTrials)] = EnoughTrials
    for kind in (ProcessRunner, ProcessMetric):
        CORE_ENCODER_REGISTRY[kind] = _arguments_as_json
        CORE_DECODER_REGISTRY[name_in_storage(kind)] = kind
    CORE_RUNNER_REGISTRY.update(register_runners({ProcessRunner: None})[0])
    CORE_METRIC_REGISTRY.update(register_metrics({ProcessMetric: None})[0])


def name_in_storage(kind: type) -> str:
    """Says what is missing, for Ax's error quotes the names that it does not know."""
    return f"{kind.__name__}: import bo_stream.ax"


def _register_class(kind: type, base: type) -> None:
    CLASS_TO_REGISTRY[base][kind] = name_in_storage(kind)
    CLASS_TO_REVERSE_REGISTRY[base][name_in_storage(kind)] = kind


def _generator_as_json(generator: StreamGenerators) -> dict[str, Any]:
    return {"__type": name_in_storage(StreamGenerators), "name": generator.name}


def _start_as_json(start: PoolStart) -> dict[str, Any]:
    arguments = {field.name: getattr(start, field.name) for field in fields(PoolStart)}
    return {"__type": name_in_storage(PoolStart), **arguments}


def _criterion_as_json(criterion: EnoughTrials) -> dict[str, Any]:
    return {"__type": name_in_storage(EnoughTrials), **serialize_init_args(criterion)}


def _arguments_as_json(obj: SerializationMixin) -> dict[str, Any]:
    return {"__type": name_in_storage(type(obj)), **type(obj).serialize_init_args(obj)}
