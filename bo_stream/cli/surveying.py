"""Work of ``bo-stream survey``: one verb of a survey each, and what it says about it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import pandas as pd
import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from bo_stream.cli import running
from bo_stream.cli.app import ERR, OUT, escape
from bo_stream.errors import UsageError
from bo_stream.loops.results import write_files
from bo_stream.loops.survey.choice import grouped_by_id, grouped_by_position
from bo_stream.loops.survey.findings import CALLED, find, goal_in_words
from bo_stream.loops.survey.model import ABOVE, BELOW, UNCERTAIN, per_cent
from bo_stream.loops.survey.next_files import (
    check_form_is_told,
    next_files,
    shown_labels,
    waypoint_files,
)
from bo_stream.loops.survey.places import position_columns, quoted
from bo_stream.loops.survey.report import headline, survey_page
from bo_stream.loops.survey.results import Told
from bo_stream.loops.survey.settings import Coordinates, SurveySettings
from bo_stream.loops.survey.survey import Survey, holds_survey, load_survey, save_survey
from bo_stream.loops.survey.tables import read_table

MOST_SHOWN = 20
"""Ids or rows that are listed on the screen."""

PREDICTIONS, REPORT = "predictions", "report.html"


def start(sites: Path, out: Path, settings: dict[str, Any], yes: bool, group: bool = False) -> None:
    """Begin a survey of a table's sites in a folder, once it is clear that they lie there.

    Rows of one position are added up if asked.
    """
    with _command():
        parse_settings(settings)
        with _spinner("Reading the sites"):
            table, chosen = read_table(sites), SurveySettings(**settings)
            said: list[str] = []
            if group:
                table, said = grouped_by_position(table, chosen, str(sites))
            survey = Survey(table, chosen, source=str(sites))
        if not holds_survey(out):  # else there is nothing to ask
            _check_place(survey, str(sites), yes)
        save_survey(out, survey)
        for text in said:
            _say(text)
        say_columns(survey)
        _say_status(survey, out)
        _say_next_step(f"survey next {out} -q 10{_own(survey)}", "choose the first sites")


def _check_place(survey: Survey, source: str, yes: bool) -> None:
    """Say where the sites lie, and ask whether that is right, or judge by what is plausible."""
    found = survey.whereabouts
    _say(f"{'Place:':12}{found.in_words()}")
    names = [str(name) for name in survey.table.columns]
    columns = position_columns(names, survey.settings, source)
    swapped = f"If {survey.coordinates.names[0]} and {survey.coordinates.names[1]} are swapped, say"
    advice = f"{swapped} --x {quoted(columns[1])} {quoted(columns[0])}; if all is right, --yes."
    if yes:
        return
    if _asks():
        if found.doubt:
            _warn(f"{found.doubt}.")
        if not typer.confirm("Do the sites lie there?", default=not found.doubt):
            raise UsageError(f"Nothing was begun. {advice}")
    elif found.doubt:
        raise UsageError(f"{source}: {found.doubt}. Nothing was begun. {advice}")


def _asks() -> bool:
    """Return whether somebody is there to answer a question."""
    return sys.stdin.isatty() and OUT.is_terminal


def choose(folder: Path, q: int, loss: str | None) -> None:
    """Choose sites for the next round and write them to files."""
    with _command():
        survey = load_survey(folder, _trusted(loss))
        check_form_is_told(folder, survey)
        earlier = len(survey.pending)
        with _spinner("Choosing sites"):
            chosen = survey.ask(q)
        files = {
            **next_files(survey),
            **waypoint_files(survey.pending, survey.labels, survey.coordinates),
        }
        write_files(folder, files)
        OUT.print(_sites_table(chosen, survey.coordinates))
        if len(chosen) < q:
            _say(f"Only {len(chosen)} of {q}: no other site is left that the settings allow.")
        if earlier:
            _say(
                f"{_count(earlier, 'site')} of earlier rounds still wait for results; the new ones "
                "were chosen to be of use beside them. Those that will not be surveyed: bo-stream "
                f"survey withdraw {folder} ID"
            )
        if chosen["gain"].notna().any():
            _say(GAIN)
        if survey.settings.stop_when is not None and len(survey.results):
            _say(survey.stopping().in_words())
        form = folder / next(iter(files))
        _say(f"All pending sites are in {', '.join(str(folder / name) for name in files)}.")
        _say_next_step(f"survey tell {folder} {form}", "once examined and positive are filled in")


def tell(folder: Path, results: Path, group: bool = False) -> None:
    """Take in a table of results; rows of one id are added up if asked."""
    with _command():
        survey, table = load_survey(folder), read_table(results)
        if group:
            table, said = grouped_by_id(table, survey.settings, str(results))
            for text in said:
                _say(text)
        told = survey.tell(table, source=str(results))
        if not (told.new or told.corrected):  # else the status says them
            for text in told.warnings:
                _warn(text)
        _say_told(told)
        for text in told.remarks:
            _warn(text)
        _say_status(survey, folder)
        _say_next_step(f"survey report {folder}{_own(survey)}", "see the maps")


def withdraw(folder: Path, ids: Sequence[str], ask_again: bool) -> None:
    """Give up sites, or take results back."""
    with _command():
        survey = load_survey(folder)
        survey.withdraw(ids, ask_again)
        _say(f"Withdrawn: {_listed(ids)}.")
        _say_status(survey, folder)


def status(folder: Path, stop_when: str | None, loss: str | None) -> None:
    """Say how far a survey is, what is called above, below and uncertain, and when it may end."""
    with _command():
        share = parse_share("--stop-when", stop_when)
        survey = load_survey(folder, _trusted(loss))
        _say_status(survey, folder)
        if len(survey.pending):
            OUT.print(_sites_table(survey.pending, survey.coordinates))
        threshold = survey.settings.threshold
        if threshold is None or not len(survey.results):
            return
        with _spinner("Learning from the results"):
            predictions = survey.predictions()
            calls = survey.calls(predictions)
        _say_calls(survey, calls, threshold)
        if share is None and survey.settings.stop_when is None:
            return
        _say(survey.stopping(share, predictions).in_words())


def report(folder: Path, rounds: int, q: int, loss: str | None) -> None:
    """Write predictions and the report."""
    with _command():
        survey = load_survey(folder, _trusted(loss))
        with _bar() as step:
            findings = find(survey, folder.resolve().name, rounds, q, on_step=step)
            step("Drawing maps")
            page = survey_page(findings, date.today())
        written, table = survey.table_format, findings.predictions
        others = survey.others(table["id"].tolist())
        others = others.rename(columns=lambda n: f"listed_{n}" if n in table else n)
        table = pd.concat((table[["id"]], others, table.iloc[:, 1:]), axis=1)
        files = {written.name(PREDICTIONS): written.write(_rounded(table)), REPORT: page}
        if findings.threshold is not None:
            files[findings.called_file] = written.write(_rounded(findings.calls_made))
        write_files(folder, files)
        _say(headline(findings))
        if findings.stopping is not None:
            _say(findings.stopping.in_words())
        for note in findings.notes:
            _warn(note)
        *others_said, last = sorted(files)
        _say(f"{', '.join(others_said)} and {last} are in {folder}.")


def _trusted(loss: str | None) -> tuple[str, ...]:
    return () if loss is None else (loss,)


def _own(survey: Survey) -> str:
    """Return the option that a survey with a loss of its own needs, empty for others."""
    return "" if survey.settings.loss is None else f" --loss {survey.settings.loss}"


_ROUNDED = ("prevalence", "sd", "lower", "q25", "q75", "upper", "exceedance", "probability")


def _rounded(table: pd.DataFrame) -> pd.DataFrame:
    """Round shares, to six digits, and write counts as whole numbers."""
    whole = table.astype(dict.fromkeys(("examined", "positive"), "Int64"))
    return whole.round({name: 6 for name in _ROUNDED if name in table})


GAIN = (
    "gain: the part of today's uncertainty over all sites that a site is expected to take away, "
    "given those above it."
)

MOST_CALLS, MOST_LABELS = 10, 2
"""Sites of each kind of call, and columns of the list, such as name and district, on the screen."""

_SHARE = re.compile(r"\s*([0-9]*[.,]?[0-9]+(?:[eE]-?[0-9]+)?)\s*(%?)\s*")


def parse_settings(settings: dict[str, Any]) -> None:
    """Parse the options of a survey that are texts: quotas and shares.

    Raises:
        UsageError: One has another form.
    """
    settings["quotas"] = parse_quotas(settings["quotas"])
    for name in ("threshold", "certainty", "stop_when"):
        settings[name] = parse_share(f"--{name.replace('_', '-')}", settings[name])


def parse_share(option: str, text: str | None) -> float | None:
    """Parse a share: ``0.1``, ``10%`` or ``0,1``; a bare 10 is asked back where somebody is there.

    Raises:
        UsageError: It is no number.
    """
    if text is None:
        return None
    found = _SHARE.fullmatch(text)
    if found is None:
        raise UsageError(f"Expected {option} as a share, such as 0.1 or 10%, got {text!r}.")
    value = float(found[1].replace(",", "."))
    if found[2]:
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


# --- what is said -------------------------------------------------------------------------------


@contextmanager
def _command() -> Iterator[None]:
    """Report problems as the other commands do, and show warnings at the end."""
    with running.reported_problems() as caught:
        yield
        for text in running.notes(caught):
            _warn(text)


@contextmanager
def _spinner(text: str) -> Iterator[None]:
    with ERR.status(f"{text} ..."):
        yield


@contextmanager
def _bar() -> Iterator[Any]:
    """Show a bar whose text is changed by calling what this returns."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    hidden = not ERR.is_terminal
    with Progress(*columns, console=ERR, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=None)
        yield lambda text: bar.update(task, description=text)


