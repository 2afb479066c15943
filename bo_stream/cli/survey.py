"""The commands ``bo-stream survey start|next|tell|withdraw|status|report|replay``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bo_stream.cli import options
from bo_stream.cli.app import app
from bo_stream.cli.options import option
from bo_stream.cli.survey_options import Group, SpreadingCommand, with_settings
from bo_stream.loops.survey.settings import SEEDS
from bo_stream.loops.survey.settings import ReplayPlan as _PLAN

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


@commands.command(cls=SpreadingCommand)
@with_settings
def start(
    sites: Annotated[
        Path,
        typer.Argument(
            metavar="SITES",
            show_default=False,
            help="Table of all sites that could be surveyed, .csv, .xlsx or .parquet; results of "
            "earlier surveys may come along in columns examined and positive.",
        ),
    ],
    out: Annotated[Path, option("Files", "Folder to begin the survey in.", "--out")],
    group: Group = False,
    yes: Annotated[
        bool, option("Files", "The sites lie where they are said to: do not ask.", "--yes", "-y")
    ] = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Begin a survey in a folder, from a table of sites.

    - `bo-stream survey start villages.csv --threshold 0.1 --covariates rain elevation --out 2026`
    - `bo-stream survey start villages.csv --goal map --x lng lat --cost days --budget 9 --out 2026`
    - `bo-stream survey start utm.csv --threshold 0.1 --x easting northing --units m --out 2026`
    """
    from bo_stream.cli import surveying  # which imports torch: help does without

    surveying.start(sites, out, settings, yes, group)


@commands.command()
def next(
    folder: Folder,
    q: Annotated[int, typer.Option("--batch", "-q", help="Sites to choose.")] = 10,
    loss: Loss = None,
) -> None:
    """Choose the sites to survey next. They are pending until their results are told.

    Writes next.csv with all pending sites, and next.geojson, next.kml and next.gpx for maps. Fill
    in the columns examined and positive of next.csv and tell it, or tell any other table of
    results.

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
            help="Table with columns id, examined, positive and perhaps date; sites that are not "
            "in the list bring their position and covariates.",
        ),
    ],
    group: Annotated[
        bool,
        typer.Option("--group", help="Add up the rows of each id: of people, one village."),
    ] = False,
) -> None:
    """Take in results: in any order, in part, and again if they were wrong.

    A table with a fault changes nothing; the message names its row and column.

    - `bo-stream survey tell 2026 results.csv`
    """
    from bo_stream.cli import surveying

    surveying.tell(folder, results, group)


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
def status(
    folder: Folder,
    stop_when: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="How many more sites until so few calls are expected to be wrong, such as 5%.",
        ),
    ] = None,
    loss: Loss = None,
) -> None:
    """Say how far the survey is, which sites are called above and below, and when it may end.

    - `bo-stream survey status 2026 --stop-when 5%`
    """
    from bo_stream.cli import surveying

    surveying.status(folder, stop_when, loss)


@commands.command()
def report(
    folder: Folder,
    rounds: Annotated[int, typer.Option(help="Rounds to look ahead.")] = 5,
    q: Annotated[int, typer.Option("--batch", "-q", help="Sites of each of these.")] = 10,
    loss: Loss = None,
) -> None:
    """Write report.html, which opens in any browser, called.csv and predictions.csv.

    The page has maps of prevalence, of its uncertainty and of the sites above and below the
    threshold, lists these, says how far to trust them and what more surveys would bring.
    """
    from bo_stream.cli import surveying

    surveying.report(folder, rounds, q, loss)


@commands.command(cls=SpreadingCommand)
@with_settings
def replay(
    ctx: typer.Context,
    sites: Annotated[
        Path,
        typer.Argument(
            metavar="SITES",
            show_default=False,
            help="Table of the sites of a finished survey, .csv, .xlsx or .parquet, with their "
            "results in columns examined and positive.",
        ),
    ],
    start: Annotated[
        int, option("Replay", "Sites drawn at random to begin with.", "--start")
    ] = _PLAN.start,
    q: Annotated[int, option("Replay", "Sites of a round.", "--batch", "-q")] = _PLAN.q,
    rounds: Annotated[int, option("Replay", "Rounds after the first sites.")] = _PLAN.rounds,
    compare: Annotated[
        str | None,
        option(
            "Replay", "Draw sites at random beside it, whatever the constraints.", metavar="random"
        ),
    ] = None,
    group: Group = False,
    seeds: Annotated[
        int | None,
        option("Replay", f"Replays of each design, with other first sites ({SEEDS})."),
    ] = None,
    truth: Annotated[
        str | None,
        option(
            "Replay",
            "True prevalence, if it is known (the share of positives stands for it).",
            metavar="NAME",
        ),
    ] = None,
    out: options.Out = None,
    resume: Annotated[
        bool,
        option(
            "Files",
            "Go on with the replays in --out: finished ones are kept; --seeds may ask for more.",
            "--resume",
        ),
    ] = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Replay a finished survey: would it have needed fewer villages?

    Begins with some villages at random, chooses the others round by round as `bo-stream survey
    next` does, looks their results up, and scores what it says of all villages that it has not
    surveyed by then.

    Writes replay.csv (scores), picks.csv (villages of each round), replay.png and replay.json.
    Ctrl-C stops after the round at hand; `--resume` does the unfinished replays anew.

    - `bo-stream survey replay last.csv --threshold 0.1 --compare random --out old`
    - `bo-stream survey replay last.csv --out old --resume --seeds 9`
    """
    plan = {"start": start, "q": q, "rounds": rounds}
    from bo_stream.cli import replaying

    replaying.run(ctx, sites, settings, plan, compare, seeds, truth, out, resume, group)
