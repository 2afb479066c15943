"""Pages of HTML that stand alone: no outside request, no script but their own, text escaped."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, tostring

from matplotlib.figure import Figure
from PIL import Image

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
