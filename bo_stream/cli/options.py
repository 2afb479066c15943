"""Options that several commands have, and the parsers of their values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from bo_stream.errors import UsageError
from bo_stream.loops.models import KERNELS, MODELS, Option, options_help

DEFAULT_FOLDER = "bo-stream-run"


def option(panel: str, text: str, *names: str, **more: Any) -> Any:
    """Return an option in a panel of the help page."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def spreading(*names: str) -> type[TyperCommand]:
    """Return a class of commands whose named options take all values up to the next option.

    As in ``--x lon lat``, which is read as ``--x lon --x lat``.
    """

    class SpreadingCommand(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            for name in names:
                args = spread(name, args)
            return super().parse_args(ctx, args)

    return SpreadingCommand


def spread(option: str, args: list[str]) -> list[str]:
    """Repeat an option before each of its values."""
    result: list[str] = []
    inside = False
    for arg in args:
        inside = arg == option or (inside and not arg.startswith("-"))
        if inside and arg != option and result[-1] != option:
            result.append(option)
        result.append(arg)
    return result


def parse_grid(text: str) -> tuple[int, ...]:
    """Parse nodes per input, ``72`` or ``72,60``."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"expected 72, or 72,60 for two inputs, got {text!r}") from error


def parse_settings(texts: list[str] | None) -> dict[str, Option]:
    """Parse options of a model, each ``name=value``.

    Raises:
        UsageError: One has another form.
    """
    options: dict[str, Option] = {}
    for text in texts or ():
        name, _, value = text.partition("=")
        if not name or not value:
            raise UsageError(
                f"Expected --set name=value, as in --set max_points=256, got {text!r}."
            )
        options[name.replace("-", "_")] = value
    return options


Model = Annotated[
    str,
    option(
        "Model",
        f"Model: {', '.join(MODELS)}. auto is exact for the first hundreds of outcomes, then on a "
        "grid in up to four inputs and at inducing points in more.",
        metavar="NAME",
    ),
]
Set = Annotated[
    list[str] | None,
    option(
        "Model",
        f"An option of the model, again for each (defaults: {options_help()}; 0: chosen).",
        "--set",
        metavar="NAME=VALUE",
    ),
]
Kernel = Annotated[str, option("Model", f"Kernel: {', '.join(KERNELS)}.", metavar="NAME")]
Grid = Annotated[
    Any,
    option(
        "Model",
        "Grid nodes per input, of model wiski (by kernel and inputs); model auto is on that grid "
        "from the first outcome on.",
        parser=parse_grid,
        metavar="N[,N...]",
    ),
]
Refit = Annotated[
    float, option("Model", "Relearn hyperparameters at so many times the observations; 0: never.")
]
Device = Annotated[str, option("Model", "Torch device: cpu, cuda, cuda:1, ...")]
Dtype = Annotated[str, option("Model", "Precision.", metavar="float64|float32")]
Out = Annotated[
    Path | None, option("Files", f"Folder for the results ({DEFAULT_FOLDER}, -2, -3, ...).")
]
Resume = Annotated[
    bool,
    option(
        "Files",
        "Go on with the run in --out; --steps may ask for more. Its files decide what is computed, "
        "but run nothing.",
        "--resume",
    ),
]
