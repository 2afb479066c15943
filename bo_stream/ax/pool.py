"""Tables of points in the user's parameters, which Ax stores by name only.

A :class:`Pool` contains candidates to choose from, or points to integrate over. A process knows
pools by the names under which they were registered. A :class:`Table` contains the points of a pool
as a model's inputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from ax.adapter.data_utils import ExperimentData
from ax.adapter.registry import MBM_X_trans_base
from ax.adapter.transforms.base import Transform
from ax.core.parameter import DerivedParameter, Parameter, ParameterType, RangeParameter
from ax.core.search_space import SearchSpace
from ax.exceptions.core import SearchSpaceExhausted, UnsupportedError
from torch import Tensor

Name: TypeAlias = str | int
Parameterization: TypeAlias = Mapping[str, Any]
Candidates: TypeAlias = pd.DataFrame | Mapping[Name, Parameterization] | Sequence[Parameterization]

POOL = "pool"
"""Option of an acquisition, and key in the metadata of a proposal: the pool's name."""

CANDIDATE = "candidate"
"""Key in the metadata of a proposal: the candidate's name."""

MC_POINTS = "mc_points"
"""Option of an acquisition: a table's name, as stored, or points, as the model's inputs."""

SHOWN = 3
"""How many names an error lists."""


@dataclass(frozen=True, eq=False)
class Pool:
    """A table of points in the user's parameter space, each with a name.

    Attributes:
        name: Name of the table, which Ax stores instead of it.
        frame: A column for each parameter; its index contains the candidates' names.
    """

    name: str
    frame: pd.DataFrame

    @classmethod
    def of(cls, candidates: Candidates, name: str | None = None) -> Pool:
        """Make a pool from a data frame, a mapping or a list.

        Parameters that the experiment fixes may be left out.

        Args:
            candidates: A data frame whose index names its rows, parameterizations by name, or a
                list of parameterizations, whose names are then 0, 1, ...
            name: Name of the table. Default: made of its contents, so that another process which
                makes the same table gives it the same name.

        Raises:
            ValueError: No rows, no columns, missing values, or names that are no strings or whole
                numbers or not distinct.

        Example:
            >>> pool = Pool.of(pd.read_csv("sites.csv").set_index("village"), name="sites")
        """
        if isinstance(candidates, pd.DataFrame):
            frame = candidates.copy()
        elif isinstance(candidates, Mapping):
            index = pd.Index(list(candidates), tupleize_cols=False)
            frame = pd.DataFrame(list(candidates.values()), index=index)
        else:
            frame = pd.DataFrame(list(candidates))
        names = frame.index
        if names.nlevels > 1 or names.inferred_type not in ("string", "integer"):
            raise ValueError(
                "Expected candidates to be named by strings or whole numbers, got an index of type "
                f"{names.inferred_type!r}. Set another: frame.set_index('name'), or "
                "frame.reset_index(drop=True)."
            )
        if not names.is_unique:
            twice = names[names.duplicated()].unique().tolist()
            raise ValueError(
                f"Expected the names of candidates to be distinct, got twice: {twice[0]!r}."
            )
        if frame.size == 0:
            raise ValueError(
                f"Expected candidates and their parameters, got {frame.shape} of them."
            )
        missing = frame.isna().to_numpy()
        if missing.any():
            row, column = np.argwhere(missing)[0]
            raise ValueError(
                f"Expected a value of each parameter for each candidate, got none of "
                f"{frame.columns[column]!r} for {names[row]!r}."
            )
        if not name:
            digest = hashlib.sha256(repr(list(frame.columns)).encode())
            digest.update(pd.util.hash_pandas_object(frame).to_numpy().tobytes())
            name = f"pool-{digest.hexdigest()[:12]}"
        return cls(name, frame)

    def __len__(self) -> int:
        """Return the number N of candidates."""
        return len(self.frame)

    def name_of(self, parameters: Parameterization) -> Name:
        """Return the name of the candidate that has the parameters of a trial.

        Parameters without a column in the table are ignored.

        Raises:
            ValueError: None has them, or two of the table's candidates are equal.
        """
        (row,) = self.rows([parameters])
        if row < 0:
            raise ValueError(
                f"No candidate of pool {self.name!r} has the parameters {dict(parameters)}. Only "
                "trials that were chosen from the pool, or attached with the values of "
                "pool.parameters_of(name), have one."
            )
        return self.name_at(int(row))

    def parameters_of(self, name: Name) -> dict[str, Any]:
        """Return the parameters of a candidate.

        Raises:
            ValueError: There is none of this name.
        """
        (row,) = self._rows_named([name])
        return self.parameters_at(int(row))

    def without(self, names: Iterable[Name], name: str | None = None) -> Pool:
        """Return the table without some candidates.

        Args:
            names: Names of those candidates.
            name: Name of the new table; default: made of its contents.

        Raises:
            ValueError: There is none of some name, or nothing is left.
        """
        left = np.ones(len(self), dtype=bool)
        left[self._rows_named(list(names))] = False
        return Pool.of(self.frame[left], name)

    def name_at(self, row: int) -> Name:
        """Return the name of the candidate in a row."""
        name: Any = self.frame.index[row]
        return name if isinstance(name, str) else int(name)

    def parameters_at(self, row: int) -> dict[str, Any]:
        """Return the parameters in a row, as Python's own numbers and strings."""
        values = {name: self.frame[name].iat[row] for name in self.frame.columns}
        return {n: v.item() if isinstance(v, np.generic) else v for n, v in values.items()}

    def rows(self, parameterizations: Sequence[Parameterization]) -> npt.NDArray[np.int64]:
        """Return the row of each of n parameterizations, -1 where there is none.

        Values must agree exactly. Cost O(n log N), and O(N log N) at the first call.

        Raises:
            ValueError: Two candidates are equal.
        """
        columns = self.frame.columns
        values = {name: [each.get(name) for each in parameterizations] for name in columns}
        keys = _comparable(pd.DataFrame(values), self.frame)
        rows: npt.NDArray[np.int64] = self._index.get_indexer(pd.MultiIndex.from_frame(keys))
        return rows

    def untried(self, parameterizations: Sequence[Parameterization]) -> npt.NDArray[np.bool_]:
        """Return which candidates are none of some parameterizations, ``N`` bools."""
        rows = self.rows(parameterizations)
        untried = np.ones(len(self), dtype=bool)
        untried[rows[rows >= 0]] = False
        return untried

    def check_distinct(self) -> None:
        """Check that no two candidates have the same parameters, or raise a ``ValueError``."""
        _ = self._index

    @cached_property
    def _index(self) -> pd.MultiIndex:
        """Return an index of the rows by their values."""
        values = _comparable(self.frame, self.frame)
        index = pd.MultiIndex.from_frame(values)
        if not index.is_unique:
            twice = values.iloc[int(index.duplicated().argmax())]
            first, second, *_ = np.flatnonzero(values.eq(twice).all(axis=1))
            raise ValueError(
                f"Candidates {self.name_at(int(first))!r} and {self.name_at(int(second))!r} of "
                f"pool {self.name!r} have the same parameters, so that a trial could not be told "
                "to be of one of them. Leave one out."
            )
        return index

    def _rows_named(self, names: Sequence[Name]) -> npt.NDArray[np.int64]:
        """Return the rows of candidates' names, or raise a ``ValueError``."""
        rows: Any = self.frame.index.get_indexer(pd.Index(names))
        unknown = [name for name, row in zip(names, rows, strict=True) if row < 0]
        if unknown:
            raise ValueError(
                f"Pool {self.name!r} has no candidate {listed(unknown)}. Its {len(self)} names are "
                f"those of the table, such as {listed([self.name_at(0)])}."
            )
        return rows


