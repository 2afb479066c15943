"""Write docs/reference.md, every public name with the first line of its docstring.

The command is ``python docs/figures/reference.py``.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference.md"
HEADER = """# What is public?

Every name that a package offers, with the first line of its docstring. `help(name)` and an editor
show the rest, with shapes, costs, errors and sources. All else is private, whatever its name, and
may change. `python docs/figures/reference.py` writes this page.
"""


def public_packages() -> list[str]:
    """List the packages that say what they offer."""
    files = sorted((ROOT / "bo_stream").rglob("__init__.py"))
    texts = {".".join(path.relative_to(ROOT).parent.parts): path.read_text() for path in files}
    return [name for name, text in texts.items() if "__all__" in text]


def page() -> str:
    """Return the whole page."""
    packages = (importlib.import_module(name) for name in public_packages())
    return "\n".join([HEADER, *(_section(each) for each in packages if list(_rows(each)))])


def _section(package: ModuleType) -> str:
    lines = [
        f"## `{package.__name__}`",
        "",
        _first_line(package),
        "",
        "| name | what it is |",
        "|---|---|",
    ]
    return "\n".join([*lines, *_rows(package)]) + "\n"


def _rows(package: ModuleType) -> Iterator[str]:
    for name, value in public_values(package).items():
        yield f"| `{name}` | {_first_line(value)} |"


def public_values(package: ModuleType) -> dict[str, object]:
    """List the classes and functions that a package offers, by name in alphabetical order."""
    values = {name: getattr(package, name) for name in sorted(package.__all__, key=str.lower)}
    return {
        name: value
        for name, value in values.items()
        if inspect.isclass(value) or inspect.isroutine(value)
    }


def _first_line(value: object) -> str:
    """Return the first line of a docstring as Markdown has it."""
    line = (inspect.getdoc(value) or "").partition("\n")[0]
    line = re.sub(r":\w+:`~?([^`]+)`", lambda match: f"`{match[1].rpartition('.')[2]}`", line)
    return line.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
