"""The pages that a user reads: their code, their links, and what they name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = ROOT / "docs" / "README.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHERS = [ROOT / name for name in ("CONTRIBUTING.md", "benchmarks/README.md", "tests/README.md")]
OTHERS.append(ROOT / "tutorials" / "README.md")


@dataclass(frozen=True)
class Block:
    """Fenced code of a page.

    Attributes:
        language: What follows the fence.
        code: The lines between the fences.
        line: Number of the first of them.
    """

    language: str
    code: str
    line: int


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(each[1], each[2], text.count("\n", 0, each.start(2)) + 1) for each in found]


def prose(page: Path) -> str:
    """The page without its fenced code."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    """Targets of links and pictures within the repository, with their anchors."""
    found = re.findall(r"\]\(([^)\s]+)\)|(?:src|href|srcset)=\"([^\"]+)\"", prose(page))
    targets = [markdown_link or attribute for markdown_link, attribute in found]
    return [target for target in targets if not re.match(r"\w+:", target)]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
