"""Settings of the site: `sphinx-build -W -c docs . OUT` makes a folder to open without a server.

Its pages are those that the repository has; the page of public names shows whole docstrings there.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bo_stream import __version__  # noqa: E402
from docs.figures import reference  # noqa: E402

project, author, version = "bo_stream", "The bo_stream authors", __version__
copyright = author
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "docs/**/*.md",
    "tutorials/*.ipynb",
    "tutorials/README.md",
    "benchmarks/README.md",
    "tests/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
]
html_theme = "furo"
html_title = "bo_stream"
html_static_path, html_css_files = ["_static"], ["tables.css"]
html_show_sourcelink = False
html_copy_source = False
myst_heading_anchors = 4
nb_execution_mode = "off"  # they have their outputs
napoleon_use_ivar = True
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
python_maximum_signature_line_length = 90

WIDE = ("docs/papers/", "docs/scale/measured", "docs/scale/devices", "benchmarks/")
"""Beginnings of the names of pages that are mostly tables."""


def directives() -> Iterator[str]:
    """Yield the page of public names, with a directive for each."""
    yield reference.HEADER.partition("\n")[0] + "\n"
    seen: set[int] = set()  # some names are offered twice
    for package in map(importlib.import_module, reference.public_packages()):
        values = reference.public_values(package)
        fresh = {name: value for name, value in values.items() if id(value) not in seen}
        seen |= {id(value) for value in fresh.values()}
        if fresh:
            yield f"## `{package.__name__}`\n\n```{{eval-rst}}"
            for name, value in fresh.items():
                kind = "autoclass" if inspect.isclass(value) else "autofunction"
                yield f".. {kind}:: {package.__name__}.{name}"
            yield "```\n"


def with_docstrings(_: object, docname: str, source: list[str]) -> None:
    """Replace the first lines on the page of public names by whole docstrings."""
    if docname == "docs/reference":
        source[0] = "\n".join(directives())


def with_room_for_tables(
    _: object, pagename: str, __: object, context: dict[str, Any], ___: object
) -> None:
    """Leave the list of a page's sections out where the page is mostly tables."""
    if pagename.startswith(WIDE):
        context["furo_hide_toc"] = True


def begins_at(app: Any, error: Exception | None) -> None:
    """Let the folder's own page lead to the landing page."""
    if error is None:
        leads = '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html">'
        (Path(app.outdir) / "index.html").write_text(
            f'{leads}<a href="docs/index.html">bo_stream</a>\n', encoding="utf-8"
        )


def setup(app: Any) -> None:
    """Connect what differs from the usual."""
    app.connect("source-read", with_docstrings)
    app.connect("html-page-context", with_room_for_tables, priority=900)  # after the theme's own
    app.connect("build-finished", begins_at)
