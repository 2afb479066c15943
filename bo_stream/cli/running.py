"""The app, the commands' shared options, and the steps that they share.

Whatever loads torch is imported in the functions: the help pages do without.
"""

from __future__ import annotations

import functools
import inspect
import os
import shlex
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import typer
from rich import markup
from rich.console import Console
from typer.core import TyperCommand

from bo_stream import __version__
from bo_stream.errors import UsageError
from bo_stream.loops.models import KERNELS, MODELS, OPTIONS, Option, checked_model
from bo_stream.loops.survey.settings import CRITERIA
from bo_stream.loops.survey.settings import SurveySettings as _DEFAULT

if TYPE_CHECKING:
    from bo_stream.diagnostics.trust import TrustReport
    from bo_stream.loops.optimization.campaign import OptimizationCampaign
    from bo_stream.loops.run import StopRequest
    from bo_stream.loops.sampling.campaign import Campaign
    from bo_stream.loops.survey.replay import ReplayRun
    from bo_stream.warnings import NumericalLog


OUT = Console(highlight=False, emoji=False)
ERR = Console(stderr=True, highlight=False, emoji=False)

_PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""Environment of every OpenMP (GNU's included), and of Intel's and LLVM's."""

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


def say(text: str) -> None:
    """Print a text of a user's file, or one with such texts in it, as one paragraph."""
    OUT.print(escape(text), soft_wrap=True)


def warn(text: str) -> None:
    """Print a warning."""
    ERR.print(f"[yellow]warning:[/] {escape(text)}", soft_wrap=True)


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
    if os.environ.keys().isdisjoint((*_PASSIVE, "GOMP_SPINCOUNT")):  # else the user has chosen
        os.environ.update(_PASSIVE)


# --- options that several commands have, and the parsers of their values -------------------------


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


def parse_folder(name: str | Path) -> Path:
    """Parse the name of a folder, which is not empty, as that of an unset variable is."""
    if not str(name):
        raise typer.BadParameter("expected a folder, got ''; . is the one at hand")
    return Path(name)


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
        f"An option of the model, again for each (defaults: {OPTIONS}; 0: chosen).",
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
    Path | None,
    option(
        "Files",
        f"Folder for the results ({DEFAULT_FOLDER}, -2, -3, ...).",
        parser=parse_folder,
        metavar="PATH",
    ),
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


# --- options of a survey's settings ---------------------------------------------------------------


_SETTINGS: dict[str, dict[str, tuple[Any, str, str | None]]] = {
    "Goal": {
        "goal": (
            str,
            "exceedance: which sites are above the threshold; map: prevalence everywhere.",
            "exceedance|map",
        ),
        "threshold": (str | None, "Prevalence that a decision hangs on: 10% or 0.1.", "SHARE"),
        "certainty": (
            str, "Probability from which on a site is called above or below: 90% or 0.9.", "SHARE"
        ),
        "stop_when": (
            str | None,
            "The survey may end once at most this share of all calls is expected to be wrong: 5%.",
            "SHARE",
        ),
        "miss_cost": (
            float, "Cost of missing a site above the threshold, in false alarms.", None
        ),
        "criterion": (
            str | None,
            f"Uncertainty to reduce: {', '.join(CRITERIA)} (misclassification for exceedance, "
            "variance for a map).",
            "NAME",
        ),
        "loss": (
            str | None,
            "Your own loss in place of a criterion: a function of the probability of exceeding the "
            "threshold, elementwise by torch.",
            "MODULE:FUNCTION",
        ),
    },
    "Columns": {
        "id": (str | None, "Names of the sites (by its usual names, else row numbers).", None),
        "x": (
            tuple[str, str] | None,
            "Longitude and latitude, or east and north (by their usual names).",
            None,
        ),
        "units": (
            str,
            "Of positions: degrees of longitude and latitude, or km or m east and north on a map "
            "projection such as UTM.",
            "degrees|km|m",
        ),
        "covariates": (
            list[str] | None,
            "Numbers that prevalence may depend on: rain, elevation, nets, ...",
            "NAME...",
        ),
        "examined": (str | None, "People examined (by its usual names).", None),
        "positive": (str | None, "People who tested positive (by its usual names).", None),
        "cost": (str | None, "Cost of a survey of each site (1 each).", None),
        "stratum": (str | None, "District or other group of a site.", None),
        "reachable": (str | None, "Whether a site can be reached, yes or no (all can).", None),
    },
    "Round": {
        "budget": (float | None, "Most that a round may cost, travel included.", None),
        "minimum_distance": (float, "Least distance between surveyed sites, in km.", None),
        "quotas": (
            list[str] | None,
            "Most sites of a round in a stratum, as in --quota north=5 south=5.",
            "NAME=N...",
        ),
        "base": (
            tuple[float, float] | None,
            "Where a round starts and ends: longitude, latitude (or east, north).",
            None,
        ),
        "cost_per_km": (float, "Cost of a kilometre of travel from the base.", None),
    },
    "Model": {
        "trials": (
            int | None, "People to be examined at a site (the mean of those so far).", None
        ),
        "overdispersion": (
            bool,
            "Counts vary more than those of independent people, as within a village.",
            None,
        ),
    },
}  # fmt: skip
"""Type, text and kind of value of each option, by panel and by its name in ``SurveySettings``."""


def with_survey_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of ``SurveySettings`` after its own.

    Args:
        command: Its argument ``settings`` has their values by the names of ``SurveySettings``;
            quotas and shares are texts yet.
    """
    own = dict(inspect.signature(command, eval_str=True).parameters)
    del own["settings"]
    shared = []
    for panel, options in _SETTINGS.items():
        for name, (kind, text, metavar) in options.items():
            names = ("--quota",) if name == "quotas" else ()
            shown = option(panel, text, *names, metavar=metavar)
            typed = Annotated[kind, shown]  # type: ignore[valid-type]
            default = getattr(_DEFAULT, name, None)
            default = f"{default:g}" if name == "certainty" else None if default == () else default
            keyword = inspect.Parameter.KEYWORD_ONLY
            shared.append(inspect.Parameter(name, keyword, default=default, annotation=typed))

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        chosen = {parameter.name: given.pop(parameter.name) for parameter in shared}
        chosen["covariates"] = tuple(chosen["covariates"] or ())
        command(**given, settings=chosen)

    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own.values()]
    wrapped.__signature__ = inspect.Signature([*parameters, *shared])  # type: ignore[attr-defined]
    return wrapped


# --- errors, folder, comparison of settings, progress and report ---------------------------------


C = TypeVar("C")
Caught: TypeAlias = list[warnings.WarningMessage]

_BAD_INPUT = 2
STOPPED = 130


@contextmanager
def reported_problems() -> Iterator[Caught]:
    """Collect warnings, and turn errors that a user can correct into one line and an exit code.

    A wait for a cluster, which the user alone can end, is also shown at once.
    """
    from botorch.exceptions.errors import BotorchError

    from bo_stream.executors.engine import WaitingWarning

    caught: Caught = []

    def keep(message: Warning | str, category: type[Warning], *at: Any, **more: Any) -> None:
        caught.append(warnings.WarningMessage(message, category, *at, **more))
        if issubclass(category, WaitingWarning):
            warn(str(message))

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.showwarning = keep
            yield caught
    except (UsageError, BotorchError, OSError) as error:
        text = str(error)
        if isinstance(error, OSError):
            place = f"{error.filename}: " if error.filename else ""
            text = f"{place}{error.strerror or error}. What was written before is whole."
        ERR.print(f"[bold red]error:[/] {escape(text)}", soft_wrap=True)
        raise typer.Exit(_BAD_INPUT) from error
    except KeyboardInterrupt:
        ERR.print("Interrupted. What was written before is whole.")
        raise typer.Exit(STOPPED) from None


@contextmanager
def campaign_in_folder(
    out: Path | None, resume: bool, begin: Callable[[], C], go_on: Callable[[Path], C]
) -> Iterator[tuple[C, Path]]:
    """Make a campaign by ``begin``, or by ``go_on`` from a folder, which is locked in the block.

    Raises:
        UsageError: There is no folder to resume from, a new run is given a file or a folder with a
            run, or another process is at work in it.
    """
    from bo_stream.loops.run import hold_folder

    if resume:
        if out is None:
            raise UsageError("Say which run to go on with: --out FOLDER --resume.")
        with _naming(out), hold_folder(out):
            yield go_on(out), out
        return
    _check_new_folder(out)
    campaign = begin()
    folder = _fresh_folder() if out is None else out
    with _naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with hold_folder(folder):
            _check_new_folder(folder)
            yield campaign, folder


def _check_new_folder(out: Path | None) -> None:
    from bo_stream.loops.run import ASKING, OPTIMIZATION, REPLAY, SAMPLING, SURVEY

    if out is None:
        return
    for kind in (SURVEY, ASKING):
        if kind.is_in(out):
            raise UsageError(f"{out} holds a {kind.run} ({kind.name}). Give another --out.")
    if any(kind.is_in(out) for kind in (SAMPLING, OPTIMIZATION, REPLAY)):
        raise UsageError(
            f"{out} holds a run already. Go on with it by --resume, or give another --out."
        )
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is not a folder.")


def _fresh_folder(number: int = 1) -> Path:
    folder = Path(DEFAULT_FOLDER if number == 1 else f"{DEFAULT_FOLDER}-{number}")
    try:
        folder.mkdir()
    except FileExistsError:
        return _fresh_folder(number + 1)
    return folder


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Say where a write failed: the system does not always."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or str(folder)) from error


def said(ctx: typer.Context, values: Mapping[str, Any]) -> dict[str, Any]:
    """Select the settings that were given on the command line."""
    sources = {name: getattr(ctx.get_parameter_source(name), "name", None) for name in values}
    return {name: values[name] for name, source in sources.items() if source == "COMMANDLINE"}


def as_typed(word: str, value: Any) -> str:
    """Write an option and its value as on the command line, ``no --compare`` where it is unset."""
    if value is None or value in ((), {}):
        return f"no {word}"
    if isinstance(value, Mapping):
        return " ".join(f"{word} {name}={shlex.quote(str(each))}" for name, each in value.items())
    each = [shlex.quote(str(part)) for part in (value if isinstance(value, tuple) else (value,))]
    return f"{word} {(',' if word == '--grid' else ' ').join(each)}"


def check_unchanged(
    ctx: typer.Context, previous: Mapping[str, Any], values: Mapping[str, Any]
) -> None:
    """Check that settings given on the command line for a resumed run equal those it began with.

    Raises:
        UsageError: One is another, or no option of the run's model.
    """
    for name, value in said(ctx, values).items():
        began, typed = previous[name], value
        if name == "model_options":
            model = previous["model"]
            began, typed = (
                {**MODELS[model].options, **checked_model(model, each)} for each in (began, value)
            )
        if typed != began:
            (parameter,) = (each for each in ctx.command.params if each.name == name)
            is_option = parameter.param_type_name == "option"
            word = parameter.opts[0] if is_option else str(parameter.metavar)
            told = as_typed(word, previous[name])
            got = as_typed(word, value).removeprefix(f"{word} ")
            if isinstance(value, bool) and parameter.secondary_opts:
                words = (*parameter.secondary_opts, word)  # of False, of True
                told, word, got = words[previous[name]], words[value], words[value]
            raise UsageError(
                f"The run began with {told}, got {got}. A run goes on with its "
                f"own settings: leave out {word}, or start again in another folder."
            )


def run_with_bar(
    campaign: OptimizationCampaign | Campaign | ReplayRun,
    total: int | None,
    status: Callable[[], str],
    run: Callable[[StopRequest, Callable[[Any], None]], None],
    stopping: str = "Stopping after this step",
) -> bool:
    """Run a campaign with a progress bar, and return whether the user stopped it before its end.

    Args:
        campaign: The campaign.
        total: Number of steps in all.
        status: Returns the text after the bar.
        run: Does the steps, and calls its second argument after each event.
        stopping: Text shown at a first Ctrl-C.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from bo_stream.loops.run import StopRequest

    bar = Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
        console=ERR,
    )

    message = f"{stopping}; Ctrl-C again to stop at once."
    with bar, StopRequest(lambda: bar.console.print(message)) as stop:
        task = bar.add_task("", total=total, completed=campaign.steps_done, status=status())

        def show(_: Any = None) -> None:
            bar.update(task, completed=campaign.steps_done, status=status())

        run(stop, show)
        show()
    return stop.made and not campaign.finished


