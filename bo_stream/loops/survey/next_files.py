"""Files of the sites that are pending: a form to fill in, and points for a map."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from bo_stream.errors import UsageError
from bo_stream.loops.survey.columns import normalised
from bo_stream.loops.survey.dates import DATE
from bo_stream.loops.survey.tables import NoRowsError, read_table
from bo_stream.loops.survey.waypoints import turned

if TYPE_CHECKING:
    from bo_stream.loops.survey.survey import Survey

NEXT, POINTS = "next", "next.geojson"
"""Name of the form without its suffix, which is that of the list; and of the points."""

_TO_FILL = ["examined", "positive"]

FORM = (
    *("round", "id", "longitude", "latitude", "east", "north", "reason", "gain", "cost"),
    *_TO_FILL,
    DATE,
)
"""Columns of the form, beside those of the list."""


def listed_as(name: str) -> str:
    """Name a column of the list in the form, which has a column of that name itself."""
    return f"listed_{name}" if name in FORM else name


def next_files(survey: Survey) -> dict[str, bytes]:
    """Return next.csv and, of positions in degrees, next.geojson, by name.

    Both have all pending sites, with all columns of the list. The table is written as the list was
    (next.xlsx of a workbook) and ends in empty columns ``examined``, ``positive`` and ``date``:
    filled in, the last or not, it is a table of results. The points are in longitude and latitude,
    the only coordinates that GeoJSON has [RFC 7946, section 4], with the other columns as
    properties.
    """
    pending, coordinates = survey.pending, survey.coordinates
    pending = pending.round({"gain": 6})
    table = pending[["round", "id", *coordinates.names, "reason", "gain", "cost"]]
    others = survey.others(pending["id"].tolist()).rename(columns=listed_as)
    table = pd.concat((table[["round", "id"]], others, table.iloc[:, 2:]), axis=1)
    form = table.assign(**dict.fromkeys((*_TO_FILL, DATE), ""))
    files = {survey.table_format.name(NEXT): survey.table_format.write(form)}
    return {**files, POINTS: _points(table)} if coordinates.are_degrees else files


def _points(table: pd.DataFrame) -> bytes:
    """Write sites with longitude and latitude as GeoJSON."""
    features = [
        {
            "type": "Feature",
            "geometry": {"type": "Point", "coordinates": [turned(longitude), latitude]},
            "properties": {name: _plain(value) for name, value in row.items()},
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


def _plain(value: Any) -> str | float | None:
    """Return a cell as a value of JSON."""
    if pd.isna(value):
        return None
    plain = value.item() if isinstance(value, np.generic) else value
    return plain if isinstance(plain, (int, float)) else str(plain)


def check_form_is_told(folder: Path, survey: Survey) -> None:
    """Check that next.csv, which is to be replaced, has no numbers that were not told.

    Raises:
        UsageError: It has, or it may have, for it cannot be read.
    """
    path = folder / survey.table_format.name(NEXT)
    if not path.is_file():
        return
    try:
        form = read_table(path)
        names = [str(name) for name in form if normalised(str(name)) in _TO_FILL]
        filled = [name for name in names if bool((form[name] != "").any())]
        if not filled:
            return
        counts = survey.read_results(form, str(path)).counts
    except NoRowsError:
        return
    except UsageError as error:
        raise UsageError(
            f"{path} would be replaced, and may have numbers that were not told: it cannot be told "
            f"as it is. {error} Or move it to another folder."
        ) from error
    told = survey.told_so_far
    new = [site for site, count in counts.items() if (site, count) not in told]
    if new:
        raise UsageError(
            f"{path} has numbers of site {new[0]} that were not told, and would be replaced. Tell "
            f"them first: bo-stream survey tell {folder} {path}."
        )
