"""The README's Python blocks run as they stand, each in a namespace and a folder of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = {
    f"line {README.count(chr(10), 0, match.start(1)) + 1}": match[1]
    for match in re.finditer(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
}


def test_the_readme_has_an_example_for_botorch_and_one_for_ax() -> None:
    assert len(BLOCKS) == 2


@pytest.mark.integration
@pytest.mark.smoke
@pytest.mark.parametrize("place", BLOCKS)
def test_block_runs(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[place], f"README.md, from {place}", "exec"), {"__name__": "__main__"})


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", README)
    assert [target for target in targets if not (ROOT / target).exists()] == []
