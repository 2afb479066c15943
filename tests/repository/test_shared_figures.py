"""What the scripts of docs/figures share: parts of pages, and pictures of numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from docs.figures.shared import is_of, save, with_part, write_part

PAGE = "before\n<!-- here:begin -->\nold\n<!-- here:end -->\nafter\n"


def test_a_part_of_a_page_is_written_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    write_part(page, "here", "new\n")
    assert page.read_text(encoding="utf-8") == PAGE.replace("old", "new")


@pytest.mark.parametrize("text", ["no marks", PAGE.replace("here:end", "gone"), PAGE + PAGE])
def test_a_page_without_both_marks_once_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="<!-- here:begin --> and <!-- here:end --> once each"):
        with_part(text, "here", "new\n")


def test_a_picture_is_of_the_numbers_until_they_change(tmp_path: Path) -> None:
    numbers, picture = tmp_path / "numbers.json", tmp_path / "picture.svg"
    numbers.write_text("{}", encoding="utf-8")
    for _ in range(2):
        save(Figure(), picture, numbers)
        assert is_of(picture, numbers)
    first = picture.read_bytes()
    numbers.write_text("[]", encoding="utf-8")
    assert not is_of(picture, numbers)
    numbers.write_text("{}", encoding="utf-8")
    save(Figure(), picture, numbers)
    assert picture.read_bytes() == first
