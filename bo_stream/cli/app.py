"""The app that the commands are registered with, its output and environment."""

from __future__ import annotations

import os
import unicodedata
from typing import Annotated

import typer
from rich import markup
from rich.console import Console

from bo_stream import __version__

OUT = Console(highlight=False)
ERR = Console(stderr=True, highlight=False)

_PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""Environment of every OpenMP (GNU's included), and of Intel's and LLVM's."""

_WAITING = (*_PASSIVE, "GOMP_SPINCOUNT")
"""Variables by which a user may have chosen already."""

_UNPRINTABLE = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Categories of Unicode."""


def escape(text: str) -> str:
    r"""Return a text of a user's file as it may be printed: no markup, no codes for the terminal.

    Control and format characters, which move the cursor, colour or reverse what follows, are
    written as in ``\x1b``.
    """
    printable = (
        letter
        if letter in "\n\t\u200c\u200d" or unicodedata.category(letter) not in _UNPRINTABLE
        else ascii(letter)[1:-1]
        for letter in text
    )
    return markup.escape("".join(printable))


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
    # Threads that spin while they wait keep the cores from those that compute: alongside a busy
    # process an update can take a hundred times as long. OpenMP reads the environment once, when
    # torch is loaded, so this must come before; worker processes inherit it.
    if not any(name in os.environ for name in _WAITING):
        os.environ.update(_PASSIVE)
