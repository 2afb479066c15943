"""Findings of a survey, in tables and in words, and the files for the next visits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree.ElementTree import Element, SubElement, indent, tostring

import pandas as pd

from bo_stream.errors import UsageError
from bo_stream.loops.survey.cells import DATE
from bo_stream.loops.survey.columns import listed_as, normalised
from bo_stream.loops.survey.model import (
    ABOVE,
    BELOW,
    UNCERTAIN,
    Stopping,
    as_set,
    chances_of_wrong_calls,
    held_out_counts,
    per_cent,
)
from bo_stream.loops.survey.settings import Coordinates, CriterionName, SurveySettings
from bo_stream.loops.survey.tables import NoRowsError, read_table

if TYPE_CHECKING:
    from bo_stream.loops.survey.survey import Survey

CALLED = "called"
"""Name of the file of all calls, without its ending."""

LEAST_HELD_OUT = 10
"""Results from which on predictions are compared with counts."""


@dataclass(frozen=True, kw_only=True)
class SurveyFindings:
    """Tables and settings of a survey at one moment.

    Attributes:
        name: Name of the campaign.
        predictions: A row a site: ``id``, ``longitude`` and ``latitude`` (or ``east`` and
            ``north``), ``prevalence`` (posterior mean), ``sd``, ``lower`` and ``upper`` (95 %
            interval), and where a site was surveyed ``examined`` and ``positive``, else NaN, and
            ``date``, empty where it is not known. With a
            threshold also ``exceedance``, the probability of a prevalence above it, and ``class``:
            above, below or uncertain.
        chosen: A row a site that is to be surveyed next, in the order of choice: ``id``,
            ``longitude``, ``latitude`` (or ``east``, ``north``), ``reason``, ``gain``, ``cost``.
        held_out: Counts predicted by models without them, from ``held_out_counts``; may be empty.
        forecast: A row a future round: ``sites``, surveyed by then after the pending ones, and
            ``remaining``, the expected uncertainty as a share of that once these are surveyed.
        settings: Of the survey.
        texts: The settings in plain words, by their names.
        notes: What looks odd in the tables of sites and results.
        stopping: How many more sites the stopping rule needs; None: there is no such rule.
        calls_made: Sites with their calls, of :func:`~bo_stream.loops.survey.model.calls_table`;
            empty without a threshold.
        labels: Other columns of the list of sites, such as name and district, indexed by id.
        called_file: Name of the file of all calls.
    """

    name: str
    predictions: pd.DataFrame
    chosen: pd.DataFrame
    held_out: pd.DataFrame
    forecast: pd.DataFrame
    settings: SurveySettings
    texts: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    stopping: Stopping | None = None
    calls_made: pd.DataFrame = field(default_factory=pd.DataFrame)
    labels: pd.DataFrame = field(default_factory=pd.DataFrame)
    called_file: str = "called.csv"

    @property
    def surveyed(self) -> pd.DataFrame:
        """Rows of the sites that were surveyed."""
        return self.predictions[self.predictions["examined"].notna()]

    def class_counts(self) -> dict[str, int]:
        """Count the sites of each class: above, uncertain, below.

        Raises:
            ValueError: There is no threshold.
        """
        if self.settings.threshold is None:
            raise ValueError("Expected findings with a threshold, got none: there are no classes.")
        counts = self.predictions["class"].value_counts()
        return {name: int(counts.get(name, 0)) for name in (ABOVE, UNCERTAIN, BELOW)}

    def expected_errors(self) -> float:
        """Compute how many sites are expected to be called wrongly, each by its cheaper call."""
        chance = self.predictions["exceedance"].to_numpy()
        return float(chances_of_wrong_calls(chance, self.settings.cheaper_above).sum())


def find(
    survey: Survey,
    name: str,
    rounds: int = 5,
    q: int = 10,
    on_step: Callable[[str], None] = lambda text: None,
) -> SurveyFindings:
    """Compute what a report shows: predictions, their calibration and a look ahead.

    Costs a fit of the model, a third of one for each of ten folds, which start from it, and
    ``rounds`` choices.

    Args:
        survey: With one result at least.
        name: Of the campaign.
        rounds: Number of rounds of the forecast.
        q: Number of sites of each.
        on_step: Is called with a text about each step before it.

    Raises:
        UsageError: There is no result yet, or the survey's loss is not trusted.
    """
    on_step("Learning from the results")
    predictions = survey.predictions()
    on_step("Looking ahead")
    ahead = survey.forecast(rounds, q)
    forecast = pd.DataFrame({"sites": [], "remaining": []})
    now = float(ahead["total"].iloc[0])
    if now > 0.0:  # else nothing is uncertain; NaN: no site may be asked for
        later = ahead[1:]
        forecast = pd.DataFrame({"sites": later["sites"], "remaining": later["total"] / now})
    held_out = pd.DataFrame()
    if len(survey.results) >= LEAST_HELD_OUT:
        on_step("Predicting each result from the others")
        fit = partial(survey.fit, former=survey.model)
        held_out = held_out_counts(fit, *survey.observations)
    ends = survey.settings.stop_when is not None
    rule = survey.stopping(predictions=predictions) if ends else None
    return SurveyFindings(
        name=name,
        predictions=predictions,
        chosen=survey.pending,
        held_out=held_out,
        forecast=forecast,
        settings=survey.settings,
        texts=in_words(survey),
        notes=survey.notes,
        stopping=rule,
        calls_made=survey.calls(predictions),
        labels=survey.labels,
        called_file=CALLED + survey.table_format.suffix,
    )


def chance_in_words(chance: float) -> str:
    """Write a probability in per cent, never as none or all."""
    if chance > 0.99:
        return "over 99 %"
    return "under 1 %" if chance < 0.01 else per_cent(chance)


def result_in_words(site: Mapping[Hashable, Any]) -> str:
    """Say the result of a site, as in ``5 of 60 positive, 2026-01-31``.

    Args:
        site: ``examined``, ``positive`` and ``date`` of a row of predictions; NaN and empty where
            it was not surveyed.
    """
    if pd.isna(site["examined"]):
        return ""
    day = f", {site['date']}" if site["date"] else ""
    return f"{site['positive']:,.0f} of {site['examined']:,.0f} positive{day}"


_CRITERIA: dict[CriterionName, str] = {
    "entropy": "uncertainty (entropy) about which side of the threshold each site is on",
    "misclassification": "expected number of sites called wrongly",
    "targeted": "variance of prevalence near the threshold",
    "variance": "variance of prevalence",
}


def in_words(survey: Survey) -> dict[str, str]:
    """Say the settings of a survey in plain words, each with its name."""
    settings = survey.settings
    reduced = _CRITERIA[settings.chosen_criterion]
    if settings.loss is not None:
        reduced = f"the expected loss of the best actions ({settings.loss})"
    texts = {"Goal": goal_in_words(settings)}
    if settings.threshold is not None:
        rest, sure = map(as_set, settings.calls)
        texts["Called above, below"] = f"chance of being above at least {sure}, at most {rest}"
    if settings.stop_when is not None:
        texts["The survey may end at"] = f"{as_set(settings.stop_when)} expected wrong calls"
    texts |= {
        "Sites are chosen to reduce": reduced,
        "Cost of a missed site": f"{settings.miss_cost:g} false alarms",
        "Covariates": ", ".join(settings.covariates) or "none",
        "People expected at a site": f"{survey.trials:,}",
        "Counts": "beta-binomial" if settings.overdispersion else "binomial",
    }
    if settings.budget is not None:
        texts["Budget of a round"] = f"{settings.budget:,.6g}"
    if settings.minimum_distance:
        texts["Least distance between sites"] = f"{settings.minimum_distance:g} km"
    if settings.quotas:
        quotas = (f"{name}: {most}" for name, most in settings.quotas.items())
        texts["Most sites of a round by stratum"] = ", ".join(quotas)
    if settings.base is not None:
        places = zip(settings.coordinates.names, settings.base, strict=True)
        place = ", ".join(f"{name} {value:.10g}" for name, value in places)
        travel = f"{settings.cost_per_km:g} a km"
        texts["Rounds start from"] = f"{place}; {travel}"
    return texts


def goal_in_words(settings: SurveySettings) -> str:
    """Say what a survey is to find out."""
    if settings.goal == "map" or settings.threshold is None:
        return "the prevalence everywhere"
    return f"which sites have a prevalence above {as_set(settings.threshold)}"


# --- columns of the list that say which site it is ------------------------------------------------


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
    shown = list(districts)
    for one in (one for one in others if one not in districts):
        texts = labels[one].dropna().astype(str).str.strip()
        texts = texts[texts != ""]
        lettered = texts.str.contains(r"[^\W\d_]", regex=True).mean()  # NaN if there are none
        if lettered > 0.5 and texts.nunique() > 1:
            shown.append(one)
    return name, shown[:_MOST]


def label_texts(labels: pd.DataFrame) -> pd.DataFrame:
    """Write the cells of such columns as texts, empty where they are missing."""
    return labels.astype(str).where(labels.notna(), "")


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
    texts = label_texts(labels.reindex(pending["id"]))
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
        position = f"{turned(point.longitude):.6f},{point.latitude:.6f},0"
        _text(SubElement(mark, "Point"), "coordinates", position)
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
        latitude, longitude = f"{point.latitude:.6f}", f"{turned(point.longitude):.6f}"
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


def next_files(survey: Survey) -> dict[str, bytes]:
    """Return next.csv and, of positions in degrees, next.geojson, by name.

    Both have all pending sites, with all columns of the list. The table is written as the list was
    (next.xlsx of a workbook) and ends in empty columns ``examined``, ``positive`` and ``date``:
    filled in, the last or not, it is a table of results. The points are in longitude and latitude,
    the only coordinates that GeoJSON has [RFC 7946, section 4], with the other columns as
    properties.
    """
    pending, coordinates = survey.pending, survey.settings.coordinates
    pending = pending.round({"gain": 6})
    table = pending[["round", "id", *coordinates.names, "reason", "gain", "cost"]]
    others = survey.others(pending["id"].tolist())
    others = others.rename(columns=listed_as(others, FORM))
    table = pd.concat((table[["round", "id"]], others, table.iloc[:, 2:]), axis=1)
    form = table.assign(**dict.fromkeys((*_TO_FILL, DATE), ""))
    files = {_NEXT + survey.table_format.suffix: survey.table_format.write(form)}
    if not coordinates.are_degrees:
        return files
    features = [
        {
            "type": "Feature",
            "geometry": {"type": "Point", "coordinates": [turned(longitude), latitude]},
            "properties": {  # a cell of parquet may be a list
                name: None if pd.api.types.is_scalar(cell) and pd.isna(cell) else cell
                for name, cell in row.items()
            },
        }
        for longitude, latitude, row in zip(
            table["longitude"].tolist(),
            table["latitude"].tolist(),
            table.drop(columns=["longitude", "latitude"]).to_dict("records"),
            strict=True,
        )
    ]
    lines = ",\n".join(json.dumps(one, ensure_ascii=False, default=str) for one in features)
    points = f'{{"type": "FeatureCollection", "features": [\n{lines}\n]}}\n'
    return {**files, POINTS: points.encode()}


def check_form_is_told(folder: Path, survey: Survey) -> None:
    """Check that next.csv, which is to be replaced, has no numbers that were not told.

    Raises:
        UsageError: It has, or it may have, for it cannot be read.
    """
    path = folder / (_NEXT + survey.table_format.suffix)
    if not path.is_file():
        return
    try:
        form = read_table(path)
        names = [str(name) for name in form if normalised(str(name)) in _TO_FILL]
        filled = [name for name in names if bool((form[name] != "").any())]
        if not filled:
            return
        new = survey.untold(form, str(path))
    except NoRowsError:
        return
    except UsageError as error:
        raise UsageError(
            f"{path} would be replaced, and may have numbers that were not told: it cannot be told "
            f"as it is. {error} Or move it to another folder."
        ) from error
    if new:
        raise UsageError(
            f"{path} has numbers of site {new[0]} that were not told, and would be replaced. Tell "
            f"them first: bo-stream survey tell {folder} {path}."
        )