def notes(caught: Iterable[warnings.WarningMessage]) -> list[str]:
    """Return the text of the last warning of each kind."""
    from bo_stream.models.wiski.resolution import GridResolutionWarning

    texts = {}
    for each in caught:
        hint = " Here: --grid." if issubclass(each.category, GridResolutionWarning) else ""
        texts[each.category, each.lineno] = " ".join(str(each.message).split()) + hint
    return list(texts.values())


def show_end(
    folder: Path,
    files: str,
    caught: Caught,
    logs: Iterable[NumericalLog],
    stopped: bool,
    command: Sequence[str],
    trust: TrustReport | None = None,
) -> None:
    """Show how a run went, say where its files are and how to go on.

    Args:
        folder: Folder of the run.
        files: Names of the files, as text.
        caught: Warnings of the run.
        logs: Numerical records of its models.
        stopped: Whether the user stopped it.
        command: Words after ``bo-stream`` that resume it, together with ``--out`` and ``--resume``.
        trust: Report on the model, of which alarms are shown.

    Raises:
        Exit: The run was stopped.
    """
    from bo_stream.executors.engine import WaitingWarning

    for alarm in () if trust is None else trust.alarms:
        OUT.print(f"[yellow]trust:[/] {escape(str(alarm))}", soft_wrap=True)
    for note in notes(each for each in caught if not issubclass(each.category, WaitingWarning)):
        warn(note)
    events = [str(event) for log in logs for event in log]
    if events:
        say(f"Numerical record: {'; '.join(events)}.")
    OUT.print(f"{files} are in [bold]{escape(str(folder))}[/].")
    if stopped:
        again = shlex.join(["bo-stream", *command, "--out", str(folder), "--resume"])
        OUT.print(f"Stopped. To go on: [bold]{escape(again)}[/]", soft_wrap=True)
        raise typer.Exit(STOPPED)
