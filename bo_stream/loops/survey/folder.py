"""The folder of a survey: sites as given, settings, the ledger, and a model as a cache."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from bo_stream.errors import UsageError
from bo_stream.loops.run import CheckpointFormat, hold_folder
from bo_stream.loops.survey.ledger import RESULTS, Ledger
from bo_stream.loops.survey.model import ModelCache
from bo_stream.loops.survey.settings import SurveySettings
from bo_stream.loops.survey.survey import Survey
from bo_stream.loops.survey.tables import TableFormat, read_table
from bo_stream.storage.archive import FileFormat, atomic_write

SURVEY = CheckpointFormat("survey.json", "survey", FileFormat("bo_stream survey", 1))

SITES = "sites.csv"
MANY_SITES = "sites.parquet"
MANY = 50_000
"""Number of sites from which they are stored as parquet."""


def save_survey(folder: str | Path, survey: Survey) -> None:
    """Begin the folder of a survey, to which each further verb is written before it returns.

    It holds ``sites.csv`` (``sites.parquet`` from 50,000 sites), ``survey.json`` (settings, and the
    format of the list, in which later tables are written),
    ``results.jsonl`` (all that was asked, told and withdrawn; it only grows) and the last model,
    which is built anew if it is missing. It is a survey's folder once ``survey.json`` is there,
    which is written last.

    Raises:
        UsageError: The folder holds a survey, or another process is writing to it; or the survey
            has a criterion of your own, which a folder cannot keep.
        OSError: It cannot be written.
    """
    if survey.criterion is not None:
        raise UsageError(
            f"A folder cannot keep {type(survey.criterion).__name__}(...), which was given as an "
            "object: later rounds would be chosen by another criterion. Name one in the settings "
            "(criterion), or a loss of your own: loss='package.module:function'."
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with hold_folder(folder, "Give another folder."):
        if holds_survey(folder):
            raise UsageError(f"{folder} holds a survey already. Give another folder.")
        ledger = folder / RESULTS
        if ledger.exists() and ledger.stat().st_size:
            raise UsageError(
                f"{folder} holds results of a survey ({RESULTS}) whose {SURVEY.name} is missing. "
                "Restore that file from a copy, or give another folder."
            )
        ledger.unlink(missing_ok=True)  # an empty one of a survey just begun
        table, many = survey.table_with_ids, len(survey.table) >= MANY
        for name in (SITES, MANY_SITES):
            (folder / name).unlink(missing_ok=True)
        with atomic_write(folder / (MANY_SITES if many else SITES)) as file:
            if many:
                table.to_parquet(file, index=False)
            else:
                file.write(TableFormat().write(table))
        survey.ledger.move_to(folder)
        content = {"settings": asdict(survey.settings), "sites": survey.sites_fingerprint}
        content["table_format"] = asdict(survey.table_format)
        SURVEY.save(folder, content, {})
    survey.cache.move_to(folder)


def load_survey(folder: str | Path, trusted: Collection[str] = ()) -> Survey:
    """Go on with the survey of a folder. Nothing is written, and nothing in it is executed.

    A loss that the survey names is imported when sites are chosen, if it is trusted.

    Args:
        folder: Of the survey.
        trusted: Losses ``package.module:function`` that the folder may name.

    Raises:
        UsageError: There is no survey, or its files are damaged or were changed.
    """
    folder = Path(folder)
    with SURVEY.opened(folder) as content:
        settings = SurveySettings(**content["settings"])
        fingerprint = content["sites"]
        written = TableFormat(**content.get("table_format", {}))
    path = next((folder / name for name in (SITES, MANY_SITES) if (folder / name).exists()), None)
    if path is None:
        raise UsageError(f"{folder} has no {SITES}. Restore it from a copy.")
    ledger, cache = Ledger.open(folder), ModelCache(folder)
    table = written.given_to(read_table(path))
    survey = Survey(table, settings, str(path), None, ledger, cache, trusted)
    if survey.sites_fingerprint != fingerprint:
        raise UsageError(
            f"{path} is not the table that the survey began with. Restore it from a copy, or start "
            "another survey with it in another folder."
        )
    return survey


def holds_survey(folder: Path) -> bool:
    """Return whether a folder is one of a survey."""
    return (folder / SURVEY.name).exists()
