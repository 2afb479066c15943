"""Ax's SQL storage with saves of constant cost; :mod:`bo_stream.ax.storage` imports it late."""

from __future__ import annotations

from typing import Any

from ax.core.data import Data
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

    def generation_strategy_from_sqa(self, gs_sqa: Any, *args: Any, **given: Any) -> Any:
        """Decode a strategy; of a :class:`StrategyRow` only its id, which alone Ax reads.

        Overrides ``Decoder.generation_strategy_from_sqa``, which Ax calls after each save for
        the ids of the rows that it has written.
        """
        if not isinstance(gs_sqa, StrategyRow):
            return super().generation_strategy_from_sqa(gs_sqa, *args, **given)
        stored = Stored()
        stored.db_id = gs_sqa.id  # type: ignore[attr-defined]
        return stored


class StreamEncoder(Encoder):
    """Ax's SQL encoder, which writes only the new candidates of a strategy."""

    def __init__(self, config: SQAConfig, decoder: Decoder) -> None:
        """Make an encoder; the decoder reads back the ids of written rows."""
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
        and all its candidates whenever it requests a trial, O(n). Ax's orchestrator adds the new
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
