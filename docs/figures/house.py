"""The imports of ``bo_stream`` in a picture, ``house.svg``: ``python docs/figures/house.py``.

A box is a package, a module beside the packages, or a family of models; all else under ``models``
is one box. An arrow from A to B says that A imports B. Of the arrows down the house only those are
drawn that no other path of arrows implies; arrows up the house, which should not be, are all drawn,
in red. The picture's metadata lists every import between boxes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
PICTURE = HERE / "house.svg"
SOURCE = HERE.parents[1] / "bo_stream"

Arrow = tuple[str, str]


@dataclass(frozen=True)
class Box:
    """A box of the picture.

    Attributes:
        x: Left edge, in pixels like all of these.
        y: Top edge.
        width: Distance of left and right edge.
        text: A line about what it holds.
        height: Distance of top and bottom edge.
    """

    x: int
    y: int
    width: int
    text: str
    height: int = 46

    @property
    def middle(self) -> float:
        """Horizontal centre."""
        return self.x + self.width / 2

    @property
    def bottom(self) -> int:
        """Lower edge."""
        return self.y + self.height


BOXES: dict[str, Box] = {
    "cli": Box(380, 84, 230, "the command bo-stream"),
    "ax": Box(810, 84, 230, "strategy, models, storage for Ax"),
    "gest": Box(660, 84, 130, "for libEnsemble"),
    "distributed": Box(60, 84, 290, "ingest, replicas, data-parallel training"),
    "loops": Box(460, 184, 285, "active sampling, optimization, run files"),
    "learning": Box(35, 284, 235, "stems, points, online learning"),
    "acquisition": Box(350, 284, 240, "qNIPV, pools, labels, sample paths"),
    "diagnostics": Box(625, 284, 190, "trust, stability; laws"),
    "models.auto": Box(950, 396, 120, "AutoGP"),
    "models.local": Box(30, 506, 90, "LocalGP"),
    "models.wiski": Box(132, 506, 190, "WISKI, and its two siblings"),
    "models.clustered": Box(334, 506, 115, "ClusteredGP"),
    "models.inducing": Box(461, 506, 115, "OSGPR, OSVGP"),
    "models.decoupled": Box(588, 506, 120, "DecoupledGP"),
    "models.last_layer": Box(720, 506, 135, "BayesianLastLayer"),
    "models.quadruply_stochastic": Box(867, 506, 203, "QSGP, QSRVM"),
    "models.stochastic": Box(620, 606, 330, "steps, replay, optimisers for four families"),
    "models": Box(
        30,
        706,
        1040,
        "StreamingGP, and what all families share; recommendation: which one costs what",
        54,
    ),
    "storage": Box(30, 828, 300, "files; executors"),
    "allocation": Box(350, 828, 210, "where inducing points go"),
    "process": Box(580, 828, 250, "the posterior, a process; maps"),
    "likelihoods": Box(850, 938, 220, "sites, expectations"),
    "bases": Box(350, 938, 210, "grids, points, frequencies"),
    "weights": Box(500, 1038, 240, "sums of observations, q(w)"),
    "linalg": Box(350, 1138, 720, "Cholesky with jitter, solves; tensors: maps and states; errors"),
}

SMALL = {
    "tensors": "linalg",
    "collective": "linalg",
    "marginal_likelihood": "weights",
    "warnings": "models",
    "mapping": "process",
    "observation_space": "process",
    "costs": "models",
    "recommendation": "models",
    "testing": "diagnostics",
    "errors": "linalg",
    "executors": "storage",
}
"""Modules that have no box of their own, and the box that they are shown in."""

FLOORS = (
    (60, 246, "ways in"),
    (262, 346, "on models"),
    (380, 778, "models"),
    (804, 1200, "foundations"),
)
"""Top, bottom and name of each floor."""

WIDTH, HEIGHT = 1200, 1268
LEFT, RIGHT = 16, 1084
CHARACTER = {13: 8.6, 11: 6.5}
"""Width of a wide character at each font size."""

MARGIN = 12
ARROW = 7


def box_of(module: str) -> str | None:
    """Name the box of a module, None for the package itself."""
    parts = module.split(".")[1:]
    family = ".".join(parts[:2])
    own = family if family in BOXES else parts[0] if parts else None
    return SMALL.get(own, own) if own is not None else None


@cache
def imports() -> list[Arrow]:
    """List the imports between boxes, each once."""
    public = _public_names()
    found: set[Arrow] = set()
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        own = box_of(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
        for name in _imported(ast.parse(path.read_text(encoding="utf-8"))):
            other = box_of(public.get(name, name))
            if own is not None and other not in (own, None, "__version__"):
                found.add((own, str(other)))
    return sorted(found)


def _imported(tree: ast.AST) -> Iterator[str]:
    """Yield the full names that a file imports from the package."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (name for name in names if name.startswith("bo_stream."))


def _public_names() -> dict[str, str]:
    """Return the module of each name that ``bo_stream`` itself offers."""
    tree = ast.parse((SOURCE / "__init__.pyi").read_text(encoding="utf-8"))
    nodes = (node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module)
    names = ((alias.name, node.module) for node in nodes for alias in node.names)
    return {f"bo_stream.{name}": f"bo_stream.{module}" for name, module in names}


def climbs(arrow: Arrow) -> bool:
    """Tell whether an arrow goes up the house."""
    return BOXES[arrow[0]].y >= BOXES[arrow[1]].y


def drawn(arrows: list[Arrow]) -> list[Arrow]:
    """Choose the arrows to draw: those up the house, and those that no other path implies."""
    down = [arrow for arrow in arrows if not climbs(arrow)]
    reach: dict[str, set[str]] = {}
    for name in sorted(BOXES, key=lambda name: -BOXES[name].y):
        below = {end for start, end in down if start == name}
        reach[name] = below.union(*(reach[other] for other in below))

    def implied(start: str, end: str) -> bool:
        return any(end in reach[other] for begin, other in down if begin == start)

    return [arrow for arrow in arrows if climbs(arrow) or not implied(*arrow)]


