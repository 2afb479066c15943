"""Pools as inputs of a model, by Ax's own transforms, with checks that they suit the search space.

:class:`Tables` keeps each :class:`Table`, a transformed pool, until the pool or the space changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from ax.adapter.data_utils import ExperimentData
from ax.adapter.registry import MBM_X_trans_base
from ax.adapter.transforms.base import Transform
from ax.core.parameter import DerivedParameter, Parameter, ParameterType, RangeParameter
from ax.core.search_space import SearchSpace
from ax.exceptions.core import UnsupportedError
from torch import Tensor

from bo_stream.ax.pool import Pool, listed


class Tables:
    """Transformed pools, each kept until it or the search space changes."""

    def __init__(self, device: torch.device | None = None) -> None:
        """Begin without tables; their inputs will be on a device."""
        self._device = device
        self._known: dict[str, Table] = {}

    def get(
        self,
        pool: Pool,
        space: SearchSpace,
        transforms: Callable[[], Iterable[Transform]],
        columns: Sequence[str] | None = None,
    ) -> Table:
        """Return a table, transformed if it is not yet; see :meth:`Table.of`."""
        known = self._known.get(pool.name)
        if known is None or not known.is_of(pool, space, columns):
            known = Table.of(pool, space, transforms(), columns)
            self._known[pool.name] = known = replace(known, X=known.X.to(self._device))
        return known


@dataclass(frozen=True)
class Table:
    """A pool as a model's inputs.

    Attributes:
        pool: The pool, in the user's parameters.
        space: The search space for which it was transformed.
        columns: Names of the d inputs in Ax.
        X: Inputs, ``N x d``, float64.
    """

    pool: Pool
    space: SearchSpace
    columns: list[str]
    X: Tensor

    @classmethod
    def of(
        cls,
        pool: Pool,
        space: SearchSpace,
        transforms: Iterable[Transform],
        columns: Sequence[str] | None,
    ) -> Table:
        """Transform a pool.

        Args:
            pool: The pool.
            space: The search space.
            transforms: Transforms of parameters.
            columns: Expected inputs; all if None.

        Raises:
            UnsupportedError: An input cannot be had from parameters.
            ValueError: See :func:`encoded`.
        """
        frame = encoded(pool, space, transforms)
        names = list(frame.columns if columns is None else columns)
        extra = [name for name in names if name not in frame]
        if extra:
            raise UnsupportedError(
                f"A pool cannot be used where the model has inputs that are no parameters, here "
                f"{listed(extra)}. Attach data at one step only."
            )
        X = torch.from_numpy(frame[names].to_numpy(dtype=float, copy=True))
        return cls(pool, space.clone(), names, X)

    def some(self, count: int) -> Tensor:
        """Return some of its rows, the same at each call, ``count x d``; all if it has no more."""
        if count >= len(self.X):
            return self.X
        if count not in self._samples:
            generator = torch.Generator().manual_seed(0)
            rows = torch.randperm(len(self.X), generator=generator)[:count]
            self._samples[count] = self.X[rows.to(self.X.device)]
        return self._samples[count]

    @cached_property
    def _samples(self) -> dict[int, Tensor]:
        return {}

    def is_of(self, pool: Pool, space: SearchSpace, columns: Sequence[str] | None) -> bool:
        """Return whether it need not be transformed again."""
        same = columns is None or list(columns) == self.columns
        return same and pool is self.pool and space == self.space


def input_transforms(space: SearchSpace) -> list[Transform]:
    """Make the transforms of parameters that the streaming generator has, for a search space."""
    transforms: list[Transform] = []
    for kind in MBM_X_trans_base:
        transform = kind(search_space=space.clone())
        space = transform.transform_search_space(space.clone())
        transforms.append(transform)
    return transforms


def num_inputs(space: SearchSpace) -> int:
    """Return the number of inputs that a model has, one-hot columns counted."""
    for transform in input_transforms(space):
        space = transform.transform_search_space(space.clone())
    return len(space.parameters)


def encoded(pool: Pool, space: SearchSpace, transforms: Iterable[Transform]) -> pd.DataFrame:
    """Return a pool as transforms make it. Vectorised: about a second for a million rows.

    Args:
        pool: The pool.
        space: The search space, in which all of it must be.
        transforms: Transforms of parameters, applied in order.

    Raises:
        ValueError: A parameter is missing, a column is none, or a candidate is outside.
    """
    check_inside(pool, space)
    frame = pool.frame.reset_index(drop=True)
    columns = {}
    for name, parameter in space.parameters.items():  # those that are not tuned are dropped later
        tuned = name in space.tunable_parameters
        columns[name] = frame[name].astype(parameter.python_type) if tuned else np.nan
    data = pd.DataFrame(columns, index=frame.index)
    for transform in transforms:
        observations = pd.DataFrame(index=data.index)
        data = transform.transform_experiment_data(ExperimentData(data, observations)).arm_data
    return data


def check_inside(pool: Pool, space: SearchSpace) -> None:
    """Check that a pool has the parameters of a search space, and its candidates are inside.

    Raises:
        ValueError: It has not, or some are outside.
    """
    _check_columns(pool, space)
    for name in pool.frame.columns:
        parameter = space.parameters[name]
        inside = _inside(parameter, pool.frame[name])
        if not inside.all():
            _refuse(pool, ~inside, f"{name} outside {parameter.domain_repr}", name)
    table = pool.frame.reset_index(drop=True)
    inside = np.array(space.check_membership_df(table, check_all_parameters_present=False))
    if not inside.all():
        _refuse(pool, ~inside, f"parameters that break {space.parameter_constraints}")


def _check_columns(pool: Pool, space: SearchSpace) -> None:
    columns = list(pool.frame.columns)
    missing = [name for name in space.tunable_parameters if name not in columns]
    if missing:
        raise ValueError(
            f"Pool {pool.name!r} has no column for the parameter {listed(missing)} of the "
            f"experiment, only {listed(columns)}. Add it to the table."
        )
    given = {n: p for n, p in space.parameters.items() if not isinstance(p, DerivedParameter)}
    unknown = [name for name in columns if name not in given]
    if unknown:
        raise ValueError(
            f"Pool {pool.name!r} has the column {listed(unknown)}, which is no parameter of the "
            "experiment, or one that it derives. Leave it out: "
            f"Pool.of(frame[{list(space.tunable_parameters)}])."
        )


def _inside(parameter: Parameter, values: pd.Series) -> npt.NDArray[np.bool_]:
    """Return whether Ax would take values as they are: neither cast, rounded nor clamped."""
    if not isinstance(parameter, RangeParameter):
        return parameter.validate_array(values.to_numpy(dtype=object)).astype(bool)
    numbers = pd.to_numeric(values, errors="coerce").to_numpy(dtype=float)
    inside = (numbers >= parameter.lower) & (numbers <= parameter.upper)
    if parameter.parameter_type is ParameterType.INT:
        inside &= numbers == np.rint(numbers)
    if parameter.digits is not None:
        inside &= numbers == numbers.round(parameter.digits)
    return inside


def _refuse(
    pool: Pool, outside: npt.NDArray[np.bool_], what: str, column: str | None = None
) -> None:
    rows = np.flatnonzero(outside)
    first = pool.parameters_at(int(rows[0]))
    value = first if column is None else first[column]
    raise ValueError(
        f"{len(rows)} of the {len(pool)} candidates of pool {pool.name!r} have {what}, such as "
        f"{pool.name_at(int(rows[0]))!r} with {value}. Leave them out, with pool.without(names), "
        "or widen the search space."
    )
