"""Points for phones: read again by what reads XML."""

from __future__ import annotations

from xml.etree.ElementTree import Element, fromstring

import pytest

from bo_stream.loops.survey.findings import Waypoint, geo_address, gpx, kml

HOSTILE = 'Ñ <b>&amp; "M\'banga" ]]> \x1b[31m\x00 \ud800'
SAFE = 'Ñ <b>&amp; "M\'banga" ]]> \ufffd[31m\ufffd \ufffd'
POINTS = [
    Waypoint("1 Zomba", "30 km", 35.3193, -15.3833),
    Waypoint(HOSTILE, HOSTILE, 190.000001, 1e-7),
]
KML = "{http://www.opengis.net/kml/2.2}"
GPX = "{http://www.topografix.com/GPX/1/1}"


def texts(parent: Element, path: str) -> list[str | None]:
    return [found.text for found in parent.findall(path)]


def test_kml_has_longitude_latitude_and_height() -> None:
    root = fromstring(kml(HOSTILE, POINTS))
    assert root.tag == f"{KML}kml"
    (document,) = root
    assert document.tag == f"{KML}Document"
    assert texts(document, f"{KML}name") == [SAFE]
    marks = document.findall(f"{KML}Placemark")
    assert [mark.findtext(f"{KML}name") for mark in marks] == ["1 Zomba", SAFE]
    assert [mark.findtext(f"{KML}description") for mark in marks] == ["30 km", SAFE]
    places = texts(document, f"{KML}Placemark/{KML}Point/{KML}coordinates")
    assert places == ["35.319300,-15.383300,0", "-169.999999,0.000000,0"]


def test_gpx_has_waypoints_in_the_order_of_its_schema() -> None:
    root = fromstring(gpx(HOSTILE, POINTS))
    assert (root.tag, root.attrib) == (f"{GPX}gpx", {"version": "1.1", "creator": "bo_stream"})
    assert [child.tag for child in root] == [f"{GPX}metadata", f"{GPX}wpt", f"{GPX}wpt"]
    first, second = root.findall(f"{GPX}wpt")
    assert first.attrib == {"lat": "-15.383300", "lon": "35.319300"}
    assert second.attrib == {"lat": "0.000000", "lon": "-169.999999"}
    assert [child.tag for child in first] == [f"{GPX}name", f"{GPX}desc"]
    assert (second.findtext(f"{GPX}name"), second.findtext(f"{GPX}desc")) == (SAFE, SAFE)


def test_no_points_are_still_a_file() -> None:
    assert fromstring(kml("none", [])).find(f"{KML}Document/{KML}Placemark") is None
    assert fromstring(gpx("none", [])).find(f"{GPX}wpt") is None


@pytest.mark.parametrize(
    ("longitude", "latitude", "address"),
    [(35.3193, -15.38333333, "geo:-15.383333,35.319300"), (190.0, 0.0, "geo:0.000000,-170.000000")],
)
def test_addresses_of_places(longitude: float, latitude: float, address: str) -> None:
    assert geo_address(longitude, latitude) == address
