"""Streaming models in Ax's experiment loops. Import it before loading what was stored with it."""

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

SUPPORTED = {"ax-platform": ">=1.3.1,<1.4", "botorch": ">=0.18.1,<0.19"}
"""Version specifiers by distribution: what is extended is not part of Ax's stable interface."""


def check_versions(supported: dict[str, str] = SUPPORTED) -> None:
    """Check the installed versions against specifiers by distribution.

    Raises:
        ImportError: A distribution is not installed, or in another version.
    """
    for name, expected in supported.items():
        try:
            installed = version(name)
        except PackageNotFoundError as error:
            raise ImportError(
                f"bo_stream.ax needs {name}{expected}, and it is not installed. Run pip install "
                "'bo-stream[ax]'."
            ) from error
        if not SpecifierSet(expected).contains(installed, prereleases=True):
            raise ImportError(
                f"bo_stream.ax expects {name}{expected}, but {name} {installed} is installed. "
                f"Run pip install '{name}{expected}', or upgrade bo-stream."
            )


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
