"""The report of a survey: a page for the people who decide where to go next."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date

import numpy as np
import pandas as pd

from bo_stream.loops.page import Content, element, page, picture, table
from bo_stream.loops.survey.calibration import coverage
from bo_stream.loops.survey.calls import ABOVE, BELOW, UNCERTAIN
from bo_stream.loops.survey.charts import draw_calibration, draw_forecast
from bo_stream.loops.survey.findings import LEAST_HELD_OUT, SurveyFindings
from bo_stream.loops.survey.maps import COLOURS, draw_classes, draw_values
from bo_stream.loops.survey.words import per_cent
from bo_stream.storage.archive import package_version

CAVEATS = (
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
    parts += [*_next_sites(findings), *_trust(findings), *_odd(findings), *_settings(findings)]
    parts += [element("h2", "What to keep in mind"), element("ul", *_items(CAVEATS))]
    version = f"Written on {written.isoformat()} by bo_stream {package_version('bo-stream')}."
    return page(title, *parts, element("p", version, class_="small"))


def _items(texts: tuple[str, ...]) -> Iterator[Content]:
    return (element("li", text) for text in texts)


# --- headline -----------------------------------------------------------------------------------


def headline(findings: SurveyFindings) -> str:
    """Say in a few sentences what was surveyed and what is known of all sites."""
    surveyed, total = findings.surveyed, len(findings.predictions)
    examined, positive = (int(surveyed[name].sum()) for name in ("examined", "positive"))
    said = (
        f"{len(surveyed):,} of {total:,} sites were surveyed: {examined:,} people examined, "
        f"{positive:,} positive ({per_cent(positive / examined)})."
    )
    if findings.threshold is None:
        width = float((findings.predictions["upper"] - findings.predictions["lower"]).median())
        mean = float(findings.predictions["prevalence"].mean())
        return (
            f"{said} The predicted prevalence is {per_cent(mean)} on average over all sites. Of "
            f"half of them it is known to within a 95 % interval of {100 * width:.2g} percentage "
            "points or less."
        )
    counts, line = findings.class_counts(), per_cent(findings.threshold)
    missed = ""
    if findings.miss_cost != 1.0:
        missed = f" (a missed site counts as {findings.miss_cost:g} false alarms)"
    return (
        f"{said} {per_cent(findings.certainty)} sure or more: above {line} "
        f"{_sites(counts[ABOVE], total)}, below it {_sites(counts[BELOW], total)}; uncertain: "
        f"{_sites(counts[UNCERTAIN], total)}. If every site had to be called today{missed}, about "
        f"{findings.expected_errors():,.0f} of {total:,} calls would be wrong."
    )


def _sites(count: int, total: int) -> str:
    noun = "site" if count == 1 else "sites"
    return f"{count:,} {noun} ({per_cent(count / total)})"


def advice(findings: SurveyFindings) -> str:
    """Say in a sentence or two what to do next."""
    if len(findings.chosen):
        count = len(findings.chosen)
        what = "the site" if count == 1 else f"the {count:,} sites"
        return (
            f"Next: survey {what} numbered on the map and listed below, and tell the results. "
            "Those of some of the sites will do."
        )
    if findings.threshold is not None and not findings.class_counts()[UNCERTAIN]:
        return "Next: no site is uncertain any more. You may end the survey here."
    return "Next: no site is waiting for a survey. Choose some with bo-stream survey next."


def _headline(findings: SurveyFindings) -> Iterator[Content]:
    yield element("p", headline(findings), class_="lead")
    if findings.stopping is not None:
        yield element("p", findings.stopping.in_words(), class_="lead")
    yield element("p", advice(findings), class_="lead next")
    surveyed, total = findings.surveyed, len(findings.predictions)
    numbers = {
        f"of {total:,} sites surveyed": f"{len(surveyed):,}",
        "people examined": f"{int(surveyed['examined'].sum()):,}",
    }
    if findings.threshold is not None:
        counts, line = findings.class_counts(), per_cent(findings.threshold)
        sure = per_cent(findings.certainty)
        numbers |= {
            f"of sites above {line}, {sure} sure": per_cent(counts[ABOVE] / total),
            "of sites uncertain": per_cent(counts[UNCERTAIN] / total),
            f"of sites below {line}, {sure} sure": per_cent(counts[BELOW] / total),
        }
    boxes = [element("div", element("strong", value), name) for name, value in numbers.items()]
    yield element("div", *boxes, class_="numbers")
    if findings.threshold is not None:
        yield _shares(findings.class_counts(), total)


def _shares(counts: dict[str, int], total: int) -> Content:
    bars = [
        element("span", style=f"background:{COLOURS[name]};width:{100 * count / total:.3f}%")
        for name, count in counts.items()
    ]
    text = ", ".join(f"{name}: {per_cent(count / total)}" for name, count in counts.items())
    return element("div", *bars, class_="shares", role="img", **{"aria-label": f"Sites {text}"})


# --- maps ---------------------------------------------------------------------------------------


def _maps(findings: SurveyFindings) -> Iterator[Content]:
    shown, chosen, ground = findings.predictions, findings.chosen, findings.coordinates
    yield element("h2", "Maps")
    pictures = [] if findings.threshold is None else [_class_map(findings, findings.threshold)]
    mean = shown["prevalence"].to_numpy()
    spread = f"from {per_cent(mean.min())} to {per_cent(mean.max())}"
    line = "" if findings.threshold is None else " The black line in the scale is the threshold."
    pictures.append(
        picture(
            draw_values(
                shown, mean, "predicted prevalence", "YlOrBr", findings.threshold, None, ground
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
    yield element("div", *pictures, class_="pictures")


def _class_map(findings: SurveyFindings, threshold: float) -> Content:
    counts = findings.class_counts()
    line, (rest, sure) = per_cent(threshold), (per_cent(chance) for chance in findings.calls)
    labels = {ABOVE: f"above {line}", UNCERTAIN: "uncertain", BELOW: f"below {line}"}
    labels = {name: f"{text} ({counts[name]:,})" for name, text in labels.items()}
    return picture(
        draw_classes(findings.predictions, labels, findings.chosen, findings.coordinates),
        f"Map of all sites by class: {', '.join(labels.values())}.",
        f"Where prevalence is above {line}. Above: with a probability of {sure} or more. Below: of "
        f"{rest} or less. Uncertain: between. Circles: surveyed sites. Numbers: the sites to "
        "survey next.",
    )


# --- next sites ---------------------------------------------------------------------------------


def _next_sites(findings: SurveyFindings) -> Iterator[Content]:
    if not len(findings.chosen):
        return
    yield element("h2", "Sites to survey next")
    coordinates = findings.coordinates
    names = (name.capitalize() for name in coordinates.names)
    head = ("No.", "Site", *names, "Expected gain", "Cost", "Why")
    rows = [
        (
            str(number),
            str(site["id"]),
            *(coordinates.text(site[name]) for name in coordinates.names),
            "" if pd.isna(site["gain"]) else per_cent(site["gain"]),
            f"{site['cost']:,.6g}",
            str(site["reason"]),
        )
        for number, site in enumerate(findings.chosen.to_dict("records"), start=1)
    ]
    yield table(head, rows, numbers=(0, 2, 3, 4, 5))
    yield element(
        "p",
        "Expected gain: the part of today's uncertainty over all sites that a site is expected to "
        "take away, given those above it.",
        class_="small",
    )


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
                "Uncertainty that is expected to be left over all sites, if the next rounds are "
                "chosen as this one.",
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
        f"{per_cent(1.0 - first['remaining'])} off the uncertainty over all sites"
    )
    if len(forecast) == 1:
        return f"{said}."
    more = per_cent(1.0 - last["remaining"])
    return f"{said}; {int(last['sites']):,} sites in {len(forecast)} rounds, {more}."


def _odd(findings: SurveyFindings) -> Iterator[Content]:
    if findings.notes:
        yield element("h2", "What looks odd in the tables")
        yield element("ul", *_items(findings.notes))


def _settings(findings: SurveyFindings) -> Iterator[Content]:
    yield element("h2", "Settings")
    yield table(["Setting", "Value"], findings.settings.items(), numbers=[])
