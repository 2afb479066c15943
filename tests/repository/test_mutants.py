"""The list of mutants fits the source that it is about."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import Mutant
from tests.mutants.listed import MUTANTS

ROOT = Path(__file__).resolve().parents[2]


def test_there_are_forty_of_different_names() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) == 42


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_its_snippet_and_nothing_else(mutant: Mutant, tmp_path: Path) -> None:
    source = (ROOT / "bo_stream" / mutant.file).read_text(encoding="utf-8")
    assert source.count(mutant.right) == 1
    assert mutant.right != mutant.wrong
    assert all((ROOT / test).exists() for test in mutant.first)
    copy = tmp_path / "bo_stream" / mutant.file
    copy.parent.mkdir(parents=True)
    copy.write_text(source, encoding="utf-8")
    mutant.apply(tmp_path)
    before, after = source.split(mutant.right)
    mutated = copy.read_text(encoding="utf-8")
    assert mutated == before + mutant.wrong + after
    compile(mutated, mutant.file, "exec")


def test_a_snippet_that_is_not_there_once_is_refused() -> None:
    mutant = Mutant("", "", "a + b", "a - b")
    for source in ("a * b", "a + b; a + b"):
        with pytest.raises(ValueError, match="once"):
            mutant.in_source(source)