_KNOWN: dict[str, Pool] = {}


def register_pool(pool: Pool, replace: bool = False) -> Pool:
    """Make a table known by its name, which alone Ax stores, and return it.

    ``generation_strategy`` does so for the tables that it is given. A process that loads an
    experiment must do so itself before it asks for trials. With ``replace`` another table of the
    same name is replaced.

    Raises:
        ValueError: Another table has the name.
    """
    known = _KNOWN.get(pool.name)
    if known is not None and known.frame.equals(pool.frame):
        return known
    if known is not None and not replace:
        raise ValueError(
            f"Another pool is registered as {pool.name!r}, of {len(known)} candidates. Give this "
            "one another name, or call register_pool(pool, replace=True)."
        )
    _KNOWN[pool.name] = pool
    return pool


def known_pool(name: str) -> Pool | None:
    """Return the table of a name, or None where this process knows none."""
    return _KNOWN.get(name)


def pool_named(name: str) -> Pool:
    """Return the table of a name.

    Raises:
        ValueError: This process knows none.
    """
    pool = known_pool(name)
    if pool is None:
        raise ValueError(
            f"No pool is registered as {name!r} in this process: Ax stores its name only. Call "
            f"bo_stream.ax.register_pool(Pool.of(candidates, name={name!r})) with its table first."
        )
    return pool


def handle(table: str | Pool | Candidates) -> str:
    """Return the name of a table, after it is registered; a name is returned itself."""
    if isinstance(table, str):
        return table
    return register_pool(table if isinstance(table, Pool) else Pool.of(table)).name


