"""The commands ``bo-stream survey start|next|tell|withdraw|status|report``: their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bo_stream.cli.app import app
from bo_stream.cli.options import option, spreading
from bo_stream.loops.survey.settings import CRITERIA
from bo_stream.loops.survey.settings import SurveySettings as _DEFAULT

commands = typer.Typer(
    name="survey",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Survey villages round by round: which next, what is known, what is still uncertain.",
)
app.add_typer(commands)

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the survey.")]
Loss = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION",
        help="The survey's own loss, if it has one, which you trust: it is imported and called.",
    ),
]


@commands.command(cls=spreading("--covariates", "--quota"))
def start(
    sites: Annotated[
        Path,
        typer.Argument(
            metavar="SITES",
            show_default=False,
            help="Table of all sites that could be surveyed, .csv or .parquet; results of earlier "
            "surveys may come along in columns examined and positive.",
        ),
    ],
    out: Annotated[Path, option("Files", "Folder to begin the survey in.", "--out")],
    goal: Annotated[
        str,
        option(
            "Goal",
            "exceedance: which sites are above the threshold; map: prevalence everywhere.",
            metavar="exceedance|map",
        ),
    ] = _DEFAULT.goal,
    threshold: Annotated[
        float | None,
        option("Goal", "Prevalence that a decision hangs on, such as 0.1 for 10 %."),
    ] = None,
    certainty: Annotated[
        float,
        option("Goal", "Probability from which on a site is called above or below."),
    ] = _DEFAULT.certainty,
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
) -> None:
    """Begin a survey in a folder, from a table of sites.

    - `bo-stream survey start villages.csv --threshold 0.1 --covariates rain elevation --out 2026`
    - `bo-stream survey start villages.csv --goal map --x lng lat --cost days --budget 9 --out 2026`
    - `bo-stream survey start utm.csv --threshold 0.1 --x easting northing --units m --out 2026`
    """
    settings = {
        "goal": goal, "threshold": threshold, "certainty": certainty, "miss_cost": miss_cost,
        "criterion": criterion, "loss": loss, "id": id, "x": x, "units": units,
        "covariates": tuple(covariates or ()), "examined": examined, "positive": positive,
        "cost": cost, "stratum": stratum, "reachable": reachable, "budget": budget,
        "minimum_distance": minimum_distance, "quotas": quota, "base": base,
        "cost_per_km": cost_per_km, "trials": trials, "overdispersion": overdispersion,
    }  # fmt: skip
    from bo_stream.cli import surveying  # which imports torch: help does without

    surveying.start(sites, out, settings)


@commands.command()
def next(
    folder: Folder,
    q: Annotated[int, typer.Option("--batch", "-q", help="Sites to choose.")] = 10,
    loss: Loss = None,
) -> None:
    """Choose the sites to survey next. They are pending until their results are told.

    Writes next.csv and next.geojson with all pending sites. Fill in the columns examined and
    positive of next.csv and tell it, or tell any other table of results.

    - `bo-stream survey next 2026 -q 10`
    """
    from bo_stream.cli import surveying

    surveying.choose(folder, q, loss)


@commands.command()
def tell(
    folder: Folder,
    results: Annotated[
        Path,
        typer.Argument(
            metavar="RESULTS",
            help="Table with columns id, examined and positive; other sites than those of the list "
            "bring their position and covariates.",
        ),
    ],
) -> None:
    """Take in results: in any order, in part, and again if they were wrong.

    A table with a fault changes nothing; the message names its row and column.

    - `bo-stream survey tell 2026 results.csv`
    """
    from bo_stream.cli import surveying

    surveying.tell(folder, results)


@commands.command()
def withdraw(
    folder: Folder,
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Sites.")],
    ask_again: Annotated[
        bool, typer.Option("--ask-again", help="They may be chosen again.")
    ] = False,
) -> None:
    """Give up pending sites, or take back results that were wrong.

    - `bo-stream survey withdraw 2026 V17 V203`
    """
    from bo_stream.cli import surveying

    surveying.withdraw(folder, ids, ask_again)


@commands.command()
def status(folder: Folder) -> None:
    """Say how far the survey is, and what is to be done."""
    from bo_stream.cli import surveying

    surveying.status(folder)


@commands.command()
def report(
    folder: Folder,
    rounds: Annotated[int, typer.Option(help="Rounds to look ahead.")] = 5,
    q: Annotated[int, typer.Option("--batch", "-q", help="Sites of each of these.")] = 10,
    loss: Loss = None,
) -> None:
    """Write report.html, which opens in any browser, and predictions.csv.

    The page has maps of prevalence, of its uncertainty and of the sites above and below the
    threshold, says how far to trust them and what more surveys would bring.
    """
    from bo_stream.cli import surveying

    surveying.report(folder, rounds, q, loss)
