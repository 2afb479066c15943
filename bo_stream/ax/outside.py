"""Observations outside the search space are kept where the model can take them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import cast

from ax.adapter.base import Adapter
from ax.adapter.data_utils import ExperimentData
from ax.core.parameter import RangeParameter
from ax.core.search_space import SearchSpace
from ax.generators.torch.botorch_modular.utils import ModelConfig
from botorch.exceptions.warnings import InputDataWarning
from botorch.utils.datasets import SupervisedDataset
from pandas import DataFrame

from bo_stream.ax.model_choice import covers_a_box
from bo_stream.ax.rows import Rows

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
