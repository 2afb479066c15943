"""The report of a survey: one page that opens anywhere, with a map to zoom."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, tostring

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from PIL import Image

from bo_stream.loops.survey.findings import (
    LEAST_HELD_OUT,
    SurveyFindings,
    chance_in_words,
    geo_address,
    label_texts,
    result_in_words,
    shown_labels,
)
from bo_stream.loops.survey.maps import (
    COLOURS,
    draw_calibration,
    draw_classes,
    draw_forecast,
    draw_values,
    zoomable_map,
)
from bo_stream.loops.survey.model import ABOVE, BELOW, UNCERTAIN, as_set, coverage, per_cent
from bo_stream.loops.survey.settings import Coordinates
from bo_stream.storage.archive import package_version

Content = Element | str

MOST_ZOOMED = 20_000
"""Sites of a zoomable map; of more there is the picture alone, which keeps the page small."""

MOST_LISTED = 200
"""Sites of a call that the page lists; a file has all."""

_MOST_OPEN = 12
"""Sites of a list that is open from the start."""

_CAVEATS = (
    "Numbers for sites that were not surveyed are predictions, not measurements. They assume that "
    "sites near each other, and sites with like covariates, have like prevalence.",
    "The certainty of a call is the model's own. How far to trust it, the section on calibration "
    "says.",
    "A site's call is about the share of all its people who would test positive, not about any "
    "one person. Errors of the test (false positives and negatives) are not corrected.",
    "The people examined must stand for the site: whole households or a random sample, not those "
    "who came to a clinic.",
    "Results of all dates count alike. Where prevalence changes fast, survey old sites again.",
    "Chosen sites are not a random sample: do not average their results to estimate the "
    "prevalence of the country. Average the predictions of all sites instead.",
    "Expected gains are averages under the model; a round may turn out better or worse.",
)


def survey_page(findings: SurveyFindings, written: date) -> bytes:
    """Return the report as one HTML file, in UTF-8.

    Args:
        findings: What is to be shown; one site at least was surveyed.
        written: Date of the report.
    """
    title = f"Survey report: {findings.name}"
    parts: list[Content] = [element("h1", title), *_headline(findings), *_maps(findings)]
    parts += [*_next_sites(findings), *_called(findings), *_trust(findings)]
    if findings.notes:
        parts += [element("h2", "What looks odd in the tables")]
        parts += [element("ul", *(element("li", text) for text in findings.notes))]
    parts += [element("h2", "Settings")]
    parts += [table(["Setting", "Value"], findings.texts.items(), numbers=[])]
    parts += [element("h2", "What to keep in mind")]
    parts += [element("ul", *(element("li", text) for text in _CAVEATS))]
    version = f"Written on {written.isoformat()} by bo_stream {package_version('bo-stream')}."
    script = ""
    if len(findings.predictions) <= MOST_ZOOMED:
        script = Path(__file__).with_name("map.js").read_text(encoding="utf-8")
    return page(title, *parts, element("p", version, class_="small"), script=script)


# --- headline -----------------------------------------------------------------------------------


def headline(findings: SurveyFindings) -> str:
    """Say in a few sentences what was surveyed and what is known of all sites."""
    surveyed, total = findings.surveyed, len(findings.predictions)
    settings = findings.settings
    examined, positive = (int(surveyed[name].sum()) for name in ("examined", "positive"))
    said = (
        f"{len(surveyed):,} of {total:,} sites were surveyed: {examined:,} people examined, "
        f"{positive:,} positive ({per_cent(positive / examined)})."
    )
    if settings.threshold is None:
        width = float((findings.predictions["upper"] - findings.predictions["lower"]).median())
        mean = float(findings.predictions["prevalence"].mean())
        return (
            f"{said} The predicted prevalence is {per_cent(mean)} on average over all sites. Of "
            f"half of them it is known to within a 95 % interval of {100 * width:.2g} percentage "
            "points or less."
        )
    line = as_set(settings.threshold)
    above, uncertain, below = (
        f"{_number(count)} ({per_cent(count / total)})"
        for count in findings.class_counts().values()
    )
    missed = ""
    if settings.miss_cost != 1.0:
        missed = f" (a missed site counts as {settings.miss_cost:g} false alarms)"
    return (
        f"{said} {as_set(settings.certainty)} sure or more: above {line} {above}, below it "
        f"{below}; uncertain: {uncertain}. If every site had to be called today{missed}, about "
        f"{findings.expected_errors():,.0f} of {total:,} calls would be wrong."
    )


def advice(findings: SurveyFindings) -> str:
    """Say in a sentence or two what to do next."""
    if len(findings.chosen):
        count = len(findings.chosen)
        what = "the site" if count == 1 else f"the {count:,} sites"
        return (
            f"Next: survey {what} numbered on the map and listed below, and tell the results. "
            "Those of some of the sites will do."
        )
    if findings.settings.threshold is not None and not findings.class_counts()[UNCERTAIN]:
        return "Next: no site is uncertain any more. You may end the survey here."
    return "Next: no site is waiting for a survey. Choose some with bo-stream survey next."


def dates_in_words(surveyed: pd.DataFrame) -> str:
    """Say from when the results are; empty if no date is known."""
    dates = [day for day in surveyed["date"] if day]
    if not dates:
        return ""
    start, end, without = min(dates), max(dates), len(surveyed) - len(dates)
    span = start if start == end else f"{start} to {end}"
    rest = f"; {without:,} of {len(surveyed):,} have no date" if without else ""
    return f"Dates of the results: {span}{rest}."


def _headline(findings: SurveyFindings) -> Iterator[Content]:
    yield element("p", headline(findings), class_="lead")
    if findings.stopping is not None:
        yield element("p", findings.stopping.in_words(), class_="lead")
    yield element("p", advice(findings), class_="lead next")
    if dated := dates_in_words(findings.surveyed):
        yield element("p", dated)
    surveyed, total = findings.surveyed, len(findings.predictions)
    numbers = {
        f"of {total:,} sites surveyed": f"{len(surveyed):,}",
        "people examined": f"{int(surveyed['examined'].sum()):,}",
    }
    if findings.settings.threshold is not None:
        counts, line = findings.class_counts(), as_set(findings.settings.threshold)
        sure = as_set(findings.settings.certainty)
        numbers |= {
            f"of sites above {line}, {sure} sure": per_cent(counts[ABOVE] / total),
            "of sites uncertain": per_cent(counts[UNCERTAIN] / total),
            f"of sites below {line}, {sure} sure": per_cent(counts[BELOW] / total),
        }
    boxes = [element("div", element("strong", value), name) for name, value in numbers.items()]
    yield element("div", *boxes, class_="numbers")
    if findings.settings.threshold is not None:
        bars = [
            element("span", style=f"background:{COLOURS[name]};width:{100 * count / total:.3f}%")
            for name, count in counts.items()
        ]
        text = ", ".join(f"{name}: {per_cent(count / total)}" for name, count in counts.items())
        yield element("div", *bars, class_="shares", role="img", **{"aria-label": f"Sites {text}"})


# --- maps ---------------------------------------------------------------------------------------


def _maps(findings: SurveyFindings) -> Iterator[Content]:
    yield element("h2", "Maps")
    settings, shown, chosen = findings.settings, findings.predictions, findings.chosen
    ground = settings.coordinates
    pictures, line = [], ""
    if settings.threshold is not None:
        line = " The black line in the scale is the threshold."
        cut, (rest, sure) = as_set(settings.threshold), map(as_set, settings.calls)
        labels = {ABOVE: f"above {cut}", UNCERTAIN: "uncertain", BELOW: f"below {cut}"}
        counts = findings.class_counts()
        labels = {name: f"{text} ({counts[name]:,})" for name, text in labels.items()}
        pictures.append(
            picture(
                draw_classes(shown, labels, chosen, ground),
                f"Map of all sites by class: {', '.join(labels.values())}.",
                f"Where prevalence is above {cut}. Above: with a probability of {sure} or more. "
                f"Below: of {rest} or less. Uncertain: between. Circles: surveyed sites. Numbers: "
                "the sites to survey next.",
            )
        )
    mean = shown["prevalence"].to_numpy()
    spread = f"from {per_cent(mean.min())} to {per_cent(mean.max())}"
    pictures.append(
        picture(
            draw_values(
                shown, mean, "predicted prevalence", "YlOrBr", settings.threshold, None, ground
            ),
            f"Map of the predicted prevalence of all sites, {spread}.",
            f"Predicted prevalence, {spread}. Circles: surveyed sites.{line}",
        )
    )
    width = (shown["upper"] - shown["lower"]).to_numpy()
    some = f"half of the sites are below {100 * np.median(width):.2g} percentage points"
    pictures.append(
        picture(
            draw_values(shown, width, "width of the 95 % interval", "BuPu", None, chosen, ground),
            f"Map of the width of the 95 % interval of prevalence; {some}.",
            "Uncertainty: how wide the 95 % interval of prevalence is, in percentage points; "
            f"{some}. Numbers: the sites to survey next.",
        )
    )
    if len(shown) <= MOST_ZOOMED:
        still, *pictures = pictures  # for paper, and for browsers without a script
        yield element("div", still, id="map", class_="zoomable")
        values = zoomable_map(findings)
        text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        inert = text.replace("<", "\\u003c")  # no text ends the element
        yield element("script", inert, id="map-data", type="application/json")
    yield element("div", *pictures, class_="pictures")


# --- next sites ---------------------------------------------------------------------------------


def _next_sites(findings: SurveyFindings) -> Iterator[Content]:
    if not len(findings.chosen):
        return
    yield element("h2", "Sites to survey next")
    who = _Described.of(findings)
    head = ("No.", *who.head, who.place_head, "Expected gain", "Cost", "Why")
    rows = [
        (
            str(number),
            *who.cells(site["id"]),
            who.place(site),
            "" if pd.isna(site["gain"]) else per_cent(site["gain"]),
            f"{site['cost']:,.6g}",
            str(site["reason"]),
        )
        for number, site in enumerate(findings.chosen.to_dict("records"), start=1)
    ]
    gain = 2 + len(who.head)
    yield table(head, rows, numbers=(0, gain, gain + 1))
    yield element(
        "p",
        "Expected gain: the part of the uncertainty left, once the sites of earlier rounds are "
        "surveyed, that a site is expected to take away, given those above it.",
        class_="small",
    )


# --- who the sites are --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Described:
    """Cells that say which site it is.

    Attributes:
        head: Headings.
        place_head: Heading of the cell of a position.
        labels: Texts by id, without the column of ids.
        named: Whether the first of them is a name, which stands above the id.
        coordinates: Units and names of positions.
    """

    head: tuple[str, ...]
    place_head: str
    labels: pd.DataFrame
    named: bool
    coordinates: Coordinates

    @classmethod
    def of(cls, findings: SurveyFindings) -> _Described:
        """Choose the columns of the list that are shown."""
        name, others = shown_labels(findings.labels)
        columns = [*([] if name is None else [name]), *others]
        labels = label_texts(findings.labels[columns])
        ground = findings.settings.coordinates
        place_head = "Latitude, longitude" if ground.are_degrees else "East, north"
        return cls(("Site", *others), place_head, labels, name is not None, ground)

    def cells(self, site: str) -> list[Content]:
        """Return the cells of a site; outside the list all but the id are empty."""
        texts: list[Content] = [""] * len(self.labels.columns)
        if site in self.labels.index:
            texts = [str(text).strip() for text in self.labels.loc[site]]
        if not self.named:
            return [site, *texts]
        name, *others = texts
        both = element("span", element("strong", name), element("small", f" {site}"))
        named: Content = both if name else site
        return [named, *others]

    def place(self, site: Mapping[Hashable, Any]) -> Content:
        """Return the cell of a position, which opens a map where the phone has one."""
        coordinates = self.coordinates
        east, north = (coordinates.text(float(site[name])) for name in coordinates.names)
        if not coordinates.are_degrees:
            return f"{east}, {north}"
        address = geo_address(float(site["longitude"]), float(site["latitude"]))
        return element("a", f"{north}, {east}", href=address)


def _called(findings: SurveyFindings) -> Iterator[Content]:
    """List the sites above, uncertain and below."""
    if findings.settings.threshold is None:
        return
    line, who = as_set(findings.settings.threshold), _Described.of(findings)
    yield element("h2", f"Sites above, uncertain and below {line}")
    said = f"The surest first. All, with all columns of the list, are in {findings.called_file}."
    if findings.settings.coordinates.are_degrees:
        said += " A position opens the map of an Android phone."
    yield element("p", said)
    head = (
        *who.head, "Prevalence", "95 % interval", f"Chance of being above {line}", "Result",
        who.place_head,
    )  # fmt: skip
    texts = {ABOVE: f"Above {line}", UNCERTAIN: "Uncertain", BELOW: f"Below {line}"}
    for name, text in texts.items():
        sites = findings.calls_made[findings.calls_made["call"] == name]
        rows = []
        for site in sites.head(MOST_LISTED).to_dict("records"):
            result = result_in_words(site)
            row = (
                *who.cells(site["id"]),
                per_cent(site["prevalence"]),
                f"{per_cent(site['lower'])} to {per_cent(site['upper'])}",
                chance_in_words(site["probability"]),
                element("span", result, class_="whole") if result else "",
                who.place(site),
            )
            rows.append(row)
        few = {"open": "open"} if 0 < len(sites) <= _MOST_OPEN else {}
        swatch = element("span", class_="swatch", style=f"background:{COLOURS[name]}")
        parts: list[Content] = [element("summary", swatch, f"{text}: {_number(len(sites))}")]
        if rows:
            start = len(who.head)
            parts.append(table(head, rows, numbers=range(start, start + 3)))
        if len(sites) > MOST_LISTED:
            more = f"And {len(sites) - MOST_LISTED:,} more, in {findings.called_file}."
            parts.append(element("p", more, class_="small"))
        yield element("details", *parts, **few)


def _number(count: int) -> str:
    return f"{count:,} {'site' if count == 1 else 'sites'}"


# --- trust and plans ----------------------------------------------------------------------------


def _trust(findings: SurveyFindings) -> Iterator[Content]:
    yield element("h2", "Can the map be trusted, and what would more surveys bring?")
    held_out, forecast, pictures = findings.held_out, findings.forecast, []
    if len(held_out) < LEAST_HELD_OUT:
        yield element(
            "p",
            f"Calibration is shown from {LEAST_HELD_OUT} surveyed sites on: trust the certainty "
            "of these maps less until then.",
        )
    else:
        yield element("p", calibration(held_out))
        inside, _ = coverage(held_out, 95)
        pictures.append(
            picture(
                draw_calibration(held_out),
                f"Observed against predicted shares of positives at {len(held_out):,} sites; "
                f"{per_cent(inside)} are inside their 95 % intervals.",
                "Each surveyed site, predicted from the others. Points on the dotted line: as "
                "predicted. Bars: 95 % intervals of the count. The white diamonds, means of sites "
                "alike, should lie on the line.",
            )
        )
    if len(forecast):
        last = forecast.iloc[-1]
        yield element("p", outlook(forecast))
        pictures.append(
            picture(
                draw_forecast(forecast),
                f"Expected uncertainty left after further rounds: {per_cent(last['remaining'])} "
                f"after {int(last['sites']):,} more sites.",
                "Uncertainty that is expected to be left, as a share of that once all pending "
                "sites are surveyed, if the next rounds are chosen as this one.",
            )
        )
    yield element("div", *pictures, class_="pictures")


def calibration(held_out: pd.DataFrame) -> str:
    """Say how many held-out counts fell inside the intervals predicted for them."""
    count = len(held_out)
    shares = {level: coverage(held_out, level) for level in (50, 95)}
    said = " and ".join(
        f"{per_cent(inside)} fell inside their {level} % intervals ({per_cent(chance)} expected)"
        for level, (inside, chance) in shares.items()
    )
    inside, chance = shares[95]
    spread = 2.0 * np.sqrt(chance * (1.0 - chance) / count)
    if inside < chance - spread - 0.5 / count:
        verdict = (
            "Fewer than expected: the model is surer than it should be. Take calls near the "
            "cut-offs for uncertain."
        )
    else:
        verdict = "The model's certainty agrees with what was found."
    return f"Each of {count:,} results was predicted from other sites' results. {said}. {verdict}"


def outlook(forecast: pd.DataFrame) -> str:
    """Say what further rounds are expected to bring."""
    first, last = forecast.iloc[0], forecast.iloc[-1]
    said = (
        f"The next {int(first['sites']):,} sites are expected to take "
        f"{per_cent(1.0 - first['remaining'])} off the uncertainty left once all pending sites are "
        "surveyed"
    )
    if len(forecast) == 1:
        return f"{said}."
    more = per_cent(1.0 - last["remaining"])
    return f"{said}; {int(last['sites']):,} sites in {len(forecast)} rounds, {more}."


# --- elements of the page -------------------------------------------------------------------------


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
