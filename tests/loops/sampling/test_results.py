from __future__ import annotations

import csv
import errno
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from bo_stream.diagnostics.trust import report
from bo_stream.loops.datasets import Dataset
from bo_stream.loops.run import Score, from_record
from bo_stream.loops.sampling.campaign import Campaign
from bo_stream.loops.sampling.results import (
    MapView,
    draw_curve,
    draw_map,
    mean_over_run,
    write_results,
)
from bo_stream.loops.sampling.settings import Settings, Strategy
from bo_stream.models.auto.inference import HandOver
from bo_stream.storage.archive import atomic_write
from tests.loops.small import LONG, QUICK, map_with_an_artefact, small_map, write_npz
from tests.support.drafts import save_small

pytestmark = pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Campaign, Path]:
    folder = tmp_path_factory.mktemp("run")
    path = write_npz(folder / "map.npz", small_map())
    campaign = Campaign.begin(path, None, None, QUICK, ("chosen", "random"))
    for _ in campaign.run():
        pass
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", save_small)
        write_results(campaign, folder, ["a warning"])
    return campaign, folder


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_picks_are_rows_of_the_data_step_by_step(results: tuple[Campaign, Path]) -> None:
    campaign, folder = results
    picks = [pick for pick in rows(folder / "picks.csv") if pick["strategy"] == "chosen"]
    assert [int(pick["step"]) for pick in picks] == [0] * 5 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    assert [int(pick["row"]) for pick in picks] == campaign.main.picked_rows()
    for pick in picks:
        row = int(pick["row"])
        written = [float(pick[name]) for name in ("lon", "lat", "prevalence")]
        assert written == [*campaign.data.X[row], campaign.data.y[row]]


def test_curve_holds_every_score(results: tuple[Campaign, Path]) -> None:
    campaign, folder = results
    curve = rows(folder / "curve.csv")
    assert [line["strategy"] for line in curve] == ["chosen"] * 3 + ["random"] * 3
    assert [int(line["observations"]) for line in curve] == [5, 11, 17] * 2
    assert [float(line["rmse"]) for line in curve[:3]] == [s.rmse for s in campaign.main.curve]


def test_a_hand_over_is_marked_in_the_curve() -> None:
    curve = [Score(n, 2.0 / n, 1.0 / n, 1.0 / n, 0.5 / n, 0.0, 0.95) for n in (10, 20, 40)]
    move = HandOver(24.0, "exact", "OSGPR", 0.1, 0.0, 0.0)
    axes = draw_curve({"chosen": curve}, {"chosen": "least variance"}, "y", [move], 30).axes[0]
    (grid,) = (line for line in axes.lines if line.get_label() == "onto a grid")
    assert list(grid.get_xdata()) == [30, 30]
    (mark,) = (line for line in axes.lines if line.get_label() == "exact to OSGPR")
    assert list(mark.get_xdata()) == [24.0, 24.0]
    legend = axes.get_legend()
    assert legend is not None
    assert "exact to OSGPR" in [text.get_text() for text in legend.texts]


def test_wrong_calls_have_a_panel_of_their_own() -> None:
    curve = [Score(n, 2.0, 1.0, 1.0, 0.5, 0.0, 0.95, wrong=2.0 / n) for n in (10, 20, 40)]
    names: dict[Strategy, str] = {"chosen": "fewest wrong calls"}
    figure = draw_curve({"chosen": curve}, names, "y")
    calls, errors = figure.axes[:2]
    assert list(calls.lines[0].get_ydata()) == [20.0, 10.0, 5.0]
    label = "fewest wrong calls: 10.0 % of calls wrong, mean over the run"  # (15 + 2 * 7.5) / 3
    assert calls.lines[0].get_label() == label
    assert list(errors.lines[0].get_ydata()) == [1.0, 1.0, 1.0]


