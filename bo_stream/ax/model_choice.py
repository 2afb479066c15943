"""Choice of the default model by the number of inputs, and of the observations a grid can take."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Sequence
from dataclasses import replace

from ax.generators.torch.botorch_modular.utils import ModelConfig
from botorch.exceptions.errors import UnsupportedError
from botorch.exceptions.warnings import InputDataWarning
from botorch.utils.datasets import SupervisedDataset

from bo_stream.ax.rows import Rows
from bo_stream.loops.models import MODELS
from bo_stream.models.inducing.osgpr import OSGPR
from bo_stream.models.wiski.grid_model import GridModel
from bo_stream.models.wiski.wiski import WISKI

logger = logging.getLogger("bo_stream.ax")

ASKED_FOR = " (asked for)"
"""End of the name of a configuration whose model was asked for."""

OTHER_WAYS = ("stem", "covar_module")
"""Options with which a model on a grid takes any number of inputs."""

REACH = 0.5
"""How far a grid is widened on each side, in parts of the search space's width."""


def name_of(model: type | None) -> str:
    """Return a configuration's name, which Ax stores and which tells a model that was asked for."""
    return WISKI.__name__ if model is None else f"{model.__name__}{ASKED_FOR}"


def suited(config: ModelConfig, dim: int) -> ModelConfig:
    """Return a configuration, with :class:`OSGPR` where the default cannot take the inputs.

    Args:
        config: Configuration of the model that was asked for, or of the default.
        dim: Number of inputs, one-hot columns counted.

    Raises:
        UnsupportedError: The model that was asked for, or the default with its options, cannot.
    """
    if config.botorch_model_class is not WISKI or config.covar_module_class is not None:
        return config
    if any(name in config.model_options for name in OTHER_WAYS):
        return config
    most = MODELS["wiski"].most_inputs
    if most is None:
        raise TypeError("Expected the number of inputs that a grid takes, got None.")
    if dim > most:
        if config.name is not None and config.name.endswith(ASKED_FOR):
            raise UnsupportedError(
                f"The parameters are {dim} inputs and a grid takes {most}: pass model=OSGPR, or a "
                "model of WISKI's kind with a projection to few inputs (stem)."
            )
        logger.info("The parameters are %d inputs, WISKI takes %d: OSGPR is used.", dim, most)
        config = replace(config, botorch_model_class=OSGPR)
    kind = WISKI if dim <= most else OSGPR
    unknown = sorted(set(config.model_options) - set(inspect.signature(kind).parameters))
    if unknown:
        raise UnsupportedError(
            f"The parameters are {dim} inputs, for which the default model is {kind.__name__}, and "
            f"it does not take the model_options {', '.join(unknown)}: leave them out, or pass "
            "model as well."
        )
    return config


def covers_a_box(config: ModelConfig, kind: type) -> bool:
    """Return whether a configuration's model has a grid over a box of the inputs themselves."""
    return issubclass(kind, GridModel) and "stem" not in config.model_options


def within_reach(
    dataset: SupervisedDataset,
    bounds: Sequence[tuple[float, float]],
    config: ModelConfig,
    kind: type,
) -> SupervisedDataset:
    """Return the observations that a model takes, with a warning if there are others.

    Args:
        dataset: Observations of one metric.
        bounds: Bounds of the search space, as the model takes its inputs.
        config: Configuration of the model.
        kind: Class of the model.
    """
    if not covers_a_box(config, kind):
        return dataset
    low, high = dataset.X.new_tensor(bounds).unbind(-1)
    margin = REACH * (high - low)
    inside = ((low - margin <= dataset.X) & (high + margin >= dataset.X)).all(-1)
    if bool(inside.all()):
        return dataset
    warnings.warn(
        f"{int((~inside).sum())} observations of {', '.join(dataset.outcome_names)} are left out: "
        f"they lie outside the search space by more than {REACH:g} of its width, and a grid over "
        f"them would be large. Choose another model than {kind.__name__}, such as OSGPR, to keep "
        "them.",
        InputDataWarning,
        stacklevel=2,
    )
    return Rows.of(dataset, 0.0)[inside].as_dataset(dataset)
