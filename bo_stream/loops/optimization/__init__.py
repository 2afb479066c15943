"""Bayesian optimization with a streaming model: ask, tell in any order, amend, withdraw."""

from bo_stream.loops.optimization.optimizer import Best, Optimizer
from bo_stream.loops.optimization.settings import OptimizationSettings
from bo_stream.loops.optimization.store import load_optimizer, save_optimizer
from bo_stream.loops.optimization.trials import Trial

__all__ = [
    "Best",
    "OptimizationSettings",
    "Optimizer",
    "Trial",
    "load_optimizer",
    "save_optimizer",
]
