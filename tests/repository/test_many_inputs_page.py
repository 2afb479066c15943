"""The page of many inputs has what its script makes, and the pictures of the numbers beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.optimization.many_input_results import Run, claims_of
from docs.figures import many_inputs
from docs.figures.shared import digest, with_part


def test_the_page_has_what_the_script_makes() -> None:
    text = many_inputs.PAGE.read_text(encoding="utf-8")
    assert with_part(text, "many-inputs", many_inputs.measured()) == text, (
        "run python docs/figures/many_inputs.py"
    )


def test_the_pictures_are_of_the_numbers() -> None:
    present = {picture.name for picture in many_inputs.PICTURES if picture.exists()}
    if not many_inputs.NUMBERS.exists():
        assert not present
        return
    digests = json.loads(many_inputs.NUMBERS.read_text(encoding="utf-8"))["pictures"]
    assert digests == {name: digest(many_inputs.HERE / name) for name in present}


def test_the_medians_are_those_of_the_searches() -> None:
    found = json.loads(many_inputs.NUMBERS.read_text(encoding="utf-8"))
    made = json.loads(json.dumps(many_inputs.summary()))
    assert made | {"pictures": found["pictures"]} == found


def test_the_claims_are_those_of_the_searches() -> None:
    found = json.loads(many_inputs.CLAIMS.read_text(encoding="utf-8"))["claims"]
    made = {claim.name: claim.measured for claim in claims_of(*many_inputs.results())}
    assert {claim["name"]: claim["measured"] for claim in found} == made


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results of two methods and two seeds, and another place for what is made of them."""
    folder = tmp_path / "many_inputs"
    folder.mkdir()
    for method, regret in {"region": 0.5, "CMA-ES": 2.0, "TuRBO-1": 3.0}.items():
        for seed in range(2):
            early = 8.0 if (method, seed) == ("TuRBO-1", 1) else 9.0
            run = Run(method, "Levy-20", seed, [500, 1_000], [early, regret], [1.0, 5.0], {})
            if (method, seed) == ("TuRBO-1", 1):
                run = replace(run, numbers=[500], regrets=[early], seconds=[1.0])
            content = {"parts": {"run": vars(run)}}
            (folder / f"search--{method}--{seed}.json").write_text(json.dumps(content))
    cost = {"method": "region", "dim": 20, "history": 1_000, "seconds": 0.01, "versions": {}}
    (folder / "cost--region.json").write_text(json.dumps({"parts": {"cost": cost}}))
    (tmp_path / "many_inputs.json").write_text("{}")
    monkeypatch.setattr(many_inputs, "HERE", tmp_path)
    monkeypatch.setattr(many_inputs, "NUMBERS", tmp_path / "many-inputs.json")
    monkeypatch.setattr(many_inputs, "SEARCHES", tmp_path / "searches.zip")
    monkeypatch.setattr(many_inputs, "CLAIMS", tmp_path / "kept" / "many_inputs.json")
    many_inputs.CLAIMS.parent.mkdir()
    pictures = tuple(tmp_path / picture.name for picture in many_inputs.PICTURES)
    monkeypatch.setattr(many_inputs, "PICTURES", pictures)
    return tmp_path


def test_results_become_pictures_and_a_table(here: Path) -> None:
    assert many_inputs.measured() == ""  # nothing was taken
    many_inputs.take(here)
    table = many_inputs.measured()
    assert "| function | region | TuRBO-1 | CMA-ES |" in table
    assert "| Levy-20 | 9 (0.5) | **8.5** (3; 1) | 9 (2) |" in table
    assert "after 1,000 in brackets, of so many seeds if not of all; the least after" in table
    assert (
        "Seeds of TuRBO-1 that were ahead of the region's median after 500: 1 of 2 on Le" in table
    )
    assert many_inputs.CLAIMS.read_text() == "{}"
    assert "Medians after 200" not in table  # none was run so
    assert "Seeds: region 2, TuRBO-1 2, CMA-ES 2." in table
    assert "| inputs | method (ms) | random history, n = 1,000 |" in table
    assert "| 20 | region | 10 |" in table
    for picture in many_inputs.PICTURES:
        assert picture.exists()
        assert f"../figures/{picture.name}" in table


def test_the_drawing_shows_a_region_candidates_and_a_leap() -> None:
    (axes,) = many_inputs.drawing().axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["region", "evaluated", "candidates", "best so far", "chosen", "a leap"]
