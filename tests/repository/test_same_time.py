"""The table and the picture of all models on the same splits are what was measured."""

from __future__ import annotations

import json

import pytest

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
    others = {"skillcraft", "modis_lst", "protein"}
    assert {d for d in sets if best[d] == "BayesianLastLayer"} == sets - others
    assert (best["modis_lst"], best["protein"]) == ("SVGP", "DecoupledGP")
    level = fits["protein", "BayesianLastLayer"].rmse / fits["protein", "DecoupledGP"].rmse
    assert level < 1.01
    layer = fits["skillcraft", "BayesianLastLayer"]
    assert layer.rmse < 1.04 * fits["skillcraft", best["skillcraft"]].rmse
    assert fits["skillcraft", "exact"].rmse < 1.03 * fits["skillcraft", best["skillcraft"]].rmse
    parts = json.loads(same_time.NUMBERS.read_text(encoding="utf-8"))["settings"]["fits"]

    def by_split(data: str, what: str) -> list[dict[str, float]]:
        """Take a number of all models in each of five splits."""
        return [{m: parts[f"{data}, {i}, 1 min, {m}"][what] for m in models} for i in range(5)]

    ends = [found["BayesianLastLayer"] for found in by_split("skillcraft", "seconds")]
    assert [round(seconds) for seconds in ends] == [3, 10, 3, 8, 10]
    five = sorted(sets - {"skillcraft", "modis_lst"})
    won = [min(found, key=found.__getitem__) for d in five for found in by_split(d, "rmse")]
    assert (len(won), won.count("BayesianLastLayer")) == (25, 22)
    protein = by_split("protein", "rmse")
    assert [round(f["QSGP"], 3) for f in protein] == [0.690, 0.615, 0.727, 0.705, 0.726]
    assert min(protein[1].values()) == protein[1]["QSGP"]
    worst = {data: max(models, key=lambda model: fits[data, model].nll) for data in sets}
    assert {d for d in sets if worst[d] == "QSGP"} == {"skillcraft", "powerplant", "elevators"}
    assert max(fits[d, "WISKI"].seconds for d in sets) < 4.5
    minute = {key: part for key, part in parts.items() if ", 1 min, " in key}
    seconds = {m: [part["seconds"] for key, part in minute.items() if m in key] for m in models}
    assert (round(max(seconds["WISKI"])), round(max(seconds["DecoupledGP"]))) == (8, 87)
    kin40k = [round(found["BayesianLastLayer"], 3) for found in by_split("kin40k", "rmse")]
    assert kin40k == [0.052, 0.048, 0.049, 0.069, 0.074]
    assert fits["kin40k", "WISKI"].rmse > 0.9


def test_what_the_page_says_of_five_minutes_is_what_was_measured() -> None:
    measured = same_time.fits(beside=5.0)
    one, five = (
        {(fit.data, fit.model): fit for fit in measured if fit.minutes == minutes}
        for minutes in (1.0, 5.0)
    )
    assert one.keys() == five.keys()
    sets, small = {data for data, _ in five}, {"powerplant", "skillcraft"}
    assert sets - small == {"kin40k", "protein", "modis_lst", "elevators", "keggdirected"}
    assert len(sets) == 7
    best = {
        data: min((f for f in five.values() if f.data == data), key=lambda f: f.rmse)
        for data in sets
    }
    assert {d for d in sets if best[d].model == "BayesianLastLayer"} == sets - small - {"modis_lst"}
    others = [f.rmse for (d, m), f in five.items() if d == "protein" and m != "BayesianLastLayer"]
    assert best["protein"].rmse < 0.94 * min(others)
    early = ("elevators", "keggdirected", "powerplant", "skillcraft")
    ended = [round(five[d, "BayesianLastLayer"].seconds) for d in early]
    assert ended == [39, 90, 37, 2]
    gain = {key: fit.rmse / one[key].rmse for key, fit in five.items()}
    assert all(gain[d, "SVGP"] < 1.0 for d in sets - {"modis_lst"})
    assert gain["kin40k", "SVGP"] == pytest.approx(0.5, abs=0.03)
    assert all((gain[d, "OSGPR"] < 0.98) == (d == "kin40k") for d in sets)
    worse = {m for d, m in gain if d == "modis_lst" and gain[d, m] > 1.03}
    assert worse >= {"SVGP", "BayesianLastLayer", "DecoupledGP"}
    assert not worse & {"QSGP", "exact"}
    assert best["modis_lst"].model == "QSGP"
    assert best["powerplant"].model == "DecoupledGP"
    assert min(gain["powerplant", m] for _, m in gain) == gain["powerplant", "DecoupledGP"]
