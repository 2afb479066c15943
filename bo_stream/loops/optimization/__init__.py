"""Bayesian optimization with a streaming model, by ``ask`` and ``tell``."""

from typing import TYPE_CHECKING

from bo_stream.lazy_names import lazy_names

if TYPE_CHECKING:
    from bo_stream.loops.optimization.asynchronous import run_asynchronously
    from bo_stream.loops.optimization.optimizer import (
        Best,
        Optimizer,
        load_optimizer,
        save_optimizer,
    )
    from bo_stream.loops.optimization.settings import OptimizationSettings
    from bo_stream.loops.optimization.trials import Trial

__all__ = [
    "Best",
    "OptimizationSettings",
    "Optimizer",
    "Trial",
    "load_optimizer",
    "run_asynchronously",
    "save_optimizer",
]

if not TYPE_CHECKING:  # to a type checker, a name that is not there is an error
    __getattr__ = lazy_names(
        __name__,
        {
            "asynchronous": ("run_asynchronously",),
            "optimizer": ("Best", "Optimizer", "load_optimizer", "save_optimizer"),
            "settings": ("OptimizationSettings",),
            "trials": ("Trial",),
        },
    )


def __dir__() -> list[str]:
    """List all public names, imported or not."""
    return sorted({*globals(), *__all__})
