"""Streaming models in Ax's experiment loops. Import it before loading what was stored with it."""

from bo_stream.ax.versions import check_versions

check_versions()  # before any import of Ax, which would fail first and say less

from bo_stream.ax.acquisition import PoolAcquisition, StreamAcquisition  # noqa: E402
from bo_stream.ax.pool import Pool, register_pool  # noqa: E402
from bo_stream.ax.processes import (  # noqa: E402
    ProcessMetric,
    ProcessRunner,
    orchestrator_options,
    run_trials,
)
from bo_stream.ax.storage import (  # noqa: E402
    close_storage,
    load_snapshot,
    register,
    save_snapshot,
    storage_config,
)
from bo_stream.ax.strategy import (  # noqa: E402
    ACQUISITIONS,
    StreamGenerator,
    StreamGenerators,
    analyses,
    generation_strategy,
    surrogate_spec,
)
from bo_stream.ax.surrogate import StreamSurrogate  # noqa: E402

register()

__all__ = [
    "ACQUISITIONS",
    "Pool",
    "PoolAcquisition",
    "ProcessMetric",
    "ProcessRunner",
    "StreamAcquisition",
    "StreamGenerator",
    "StreamGenerators",
    "StreamSurrogate",
    "analyses",
    "close_storage",
    "generation_strategy",
    "load_snapshot",
    "orchestrator_options",
    "register_pool",
    "run_trials",
    "save_snapshot",
    "storage_config",
    "surrogate_spec",
]