def _say(text: str) -> None:
    OUT.print(escape(text), soft_wrap=True)


def _warn(text: str) -> None:
    ERR.print(f"[yellow]warning:[/] {escape(text)}", soft_wrap=True)


def _say_next_step(command: str, why: str) -> None:
    OUT.print(f"Next: [bold]bo-stream {escape(command)}[/] ({why}).", soft_wrap=True)


def _say_told(told: Told) -> None:
    for ids, text in (
        (told.new, "new"),
        (told.corrected, "corrected"),
        (told.unchanged, "known already"),
        (told.unasked, "of these never asked for"),
        (told.outside, "of these not in the list of sites"),
    ):
        if ids:
            _say(f"{_count(len(ids), 'result')} {text}: {_listed(ids)}.")
    if told.empty:
        _say(f"{_count(told.empty, 'row')} without numbers passed over.")


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
    _say(f"Columns:    {', '.join(used)}, covariates: {covariates}.")
    unused = [name for name in survey.unused_columns if name != truth]
    if unused:
        _say(
            f"Not used:   {', '.join(map(repr, unused))}. Tables keep them; those that prevalence "
            "may depend on are named by --covariates."
        )


def _say_status(survey: Survey, folder: Path) -> None:
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
        _say(f"{name + ':':12}{text}")
    for note in now.notes:
        _warn(note)


