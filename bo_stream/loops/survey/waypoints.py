"""Points that a phone's map reads: KML, GPX, and addresses of a place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, indent, tostring

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
