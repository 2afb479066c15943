"""How the command fails: one line and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.markup import escape

from bo_stream.cli.consoles import ERR
from bo_stream.loops.errors import UsageError

BAD_INPUT = 2
STOPPED = 130


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn errors that a user can mend into one line and an exit code."""
    try:
        yield
    except Exception as error:
        if not _can_be_mended(error):
            raise
        ERR.print(f"[bold red]error:[/] {escape(_in_words(error))}", soft_wrap=True)
        raise typer.Exit(BAD_INPUT) from error
    except KeyboardInterrupt:
        ERR.print("Interrupted. What was written before is whole.")
        raise typer.Exit(STOPPED) from None


def _can_be_mended(error: Exception) -> bool:
    from botorch.exceptions.errors import BotorchError

    return isinstance(error, UsageError | BotorchError | OSError)


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Say where a write failed: the system does not always."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or str(folder)) from error


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror or error}. What was written before is whole."
    return str(error)
