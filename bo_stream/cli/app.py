"""The app that the commands are registered with."""

from __future__ import annotations

from typing import Annotated

import typer

from bo_stream import __version__
from bo_stream.cli.consoles import OUT
from bo_stream.cli.waiting import wait_passively

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
    wait_passively()
