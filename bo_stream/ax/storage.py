"""An experiment in one JSON file."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pandas as pd
from ax.api.client import Client
from ax.core.data import Data, DataRow
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
from packaging.specifiers import SpecifierSet

from bo_stream.acquisition import FeatureNIPV
from bo_stream.ax.acquisition import StreamAcquisition
from bo_stream.ax.generator import StreamGenerators
from bo_stream.ax.initialization import EnoughTrials, PoolStart
from bo_stream.ax.nipv import StreamNIPV
from bo_stream.ax.pool_acquisition import PoolAcquisition
from bo_stream.ax.processes import ProcessMetric, ProcessRunner
from bo_stream.ax.transforms import (
    ExactCandidates,
    FiniteOutcomes,
    GaussianOutcomes,
    ReportedMetrics,
    SteadyWinsorize,
)
from bo_stream.models.clustered.clustered import ClusteredGP
from bo_stream.models.decoupled.decoupled import DecoupledGP
from bo_stream.models.inducing.osgpr import OSGPR
from bo_stream.models.inducing.osvgp import OSVGP
from bo_stream.models.local.local import LocalGP
from bo_stream.models.quadruply_stochastic.qsgp import QSGP
from bo_stream.models.quadruply_stochastic.qsrvm import QSRVM
from bo_stream.models.wiski.heteroscedastic import HeteroscedasticWISKI
from bo_stream.models.wiski.wiski import WISKI
from bo_stream.storage import atomic_write

SUPPORTED = {"ax-platform": ">=1.3.1,<1.4", "botorch": ">=0.18.1,<0.19"}
"""What ``bo_stream.ax`` extends is not part of Ax's stable interface."""


def check_versions(supported: dict[str, str] = SUPPORTED) -> None:
    """Refuse versions that the plug-in was not made for.

    Args:
        supported: Version specifiers by distribution.

    Raises:
        ImportError: One is not installed, or in another version.
    """
    for name, expected in supported.items():
        installed = _version(name, expected)
        if not SpecifierSet(expected).contains(installed, prereleases=True):
            raise ImportError(
                f"bo_stream.ax expects {name}{expected}, but {name} {installed} is installed. "
                f"Run pip install '{name}{expected}', or upgrade bo-stream."
            )


def _version(name: str, expected: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError as error:
        raise ImportError(
            f"bo_stream.ax needs {name}{expected}, and it is not installed. Run pip install "
            "'bo-stream[ax]'."
        ) from error


def data_as_json(data: Data) -> dict[str, Any]:
    """What Ax's JSON storage is given for data, in Ax's format.

    Ax stores each trial's data by themselves, and its frames take milliseconds each: rows without
    times are written as they are, which is four times as fast for a whole experiment.
    """
    rows = data._data_rows
    is_plain = rows and all(row.start_time is None and row.end_time is None for row in rows)
    value = _rows_as_json(rows) if is_plain else frame_as_json(data.full_df)
    return {"__type": type(data).__name__, "df": {"__type": "DataFrame", "value": value}}


def _rows_as_json(rows: list[DataRow]) -> str:
    """As :func:`frame_as_json` of the frame that Ax makes of them, in the rows' own order."""
    columns: dict[str, list[Any]] = {
        "trial_index": [row.trial_index for row in rows],
        "arm_name": [row.arm_name for row in rows],
        "metric_name": [row.metric_name for row in rows],
        "metric_signature": [row.metric_signature for row in rows],
        "mean": [float(row.mean) for row in rows],
        "sem": [float(row.se) for row in rows],
        "step": [row.step for row in rows],
        "n": [row.n for row in rows],
    }
    optional = {name for name in ("step", "n") if all(each is None for each in columns[name])}
    return json.dumps(
        {
            name: {str(row): _finite(value) for row, value in enumerate(values)}
            for name, values in columns.items()
            if name not in optional
        }
    )


def frame_as_json(frame: pd.DataFrame) -> str:
    """As ``frame.to_json()``, which writes ten decimals: of an outcome of 1e-12 nothing is left.

    Args:
        frame: Of numbers, strings and times; what is not finite is written as null, as pandas does.
    """
    columns = frame.astype(object).to_dict()
    return json.dumps(
        {
            name: {row: _finite(value) for row, value in column.items()}
            for name, column in columns.items()
        }
    )


def _finite(value: Any) -> Any:
    if value is pd.NaT:
        return None
    if isinstance(value, pd.Timestamp):
        return value.value // 1_000_000  # milliseconds, as pandas writes and reads them
    return None if isinstance(value, float) and not math.isfinite(value) else value


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

_TRANSFORMS = (ExactCandidates, FiniteOutcomes, GaussianOutcomes, ReportedMetrics, SteadyWinsorize)


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


def save_snapshot(client: Client, path: str | Path) -> None:
    """As ``client.save_to_json_file``, but a process killed meanwhile leaves the former file whole.

    Call it after each trial that must not be lost. It writes the whole experiment, some
    milliseconds for each trial in it: O(n) for n trials. From some hundred trials on take
    :func:`storage_config`, which writes what is new only.

    Args:
        client: With an experiment.
        path: Of the file, for ``Client.load_from_json_file``.

    Raises:
        OSError: The file cannot be written; a former one is left whole.
    """
    with atomic_write(path) as file:
        client.save_to_json_file(file.name)
