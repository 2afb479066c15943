"""The commands ``bo-stream survey start|next|tell|withdraw|status|report``.

Whatever loads torch or pandas is imported in the functions: the help pages do without.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bo_stream.cli import running
from bo_stream.cli.running import (
    ERR,
    OUT,
    app,
    escape,
    option,
    say,
    spreading,
    warn,
    with_survey_settings,
)
from bo_stream.errors import UsageError
from bo_stream.loops.survey.settings import SurveySettings

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from bo_stream.loops.survey.settings import Coordinates
    from bo_stream.loops.survey.survey import Survey

_MOST_SHOWN = 20
"""Ids or rows that are listed on the screen."""

_MOST_CALLS, _MOST_LABELS = 10, 2
"""Sites of each kind of call, and columns of the list, such as name and district, on the screen."""

commands = typer.Typer(
    name="survey",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Survey villages round by round: which next, what is known, what is still uncertain.",
)
app.add_typer(commands)

SurveyCommand = spreading("--covariates", "--quota")
"""Class of the commands that have the options of a survey's settings."""

Group = Annotated[
    bool,
    option(
        "Columns", "Add up the rows of each position: of people or visits, one village.", "--group"
    ),
]
"""Option of the commands that read a list of sites."""

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the survey.")]
Loss = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION",
        help="The survey's own loss, if it has one, which you trust: it is imported and called.",
    ),
]


@commands.command(cls=SurveyCommand)
@with_survey_settings
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
    out: Annotated[
        Path,
        option(
            "Files",
            "Folder to begin the survey in.",
            "--out",
            parser=running.parse_folder,
            metavar="PATH",
        ),
    ],
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
    from bo_stream.loops.survey.results import grouped_by_position
    from bo_stream.loops.survey.survey import Survey, holds_survey, save_survey
    from bo_stream.loops.survey.tables import read_table

    with _command():
        parse_settings(settings)
        with ERR.status("Reading the sites ..."):
            table, chosen = read_table(sites), SurveySettings(**settings)
            check_used(chosen)
            said: list[str] = []
            if group:
                table, said = grouped_by_position(table, chosen, str(sites))
            survey = Survey(table, chosen, source=str(sites))
        if not holds_survey(out):  # else there is nothing to ask
            _check_place(survey, str(sites), yes)
        save_survey(out, survey)
        for text in said:
            say(text)
        say_columns(survey)
        _say_status(survey, out)
        which = "next" if len(survey.results) else "first"
        _say_next_step(f"survey next {out} -q 10{_own(survey)}", f"choose the {which} sites")


def _check_place(survey: Survey, source: str, yes: bool) -> None:
    """Say where the sites lie, and ask whether that is right, or judge by what is plausible."""
    from bo_stream.loops.survey.places import position_columns, quoted, whereabouts

    coordinates = survey.settings.coordinates
    places = survey.sites.iloc[:, 1:3].to_numpy()  # a covariate may have one of their names
    where, doubt = whereabouts(places, coordinates)
    say(f"{'Place:':12}{where}")
    names = [str(name) for name in survey.table.columns]
    columns = position_columns(names, survey.settings, source)
    swapped = f"If {coordinates.names[0]} and {coordinates.names[1]} are swapped, say"
    advice = f"{swapped} --x {quoted(columns[1])} {quoted(columns[0])}; if all is right, --yes."
    if yes:
        return
    if _asks():
        if doubt:
            warn(f"{doubt}.")
        if not typer.confirm("Do the sites lie there?", default=not doubt):
            raise UsageError(f"Nothing was begun. {advice}")
    elif doubt:
        raise UsageError(f"{source}: {doubt}. Nothing was begun. {advice}")


