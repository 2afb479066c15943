"""The tables that this process knows by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from bo_stream.ax.pool import Candidates, Pool

_KNOWN: dict[str, Pool] = {}


def register_pool(pool: Pool, replace: bool = False) -> Pool:
    """Make a table known by its name, which is all that Ax stores of it.

    ``generation_strategy`` does it for the tables that it is given. A process that loads an
    experiment must do it itself before it asks for trials.

    Args:
        pool: The table.
        replace: Whether it may take the place of another of the same name.

    Returns:
        The table.

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
    """The table of a name, or None where this process knows none."""
    return _KNOWN.get(name)


def pool_named(name: str) -> Pool:
    """The table of a name.

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
    """The name of a table, which is registered where it is not a name already."""
    if isinstance(table, str):
        return table
    return register_pool(table if isinstance(table, Pool) else Pool.of(table)).name


def with_handles(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an acquisition function as Ax can store them.

    Args:
        options: ``mc_points`` may be a table; a tensor, or anything else, stays as it is.
    """
    points: Any = options.get("mc_points")
    is_table = isinstance(points, str | Pool | pd.DataFrame | Mapping | list)
    return {**options, "mc_points": handle(points)} if is_table else dict(options)
