"""Storage of Ax's experiments with this package's classes: JSON snapshots and SQL databases.

Ax stores classes by name. :func:`register` gives it a name for each of ours and the way back; each
name ends in what to import, because Ax's errors quote the names that it does not know.
"""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pandas as pd
from ax.api.client import Client
from ax.api.configs import StorageConfig
from ax.core.data import Data
from ax.generators.torch.botorch_modular.acquisition import Acquisition
from ax.storage.botorch_modular_registry import CLASS_TO_REGISTRY, CLASS_TO_REVERSE_REGISTRY
from ax.storage.json_store.registry import CORE_DECODER_REGISTRY, CORE_ENCODER_REGISTRY
from ax.storage.metric_registry import CORE_METRIC_REGISTRY, register_metrics
from ax.storage.runner_registry import CORE_RUNNER_REGISTRY, register_runners
from ax.storage.transform_registry import register_transform
from ax.utils.common.serialization import serialize_init_args
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.acquisition.active_learning import qNegIntegratedPosteriorVariance
from botorch.models.model import Model
from gpytorch.kernels import Kernel

import bo_stream
from bo_stream import DirichletWISKI, ProductMatern
from bo_stream.ax.acquisition import INTEGRATED, PoolAcquisition, StreamAcquisition
from bo_stream.ax.initialization import EnoughTrials, PoolStart, RegionSuits
from bo_stream.ax.processes import ProcessMetric, ProcessRunner
from bo_stream.ax.strategy import StreamGenerators
from bo_stream.ax.transforms import TRANSFORMS
from bo_stream.models.base import StreamingGP
from bo_stream.storage.archive import FileFormat, read_index, write_index

_STORED_MODELS = tuple(
    model
    for model in (getattr(bo_stream, name) for name in bo_stream.__all__)
    if isinstance(model, type)
    and issubclass(model, StreamingGP)
    and model not in (StreamingGP, DirichletWISKI)  # Ax has no labels
)
SNAPSHOT = FileFormat("bo_stream Ax snapshot", 1)
_NEEDED_BY_SQL = ("sqlalchemy", "tabulate")
"""Modules that Ax's SQL storage imports, or calls without declaring them."""


def save_snapshot(client: Client, path: str | Path) -> None:
    """Write an experiment to a JSON file that is always whole.

    A process killed while ``Client.save_to_json_file`` writes leaves half a file; here it leaves
    the previous one. Call it after each trial that must not be lost. It writes the whole
    experiment, some milliseconds for each of its n trials, O(n): from some hundred trials on take
    :func:`storage_config`, which writes only new trials.

    Args:
        client: A client with an experiment.
        path: Path of the file, for :func:`load_snapshot`.

    Raises:
        OSError: The file cannot be written; a previous one is left whole.
    """
    with TemporaryDirectory() as folder:
        draft = Path(folder) / "snapshot.json"
        client.save_to_json_file(str(draft))
        content = json.loads(draft.read_text())
    write_index(Path(path), SNAPSHOT, content)


def load_snapshot(path: str | Path, config: StorageConfig | None = None) -> Client:
    """Read a file of :func:`save_snapshot`, after a check of its format, version and digest.

    ``Client.load_from_json_file`` reads the file, too, without this check.

    Args:
        path: Path of the file.
        config: As in ``Client.load_from_json_file``.

    Raises:
        OSError: The file cannot be opened.
        ValueError: It is of another format or version, or damaged.
    """
    read_index(Path(path), SNAPSHOT)
    return Client.load_from_json_file(str(path), storage_config=config)


def storage_config(database: str | Path) -> StorageConfig:
    """Open a database for Ax's ``Client(storage_config=...)`` and ``Client.load_from_database``.

    Every trial is in the database when the call that made or completed it returns, so that a
    process can be killed at any time. Tables are made where there are none. The cost of a save does
    not grow with the number of trials; Ax's own writes all candidates again with each.

    Ax has one database open in a process. It can contain many experiments; before opening another
    one call :func:`close_storage`.

    Args:
        database: Path of a file of sqlite, which need not exist yet, or a URL of SQLAlchemy, such
            as ``postgresql://user:password@host/name``, whose driver must be installed.

    Raises:
        ImportError: SQLAlchemy is not installed.
        ValueError: The database cannot be opened, or another one is open.

    Example:
        >>> client = Client(storage_config=storage_config("campaign.db"))
    """
    sql, url = _sql(), str(database)
    if "://" not in url:
        path = Path(database).absolute()
        if not path.parent.is_dir():
            raise ValueError(f"Expected database in a folder that exists, got {str(database)!r}.")
        url = f"sqlite:///{path}"
    sql.open_database(url)
    return StorageConfig(url=url, registry_bundle=sql.StreamBundle())


