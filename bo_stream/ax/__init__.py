"""Streaming models in Ax's experiment loops. Import it before loading what was stored with it."""

from bo_stream.ax.versions import check_versions

check_versions()

from bo_stream.ax.acquisition import StreamAcquisition  # noqa: E402
from bo_stream.ax.generator import StreamGenerator, StreamGenerators, surrogate_spec  # noqa: E402
from bo_stream.ax.pool import Pool  # noqa: E402
from bo_stream.ax.pool_acquisition import PoolAcquisition  # noqa: E402
from bo_stream.ax.pools import register_pool  # noqa: E402
from bo_stream.ax.storage import register  # noqa: E402
from bo_stream.ax.strategy import ACQUISITIONS, generation_strategy  # noqa: E402
from bo_stream.ax.surrogate import StreamSurrogate  # noqa: E402

register()

__all__ = [
    "ACQUISITIONS",
    "Pool",
    "PoolAcquisition",
    "StreamAcquisition",
    "StreamGenerator",
    "StreamGenerators",
    "StreamSurrogate",
    "generation_strategy",
    "register_pool",
    "surrogate_spec",
]
