"""What a model has learned, as plain values that Ax stores with each generator run."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypedDict, cast

import torch
from ax.adapter.base import Adapter
from ax.adapter.data_utils import ExperimentData
from ax.core.parameter import RangeParameter
from ax.core.search_space import SearchSpace
from ax.generators.torch.botorch_modular.utils import ModelConfig
from botorch.exceptions.errors import UnsupportedError
from botorch.exceptions.warnings import InputDataWarning
from botorch.utils.datasets import SupervisedDataset
from gpytorch.constraints import Interval
from gpytorch.priors import Prior
from pandas import DataFrame
from torch import Tensor

from bo_stream.ax.rows import Rows
from bo_stream.loops.models import MODELS
from bo_stream.models.base import StreamingGP
from bo_stream.models.inducing.osgpr import OSGPR
from bo_stream.models.wiski.grid_gp import GridGP
from bo_stream.models.wiski.wiski import WISKI

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


REACH = 0.5
"""How far a grid is widened on each side, in parts of the search space's width."""


class KeepsRowsOutside(Adapter):
    """Keeps observations beyond the bounds of range parameters, and beyond constraints.

    Ax does so by widening the space of the model, and with it the units of the inputs, so that each
    such row would build the model anew. Here the model's inputs stay in units of the search space,
    and these rows lie outside its unit cube. What the transforms cannot take, such as another
    value of a choice or no positive one on a logarithmic scale, is left out with a warning.
    """

    def _compute_in_design(
        self, search_space: SearchSpace, experiment_data: ExperimentData
    ) -> list[bool]:
        arms = experiment_data.arm_data
        kept = super()._compute_in_design(covering(search_space, arms), experiment_data)
        if not all(kept):
            _warn_of(arms, kept)
        return kept


def covering(space: SearchSpace, arms: DataFrame) -> SearchSpace:
    """A search space without constraints, whose ranges have been widened to hold points.

    Args:
        space: Stays as it is.
        arms: A column for each parameter.
    """
    wide = space.clone()
    for name, parameter in wide.parameters.items():
        if isinstance(parameter, RangeParameter) and name in arms:
            _widen(parameter, arms[name].dropna().tolist())
    wide.set_parameter_constraints([])
    return wide


def within_reach(
    dataset: SupervisedDataset,
    bounds: Sequence[tuple[float, float]],
    config: ModelConfig,
    kind: type,
) -> SupervisedDataset:
    """The observations that a model takes, with a warning if there are others.

    Args:
        dataset: Of one metric.
        bounds: Of the search space, as the model takes its inputs.
        config: With the options that the model is built with.
        kind: The model's class.
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
    return Rows.of(dataset, 0.0)[inside.nonzero().flatten().tolist()].as_dataset(dataset)


def _widen(parameter: RangeParameter, values: list[float]) -> None:
    usable = [value for value in values if _is_usable(parameter, value)]
    if usable:
        parameter.update_range(
            lower=cast(float, min(parameter.lower, *usable)),
            upper=cast(float, max(parameter.upper, *usable)),
        )


def _is_usable(parameter: RangeParameter, value: float) -> bool:
    if parameter.log_scale:
        return value > 0.0
    return 0.0 < value < 1.0 if parameter.logit_scale else True


def _warn_of(arms: DataFrame, kept: list[bool]) -> None:
    trials = arms.index.get_level_values("trial_index")
    left_out = sorted(
        {int(trial) for trial, is_kept in zip(trials, kept, strict=True) if not is_kept}
    )
    warnings.warn(
        f"Trials {', '.join(map(str, left_out))} are left out of the model: they lie outside the "
        "search space, in parameters or values that it cannot be widened by.",
        InputDataWarning,
        stacklevel=2,
    )


INPUTS = "input_transform."
"""Prefix of what the search space gives."""


class Record(TypedDict):
    """Hyperparameters and standardisation as a refit left them.

    Attributes:
        count: Number of observations at that refit.
        bounds: Of the search space then.
        unit: In which the model had the outcomes.
        floor: What known noise variances are raised to.
        values: By name in ``state_dict``, nested lists; bounds and priors are not among them, for
            they are not learned.
    """

    count: int
    bounds: list[list[float]]
    unit: float
    floor: float
    values: dict[str, Any]


def values_of(model: StreamingGP) -> dict[str, Any]:
    """What a model has learned, as a record has it."""
    return {name: value.tolist() for name, value in _state(model).items()}


def restore(model: StreamingGP, record: Record) -> bool:
    """Give a new model what one of the same shape had learned; whether it has that shape.

    Args:
        model: Changed in place.
        record: Of another model.
    """
    state, former = _state(model), record["values"]
    if former.keys() != state.keys():
        return False
    values = {name: _read(former[name], value) for name, value in state.items()}
    if any(values[name].shape != value.shape for name, value in state.items()):
        return False
    model.load_state_dict({**model.state_dict(), **values})
    return True


def _state(model: StreamingGP) -> dict[str, Tensor]:
    given = (INPUTS, *_bounds_and_priors(model))
    return {name: v for name, v in model.state_dict().items() if not name.startswith(given)}


def _bounds_and_priors(model: StreamingGP) -> list[str]:
    modules = model.named_modules()
    return [f"{name}." for name, part in modules if isinstance(part, Interval | Prior)]


def _read(value: Any, like: Tensor) -> Tensor:
    return torch.tensor(value, dtype=like.dtype, device=like.device)
