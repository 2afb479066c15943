"""The folder of a survey: sites as given, settings, the ledger, and a model as a cache."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pandas as pd

import bo_stream
from bo_stream.loops.errors import UsageError
from bo_stream.loops.run import CheckpointFormat, ModelFile, from_record
from bo_stream.loops.sampling.ledger import RESULTS, Ledger
from bo_stream.loops.sampling.survey import Survey
from bo_stream.loops.sampling.survey_settings import SurveySettings
from bo_stream.loops.sampling.tables import ROW, read_table
from bo_stream.models.base import StreamingGP
from bo_stream.storage.archive import FileFormat, atomic_write, describe_file, read_index

SURVEY = CheckpointFormat("survey.json", "survey", FileFormat("bo_stream survey", 1))
MODEL = CheckpointFormat("model.json", "model", FileFormat("bo_stream survey model", 1, True))

SITES = "sites.csv"
MANY_SITES = "sites.parquet"
MANY = 50_000
"""Number of sites from which they are kept as parquet."""


def save_survey(folder: str | Path, survey: Survey) -> None:
    """Begin the folder of a survey, to which each further verb is written before it returns.

    It holds ``sites.csv`` (``sites.parquet`` from 50,000 sites), ``survey.json`` (settings),
    ``results.jsonl`` (all that was asked, told and withdrawn; it only grows) and the last model,
    which is built anew if it is missing. The folder is a survey's once ``survey.json`` is there,
    which is written last.

    Raises:
        UsageError: The folder holds a survey.
        OSError: It cannot be written.
    """
    folder = Path(folder)
    if (folder / SURVEY.name).exists():
        raise UsageError(f"{folder} holds a survey already. Give another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    _write_sites(folder, survey)
    (folder / RESULTS).unlink(missing_ok=True)  # of a beginning that was interrupted
    survey.ledger.move_to(folder)
    SURVEY.save(folder, {"settings": asdict(survey.settings)}, {})
    _keep_model(folder, survey)


def load_survey(folder: str | Path) -> Survey:
    """Go on with the survey of a folder. Nothing is written, and nothing in it is executed.

    Raises:
        UsageError: There is no survey, or its files are damaged.
    """
    folder = Path(folder)
    with SURVEY.opened(folder) as content:
        settings = from_record(SurveySettings, content["settings"])
    file = next((folder / n for n in (SITES, MANY_SITES) if (folder / n).is_file()), None)
    if file is None:
        raise UsageError(f"{folder} has no {SITES}. Restore it from a copy.")
    survey = Survey(read_table(file), settings, Ledger.open(folder), str(file))
    _use_kept_model(folder, survey)
    _keep_model(folder, survey)
    return survey


def _write_sites(folder: Path, survey: Survey) -> None:
    """Write the table as it was given, with an id if it had none."""
    table = survey.table_with_ids
    name = SITES if len(table) < MANY else MANY_SITES
    with atomic_write(folder / name) as file:
        if name == SITES:
            table.to_csv(file, index=False)
        else:
            table.to_parquet(file, index=False)


def _keep_model(folder: Path, survey: Survey) -> None:
    def keep(facts: str, model: StreamingGP) -> None:
        MODEL.save(folder, {"facts": facts}, {"survey": model})

    survey.on_model = keep


def _use_kept_model(folder: Path, survey: Survey) -> None:
    """Use the kept model if it is there and whole; else it is built anew when it is needed."""
    try:
        content = read_index(folder / MODEL.name, MODEL.format)
        file = from_record(ModelFile, content["models"]["survey"])
        kind = getattr(bo_stream, describe_file(folder / file.name)["class"])
        if not issubclass(kind, StreamingGP):
            return
        survey.use_model(content["facts"], file.read(folder, kind, "cpu"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return
