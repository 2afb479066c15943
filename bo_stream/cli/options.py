"""What the commands' options have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer

from bo_stream.cli.app import naming
from bo_stream.loops.errors import UsageError
from bo_stream.loops.models import KERNELS, MODELS, Option, checked_model, options_help
from bo_stream.loops.run_lock import hold_folder

DEFAULT_FOLDER = "bo-stream-run"


def option(panel: str, text: str, *names: str, **more: Any) -> Any:
    """An option in a panel of the help page."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def parse_grid(text: str) -> tuple[int, ...]:
    """Nodes per input, ``72`` or ``72,60``."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"expected 72, or 72,60 for two inputs, got {text!r}") from error


def parse_settings(texts: list[str] | None) -> dict[str, Option]:
    """Options of a model, each as ``name=value``.

    Raises:
        UsageError: Another form.
    """
    pairs = [text.partition("=") for text in texts or ()]
    for text, (name, sign, value) in zip(texts or (), pairs, strict=True):
        if not name or not sign or not value:
            raise UsageError(
                f"Expected --set name=value, as in --set max_points=256, got {text!r}."
            )
    return {name.replace("-", "_"): value for name, _, value in pairs}


ModelOption = Annotated[str, option("Model", f"Model: {', '.join(MODELS)}.", metavar="NAME")]
SetOption = Annotated[
    list[str] | None,
    option(
        "Model",
        f"An option of the model, again for each (defaults: {options_help()}).",
        "--set",
        metavar="NAME=VALUE",
    ),
]
KernelOption = Annotated[str, option("Model", f"Kernel: {', '.join(KERNELS)}.", metavar="NAME")]
GridOption = Annotated[
    Any,
    option(
        "Model",
        "Grid nodes per input, of model wiski (by kernel and inputs).",
        parser=parse_grid,
        metavar="N[,N...]",
    ),
]
RefitOption = Annotated[
    float, option("Model", "Relearn hyperparameters at so many times the observations; 0: never.")
]
DeviceOption = Annotated[str, option("Model", "Torch device: cpu, cuda, cuda:1, ...")]
DtypeOption = Annotated[str, option("Model", "Precision.", metavar="float64|float32")]
OutOption = Annotated[
    Path | None, option("Files", f"Folder for the results ({DEFAULT_FOLDER}, -2, -3, ...).")
]
ResumeOption = Annotated[
    bool,
    option(
        "Files",
        "Go on with the run in --out; --steps may ask for more. Its files decide what is computed, "
        "but run nothing.",
        "--resume",
    ),
]


def as_recorded(name: str, value: Any, former: Mapping[str, Any]) -> Any:
    """A setting from the command line in the form in which a run's record has it.

    Raises:
        UsageError: It is no option of the run's model.
    """
    return checked_model(former["model"], value) if name == "model_options" else value


def was_said(ctx: typer.Context, name: str) -> bool:
    """Whether an option was given on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


@contextmanager
def folder_to_resume(out: Path | None) -> Iterator[Path]:
    """Hold the folder of a run at rest.

    Raises:
        UsageError: It was not said, or another process is at work in it.
    """
    if out is None:
        raise UsageError("Say which run to go on with: --out FOLDER --resume.")
    with naming(out), hold_folder(out):
        yield out


def check_new_folder(out: Path | None) -> None:
    """Refuse a folder that cannot take a new run.

    Raises:
        UsageError: It holds a run already, or is a file.
    """
    from bo_stream.loops.optimization.store import FILE_NAME as OPTIMIZATION_FILE
    from bo_stream.loops.sampling.checkpoint import FILE_NAME as SAMPLING_FILE

    if out is None:
        return
    if (out / SAMPLING_FILE).exists() or (out / OPTIMIZATION_FILE).exists():
        raise UsageError(
            f"{out} holds a run already. Go on with it by --resume, or give another --out."
        )
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is not a folder.")


@contextmanager
def new_folder(out: Path | None) -> Iterator[Path]:
    """Make and hold a folder for a new run; a fresh one if none was said.

    Raises:
        UsageError: It holds a run already, is a file, or another process is at work in it.
    """
    folder = _fresh_folder() if out is None else out
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with hold_folder(folder):
            check_new_folder(folder)
            yield folder


def _fresh_folder() -> Path:
    names = (DEFAULT_FOLDER + (f"-{i}" if i > 1 else "") for i in count(1))
    return next(Path(name) for name in names if _made(Path(name)))


def _made(folder: Path) -> bool:
    with suppress(FileExistsError):
        folder.mkdir()
        return True
    return False