@commands.command("next")
def choose(
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
    from bo_stream.loops.run import write_files
    from bo_stream.loops.survey.findings import check_form_is_told, next_files, waypoint_files
    from bo_stream.loops.survey.survey import load_survey

    with _command():
        survey = load_survey(folder, [loss] if loss else [])
        check_form_is_told(folder, survey)
        earlier = len(survey.pending)
        with ERR.status("Choosing sites ..."):
            chosen = survey.ask(q)
        files = {
            **next_files(survey),
            **waypoint_files(survey.pending, survey.labels, survey.settings.coordinates),
        }
        write_files(folder, files)
        OUT.print(_sites_table(chosen, survey.settings.coordinates))
        if len(chosen) < q:
            say(f"Only {len(chosen)} of {q}: no other site is left that the settings allow.")
        if earlier:
            say(
                f"{_count(earlier, 'site')} of earlier rounds still wait for results; the new ones "
                "were chosen to be of use beside them. Those that will not be surveyed: bo-stream "
                f"survey withdraw {folder} ID"
            )
        if chosen["gain"].notna().any():
            say(
                "gain: the part of the uncertainty left, once earlier pending sites are surveyed, "
                "that a site is expected to take away, given those above it."
            )
        if survey.settings.stop_when is not None and len(survey.results):
            say(survey.stopping().in_words())
        form = folder / next(iter(files))
        say(f"All pending sites are in {', '.join(str(folder / name) for name in files)}.")
        _say_next_step(f"survey tell {folder} {form}", "once examined and positive are filled in")


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
    from bo_stream.loops.survey.results import grouped_by_id
    from bo_stream.loops.survey.survey import load_survey
    from bo_stream.loops.survey.tables import read_table

    with _command():
        survey, table = load_survey(folder), read_table(results)
        if group:
            table, said = grouped_by_id(table, survey.settings, str(results))
            for text in said:
                say(text)
        told = survey.tell(table, source=str(results))
        if not (told.new or told.corrected):  # else the status says them
            for text in told.warnings:
                warn(text)
        for ids, kind in (
            (told.new, "new"),
            (told.corrected, "corrected"),
            (told.unchanged, "known already"),
            (told.unasked, "of these never asked for"),
            (told.outside, "of these not in the list of sites"),
        ):
            if ids:
                say(f"{_count(len(ids), 'result')} {kind}: {_listed(ids)}.")
        if told.empty:
            say(f"{_count(told.empty, 'row')} without numbers passed over.")
        for text in told.remarks:
            warn(text)
        _say_status(survey, folder)
        _say_next_step(f"survey report {folder}{_own(survey)}", "see the maps")


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
    from bo_stream.loops.survey.survey import load_survey

    with _command():
        survey = load_survey(folder)
        survey.withdraw(ids, ask_again)
        say(f"Withdrawn: {_listed(ids)}.")
        _say_status(survey, folder)


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
    from bo_stream.loops.survey.survey import load_survey

    with _command():
        share = parse_share("--stop-when", stop_when)
        survey = load_survey(folder, [loss] if loss else [])
        if share is not None:
            replace(survey.settings, stop_when=share)  # which checks it
        _say_status(survey, folder)
        if len(survey.pending):
            OUT.print(_sites_table(survey.pending, survey.settings.coordinates))
        threshold = survey.settings.threshold
        if threshold is None or not len(survey.results):
            return
        with ERR.status("Learning from the results ..."):
            predictions = survey.predictions()
            calls = survey.calls(predictions)
        _say_calls(survey, calls, threshold)
        if share is not None or survey.settings.stop_when is not None:
            say(survey.stopping(share, predictions).in_words())


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
    import pandas as pd
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from bo_stream.loops.run import write_files
    from bo_stream.loops.survey.columns import listed_as
    from bo_stream.loops.survey.findings import find
    from bo_stream.loops.survey.report import headline, survey_page
    from bo_stream.loops.survey.survey import load_survey

    with _command():
        survey = load_survey(folder, [loss] if loss else [])
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        bar = Progress(*columns, console=ERR, transient=True)
        with bar if ERR.is_terminal else nullcontext():
            task = bar.add_task("", total=None)

            def step(text: str) -> None:
                bar.update(task, description=text)

            findings = find(survey, folder.resolve().name, rounds, q, on_step=step)
            step("Drawing maps")
            page = survey_page(findings, date.today())
        written, table = survey.table_format, findings.predictions
        others = survey.others(table["id"].tolist())
        others = others.rename(columns=listed_as(others, table))
        table = pd.concat((table[["id"]], others, table.iloc[:, 1:]), axis=1)
        files = {
            f"predictions{written.suffix}": written.write(_rounded(table)),
            "report.html": page,
        }
        if findings.settings.threshold is not None:
            files[findings.called_file] = written.write(_rounded(findings.calls_made))
        write_files(folder, files)
        say(headline(findings))
        if findings.stopping is not None:
            say(findings.stopping.in_words())
        for note in findings.notes:
            warn(note)
        *others_said, last = sorted(files)
        say(f"{', '.join(others_said)} and {last} are in {folder}.")


# --- values of options ---------------------------------------------------------------------------


def _asks() -> bool:
    """Return whether somebody is there to answer a question."""
    return sys.stdin.isatty() and OUT.is_terminal


_SHARE = re.compile(r"\s*([0-9]*[.,]?[0-9]+(?:[eE]-?[0-9]+)?)\s*(%?)\s*")


def parse_settings(settings: dict[str, Any]) -> None:
    """Parse the options of a survey that are texts: quotas and shares.

    Raises:
        UsageError: One has another form, or the threshold is 100 % or more.
    """
    settings["quotas"] = parse_quotas(settings["quotas"])
    threshold = settings["threshold"]
    for name in ("threshold", "certainty", "stop_when"):
        settings[name] = parse_share(f"--{name.replace('_', '-')}", settings[name])
    if threshold is not None and "%" in threshold and settings["threshold"] >= 1.0:
        raise UsageError(f"Expected --threshold below 100 %, got {threshold!r}.")


def check_used(settings: SurveySettings) -> None:
    """Check that no setting is given in vain; folders that were begun with such a one go on.

    Raises:
        UsageError: It says what else to give.
    """
    for name in ("certainty", "miss_cost"):
        is_given = getattr(settings, name) != getattr(SurveySettings, name)
        if is_given and settings.threshold is None:
            raise UsageError(
                f"{name.replace('_', ' ').capitalize()} is of calls above and below a threshold: "
                "give threshold, too."
            )
    if settings.base is not None and not settings.cost_per_km:
        raise UsageError("A base is where travel that costs begins: give cost_per_km, too.")


def parse_share(option: str, text: str | None) -> float | None:
    """Parse a share: ``0.1``, ``10%`` or ``0,1``; a bare 10 is confirmed where somebody is there.

    Raises:
        UsageError: It is no number.
    """
    if text is None:
        return None
    match = _SHARE.fullmatch(text)
    if match is None:
        raise UsageError(f"Expected {option} as a share, such as 0.1 or 10%, got {text!r}.")
    value = float(match[1].replace(",", "."))
    if match[2]:
        return value / 100.0
    meant = 1.0 <= value < 100.0 and _asks()
    if meant and typer.confirm(f"{option} {text}: do you mean {value:g} %?", default=True):
        return value / 100.0
    return value


def parse_quotas(texts: Sequence[str] | None) -> dict[str, int]:
    """Parse quotas, each ``name=number``.

    Raises:
        UsageError: One has another form.
    """
    quotas = {}
    for text in texts or ():
        name, _, number = text.rpartition("=")
        if not name or not number.isdigit():
            raise UsageError(f"Expected --quota stratum=number, as in north=5, got {text!r}.")
        quotas[name] = int(number)
    return quotas


# --- messages and tables -------------------------------------------------------------------------


def _own(survey: Survey) -> str:
    """Return the option that a survey with a loss of its own needs, empty for others."""
    return "" if survey.settings.loss is None else f" --loss {survey.settings.loss}"


_ROUNDED = ("prevalence", "sd", "lower", "q25", "q75", "upper", "exceedance", "probability")


def _rounded(table: pd.DataFrame) -> pd.DataFrame:
    """Round shares, to six digits, and write counts as whole numbers."""
    whole = table.astype(dict.fromkeys(("examined", "positive"), "Int64"))
    return whole.round({name: 6 for name in _ROUNDED if name in table})


@contextmanager
def _command() -> Iterator[None]:
    """Report problems as the other commands do, and show warnings at the end."""
    with running.reported_problems() as caught:
        yield
        for text in running.notes(caught):
            warn(text)


def _say_next_step(command: str, why: str) -> None:
    OUT.print(f"Next: [bold]bo-stream {escape(command)}[/] ({why}).", soft_wrap=True)


def say_columns(survey: Survey, truth: str | None = None) -> None:
    """Say which column was taken for what, and which ones are not used.

    Args:
        survey: Of the list.
        truth: Column of the true prevalence, where the list has one.
    """
    ids = {"id": survey.columns.get("id")}
    known = {} if truth is None else {"truth": truth}
    used = [
        f"{meaning}: {'the rows as numbered by a spreadsheet' if column is None else repr(column)}"
        for meaning, column in (ids | survey.columns | known).items()
    ]
    covariates = ", ".join(map(repr, survey.settings.covariates)) or "none"
    say(f"Columns:    {', '.join(used)}, covariates: {covariates}.")
    unused = [name for name in survey.labels if name not in (survey.settings.stratum, truth)]
    if unused:
        say(
            f"Not used:   {', '.join(map(repr, unused))}. Tables keep them; those that prevalence "
            "may depend on are named by --covariates."
        )


def _say_status(survey: Survey, folder: Path) -> None:
    from bo_stream.loops.survey.findings import goal_in_words
    from bo_stream.loops.survey.model import per_cent

    now = survey.status()
    share = f", {per_cent(now.positive / now.examined)}" if now.examined else ""
    lines: Mapping[str, str] = {
        "Survey": f"{folder}: {goal_in_words(survey.settings)}",
        "Sites": f"{now.sites:,}, of which {now.surveyed:,} surveyed"
        + (f" (and {now.outside:,} outside the list)" if now.outside else ""),
        "People": f"{now.examined:,} examined, {now.positive:,} positive{share}",
        "Rounds": f"{now.rounds}; {_count(now.pending, 'site')} pending"
        + (f", {now.given_up} given up" if now.given_up else ""),
        "Last entry": now.last or "none",
    }
    for name, text in lines.items():
        say(f"{name + ':':12}{text}")
    for note in now.notes:
        warn(note)


def _say_calls(survey: Survey, calls: pd.DataFrame, threshold: float) -> None:
    """List the first sites of each kind of call, with their names and numbers."""
    import pandas as pd
    from rich.table import Table

    from bo_stream.loops.survey.findings import CALLED, label_texts, shown_labels
    from bo_stream.loops.survey.model import ABOVE, BELOW, UNCERTAIN, as_set, per_cent

    sure, line = as_set(survey.settings.certainty), as_set(threshold)
    name, others = shown_labels(survey.labels)
    chosen = [*([] if name is None else [name]), *others][:_MOST_LABELS]
    columns = dict(zip(survey.labels, calls.columns[1:], strict=False))  # behind the id
    labels = [columns[label] for label in chosen]
    for call, text in (
        (ABOVE, f"above {line}, {sure} sure or more"),
        (UNCERTAIN, "uncertain"),
        (BELOW, f"below {line}, {sure} sure or more"),
    ):
        rows = calls[calls["call"] == call]
        shown = Table(title=f"{len(rows):,} of {len(calls):,} sites {text}", title_justify="left")
        numbers = ("prevalence", "95 % interval", f"chance above {line}", "surveyed")
        for heading in ("site", *labels, *numbers):
            shown.add_column(escape(heading), justify="right" if heading in numbers else "left")
        first = rows.head(_MOST_CALLS)
        texts = label_texts(first[labels]).to_numpy()
        for row, named in zip(first.to_dict("records"), texts, strict=True):
            counts = "" if pd.isna(row["examined"]) else f"{row['positive']:g}/{row['examined']:g}"
            shown.add_row(
                escape(str(row["id"])),
                *map(escape, named),
                per_cent(row["prevalence"]),
                f"{per_cent(row['lower'])} to {per_cent(row['upper'])}",
                per_cent(row["probability"]),
                counts,
            )
        if len(rows) > _MOST_CALLS:
            rest = len(rows) - _MOST_CALLS
            file = escape(CALLED + survey.table_format.suffix)
            shown.caption = f"and {rest:,} more; bo-stream survey report writes all to {file}"
        OUT.print(shown)


def _sites_table(sites: pd.DataFrame, coordinates: Coordinates) -> Table:
    import pandas as pd
    from rich.table import Table

    from bo_stream.loops.survey.model import per_cent

    shown = Table()
    for heading in ("", "site", *coordinates.names, "gain", "cost", "why"):
        shown.add_column(heading, justify="left" if heading in ("site", "why") else "right")
    for number, row in enumerate(sites.head(_MOST_SHOWN).to_dict("records"), start=1):
        gain = "" if pd.isna(row["gain"]) else per_cent(row["gain"])
        place = (coordinates.text(row[name]) for name in coordinates.names)
        why = escape(row["reason"])
        shown.add_row(str(number), escape(row["id"]), *place, gain, f"{row['cost']:.4g}", why)
    if len(sites) > _MOST_SHOWN:
        shown.caption = f"and {len(sites) - _MOST_SHOWN} more, in the table"
    return shown


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _listed(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _MOST_SHOWN:,} more" if len(ids) > _MOST_SHOWN else ""
    return ", ".join(ids[:_MOST_SHOWN]) + more
