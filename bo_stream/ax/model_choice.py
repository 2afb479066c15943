"""Which model serves a metric, given how many inputs Ax's transforms make of the parameters."""

from __future__ import annotations

import inspect
import logging
from dataclasses import replace

from ax.generators.torch.botorch_modular.utils import ModelConfig
from botorch.exceptions.errors import UnsupportedError

from bo_stream.loops.models import MODELS
from bo_stream.models.grid_gp import GridGP
from bo_stream.models.osgpr import OSGPR
from bo_stream.models.wiski import WISKI

logger = logging.getLogger("bo_stream.ax")

ASKED_FOR = " (asked for)"

OTHER_WAYS = ("stem", "covar_module")
"""Options with which a model on a grid takes any number of inputs."""


def name_of(model: type | None) -> str:
    """A configuration's name, which Ax stores: it tells a model that was asked for by name.

    Args:
        model: Its class; None: the default.
    """
    return WISKI.__name__ if model is None else f"{model.__name__}{ASKED_FOR}"


def suited(config: ModelConfig, dim: int) -> ModelConfig:
    """The same configuration, or one of :class:`OSGPR` where the default cannot take the inputs.

    Args:
        config: Of the model that was asked for, or of the default.
        dim: Number of inputs, one-hot columns counted.

    Raises:
        UnsupportedError: The model that was asked for, or the default with its options, cannot.
    """
    if config.botorch_model_class is not WISKI or config.covar_module_class is not None:
        return config
    if any(name in config.model_options for name in OTHER_WAYS):
        return config
    most = _most_inputs()
    if dim <= most:
        return _with_options_of(WISKI, config, dim)
    if config.name is not None and config.name.endswith(ASKED_FOR):
        raise UnsupportedError(
            f"The parameters are {dim} inputs and a grid takes {most}: pass model=OSGPR, or a "
            "model of WISKI's kind with a projection to few inputs (stem)."
        )
    logger.info("The parameters are %d inputs, WISKI takes %d: OSGPR is used.", dim, most)
    return replace(_with_options_of(OSGPR, config, dim), botorch_model_class=OSGPR)


def _with_options_of(kind: type, config: ModelConfig, dim: int) -> ModelConfig:
    unknown = sorted(set(config.model_options) - set(inspect.signature(kind).parameters))
    if unknown:
        raise UnsupportedError(
            f"The parameters are {dim} inputs, for which the default model is {kind.__name__}, and "
            f"it does not take the model_options {', '.join(unknown)}: leave them out, or pass "
            "model as well."
        )
    return config


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