def test_run_json_says_how_it_was_made(results: tuple[Campaign, Path]) -> None:
    campaign, folder = results
    run = json.loads((folder / "run.json").read_text())
    assert run["finished"] is True
    assert from_record(Settings, run["settings"]) == campaign.main.settings
    assert run["data"]["fingerprint"] == campaign.data.fingerprint
    assert run["data"]["rows"] == 120
    assert set(run["versions"]) >= {"python", "bo-stream", "torch", "botorch", "gpytorch"}
    assert run["strategies"]["chosen"]["model"]["grid_size"] == [12, 12]
    kernel = run["strategies"]["chosen"]["model"]["kernel"]
    module = campaign.main.sampling.model.covar_module
    assert kernel["base_kernel.lengthscale"] == module.base_kernel.lengthscale.tolist()
    assert run["strategies"]["random"]["final"]["observations"] == 17
    mean = run["strategies"]["chosen"]["mean_over_run"]
    assert mean == asdict(mean_over_run(campaign.main.curve))
    assert run["strategies"]["chosen"]["kernels"] == campaign.main.state.kernels
    assert run["warnings"] == ["a warning"]
    assert run["strategies"]["chosen"]["model"]["numerical_log"] == []


def test_outliers_are_in_the_results(tmp_path: Path) -> None:
    data, row = map_with_an_artefact(LONG)
    path = write_npz(tmp_path / "map.npz", data)
    campaign = Campaign.begin(path, None, None, replace(LONG, steps=0), ("chosen",))
    for _ in campaign.run():
        pass
    write_results(campaign, tmp_path, [])
    marked = [int(pick["row"]) for pick in rows(tmp_path / "picks.csv") if pick["outlier"] == "1"]
    run = json.loads((tmp_path / "run.json").read_text())
    assert marked == run["strategies"]["chosen"]["outliers"] == [row]
    assert run["settings"]["outliers"] == 7.0


def test_the_map_marks_outliers() -> None:
    data = small_map(20)
    view = MapView(data, data.y, np.ones(20), [1, 2, 3, 4], 2, [3])
    (axes,) = [a for a in draw_map(view).axes if a.get_legend() is not None]
    (marks,) = [line for line in axes.lines if line.get_label() == "outliers (1)"]
    assert marks.get_xydata().tolist() == [data.X[3].tolist()]


@pytest.mark.usefixtures("whole_pictures", "one_report")
def test_pictures_show_something(results: tuple[Campaign, Path], tmp_path: Path) -> None:
    write_results(results[0], tmp_path, [])
    for name in ("map.png", "curve.png", "trust.png"):
        picture = imread(tmp_path / name)
        assert min(picture.shape[:2]) > 500
        assert picture[..., :3].std() > 0.1


@pytest.fixture(scope="module")
def one_report() -> Iterator[None]:
    """Make the report on a model once for all results that are written of it."""
    with pytest.MonkeyPatch.context() as patch:  # which a test's own does not undo
        patch.setattr("bo_stream.loops.run.report", cache(report))
        yield


