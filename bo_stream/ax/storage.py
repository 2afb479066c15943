"""Save and load Ax experiments and strategies with this package's classes, as JSON or SQL.

Ax stores classes by name. :func:`register` gives it a name for each of ours and the way back; each
name ends in what to import, because Ax's errors quote the names that it does not know.
"""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
from ax.api.client import Client
from ax.api.configs import StorageConfig
from ax.core.data import Data, DataRow
from ax.core.experiment import Experiment
from ax.generation_strategy.generation_strategy import GenerationStrategy
from ax.generators.torch.botorch_modular.acquisition import Acquisition
from ax.storage.botorch_modular_registry import CLASS_TO_REGISTRY, CLASS_TO_REVERSE_REGISTRY
from ax.storage.json_store.encoder import object_to_json
from ax.storage.json_store.registry import CORE_DECODER_REGISTRY, CORE_ENCODER_REGISTRY
from ax.storage.metric_registry import CORE_METRIC_REGISTRY, register_metrics
from ax.storage.registry_bundle import RegistryBundle
from ax.storage.runner_registry import CORE_RUNNER_REGISTRY, register_runners
from ax.storage.sqa_store import db
from ax.storage.sqa_store.decoder import Decoder
from ax.storage.sqa_store.encoder import Encoder
from ax.storage.sqa_store.save import _update_generation_strategy
from ax.storage.sqa_store.sqa_classes import SQAData, SQAGenerationStrategy
from ax.storage.sqa_store.sqa_config import SQAConfig
from ax.storage.transform_registry import register_transform
from ax.utils.common.base import Base as Stored
from ax.utils.common.serialization import serialize_init_args
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.acquisition.active_learning import qNegIntegratedPosteriorVariance
from botorch.models.model import Model
from gpytorch.kernels import Kernel
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DatabaseError

import bo_stream
from bo_stream import DirichletWISKI, ProductMatern
from bo_stream.acquisition import FeatureNIPV
from bo_stream.ax.acquisition import PoolAcquisition, StreamAcquisition
from bo_stream.ax.adapters import (
    ExactCandidates,
    FiniteOutcomes,
    OutcomeUnits,
    ReportedMetrics,
    SteadyWinsorize,
)
from bo_stream.ax.initialization import EnoughTrials, PoolStart
from bo_stream.ax.processes import ProcessMetric, ProcessRunner
from bo_stream.ax.strategy import StreamGenerators
from bo_stream.models.base import StreamingGP
from bo_stream.storage.archive import FileFormat, read_index, write_index

STORED_MODELS = tuple(
    model
    for model in (getattr(bo_stream, name) for name in bo_stream.__all__)
    if isinstance(model, type)
    and issubclass(model, StreamingGP)
    and model not in (StreamingGP, DirichletWISKI)  # Ax has no labels
)
STORED_ACQUISITIONS = (FeatureNIPV, qNegIntegratedPosteriorVariance)
TRANSFORMS = (ExactCandidates, FiniteOutcomes, OutcomeUnits, ReportedMetrics, SteadyWinsorize)
SNAPSHOT = FileFormat("bo_stream Ax snapshot", 1)
NEEDED_BY_SQL = ("sqlalchemy", "tabulate")
"""Modules of Ax's SQL storage: one that it imports, one that it calls without declaring it."""


def save_snapshot(client: Client, path: str | Path) -> None:
    """Write an experiment to a JSON file that is always whole.

    A process killed while ``Client.save_to_json_file`` writes leaves half a file; here it leaves
    the former one. Call it after each trial that must not be lost. It writes the whole experiment,
    some milliseconds for each of its n trials, O(n): from some hundred trials on take
    :func:`storage_config`, which writes only what is new.

    Args:
        client: A client with an experiment.
        path: Path of the file, for :func:`load_snapshot`.

    Raises:
        OSError: The file cannot be written; a former one is left whole.
    """
    with TemporaryDirectory() as folder:
        draft = Path(folder) / "snapshot.json"
        client.save_to_json_file(str(draft))
        content = json.loads(draft.read_text())
    write_index(Path(path), SNAPSHOT, content)


def load_snapshot(path: str | Path, config: StorageConfig | None = None) -> Client:
    """Read what :func:`save_snapshot` wrote, after a look at its format, version and digest.

    ``Client.load_from_json_file`` reads the file, too, without that look.

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

    Ax has one database open in a process. It can hold many experiments; for another one call
    :func:`close_storage` first.

    Args:
        database: Path of a file of sqlite, which need not exist yet, or a URL of SQLAlchemy, such
            as ``postgresql://user:password@host/name``, whose driver must be installed.

    Raises:
        ImportError: SQLAlchemy is not installed.
        ValueError: The database cannot be opened, or another one is open.

    Example:
        >>> client = Client(storage_config=storage_config("campaign.db"))
    """
    _check_sql_installed()
    from bo_stream.ax import storage

    url = _url(database)
    storage.open_database(url)
    return StorageConfig(url=url, registry_bundle=storage.StreamBundle())


