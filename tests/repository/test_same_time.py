"""The table and the picture of all models on the same splits are what was measured."""

from __future__ import annotations

import json

from docs.figures import same_time
from docs.figures.shared import is_of, with_part


def test_the_page_has_the_table_that_the_script_makes() -> None:
    text = same_time.PAGE.read_text(encoding="utf-8")
    assert with_part(text, "same-time", same_time.tables()) == text, (
        "run python docs/figures/same_time.py"
    )
    assert len(same_time.fits()) >= 49


def test_the_picture_is_of_the_present_measurements() -> None:
    assert is_of(same_time.PICTURE, same_time.NUMBERS), "run python docs/figures/same_time.py"


def test_what_the_page_says_is_what_was_measured() -> None:
    fits = {(fit.data, fit.model): fit for fit in same_time.fits() if fit.minutes == 1.0}
    sets, models = ({key[i] for key in fits} for i in (0, 1))
    best = {data: min(models, key=lambda model: fits[data, model].rmse) for data in sets}
    several = sets - {"skillcraft", "modis_lst", "protein"}
    assert {data for data in sets if best[data] == "BayesianLastLayer"} == several
    assert best["modis_lst"] == "SVGP"
    layer = fits["skillcraft", "BayesianLastLayer"]
    assert layer.rmse < 1.02 * fits["skillcraft", best["skillcraft"]].rmse
    parts = json.loads(same_time.NUMBERS.read_text(encoding="utf-8"))["settings"]["fits"]
    ends = [parts[f"skillcraft, {i}, 1 min, BayesianLastLayer"]["seconds"] for i in (0, 1)]
    assert [round(seconds) for seconds in ends] == [3, 10]
    protein = [round(parts[f"protein, {split}, 1 min, QSGP"]["rmse"], 3) for split in (0, 1)]
    assert protein == [0.686, 0.619]
    others = [fit for key, fit in parts.items() if key.startswith("protein, 1")]
    assert min(fit["rmse"] for fit in others) == parts["protein, 1, 1 min, QSGP"]["rmse"]
    assert fits["protein", "BayesianLastLayer"].rmse < 1.02 * fits["protein", "QSGP"].rmse
    kin40k = [round(parts[f"kin40k, {split}, 1 min, QSGP"]["nll"], 1) for split in (0, 1)]
    assert kin40k == [0.1, 1.7]
    assert max(fits[d, "WISKI"].seconds for d in sets) < 4.5
    assert 84.0 < max(fits[d, "DecoupledGP"].seconds for d in sets) < 86.0
    assert fits["kin40k", "WISKI"].rmse > 0.9