def close_storage() -> None:
    """Close the database that is open, if any. Its clients can save nothing from then on."""
    _sql().close_database()


def _sql() -> ModuleType:
    """Import our part of Ax's SQL storage; an ``ImportError`` says what it needs."""
    missing = [name for name in _NEEDED_BY_SQL if find_spec(name) is None]
    if missing:
        raise ImportError(
            f"Ax's SQL storage needs {' and '.join(missing)}: run pip install 'bo-stream[sql]', or "
            "use client.save_to_json_file."
        )
    from bo_stream.ax import sql

    return sql


def register() -> None:
    """Add our classes to Ax's registries, as the import of ``bo_stream.ax`` does."""
    for base, kinds in (
        (Model, _STORED_MODELS),
        (AcquisitionFunction, INTEGRATED),
        (Kernel, (ProductMatern,)),
        (Acquisition, (StreamAcquisition, PoolAcquisition)),
    ):
        for kind in kinds:
            CLASS_TO_REGISTRY[base][kind] = _name_in_storage(kind)
            CLASS_TO_REVERSE_REGISTRY[base][_name_in_storage(kind)] = kind
    names = CLASS_TO_REVERSE_REGISTRY[AcquisitionFunction]
    names["StreamNIPV: import bo_stream.ax"] = qNegIntegratedPosteriorVariance  # of older files
    for transform in TRANSFORMS:
        register_transform(transform)
    CORE_ENCODER_REGISTRY[Data] = data_as_json
    criteria = (EnoughTrials, RegionSuits)
    for other in (StreamGenerators, PoolStart, *criteria, ProcessRunner, ProcessMetric):
        CORE_ENCODER_REGISTRY[other] = _as_json
        CORE_DECODER_REGISTRY[_name_in_storage(other)] = other
    CORE_RUNNER_REGISTRY.update(register_runners({ProcessRunner: None})[0])
    CORE_METRIC_REGISTRY.update(register_metrics({ProcessMetric: None})[0])


def _name_in_storage(kind: type) -> str:
    """Return the name of a class in JSON, with the import that makes it known to Ax."""
    return f"{kind.__name__}: import bo_stream.ax"


def _as_json(value: Any) -> dict[str, Any]:
    """Encode one of our objects by the arguments of its class."""
    is_member = isinstance(value, StreamGenerators)
    arguments = {"name": value.name} if is_member else serialize_init_args(value)
    return {"__type": _name_in_storage(type(value)), **arguments}


def data_as_json(data: Data) -> dict[str, Any]:
    """Encode data in the format of Ax's JSON storage, instead of its ``data_to_dict``.

    Rows without times are written directly: a frame of each trial takes milliseconds, four times as
    long for a whole experiment.
    """
    rows = data._data_rows
    is_plain = rows and all(row.start_time is None and row.end_time is None for row in rows)
    if is_plain:  # as :func:`frame_as_json` encodes Ax's frame, in the rows' own order
        keys = ("trial_index", "arm_name", "metric_name", "metric_signature")
        columns = {
            **{name: [getattr(row, name) for row in rows] for name in keys},
            "mean": [float(row.mean) for row in rows],
            "sem": [float(row.se) for row in rows],
            "step": [row.step for row in rows],
            "n": [row.n for row in rows],
        }
        known = {name: column for name, column in columns.items() if set(column) != {None}}
        value = json.dumps({name: dict(enumerate(map(_finite, c))) for name, c in known.items()})
    else:
        value = frame_as_json(data.full_df)
    return {"__type": type(data).__name__, "df": {"__type": "DataFrame", "value": value}}


def frame_as_json(frame: pd.DataFrame) -> str:
    """Encode a frame of numbers, strings and times as ``frame.to_json()`` does, with all digits.

    The default of pandas is ten decimals, which would make an outcome of 1e-12 zero.
    """
    columns = frame.astype(object).to_dict()
    return json.dumps(
        {name: {row: _finite(v) for row, v in column.items()} for name, column in columns.items()}
    )


def _finite(value: Any) -> Any:
    """Return a value as pandas writes it in JSON: times as numbers, null for what is not finite."""
    if value is pd.NaT:
        return None
    if isinstance(value, pd.Timestamp):
        return value.value // 1_000_000  # milliseconds, as pandas writes and reads them
    return None if isinstance(value, float) and not math.isfinite(value) else value