def close_storage() -> None:
    """Close the database that is open, if any. Its clients can save nothing from then on."""
    _check_sql_installed()
    from bo_stream.ax import storage

    storage.close_database()


def _check_sql_installed() -> None:
    missing = [name for name in NEEDED_BY_SQL if find_spec(name) is None]
    if missing:
        raise ImportError(
            f"Ax's SQL storage needs {' and '.join(missing)}: run pip install 'bo-stream[sql]', or "
            "use client.save_to_json_file."
        )


def _url(database: str | Path) -> str:
    if "://" in str(database):
        return str(database)
    path = Path(database).absolute()
    if not path.parent.is_dir():
        raise ValueError(f"Expected database in a folder that exists, got {str(database)!r}.")
    return f"sqlite:///{path}"


def register() -> None:
    """Add our classes to Ax's registries, as the import of ``bo_stream.ax`` does."""
    for base, kinds in (
        (Model, STORED_MODELS),
        (AcquisitionFunction, STORED_ACQUISITIONS),
        (Kernel, (ProductMatern,)),
        (Acquisition, (StreamAcquisition, PoolAcquisition)),
    ):
        for kind in kinds:
            CLASS_TO_REGISTRY[base][kind] = name_in_storage(kind)
            CLASS_TO_REVERSE_REGISTRY[base][name_in_storage(kind)] = kind
    names = CLASS_TO_REVERSE_REGISTRY[AcquisitionFunction]
    names["StreamNIPV: import bo_stream.ax"] = qNegIntegratedPosteriorVariance  # of older files
    for transform in TRANSFORMS:
        register_transform(transform)
    CORE_ENCODER_REGISTRY[Data] = data_as_json
    for other in (StreamGenerators, PoolStart, EnoughTrials, ProcessRunner, ProcessMetric):
        CORE_ENCODER_REGISTRY[other] = _as_json
        CORE_DECODER_REGISTRY[name_in_storage(other)] = other
    CORE_RUNNER_REGISTRY.update(register_runners({ProcessRunner: None})[0])
    CORE_METRIC_REGISTRY.update(register_metrics({ProcessMetric: None})[0])


def name_in_storage(kind: type) -> str:
    """Return the name of a class in JSON, with the import that makes it known to Ax."""
    return f"{kind.__name__}: import bo_stream.ax"


def _as_json(value: Any) -> dict[str, Any]:
    is_member = isinstance(value, StreamGenerators)
    arguments = {"name": value.name} if is_member else serialize_init_args(value)
    return {"__type": name_in_storage(type(value)), **arguments}


def data_as_json(data: Data) -> dict[str, Any]:
    """Encode data in the format of Ax's JSON storage, instead of its ``data_to_dict``.

    Rows without times are written directly: a frame of each trial takes milliseconds, four times as
    long for a whole experiment.
    """
    rows = data._data_rows
    is_plain = rows and all(row.start_time is None and row.end_time is None for row in rows)
    value = _rows_as_json(rows) if is_plain else frame_as_json(data.full_df)
    return {"__type": type(data).__name__, "df": {"__type": "DataFrame", "value": value}}


def _rows_as_json(rows: list[DataRow]) -> str:
    """Encode rows as :func:`frame_as_json` does Ax's frame of them, in the rows' own order."""
    keys = ("trial_index", "arm_name", "metric_name", "metric_signature")
    columns = {
        **{name: [getattr(row, name) for row in rows] for name in keys},
        "mean": [float(row.mean) for row in rows],
        "sem": [float(row.se) for row in rows],
        "step": [row.step for row in rows],
        "n": [row.n for row in rows],
    }
    known = {name: column for name, column in columns.items() if set(column) != {None}}
    return json.dumps({name: dict(enumerate(map(_finite, c))) for name, c in known.items()})


def frame_as_json(frame: pd.DataFrame) -> str:
    """Encode a frame of numbers, strings and times as ``frame.to_json()`` does, with all digits.

    The default of pandas is ten decimals, which leave nothing of an outcome of 1e-12.
    """
    columns = frame.astype(object).to_dict()
    return json.dumps(
        {name: {row: _finite(v) for row, v in column.items()} for name, column in columns.items()}
    )


