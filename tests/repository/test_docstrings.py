"""First lines of docstrings: a verb phrase for a function, nothing elliptic for anything."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import bo_stream

PACKAGE = Path(bo_stream.__file__).parent
NO_VERBS = frozenset(
    (
        "A",
        "All",
        "An",
        "As",
        "Both",
        "By",
        "Each",
        "From",
        "How",
        "If",
        "In",
        "Its",
        "None",
        "Of",
        "One",
        "Same",
        "Some",
        "That",
        "The",
        "Their",
        "These",
        "This",
        "Those",
        "To",
        "True",
        "What",
        "Where",
        "Whether",
        "Which",
        "With",
        "Without",
    )
)
ELLIPTIC = frozenset(("As", "From", "Of", "What", "With"))
"""Some of those, which no attribute begins with either."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> Iterator[tuple[str, Function]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, Function):
                yield f"{path.relative_to(PACKAGE)}: {node.name}", node


def is_attribute(function: Function) -> bool:
    """Whether it is read, or set, as an attribute: its docstring is a noun then."""
    names = {ast.unparse(decorator) for decorator in function.decorator_list}
    return bool(names & {"property", "cached_property"}) or any(".setter" in n for n in names)


def test_first_lines_begin_with_a_verb() -> None:
    found = {}
    for place, function in functions():
        text = ast.get_docstring(function)
        first = text.split()[0].strip(",:;") if text else ""
        if first in ELLIPTIC or (first in NO_VERBS and not is_attribute(function)):
            found[place] = text
    assert found == {}
