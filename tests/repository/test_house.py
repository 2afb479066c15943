"""The picture shows the present imports, the text names what there is; few places to look."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from itertools import combinations

import bo_stream
from bo_stream.models.base import StreamingGP
from docs.figures import house


def test_the_picture_shows_the_present_imports() -> None:
    boxes, arrows = house.listed(house.PICTURE.read_text(encoding="utf-8"))
    present = house.imports()
    assert boxes == {name for arrow in present for name in arrow}, "run docs/figures/house.py"
    assert arrows == present, "run docs/figures/house.py"


def test_every_model_is_in_the_box_of_a_family() -> None:
    public = (getattr(bo_stream, name) for name in bo_stream.__all__)
    models = [each for each in public if isinstance(each, type) and issubclass(each, StreamingGP)]
    families = {str(house.box_of(model.__module__)) for model in models}
    shared = {"models.stochastic"}
    assert families == {name for name in house.BOXES if name.startswith("models.")} - shared


def test_the_picture_is_the_one_that_the_script_draws() -> None:
    assert house.PICTURE.read_text(encoding="utf-8") == house.picture(), "run docs/figures/house.py"


def test_no_arrow_goes_up() -> None:
    assert [arrow for arrow in house.imports() if house.climbs(arrow)] == []


def test_arrows_left_out_follow_from_those_drawn() -> None:
    arrows = house.imports()
    reach: dict[str, set[str]] = {name: set() for name in house.BOXES}
    for _ in house.BOXES:
        for start, end in house.drawn(arrows):
            reach[start] |= {end} | reach[end]
    assert all(end in reach[start] for start, end in arrows)


def test_boxes_stand_apart_and_hold_their_labels() -> None:
    boxes = house.BOXES
    for (first, a), (second, b) in combinations(boxes.items(), 2):
        beside = a.x + a.width < b.x or b.x + b.width < a.x
        assert beside or a.bottom < b.y or b.bottom < a.y, (first, second)
    for name, box in boxes.items():
        for text, size in ((house.label(name), 13), (box.text, 11)):
            assert len(text) * house.CHARACTER[size] <= box.width - house.MARGIN, (name, text)


def test_no_arrow_crosses_a_box_of_others() -> None:
    for line in house.lines(house.imports()):
        for name, box in house.BOXES.items():
            assert name in line.arrow or not line.crosses(box), (line.arrow, name)


def test_the_text_names_what_there_is() -> None:
    """Every path in it exists, and every identifier is in the source."""
    text = (house.HERE.parent / "architecture.md").read_text(encoding="utf-8")
    root, quoted = house.HERE.parents[1], set(re.findall(r"`([^`]+)`", text))
    paths = {name for name in quoted if (root / name.partition("/")[0]).exists()}
    assert not [name for name in paths if not (root / name).exists()]
    words = set(re.findall(r"[A-Za-z_]\w+", " ".join(quoted - paths)))
    source = "\n".join(path.read_text(encoding="utf-8") for path in house.SOURCE.rglob("*.py"))
    known = set(re.findall(r"\w+", source)) | {name.split(".")[-1] for name in house.BOXES}
    assert words <= known


# --- places to look -----------------------------------------------------------------------------

MOST_FILES = 194
MOST_CALLED_ONCE = 279
"""Of files 185 are wanted; 188 were reached, before the search of a region, its part in Ax and
radial kernels came. Both may fall."""

FILES = {path: path.read_text(encoding="utf-8") for path in house.SOURCE.rglob("*.py")}


@cache
def definitions(text: str) -> list[ast.FunctionDef | ast.ClassDef]:
    """Functions and classes of a module, and methods."""
    top = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    classes = [each for each in top if isinstance(each, ast.ClassDef)]
    methods = [n for each in classes for n in each.body if isinstance(n, ast.FunctionDef)]
    return [*top, *methods]


def test_no_class_has_the_name_of_another() -> None:
    """A reader who searches for a class finds one."""
    classes = [
        n for text in FILES.values() for n in definitions(text) if isinstance(n, ast.ClassDef)
    ]
    names = Counter(each.name for each in classes)
    assert {name for name, number in names.items() if number > 1} == set()


def test_private_functions_earn_their_names() -> None:
    """Few stand once in their file beside their definitions: others are where they are used.

    What other libraries call, and several classes define, stands nowhere else.
    """
    once = list[tuple[str, str]]()
    for path, text in FILES.items():
        functions = [each for each in definitions(text) if isinstance(each, ast.FunctionDef)]
        defined = Counter(each.name for each in functions if re.match("_[^_]", each.name))
        for name, number in defined.items():
            if len(re.findall(rf"\b{name}\b", text)) == number + 1:
                once += [(path.name, name)] * number
    assert len(once) <= MOST_CALLED_ONCE


def test_subjects_are_in_few_files() -> None:
    assert len(FILES) <= MOST_FILES