def _finite(value: Any) -> Any:
    if value is pd.NaT:
        return None
    if isinstance(value, pd.Timestamp):
        return value.value // 1_000_000  # milliseconds, as pandas writes and reads them
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- ax's SQL storage with saves of constant cost. Only :mod:`bo_stream.ax.storage` --------------


def open_database(url: str) -> None:
    """Open the database of a URL for Ax, with tables if it has none.

    Raises:
        ValueError: It cannot be opened, or another one is open.
    """
    if db.SESSION_FACTORY is not None and db.get_engine().url != make_url(url):
        raise ValueError(
            f"Ax has one database open in a process, and this has {db.get_engine().url!r}: keep "
            "the experiment in it too, or call bo_stream.ax.close_storage() first."
        )
    db.init_engine_and_session_factory(url=url)
    try:
        db.create_all_tables(db.get_engine())
    except DatabaseError as error:
        close_database()
        raise ValueError(f"{make_url(url)!r} cannot be opened: {error.orig}.") from error


def close_database() -> None:
    """Close Ax's database, so that it can open another one."""
    if db.SESSION_FACTORY is not None:
        db.SESSION_FACTORY.remove()
        db.get_engine().dispose()
        db.SESSION_FACTORY = None


class StrategyRow(db.Base):
    """A row of Ax's table of strategies without its candidates, so that a write reads none."""

    __table__ = SQAGenerationStrategy.__table__


class StreamDecoder(Decoder):
    """Ax's SQL decoder, which also takes a :class:`StrategyRow`."""

    def generation_strategy_from_sqa(
        self, gs_sqa: Any, experiment: Experiment | None = None, reduced_state: bool = False
    ) -> Any:
        """Decode a strategy; of a :class:`StrategyRow` only its id, all that Ax reads of it.

        Overrides ``Decoder.generation_strategy_from_sqa``, which Ax calls after each save to learn
        the ids of what it has written.
        """
        if not isinstance(gs_sqa, StrategyRow):
            return super().generation_strategy_from_sqa(gs_sqa, experiment, reduced_state)
        stored = Stored()
        stored.db_id = gs_sqa.id  # type: ignore[attr-defined]
        return stored


class StreamEncoder(Encoder):
    """Ax's SQL encoder, which writes only the new candidates of a strategy."""

    def __init__(self, config: SQAConfig, decoder: Decoder) -> None:
        """Make an encoder; the decoder reads back the ids of what was written."""
        super().__init__(config)
        self.decoder = decoder

    def generation_strategy_to_sqa(
        self,
        generation_strategy: GenerationStrategy,
        experiment_id: int | None,
        generator_run_reduced_state: bool = False,
    ) -> Any:
        """Encode a strategy; of one that is stored already only its own row and new candidates.

        Overrides ``Encoder.generation_strategy_to_sqa``, by which Ax's client saves the strategy
        and all its candidates whenever it asks for a trial, O(n). Ax's orchestrator adds the new
        ones by ``_update_generation_strategy``, which serves both here.
        """
        if generation_strategy.db_id is None:
            return super().generation_strategy_to_sqa(
                generation_strategy, experiment_id, generator_run_reduced_state
            )
        fresh = [run for run in generation_strategy._generator_runs if run.db_id is None]
        _update_generation_strategy(generation_strategy, fresh, self, self.decoder)
        return StrategyRow(
            id=generation_strategy.db_id,
            name=generation_strategy.name,
            steps=[],
            curr_index=-1,
            experiment_id=experiment_id,
            nodes=object_to_json(
                generation_strategy._nodes,
                self.config.json_encoder_registry,
                self.config.json_class_encoder_registry,
            ),
            curr_node_name=generation_strategy.current_node_name,
        )

    def data_to_sqa(self, data: Data, trial_index: int | None, timestamp: int) -> SQAData:
        """Encode data with all digits; ``Encoder.data_to_sqa`` writes ten decimals."""
        row = super().data_to_sqa(data, trial_index, timestamp)
        row.data_json = frame_as_json(data.full_df)
        return row


class StreamBundle(RegistryBundle):
    """Ax's registries of metrics and runners as they are now, with our encoder and decoder."""

    def __init__(self) -> None:
        """Override the encoder and decoder that ``RegistryBundle`` makes of its registries."""
        super().__init__(
            metric_clss=dict(CORE_METRIC_REGISTRY), runner_clss=dict(CORE_RUNNER_REGISTRY)
        )
        self._decoder = StreamDecoder(self.sqa_config)
        self._encoder = StreamEncoder(self.sqa_config, self._decoder)