def _say_calls(survey: Survey, calls: pd.DataFrame, threshold: float) -> None:
    """List the first sites of each kind of call, with their names and numbers."""
    sure, line = per_cent(survey.settings.certainty), per_cent(threshold)
    name, others = shown_labels(survey.labels)
    chosen = [*([] if name is None else [name]), *others][:MOST_LABELS]
    labels = [f"listed_{label}" if f"listed_{label}" in calls else label for label in chosen]
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
        for row in rows.head(MOST_CALLS).to_dict("records"):
            counts = "" if pd.isna(row["examined"]) else f"{row['positive']:g}/{row['examined']:g}"
            named = (escape(str(row[name])) for name in labels)
            shown.add_row(
                escape(str(row["id"])),
                *named,
                per_cent(row["prevalence"]),
                f"{per_cent(row['lower'])} to {per_cent(row['upper'])}",
                per_cent(row["probability"]),
                counts,
            )
        if len(rows) > MOST_CALLS:
            rest = len(rows) - MOST_CALLS
            file = escape(survey.table_format.name(CALLED))
            shown.caption = f"and {rest:,} more; bo-stream survey report writes all to {file}"
        OUT.print(shown)


def _sites_table(sites: pd.DataFrame, coordinates: Coordinates) -> Table:
    shown = Table()
    for heading in ("", "site", *coordinates.names, "gain", "cost", "why"):
        shown.add_column(heading, justify="left" if heading in ("site", "why") else "right")
    for number, row in enumerate(sites.head(MOST_SHOWN).to_dict("records"), start=1):
        gain = "" if pd.isna(row["gain"]) else per_cent(row["gain"])
        place = (coordinates.text(row[name]) for name in coordinates.names)
        why = escape(row["reason"])
        shown.add_row(str(number), escape(row["id"]), *place, gain, f"{row['cost']:.4g}", why)
    if len(sites) > MOST_SHOWN:
        shown.caption = f"and {len(sites) - MOST_SHOWN} more, in the table"
    return shown


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _listed(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - MOST_SHOWN:,} more" if len(ids) > MOST_SHOWN else ""
    return ", ".join(ids[:MOST_SHOWN]) + more
