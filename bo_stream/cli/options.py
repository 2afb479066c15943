"""Options that several commands have, and the parsers of their values."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from bo_stream.errors import UsageError
from bo_stream.loops.models import KERNELS, MODELS, Option, options_help
from bo_stream.loops.survey.settings import CRITERIA
from bo_stream.loops.survey.settings import SurveySettings as _DEFAULT

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


# --- options of a survey's settings ---------------------------------------------------------------


SurveyCommand = spreading("--covariates", "--quota")
"""Class of the commands that have the options of a survey's settings."""

Group = Annotated[
    bool,
    option(
        "Columns", "Add up the rows of each position: of people or visits, one village.", "--group"
    ),
]
"""Option of the commands that read a list of sites."""


def with_survey_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of :func:`_survey_settings` after its own.

    Args:
        command: Its argument ``settings`` is what that function returns.
    """
    own = dict(inspect.signature(command, eval_str=True).parameters)
    shared = inspect.signature(_survey_settings, eval_str=True).parameters
    del own["settings"]

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        chosen = _survey_settings(**{name: given.pop(name) for name in shared})
        command(**given, settings=chosen)

    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in (*own.values(), *shared.values())
    ]
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return wrapped


def _survey_settings(
    goal: Annotated[
        str,
        option(
            "Goal",
            "exceedance: which sites are above the threshold; map: prevalence everywhere.",
            metavar="exceedance|map",
        ),
    ] = _DEFAULT.goal,
    threshold: Annotated[
        str | None,
        option("Goal", "Prevalence that a decision hangs on: 10% or 0.1.", metavar="SHARE"),
    ] = None,
    certainty: Annotated[
        str,
        option(
            "Goal",
            "Probability from which on a site is called above or below: 90% or 0.9.",
            metavar="SHARE",
        ),
    ] = f"{_DEFAULT.certainty:g}",
    stop_when: Annotated[
        str | None,
        option(
            "Goal",
            "The survey may end once at most this share of all calls is expected to be wrong: 5%.",
            "--stop-when",
            metavar="SHARE",
        ),
    ] = None,
    miss_cost: Annotated[
        float,
        option("Goal", "Cost of missing a site above the threshold, in false alarms."),
    ] = _DEFAULT.miss_cost,
    criterion: Annotated[
        str | None,
        option(
            "Goal",
            f"Uncertainty to reduce: {', '.join(CRITERIA)} (misclassification for exceedance, "
            "variance for a map).",
            metavar="NAME",
        ),
    ] = None,
    loss: Annotated[
        str | None,
        option(
            "Goal",
            "Your own loss in place of a criterion: a function of the probability of exceeding the "
            "threshold, elementwise by torch.",
            metavar="MODULE:FUNCTION",
        ),
    ] = None,
    id: Annotated[
        str | None,
        option("Columns", "Names of the sites (by its usual names, else row numbers).", "--id"),
    ] = None,
    x: Annotated[
        tuple[str, str] | None,
        option(
            "Columns", "Longitude and latitude, or east and north (by their usual names).", "--x"
        ),
    ] = None,
    units: Annotated[
        str,
        option(
            "Columns",
            "Of positions: degrees of longitude and latitude, or km or m east and north on a map "
            "projection such as UTM.",
            metavar="degrees|km|m",
        ),
    ] = _DEFAULT.units,
    covariates: Annotated[
        list[str] | None,
        option(
            "Columns",
            "Numbers that prevalence may depend on: rain, elevation, nets, ...",
            "--covariates",
            metavar="NAME...",
        ),
    ] = None,
    examined: Annotated[
        str | None, option("Columns", "People examined (by its usual names).")
    ] = None,
    positive: Annotated[
        str | None, option("Columns", "People who tested positive (by its usual names).")
    ] = None,
    cost: Annotated[
        str | None, option("Columns", "Cost of a survey of each site (1 each).")
    ] = None,
    stratum: Annotated[str | None, option("Columns", "District or other group of a site.")] = None,
    reachable: Annotated[
        str | None, option("Columns", "Whether a site can be reached, yes or no (all can).")
    ] = None,
    budget: Annotated[
        float | None, option("Round", "Most that a round may cost, travel included.")
    ] = None,
    minimum_distance: Annotated[
        float, option("Round", "Least distance between surveyed sites, in km.")
    ] = _DEFAULT.minimum_distance,
    quota: Annotated[
        list[str] | None,
        option(
            "Round",
            "Most sites of a round in a stratum, as in --quota north=5 south=5.",
            "--quota",
            metavar="NAME=N...",
        ),
    ] = None,
    base: Annotated[
        tuple[float, float] | None,
        option(
            "Round",
            "Where a round starts and ends: longitude, latitude (or east, north).",
            "--base",
        ),
    ] = None,
    cost_per_km: Annotated[
        float, option("Round", "Cost of a kilometre of travel from the base.")
    ] = _DEFAULT.cost_per_km,
    trials: Annotated[
        int | None, option("Model", "People to be examined at a site (the mean of those so far).")
    ] = None,
    overdispersion: Annotated[
        bool,
        option(
            "Model",
            "Counts vary more than those of independent people, as within a village.",
            "--overdispersion/--no-overdispersion",
        ),
    ] = _DEFAULT.overdispersion,
) -> dict[str, Any]:
    """Collect options by the names of ``SurveySettings``; quotas and shares are texts yet."""
    return {
        "goal": goal, "threshold": threshold, "certainty": certainty, "miss_cost": miss_cost,
        "stop_when": stop_when, "criterion": criterion, "loss": loss, "id": id, "x": x,
        "units": units,
        "covariates": tuple(covariates or ()), "examined": examined, "positive": positive,
        "cost": cost, "stratum": stratum, "reachable": reachable, "budget": budget,
        "minimum_distance": minimum_distance, "quotas": quota, "base": base,
        "cost_per_km": cost_per_km, "trials": trials, "overdispersion": overdispersion,
    }  # fmt: skip
