"""The table and the picture of all models on the same splits are what was measured."""

from __future__ import annotations

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
    several = sets - {"skillcraft", "modis_lst"}
    assert {data for data in sets if best[data] == "BayesianLastLayer"} == several
    assert best["modis_lst"] == "SVGP"
    layer = fits["skillcraft", "BayesianLastLayer"]
    assert layer.rmse < 1.02 * fits["skillcraft", best["skillcraft"]].rmse
    assert 3.0 < layer.seconds < 5.0
    assert max(fits[d, "WISKI"].seconds for d in sets) < 2.5
    assert 84.0 < max(fits[d, "DecoupledGP"].seconds for d in sets) < 86.0
    assert fits["kin40k", "WISKI"].rmse > 0.9