@pytest.mark.usefixtures("small_pictures", "one_report")
def test_results_are_written_all_or_none(
    results: tuple[Campaign, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign, folder = results
    names = ["curve.csv", "picks.csv", "run.json"]
    for name in names:
        (tmp_path / name).write_text("old")
    asked: list[Path] = []
    failing = 1

    def full(path: Path) -> AbstractContextManager[IO[bytes]]:
        asked.append(path)
        if len(asked) == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return atomic_write(path)

    monkeypatch.setattr("bo_stream.loops.run.atomic_write", full)
    for failing in (1, 2, 3):
        asked.clear()
        with pytest.raises(OSError, match="No space left"):
            write_results(campaign, tmp_path, [])
        assert len(asked) == failing
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
            names, "old"
        )
    monkeypatch.undo()
    write_results(campaign, tmp_path, [])
    for name in ("curve.csv", "picks.csv", "map.png"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.usefixtures("small_pictures", "one_report")
@pytest.mark.parametrize("error", [MemoryError("7.5 GiB"), ValueError("Image size\nis too large")])
def test_a_picture_that_cannot_be_drawn_loses_no_result(
    results: tuple[Campaign, Path],
    tmp_path: Path,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    campaign, folder = results
    (tmp_path / "map.png").write_text("of another run")
    there = []

    def fail(_: MapView) -> None:
        there.extend(path.name for path in tmp_path.iterdir())
        raise error

    monkeypatch.setattr("bo_stream.loops.sampling.results.draw_map", fail)
    with pytest.warns(
        RuntimeWarning, match=rf"map\.png could not be drawn \({type(error).__name__}"
    ):
        write_results(campaign, tmp_path, [])
    assert {"picks.csv", "curve.csv", "run.json"} <= set(there)
    assert not (tmp_path / "map.png").exists()
    assert (tmp_path / "curve.png").read_bytes() == (folder / "curve.png").read_bytes()


def test_the_trust_in_the_main_model_is_reported(results: tuple[Campaign, Path]) -> None:
    campaign, folder = results
    found = json.loads((folder / "trust.json").read_text())
    assert found["model"] == "AutoGP"
    assert found["observations"] == len(campaign.main.picked_rows())
    assert found["validation"]["total"]["count"] == 12
    assert (folder / "trust.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_that_fails_loses_no_result(
    results: tuple[Campaign, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign, _ = results
    (tmp_path / "trust.json").write_text("of another run")

    def fail(*_: object) -> None:
        raise ValueError("not positive definite")

    monkeypatch.setattr("bo_stream.loops.run.report", fail)
    with pytest.warns(RuntimeWarning, match=r"trust\.json could not be written \(ValueError: not"):
        finals, means, trust = write_results(campaign, tmp_path, [])
    assert trust is None
    assert set(finals) == set(means) == {"chosen", "random"}
    assert not (tmp_path / "trust.json").exists()
    assert (tmp_path / "picks.csv").exists()


def test_a_coordinate_far_away_needs_no_raster() -> None:
    """On a raster, whose ticks up to the far site would take 7.5 TiB."""
    lon, lat = np.meshgrid(np.arange(12.0), np.arange(9.0))
    X = np.stack((lon.ravel(), lat.ravel()), -1)
    X[0, 0] = 1e12
    shown = draw_map(view(X, ("a", "b"))).axes[0]
    assert len(shown.collections[0].get_offsets()) == len(X)


def view(X: Any, columns: tuple[str, ...]) -> MapView:
    y = np.sin(X.sum(-1))
    return MapView(Dataset(X, y, columns, "y", "map"), y, np.full(len(y), 0.1), [0, 3, 5], 1)


def titles(shown: MapView) -> list[str]:
    return [axes.get_title() for axes in draw_map(shown).axes]


def test_a_line_in_one_dimension_and_maps_of_two_inputs_in_more() -> None:
    X = np.random.default_rng(0).uniform(0, 5, (40, 3))
    assert titles(view(X[:, :1], ("t",))) == [""]
    for dim in (2, 3):
        shown = titles(view(X[:, :dim], ("a", "b", "c")[:dim]))
        assert shown[:4] == [
            "truth",
            "posterior mean",
            "posterior standard deviation",
            "picks over the posterior mean",
        ]


def test_sites_on_a_raster_are_drawn_as_pixels_where_they_lie() -> None:
    lon, lat = np.meshgrid(np.linspace(3.0, 4.0, 11), np.linspace(9.0, 9.5, 6))
    X = np.stack((lon.ravel(), lat.ravel()), -1)
    inside = X[:, 0] + X[:, 1] < 13.2
    shown = view(X[inside], ("longitude", "latitude"))
    axes = draw_map(shown).axes[0]
    (image,) = axes.images
    pixels = np.ma.filled(np.ma.asarray(image.get_array()), np.nan)
    expected = np.full(66, np.nan)
    expected[inside] = shown.data.y
    np.testing.assert_array_equal(pixels.ravel(), expected)
    np.testing.assert_allclose(image.get_extent(), (2.95, 4.05, 8.95, 9.55))
    assert image.origin == "lower"
    assert axes.get_aspect() == pytest.approx(
        1.0 / np.cos(np.radians(np.median(shown.data.X[:, 1])))
    )
    assert draw_map(shown).axes[2].get_xlabel() == "longitude (degrees)"