def listed(names: Sequence[object]) -> str:
    """Return the first of some names, for an error."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(repr(name) for name in names[:SHOWN]) + more


def _comparable(frame: pd.DataFrame, like: pd.DataFrame) -> pd.DataFrame:
    """Return numbers as float64 and everything else as strings, by the columns of a table."""
    return pd.DataFrame(
        {
            name: pd.to_numeric(frame[name], errors="coerce").astype(float) + 0.0
            if pd.api.types.is_numeric_dtype(like[name])
            else frame[name].astype(str)
            for name in like.columns
        }
    )


@dataclass(frozen=True)
class Tables:
    """Pools as a model's inputs, each transformed once for a search space that contains it.

    Attributes:
        device: Where the inputs will be.
    """

    device: torch.device | None = None
    _known: dict[str, Table] = field(default_factory=dict)

    def get(
        self,
        pool: Pool,
        space: SearchSpace,
        transforms: Iterable[Transform],
        columns: list[str] | None = None,
    ) -> Table:
        """Return a table, transformed if it is not yet, with all columns or the expected ones.

        Raises:
            UnsupportedError: An input is no function of the parameters.
            ValueError: A parameter is missing, a column is no parameter, or a candidate is outside
                the search space.
        """
        known = self._known.get(pool.name)
        same = known is not None and columns in (None, known.columns)
        if known is not None and same and known.pool is pool and known.space == space:
            return known
        check_inside(pool, space)
        given = pool.frame.reset_index(drop=True)
        values = {}
        for name, parameter in space.parameters.items():  # parameters not tuned are dropped later
            tuned = name in space.tunable_parameters
            values[name] = given[name].astype(parameter.python_type) if tuned else np.nan
        frame = pd.DataFrame(values, index=given.index)
        for transform in transforms:  # vectorised: about a second for a million rows
            observations = pd.DataFrame(index=frame.index)
            data = transform.transform_experiment_data(ExperimentData(frame, observations))
            frame = data.arm_data
        names = list(frame.columns if columns is None else columns)
        extra = [name for name in names if name not in frame]
        if extra:
            raise UnsupportedError(
                f"A pool cannot be used where the model has inputs that are no parameters, here "
                f"{listed(extra)}. Attach data at one step only."
            )
        X = torch.from_numpy(frame[names].to_numpy(dtype=float, copy=True)).to(self.device)
        table = self._known[pool.name] = Table(pool, space.clone(), names, X)
        return table


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
    _samples: dict[int, Tensor] = field(default_factory=dict)

    def some(self, count: int) -> Tensor:
        """Return a sample of its rows, ``count x d`` or all, the same at each call."""
        if count >= len(self.X):
            return self.X
        if count not in self._samples:
            generator = torch.Generator().manual_seed(0)
            rows = torch.randperm(len(self.X), generator=generator)[:count]
            self._samples[count] = self.X[rows.to(self.X.device)]
        return self._samples[count]


def input_transforms(space: SearchSpace) -> tuple[list[Transform], SearchSpace]:
    """Return the streaming generator's transforms of parameters, and the transformed space.

    The parameters of the latter are a model's inputs, one-hot columns among them. A hierarchical
    space is flattened first, as Ax's adapters do.
    """
    transforms: list[Transform] = []
    space = space.flatten() if space.is_hierarchical else space
    for kind in MBM_X_trans_base:
        transform = kind(search_space=space.clone())
        space = transform.transform_search_space(space.clone())
        transforms.append(transform)
    return transforms, space


def check_inside(pool: Pool, space: SearchSpace) -> None:
    """Check that a pool has the parameters of a search space, and its candidates are inside.

    Raises:
        ValueError: It has not, or some are outside.
    """
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
    for name in columns:
        domain = f"{name} outside {given[name].domain_repr}"
        _refuse(pool, ~_inside(given[name], pool.frame[name]), domain, name)
    table = pool.frame.reset_index(drop=True)
    inside = np.array(space.check_membership_df(table, check_all_parameters_present=False))
    _refuse(pool, ~inside, f"parameters that break {space.parameter_constraints}")


def _inside(parameter: Parameter, values: pd.Series) -> npt.NDArray[np.bool_]:
    """Return whether Ax would neither cast, round nor clamp values."""
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
    """Raise an error if there are candidates outside."""
    if not outside.any():
        return
    rows = np.flatnonzero(outside)
    first = pool.parameters_at(int(rows[0]))
    value = first if column is None else first[column]
    raise ValueError(
        f"{len(rows)} of the {len(pool)} candidates of pool {pool.name!r} have {what}, such as "
        f"{pool.name_at(int(rows[0]))!r} with {value}. Leave them out, with pool.without(names), "
        "or widen the search space."
    )


def check_enough(wanted: int, left: int, pool: Pool, fixed: bool) -> None:
    """Check that a pool has enough candidates left; some parameters may be fixed.

    Raises:
        SearchSpaceExhausted: It has not.
    """
    if left >= wanted:
        return
    which = " and have the fixed parameters" if fixed else ""
    raise SearchSpaceExhausted(
        f"Asked for {wanted} of the candidates of pool {pool.name!r} that no trial has had{which}, "
        f"and {left} of {len(pool)} are left; those that the same call has chosen already are not. "
        "Ask for fewer, stop here, or register a larger table with "
        "register_pool(Pool.of(candidates, name=...), replace=True)."
    )
