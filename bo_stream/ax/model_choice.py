"""Which model serves a metric, given how many inputs Ax's transforms make of the parameters."""

from __future__ import annotations

import inspect
import logging
from dataclasses import replace

from ax.generators.torch.botorch_modular.utils import ModelConfig

from bo_stream.loops.models import MODELS
from bo_stream.models.grid_gp import GridGP
from bo_stream.models.osgpr import OSGPR
from bo_stream.models.wiski import WISKI

logger = logging.getLogger("bo_stream.ax")

OTHER_WAYS = ("stem", "covar_module")
"""Options with which a model on a grid takes any number of inputs."""


def suited(config: ModelConfig, dim: int) -> ModelConfig:
    """The same configuration, or one of :class:`OSGPR` where a grid cannot take the inputs.

    Args:
        config: What the user asked for.
        dim: Number of inputs, one-hot columns counted.
    """
    if config.botorch_model_class is not WISKI or dim <= _most_inputs():
        return config
    if config.covar_module_class is not None or any(
        name in config.model_options for name in OTHER_WAYS
    ):
        return config
    options, dropped = _taken_by_points(config)
    logger.info(
        "The parameters are %d inputs, WISKI takes %d: OSGPR is used%s.",
        dim,
        _most_inputs(),
        f" without the options {', '.join(dropped)}" if dropped else "",
    )
    return replace(config, botorch_model_class=OSGPR, model_options=options)


def covers_a_box(config: ModelConfig, kind: type) -> bool:
    """Whether a model's grid covers a box of the inputs themselves.

    Args:
        config: With the options that it is built with.
        kind: Its class.
    """
    return issubclass(kind, GridGP) and "stem" not in config.model_options


def _most_inputs() -> int:
    most = MODELS["wiski"].most_inputs
    if most is None:
        raise TypeError("Expected the number of inputs that a grid takes, got None.")
    return most


def _taken_by_points(config: ModelConfig) -> tuple[dict[str, object], list[str]]:
    names = inspect.signature(OSGPR).parameters
    taken = {key: value for key, value in config.model_options.items() if key in names}
    return taken, sorted(set(config.model_options) - set(taken))
