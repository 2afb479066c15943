"""What the scripts of this folder share: parts of pages, numbers in them, and pictures as SVG."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure


def with_part(text: str, name: str, part: str) -> str:
    """Put a part between ``<!-- name:begin -->`` and ``<!-- name:end -->`` of a page's text.

    Raises:
        ValueError: The text does not have both, or has one of them twice.
    """
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"Expected a page with {begin.strip()} and {end} once each.")
    before, _, rest = text.partition(begin)
    return before + begin + part + end + rest.partition(end)[2]


def write_part(page: Path, name: str, part: str) -> None:
    """Write a part of a page; see :func:`with_part`."""
    page.write_text(with_part(page.read_text(encoding="utf-8"), name, part), encoding="utf-8")


def short(value: float) -> str:
    """Write two significant digits, or all before the point."""
    return f"{value:.2g}" if value < 100.0 else f"{value:,.0f}"


def with_short_exponents(text: str) -> str:
    """Write ``9e5`` for ``9e+05`` and ``1e-3`` for ``1e-03``."""
    return re.sub(r"e([+-])0*(\d)", lambda m: f"e{m[1].strip('+')}{m[2]}", text)


def digest(file: Path) -> str:
    """Return the digest of a file's content."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def save(picture: Figure, file: Path, numbers: Path | None = None) -> None:
    """Save a picture as SVG, always the same bytes, with the digest of the numbers it shows."""
    metadata = {"Date": None}
    if numbers is not None:
        metadata["Description"] = digest(numbers)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "bo_stream"}):
        picture.savefig(file, metadata=metadata)


def is_of(picture: Path, numbers: Path) -> bool:
    """Say whether a picture that :func:`save` wrote shows the numbers as they are now."""
    return f">{digest(numbers)}<" in picture.read_text(encoding="utf-8")
