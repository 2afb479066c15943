"""The files for the next visits: tables to fill in, waypoints and links; pages of HTML."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree.ElementTree import Element, SubElement, indent, tostring

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from PIL import Image

from bo_stream.errors import UsageError
from bo_stream.loops.survey.cells import DATE
from bo_stream.loops.survey.columns import normalised
from bo_stream.loops.survey.settings import Coordinates
from bo_stream.loops.survey.tables import NoRowsError, read_table

if TYPE_CHECKING:
    from bo_stream.loops.survey.survey import Survey


Content = Element | str

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""What a browser may load: pictures inside the page and its own style, and nothing else."""

_COLOURS = 255
"""Of a picture; more are drawn as the nearest of these."""

_STYLE = Path(__file__).with_name("page.css")


def element(tag: str, *children: Content, **attributes: str) -> Element:
    """Make an element of HTML; text, children's and attributes', is escaped when it is written.

    Args:
        tag: Name of the element.
        children: Elements and texts, in order.
        attributes: By name; ``class_`` stands for ``class``.
    """
    made = Element(tag, {name.rstrip("_"): value for name, value in attributes.items()})
    for child in children:
        if isinstance(child, Element):
            made.append(child)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + child
        else:
            made.text = (made.text or "") + child
    return made


def table(
    head: Sequence[str], rows: Iterable[Sequence[Content]], numbers: Sequence[int]
) -> Element:
    """Make a table; rows of three cells or more are cards where a screen is narrow.

    Args:
        head: Headings of the columns.
        rows: Contents of the cells.
        numbers: Columns of numbers, which are set flush right.
    """
    looks = ["number" if column in numbers else "text" for column in range(len(head))]

    def row(cells: Sequence[Content]) -> Element:
        made = [
            element("td", cell, class_=look, role="cell", **{"data-head": heading})
            for cell, look, heading in zip(cells, looks, head, strict=True)
        ]
        return element("tr", *made, role="row")

    headings = [
        element("th", heading, class_=look, role="columnheader")
        for heading, look in zip(head, looks, strict=True)
    ]
    top = element("thead", element("tr", *headings, role="row"), role="rowgroup")
    body = element("tbody", *(row(cells) for cells in rows), role="rowgroup")
    return element("table", top, body, class_="cards" if len(head) > 2 else "pairs", role="table")


def picture(figure: Figure, text: str, caption: str) -> Element:
    """Make a picture with its caption, its pixels within the page.

    Args:
        figure: The picture.
        text: What it shows, for those who cannot see it.
        caption: What to read from it.
    """
    raw, file = io.BytesIO(), io.BytesIO()
    figure.savefig(raw, format="png", dpi=160, pil_kwargs={"compress_level": 1})
    drawn = Image.open(raw).convert("RGB")
    kept = drawn.quantize(_COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    kept.save(file, format="png", optimize=True)
    data = base64.b64encode(file.getvalue()).decode()
    image = element("img", src=f"data:image/png;base64,{data}", alt=text)
    return element("figure", image, element("figcaption", caption))


def data(name: str, values: Any) -> Element:
    """Make an element of values that the page's script reads, as JSON.

    Args:
        name: Of the element.
        values: Lists, dicts, texts, finite numbers and None.
    """
    text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    inert = text.replace("<", "\\u003c")  # no text ends the element
    return element("script", inert, id=name, type="application/json")


def page(title: str, *content: Content, script: str = "") -> bytes:
    """Return a whole page in UTF-8, which a browser opens without any other file.

    Args:
        title: Of the page.
        content: Of its body.
        script: JavaScript that runs at the end; a browser runs no other.
    """
    script, policy = _spaced(script), _POLICY
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy += f"; script-src 'sha256-{digest}'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", **{"http-equiv": "Content-Security-Policy", "content": policy}),
        element("title", title),
        element("style", _STYLE.read_text(encoding="utf-8")),
    )
    scripts = [element("script", script)] if script else []
    whole = element("html", head, element("body", element("main", *content), *scripts), lang="en")
    text = f"<!DOCTYPE html>\n{tostring(whole, encoding='unicode', method='html')}\n"
    return _spaced(text).encode("utf-8", "replace")


def _spaced(text: str) -> str:
    """Keep per cent signs on the line of their number."""
    return re.sub(r"(?<=\d) %", "\N{NO-BREAK SPACE}%", text)


# --- files for the next visits -------------------------------------------------------------------


_MOST = 3
"""Columns that are shown alongside a name."""

_NAME = re.compile(
    r"(site_|village_|school_|cluster_|place_|locality_|community_)?name|village|locality|settlement"
    r"|community|school|localite|nom(_du|_de_la|_de)?(_village|_localite|_site)?|nome|nombre|aldeia"
    r"|comunidade|comunidad|localidad|localidade"
)
_DISTRICT = re.compile(
    r"adm(in)?_?\d(_name)?|.*(district|distrito|region|regiao|provin|county|commune|municip|ward"
    r"|departe?ment|departamento|chiefdom|parish|island|constituency|cercle|woreda|health_area).*"
    r"|zone|state|lga|ta|t_a|area|sector"
)


