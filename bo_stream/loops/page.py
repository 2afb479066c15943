"""Pages of HTML that stand alone: no script, no outside request, all text escaped."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element, tostring

from matplotlib.figure import Figure

Content = Element | str

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""What a browser may load: pictures inside the page and its own style, and nothing else."""

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


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int]) -> Element:
    """Make a table that scrolls where a screen is too narrow for it.

    Args:
        head: Headings of the columns.
        rows: Texts of the cells.
        numbers: Columns of numbers, which are set flush right.
    """
    looks = ["number" if column in numbers else "text" for column in range(len(head))]

    def cells(tag: str, texts: Sequence[str]) -> Element:
        made = [element(tag, text, class_=look) for text, look in zip(texts, looks, strict=True)]
        return element("tr", *made)

    body = element("tbody", *(cells("td", row) for row in rows))
    grid = element("table", element("thead", cells("th", head)), body)
    return element("div", grid, class_="scrolling", tabindex="0", role="region")


def picture(figure: Figure, text: str, caption: str) -> Element:
    """Make a picture with its caption, its pixels within the page.

    Args:
        figure: The picture.
        text: What it shows, for those who cannot see it.
        caption: What to read from it.
    """
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=160)
    data = base64.b64encode(file.getvalue()).decode()
    image = element("img", src=f"data:image/png;base64,{data}", alt=text)
    return element("figure", image, element("figcaption", caption))


def page(title: str, *content: Content) -> bytes:
    """Return a whole page in UTF-8, which a browser opens without any other file.

    Args:
        title: Of the page.
        content: Of its body.
    """
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", **{"http-equiv": "Content-Security-Policy", "content": _POLICY}),
        element("title", title),
        element("style", _STYLE.read_text(encoding="utf-8")),
    )
    whole = element("html", head, element("body", element("main", *content)), lang="en")
    text = f"<!DOCTYPE html>\n{tostring(whole, encoding='unicode', method='html')}\n"
    return re.sub(r"(?<=\d) %", "\N{NO-BREAK SPACE}%", text).encode("utf-8", "replace")
