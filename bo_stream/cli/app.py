"""The app that the commands are registered with, its output, errors and environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from bo_stream import __version__
from bo_stream.loops.errors import UsageError

OUT = Console(highlight=False)
ERR = Console(stderr=True, highlight=False)

BAD_INPUT = 2
STOPPED = 130

_PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""Environment of every OpenMP (GNU's included), and of Intel's and LLVM's."""

_WAITING = (*_PASSIVE, "GOMP_SPINCOUNT")
"""Variables by which a user may have chosen already."""


app = typer.Typer(
    name="bo-stream",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        OUT.print(f"bo-stream {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Streaming Gaussian processes: choose where to measure next, at the same cost each time."""
    _wait_passively()


def _wait_passively() -> None:
    """Let threads sleep while they wait, unless the environment says how they wait.

    Threads that spin keep the cores from those that compute: beside another busy process an update
    can take a hundred times as long. OpenMP reads the environment once, when torch is loaded, so
    this must come before; worker processes inherit it.
    """
    if not any(name in os.environ for name in _WAITING):
        os.environ.update(_PASSIVE)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn errors that a user can correct into one line and an exit code."""
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


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror or error}. What was written before is whole."
    return str(error)
