"""Where Ax's client keeps an experiment: a file of sqlite, or a database on a server."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ax.api.configs import StorageConfig
from ax.core.data import Data
from ax.core.experiment import Experiment
from ax.generation_strategy.generation_strategy import GenerationStrategy
from ax.storage.json_store.encoder import object_to_json
from ax.storage.metric_registry import CORE_METRIC_REGISTRY
from ax.storage.registry_bundle import RegistryBundle
from ax.storage.runner_registry import CORE_RUNNER_REGISTRY
from ax.storage.sqa_store import db
from ax.storage.sqa_store.decoder import Decoder
from ax.storage.sqa_store.encoder import Encoder
from ax.storage.sqa_store.save import _update_generation_strategy
from ax.storage.sqa_store.sqa_classes import SQAData, SQAGenerationStrategy
from ax.storage.sqa_store.sqa_config import SQAConfig
from ax.utils.common.base import Base as Stored
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DatabaseError

from bo_stream.ax.storage import frame_as_json


class StrategyRow(db.Base):
    """A strategy's row without its candidates, so that to write it does not read them all."""

    __table__ = SQAGenerationStrategy.__table__


class StreamDecoder(Decoder):
    """Ax's decoder, which also takes a :class:`StrategyRow`."""

    def generation_strategy_from_sqa(
        self,
        gs_sqa: Any,
        experiment: Experiment | None = None,
        reduced_state: bool = False,
    ) -> Any:
        """The strategy; of a :class:`StrategyRow` its id only, which is all that Ax reads then."""
        if not isinstance(gs_sqa, StrategyRow):
            return super().generation_strategy_from_sqa(gs_sqa, experiment, reduced_state)
        stored = Stored()
        stored.db_id = gs_sqa.id  # type: ignore[attr-defined]
        return stored


class StreamEncoder(Encoder):
    """Ax's encoder, whose strategies are written with their new candidates only.

    Ax's client saves the strategy whenever it asks for a trial, and all its candidates with it:
    O(n) a trial. Its orchestrator has a way of its own, which is taken here for both.
    """

    def __init__(self, config: SQAConfig, decoder: Decoder) -> None:
        """As Ax's; ``decoder`` reads back the ids of what was written."""
        super().__init__(config)
        self.decoder = decoder

    def generation_strategy_to_sqa(
        self,
        generation_strategy: GenerationStrategy,
        experiment_id: int | None,
        generator_run_reduced_state: bool = False,
    ) -> Any:
        """The row of a strategy; one that is stored already gets its new candidates first."""
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
            nodes=self._as_json(generation_strategy._nodes),
            curr_node_name=generation_strategy.current_node_name,
        )

    def data_to_sqa(self, data: Data, trial_index: int | None, timestamp: int) -> SQAData:
        """The row of data, outcomes with all their digits."""
        row = super().data_to_sqa(data, trial_index, timestamp)
        row.data_json = frame_as_json(data.full_df)
        return row

    def _as_json(self, value: Any) -> Any:
        return object_to_json(
            value, self.config.json_encoder_registry, self.config.json_class_encoder_registry
        )


class StreamBundle(RegistryBundle):
    """Ax's registries, to which ``import bo_stream.ax`` has added, with our encoder."""

    def __init__(self) -> None:
        """Of all metrics and runners that Ax knows now."""
        super().__init__(
            metric_clss=dict(CORE_METRIC_REGISTRY), runner_clss=dict(CORE_RUNNER_REGISTRY)
        )
        self._decoder = StreamDecoder(self.sqa_config)
        self._encoder = StreamEncoder(self.sqa_config, self._decoder)


def registry_bundle() -> RegistryBundle:
    """For Ax's ``StorageConfig``."""
    return StreamBundle()


def open_database(url: str) -> None:
    """Make it the one that Ax uses, with tables if it has none.

    Args:
        url: Of SQLAlchemy.

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
    """Let Ax open another one."""
    if db.SESSION_FACTORY is not None:
        db.SESSION_FACTORY.remove()
        db.get_engine().dispose()
        db.SESSION_FACTORY = None


NEEDED = ("sqlalchemy", "tabulate")
"""What Ax's SQL storage imports, and what it calls without saying so."""


def storage_config(database: str | Path) -> StorageConfig:
    """For Ax's ``Client(storage_config=...)`` and ``Client.load_from_database``.

    Every trial is in the database when the call that made or completed it returns, so that a
    process can be killed at any time. Tables are made where there are none. What a save costs does
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
    _check_installed()
    from bo_stream.ax import sql

    sql.open_database(_url(database))
    return StorageConfig(url=_url(database), registry_bundle=sql.registry_bundle())


def close_storage() -> None:
    """Close the database that is open, if any. Its clients can save nothing from then on."""
    _check_installed()
    from bo_stream.ax import sql

    sql.close_database()


def _check_installed() -> None:
    missing = [name for name in NEEDED if find_spec(name) is None]
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
