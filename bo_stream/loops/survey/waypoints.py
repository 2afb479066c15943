"""Points that a phone's map reads: KML, GPX, and addresses of a place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, indent, tostring

import pandas as pd

from bo_stream.loops.survey.coordinates import Coordinates
from bo_stream.loops.survey.labels import shown_labels

KML, GPX = "next.kml", "next.gpx"

_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no file of XML can hold [XML 1.0, section 2.2]."""


@dataclass(frozen=True)
class Waypoint:
    """A named place.

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