@dataclass(frozen=True)
class Line:
    """A drawn arrow with its two ends."""

    arrow: Arrow
    x1: float
    y1: float
    x2: float
    y2: float

    def crosses(self, box: Box) -> bool:
        """Tell whether it passes through a box, or closer than a few pixels."""
        for step in range(1, 200):
            share = step / 200
            x, y = self.x1 + share * (self.x2 - self.x1), self.y1 + share * (self.y2 - self.y1)
            if box.x - 4 < x < box.x + box.width + 4 and box.y - 4 < y < box.bottom + 4:
                return True
        return False


def lines(arrows: list[Arrow]) -> list[Line]:
    """Place the ends of the drawn arrows along the edges of their boxes."""
    down = [arrow for arrow in drawn(arrows) if not climbs(arrow)]
    up = [arrow for arrow in drawn(arrows) if climbs(arrow)]
    result = []
    for start, end in down:
        out = sorted((other for begin, other in down if begin == start), key=_middle)
        into = sorted((other for other, finish in down if finish == end), key=_middle)
        x1 = _slot(BOXES[start], out, end)
        x2 = _slot(BOXES[end], into, start)
        result.append(Line((start, end), x1, BOXES[start].bottom, x2, BOXES[end].y - ARROW))
    for start, end in up:
        x = BOXES[end].x + 0.8 * BOXES[end].width
        result.append(Line((start, end), x, BOXES[start].y, x, BOXES[end].bottom + ARROW))
    return result


def _middle(name: str) -> float:
    return BOXES[name].middle


def _slot(box: Box, others: list[str], other: str) -> float:
    """Place one end: below or above the other box where that is possible, else in a row."""
    if box.width > 600:
        return min(max(BOXES[other].middle, box.x + 20), box.x + box.width - 20)
    return box.x + box.width * (others.index(other) + 1) / (len(others) + 1)


def picture() -> str:
    """Draw the house."""
    arrows = imports()
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="Helvetica, Arial, sans-serif">',
        "<title>The house of bo_stream: what imports what</title>",
        "<metadata>",
        *(f"{escape(start)} imports {escape(end)}" for start, end in arrows),
        "</metadata>",
        *(_marker(name, colour) for name, colour in (("down", "#555"), ("up", "#c22"))),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<path d="M{LEFT - 8} 60 L{(LEFT + RIGHT) // 2} 12 L{RIGHT + 8} 60 Z" fill="#e9e2d8"/>',
        *(_floor(*floor) for floor in FLOORS),
        *(_line(line) for line in lines(arrows)),
        *(_box(name, box) for name, box in BOXES.items()),
        f'<text x="{LEFT}" y="{HEIGHT - 40}" font-size="12" fill="#444">An arrow points to what is '
        "imported. Arrows that follow from a path of others are left out; a red one goes up the "
        "house, against the rule.</text>",
        f'<text x="{LEFT}" y="{HEIGHT - 20}" font-size="12" fill="#444">Drawn by house.py '
        "from the import statements; all of them are listed in this file's metadata.</text>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _marker(name: str, colour: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 10 10" refX="1" refY="5" markerWidth="{ARROW}" '
        f'markerHeight="{ARROW}" markerUnits="userSpaceOnUse" orient="auto">'
        f'<path d="M0 0 L10 5 L0 10 Z" fill="{colour}"/></marker>'
    )


def _floor(top: int, bottom: int, name: str) -> str:
    return (
        f'<rect x="{LEFT}" y="{top}" width="{RIGHT - LEFT}" height="{bottom - top}" '
        'fill="#f6f3ee" stroke="#d8d0c4"/>'
        f'<text x="{RIGHT + 10}" y="{(top + bottom) // 2}" font-size="13" fill="#444">{name}</text>'
    )


def _line(line: Line) -> str:
    kind, colour = ("up", "#c22") if climbs(line.arrow) else ("down", "#555")
    return (
        f'<line class="{kind}" data-arrow="{line.arrow[0]} {line.arrow[1]}" x1="{line.x1:.1f}" '
        f'y1="{line.y1:.1f}" x2="{line.x2:.1f}" y2="{line.y2:.1f}" stroke="{colour}" '
        f'stroke-width="1.2" marker-end="url(#{kind})"/>'
    )


def _box(name: str, box: Box) -> str:
    fill = "#dfe9f3" if name.startswith("models") else "#fff"
    return (
        f'<g class="box" id="{name}"><rect x="{box.x}" y="{box.y}" width="{box.width}" '
        f'height="{box.height}" rx="4" fill="{fill}" stroke="#667"/>'
        f'<text x="{box.middle:.1f}" y="{box.y + 19}" font-size="13" font-weight="bold" '
        f'text-anchor="middle">{label(name)}</text>'
        f'<text x="{box.middle:.1f}" y="{box.y + 36}" font-size="11" fill="#333" '
        f'text-anchor="middle">{escape(box.text)}</text></g>'
    )


def label(name: str) -> str:
    """Return the name that a box shows: of a family without its package."""
    return name.removeprefix("models.")


def listed(svg: str) -> tuple[set[str], list[Arrow]]:
    """Return the boxes and all arrows that a picture lists."""
    boxes = {part.partition('"')[0] for part in svg.split('<g class="box" id="')[1:]}
    metadata = svg.partition("<metadata>\n")[2].partition("</metadata>")[0]
    pairs = (line.split(" imports ") for line in metadata.splitlines())
    return boxes, [(start, end) for start, end in pairs]


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
