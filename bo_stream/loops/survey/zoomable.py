"""A map that is zoomed and asked by finger or mouse; without a script it is a still picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import numpy as np
import pandas as pd
from matplotlib.colors import PowerNorm, to_hex
from numpy.typing import NDArray

from bo_stream.loops.page import data, element
from bo_stream.loops.survey.calls import ABOVE, BELOW, UNCERTAIN
from bo_stream.loops.survey.findings import (
    SurveyFindings,
    chance_in_words,
    result_in_words,
)
from bo_stream.loops.survey.labels import shown_labels
from bo_stream.loops.survey.maps import COLOURS, Ground, bar_ticks, nearest, without_white
from bo_stream.loops.survey.words import per_cent

Array = NDArray[np.float64]

MOST = 20_000
"""Sites of a zoomable map; of more there is the picture alone, which keeps the page small."""

_STEPS = 24
"""Colours of a layer of numbers."""

_TALLEST, _WIDEST = 2.0, 0.5
"""Height over width of the map at most, at least, so that a phone shows it whole."""


def zoomable_map(findings: SurveyFindings, still: Element) -> list[Element]:
    """Make a map of all sites with their data, to be drawn by :func:`script`.

    Costs some hundred bytes a site.

    Args:
        findings: At most ``MOST`` sites.
        still: Picture with a caption, for paper and for browsers without a script.
    """
    return [element("div", still, id="map", class_="zoomable"), data("map-data", _values(findings))]


def script() -> str:
    """Return the JavaScript that draws the map."""
    return Path(__file__).with_name("map.js").read_text(encoding="utf-8")


def _values(findings: SurveyFindings) -> dict[str, Any]:
    """Return what the script draws: lists of numbers and texts, an entry a site."""
    table, coordinates = findings.predictions, findings.coordinates
    ground = Ground.of(table, coordinates)
    (left, right), (bottom, top) = ground.extent(_TALLEST, _WIDEST)
    width, height = right - left, top - bottom
    apart = min(2.0 * nearest(ground.sites), width, height)
    east, north = ground.sites.T
    chosen = pd.Index(table["id"]).get_indexer(pd.Index(findings.chosen["id"]))
    names, labels = _described(findings)
    values: dict[str, Any] = {
        "width": round(width, 3),
        "height": round(height, 3),
        "apart": round(apart, 4),
        "zoom": float(np.clip(max(width, height) / max(apart, 1e-9), 8.0, 1000.0)),
        "x": (east - left).round(3).tolist(),
        "y": (top - north).round(3).tolist(),
        "names": names,
        "labels": [[name, texts] for name, texts in labels.items()],
        "mean": _in_per_cent(table["prevalence"]),
        "low": _in_per_cent(table["lower"]),
        "high": _in_per_cent(table["upper"]),
        "chance": None,
        "places": None,
        "results": _results(findings),
        "next": chosen[chosen >= 0].tolist(),
        "layers": [],
        "marks": [[f"surveyed ({len(findings.surveyed):,})", "ring"]],
    }
    if coordinates.are_degrees:
        longitude = (table["longitude"] + 180.0) % 360.0 - 180.0
        values["places"] = [table["latitude"].round(5).tolist(), longitude.round(5).tolist()]
    if len(findings.chosen):
        values["marks"].append([f"to survey next ({len(findings.chosen):,})", "disc"])
    if findings.threshold is not None:
        line = per_cent(findings.threshold)
        values["above"] = f"Above {line}"
        values["called"] = ["called above", "uncertain", "called below"]
        values["chance"] = [chance_in_words(chance) for chance in table["exceedance"]]
        values["layers"].append(_classes(findings, line))
    mean, spread = table["prevalence"].to_numpy(), (table["upper"] - table["lower"]).to_numpy()
    values["layers"] += [
        _numbers("Prevalence", mean, "YlOrBr", findings.threshold or 0.0),
        _numbers("Uncertainty", spread, "BuPu", 0.0),
    ]
    return values


def _described(findings: SurveyFindings) -> tuple[list[str], dict[str, list[str]]]:
    """Return the name of each site, else its id, and what else says which it is, by heading."""
    ids = findings.predictions["id"].astype(str)
    name, others = shown_labels(findings.labels)
    labels = findings.labels.reindex(findings.predictions["id"]).fillna("").astype(str)
    texts = {other: labels[other].str.strip().tolist() for other in others}
    if name is None:
        return ids.tolist(), texts
    names = labels[name].str.strip().to_numpy()
    return np.where(names == "", ids, names).tolist(), {**texts, "Id": ids.tolist()}


def _in_per_cent(shares: pd.Series[float]) -> list[float]:
    return (100.0 * shares).round(1).tolist()


def _results(findings: SurveyFindings) -> dict[str, str]:
    """Say the result of each surveyed site, by its place among all."""
    return {
        str(place): result_in_words(row)
        for place, row in enumerate(findings.predictions.to_dict("records"))
        if not pd.isna(row["examined"])
    }


def _classes(findings: SurveyFindings, line: str) -> dict[str, Any]:
    """Return the layer of classes."""
    order, counts = [ABOVE, UNCERTAIN, BELOW], findings.class_counts()
    texts = (f"above {line}", "uncertain", f"below {line}")
    named = zip(texts, order, strict=True)
    return {
        "name": "Calls",
        "colours": [COLOURS[name] for name in order],
        "index": [order.index(name) for name in findings.predictions["class"]],
        "legend": [[f"{text} ({counts[name]:,})", COLOURS[name]] for text, name in named],
    }


def _numbers(name: str, values: Array, colours: str, mark: float) -> dict[str, Any]:
    """Return a layer of shares, coloured as those of the still maps."""
    top = max(float(np.quantile(values, 0.995)), mark, 1e-9)
    norm, palette = PowerNorm(0.5, 0.0, top, clip=True), without_white(colours)
    steps = np.minimum(np.asarray(norm(values)) * _STEPS, _STEPS - 1).astype(int)
    ticks = bar_ticks(top)
    return {
        "name": name,
        "colours": [to_hex(palette((step + 0.5) / _STEPS)) for step in range(_STEPS)],
        "index": steps.tolist(),
        "legend": [[f"{100 * tick:.3g} %", to_hex(palette(float(norm(tick))))] for tick in ticks],
    }