def shown_labels(labels: pd.DataFrame) -> tuple[str | None, list[str]]:
    """Choose the columns that say which site it is.

    Args:
        labels: Further columns of a list, such as ``Survey.labels``.

    Returns:
        The column of names, None if there is none by its usual names; and up to three others:
        districts and the like first, then other columns of texts that differ between sites.
    """
    columns = [str(name) for name in labels.columns]
    name = next((one for one in columns if _NAME.fullmatch(normalised(one))), None)
    others = [one for one in columns if one != name]
    districts = [one for one in others if _DISTRICT.fullmatch(normalised(one))]
    texts = [one for one in others if one not in districts and _has_texts(labels[one])]
    return name, [*districts, *texts][:_MOST]


def _has_texts(column: pd.Series[str]) -> bool:
    """Return whether a column has texts with letters, and not the same in all rows."""
    texts = column.dropna().astype(str).str.strip()
    texts = texts[texts != ""]
    lettered = texts.str.contains(r"[^\W\d_]", regex=True)
    return bool(len(texts)) and bool(lettered.mean() > 0.5) and texts.nunique() > 1


# --- points that a phone's map reads: KML, GPX, and addresses ---------------------------------


KML, GPX = "next.kml", "next.gpx"

_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no file of XML can hold [XML 1.0, section 2.2]."""


@dataclass(frozen=True)
class Waypoint:
    """A named position.

    Attributes:
        name: For the map.
        text: What is known of it.
        longitude: In degrees, from -180 to 360.
        latitude: In degrees.
    """

    name: str
    text: str
    longitude: float
    latitude: float


def waypoint_files(
    pending: pd.DataFrame, labels: pd.DataFrame, coordinates: Coordinates
) -> dict[str, bytes]:
    """Return next.kml and next.gpx, by name; nothing where positions are not in degrees.

    A site has its number in the order of choice and its name, else its id, as name, and district,
    id and reason as text.

    Args:
        pending: Of a survey.
        labels: Further columns of its list, indexed by id.
        coordinates: Of its positions.
    """
    if not coordinates.are_degrees:
        return {}
    name, others = shown_labels(labels)
    texts = labels.reindex(pending["id"]).fillna("").astype(str)
    points = []
    for number, (site, row) in enumerate(
        zip(pending.to_dict("records"), texts.to_dict("records"), strict=True), start=1
    ):
        title = "" if name is None else row[name].strip()
        said = [f"{other}: {row[other].strip()}" for other in others if row[other].strip()]
        said += [f"id: {site['id']}", str(site["reason"])]
        points.append(
            Waypoint(
                f"{number}. {title or site['id']}",
                "\n".join(said),
                float(site["longitude"]),
                float(site["latitude"]),
            )
        )
    title = "Sites to survey next"
    return {KML: kml(title, points), GPX: gpx(title, points)}


def kml(title: str, points: Sequence[Waypoint]) -> bytes:
    """Return points as KML 2.2, coordinates as longitude, latitude, altitude 0.

    Args:
        title: Of the whole.
        points: In their order.
    """
    root = Element("kml", xmlns="http://www.opengis.net/kml/2.2")
    document = SubElement(root, "Document")
    _text(document, "name", title)
    for point in points:
        mark = SubElement(document, "Placemark")
        _text(mark, "name", point.name)
        _text(mark, "description", point.text)
        longitude, latitude = _degrees(point)
        _text(SubElement(mark, "Point"), "coordinates", f"{longitude},{latitude},0")
    return _written(root)


def gpx(title: str, points: Sequence[Waypoint]) -> bytes:
    """Return points as waypoints of GPX 1.1.

    Args:
        title: Of the whole.
        points: In their order.
    """
    space = "http://www.topografix.com/GPX/1/1"
    root = Element("gpx", version="1.1", creator="bo_stream", xmlns=space)
    _text(SubElement(root, "metadata"), "name", title)
    for point in points:
        longitude, latitude = _degrees(point)
        mark = SubElement(root, "wpt", lat=latitude, lon=longitude)
        _text(mark, "name", point.name)
        _text(mark, "desc", point.text)
    return _written(root)


def geo_address(longitude: float, latitude: float) -> str:
    """Return the address ``geo:latitude,longitude`` [RFC 5870], which a phone's map opens."""
    return f"geo:{latitude:.6f},{turned(longitude):.6f}"


def turned(longitude: float) -> float:
    """Return a longitude between -180 and 180 degrees."""
    return longitude - 360.0 if longitude > 180.0 else longitude


def _degrees(point: Waypoint) -> tuple[str, str]:
    """Write longitude and latitude to a decimetre, without exponents."""
    return f"{turned(point.longitude):.6f}", f"{point.latitude:.6f}"


def _text(parent: Element, tag: str, text: str) -> None:
    SubElement(parent, tag).text = _NO_XML.sub("\N{REPLACEMENT CHARACTER}", text)


def _written(root: Element) -> bytes:
    indent(root)
    return b'<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(root, encoding="utf-8") + b"\n"


# --- files of the sites that are pending: a form to fill in, and points for a map ----------------


_NEXT, POINTS = "next", "next.geojson"
"""Name of the form without its suffix, which is the list's; and of the points."""

_TO_FILL = ["examined", "positive"]

FORM = (
    *("round", "id", "longitude", "latitude", "east", "north", "reason", "gain", "cost"),
    *_TO_FILL,
    DATE,
)
"""Columns of the form, besides the columns of the list."""


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
    files = {survey.table_format.name(_NEXT): survey.table_format.write(form)}
    if not coordinates.are_degrees:
        return files
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
    points = f'{{"type": "FeatureCollection", "features": [\n{lines}\n]}}\n'
    return {**files, POINTS: points.encode()}


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
    path = folder / survey.table_format.name(_NEXT)
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
