"""Files of the sites that are pending: a form to fill in, and points for a map."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from bo_stream.errors import UsageError
from bo_stream.loops.survey.coordinates import DEGREES, Coordinates
from bo_stream.loops.survey.tables import read_table

if TYPE_CHECKING:
    from bo_stream.loops.survey.survey import Survey

NEXT, POINTS = "next.csv", "next.geojson"

_TO_FILL = ["examined", "positive"]


def next_files(pending: pd.DataFrame, coordinates: Coordinates = DEGREES) -> dict[str, bytes]:
    """Return next.csv and, of positions in degrees, next.geojson, by name.

    Both have all pending sites. The table ends in empty columns ``examined`` and ``positive``:
    filled in, it is a table of results. The points are in longitude and latitude, the only
    coordinates that GeoJSON has [RFC 7946, section 4], with the other columns as properties.

    Args:
        pending: Of a survey.
        coordinates: Of its positions.
    """
    table = pending[["round", "id", *coordinates.names, "reason", "gain", "cost"]]
    form = table.assign(**dict.fromkeys(_TO_FILL, ""))
    files = {NEXT: form.to_csv(index=False, lineterminator="\n").encode()}
    return {**files, POINTS: _points(table)} if coordinates.are_degrees else files


def _points(table: pd.DataFrame) -> bytes:
    """Write sites with longitude and latitude as GeoJSON."""
    features = [
        {
            "type": "Feature",
            "geometry": {"type": "Point", "coordinates": [_turned(longitude), latitude]},
            "properties": {**row, "gain": None if pd.isna(row["gain"]) else row["gain"]},
        }
        for longitude, latitude, row in zip(
            table["longitude"].tolist(),
            table["latitude"].tolist(),
            table.drop(columns=["longitude", "latitude"]).to_dict("records"),
            strict=True,
        )
    ]
    lines = ",\n".join(json.dumps(feature, ensure_ascii=False) for feature in features)
    return f'{{"type": "FeatureCollection", "features": [\n{lines}\n]}}\n'.encode()


def _turned(longitude: float) -> float:
    """Return a longitude between -180 and 180 degrees."""
    return longitude - 360.0 if longitude > 180.0 else longitude


def check_form_is_told(folder: Path, survey: Survey) -> None:
    """Check that next.csv, which is to be replaced, has no numbers that were not told.

    Raises:
        UsageError: It has.
    """
    path = folder / NEXT
    if not path.is_file():
        return
    try:
        form = read_table(path)
    except UsageError:  # it has no rows, or is no longer a table: nothing can be read from it
        return
    filled = [name for name in _TO_FILL if name in form and bool((form[name] != "").any())]
    if not filled or "id" not in form:
        return
    rows = form[(form[filled] != "").any(axis=1)]
    waiting = rows["id"].isin(survey.pending["id"])
    if bool(waiting.any()):
        raise UsageError(
            f"{path} has numbers of site {rows['id'][waiting].iloc[0]} that were not told, and "
            f"would be replaced. Tell them first: bo-stream survey tell {folder} {path}."
        )
