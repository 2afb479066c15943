"""Where Ax's client keeps an experiment: a file of sqlite, or a database on a server."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ax.api.configs import StorageConfig

NEEDED = ("sqlalchemy", "tabulate")
"""What Ax's SQL storage imports, and what it calls without saying so."""


def storage_config(database: str | Path) -> StorageConfig:
    """For Ax's ``Client(storage_config=...)`` and ``Client.load_from_database``.

    Every trial is in the database when the call that made or completed it returns, so that a
    process can be killed at any time. Tables are made where there are none. What a save costs does
    not grow with the number of trials; Ax's own writes all candidates again with each.

    Ax has one database open in a process. It can hold many experiments; for another one call
    :func:`close_storage` first.

    Args:
        database: Path of a file of sqlite, which need not exist yet, or a URL of SQLAlchemy, such
            as ``postgresql://user:password@host/name``, whose driver must be installed.

    Raises:
        ImportError: SQLAlchemy is not installed.
        ValueError: The database cannot be opened, or another one is open.

    Example:
        >>> client = Client(storage_config=storage_config("campaign.db"))
    """
    _check_installed()
    from bo_stream.ax import sql

    sql.open_database(_url(database))
    return StorageConfig(url=_url(database), registry_bundle=sql.registry_bundle())


def close_storage() -> None:
    """Close the database that is open, if any. Its clients can save nothing from then on."""
    _check_installed()
    from bo_stream.ax import sql

    sql.close_database()


def _check_installed() -> None:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ImportError(
            f"Ax's SQL storage needs {' and '.join(missing)}: run pip install 'bo-stream[sql]', or "
            "use client.save_to_json_file."
        )


def _url(database: str | Path) -> str:
    if "://" in str(database):
        return str(database)
    path = Path(database).absolute()
    if not path.parent.is_dir():
        raise ValueError(f"Expected database in a folder that exists, got {str(database)!r}.")
    return f"sqlite:///{path}"
