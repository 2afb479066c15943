"""Maps and charts of a survey: true scales, marks, classes, and positions across the date line."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from bo_stream.loops.survey.maps import (
    COLOURS,
    DISC,
    MOST_NUMBERS,
    draw_calibration,
    draw_classes,
    draw_forecast,
    draw_values,
    spread_apart,
)
from tests.loops.survey.surveys import findings

LABELS = {name: name for name in COLOURS}


def classes(table: pd.DataFrame, chosen: pd.DataFrame) -> Figure:
    return draw_classes(table, LABELS, chosen)


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def drawn(figure: Figure) -> np.ndarray:
    """Positions of the dots, in kilometres."""
    return np.asarray(figure.axes[0].collections[0].get_offsets())


def moved(table: pd.DataFrame, longitude: float, latitude: float) -> pd.DataFrame:
    """The table with its sites shifted so that their first is there."""
    return table.assign(
        longitude=table["longitude"] - table["longitude"][0] + longitude,
        latitude=table["latitude"] - table["latitude"][0] + latitude,
    )


def test_the_scale_bar_has_the_length_it_says() -> None:
    table = findings().predictions
    axes = classes(table, findings().chosen).axes[0]
    (said,) = (text for text in texts(axes) if text.endswith(" km"))
    (bar,) = (line for line in axes.lines if len(line.get_xdata()) == 4)
    assert np.ptp(bar.get_xdata()) == pytest.approx(float(said.removesuffix(" km")))
    assert axes.get_aspect() == 1.0
    south, north = table["latitude"].idxmin(), table["latitude"].idxmax()
    dots = drawn(classes(table, findings().chosen))
    tall = dots[north, 1] - dots[south, 1]
    degrees = table["latitude"][north] - table["latitude"][south]
    assert tall == pytest.approx(111.2 * degrees, rel=0.01)


def test_sites_are_coloured_by_class_and_the_next_ones_numbered() -> None:
    table, chosen = findings().predictions, findings().chosen
    figure = classes(table, chosen)
    colours = figure.axes[0].collections[0].get_facecolors()
    expected = [to_rgba(COLOURS[name]) for name in table["class"]]
    np.testing.assert_allclose(colours, expected)
    assert [text for text in texts(figure.axes[0]) if text.isdigit()] == ["1", "2", "3"]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["above", "uncertain", "below", "surveyed (20)", "next (3)"]


def test_many_next_sites_are_marked_without_numbers() -> None:
    table = findings(n=100).predictions
    figure = classes(table, table[40 : 41 + MOST_NUMBERS])
    assert not any(text.isdigit() for text in texts(figure.axes[0]))


def test_numbers_in_one_valley_do_not_cover_each_other() -> None:
    table = findings().predictions
    chosen = table[-12:].assign(longitude=np.linspace(31.0, 31.01, 12), latitude=-3.0)
    figure = classes(table, chosen)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    discs = [line for line in axes.lines if line.get_markersize() == DISC]
    middles = np.array([line.get_transform().transform(line.get_xydata())[0] for line in discs])
    apart = np.hypot(*(middles[:, None] - middles).T) + 1e9 * np.eye(12)
    assert apart.min() >= DISC * figure.dpi / 72.0
    room = axes.get_window_extent()
    assert all(room.x0 <= x <= room.x1 and room.y0 <= y <= room.y1 for x, y in middles)


@pytest.mark.parametrize("seed", range(3))
def test_points_are_moved_apart_and_not_farther_than_needed(seed: int) -> None:
    random = np.random.default_rng(seed)
    low, high = np.zeros(2), np.full(2, 300.0)
    points = np.concatenate((300.0 * random.random((20, 2)), np.full((10, 2), 3.0)))
    moved = spread_apart(points, 15.0, low, high)
    apart = np.hypot(*(moved[:, None] - moved).T) + 1e9 * np.eye(30)
    assert apart.min() >= 15.0 - 1e-9
    assert ((low <= moved) & (moved <= high)).all()
    assert np.hypot(*(moved - points).T).max() < 120.0
    lone = np.array([[10.0, 10.0], [100.0, 100.0]])
    np.testing.assert_array_equal(spread_apart(lone, 15.0, low, high), lone)


@pytest.mark.parametrize(("tall", "wide"), [(10.0, 3.0), (3.0, 10.0), (4.0, 4.0)])
def test_a_map_of_a_long_country_uses_the_width_of_the_picture(tall: float, wide: float) -> None:
    table = findings().predictions
    for name, length in (("longitude", wide), ("latitude", tall)):
        table[name] = length * (table[name] - table[name].min()) / np.ptp(table[name])
    figure = classes(table, table[-3:])
    figure.draw_without_rendering()
    axes = figure.axes[0]
    assert axes.get_window_extent().width >= 0.8 * figure.bbox.width
    dots = axes.transData.transform(drawn(figure))
    assert np.ptp(dots[:, 0]) >= 0.5 * figure.bbox.width
    labels = [text for text in axes.get_xticklabels() if text.get_text()]
    boxes = [label.get_window_extent() for label in labels]
    assert all(a.x1 < b.x0 for a, b in pairwise(boxes))


def test_a_map_across_the_date_line_is_in_one_piece() -> None:
    table = moved(findings().predictions, 180.0, -17.0)
    wrapped = table.assign(longitude=(table["longitude"] + 180.0) % 360.0 - 180.0)
    assert wrapped["longitude"].min() < 0.0 < wrapped["longitude"].max()
    chosen = wrapped[-3:]
    np.testing.assert_allclose(drawn(classes(wrapped, chosen)), drawn(classes(table, chosen)))
    labels = [text.get_text() for text in classes(wrapped, chosen).axes[0].get_xticklabels()]
    assert any("E" in label for label in labels)
    assert any("W" in label for label in labels)


@pytest.mark.parametrize("longitude", [-180.0, -179.95, 179.9])
def test_a_map_beside_the_date_line_is_that_of_any_longitude(longitude: float) -> None:
    table = moved(findings().predictions, longitude, -17.0)
    table["longitude"] += longitude - table["longitude"].min()
    table["longitude"] = (table["longitude"] + 180.0) % 360.0 - 180.0
    figure = classes(table, table[-3:])
    elsewhere = table.assign(longitude=(table["longitude"] - longitude) % 360.0)
    np.testing.assert_allclose(drawn(figure), drawn(classes(elsewhere, elsewhere[-3:])), atol=1e-6)
    labels = [text.get_text() for text in figure.axes[0].get_xticklabels()]
    assert len(labels) > 1
    assert all(label.endswith(" W") for label in labels)


def test_a_map_of_a_continent_has_no_lines_beyond_its_reach() -> None:
    table = findings().predictions
    for name, low, length in (("longitude", -17.0, 57.0), ("latitude", -25.0, 40.0)):
        table[name] = low + length * (table[name] - table[name].min()) / np.ptp(table[name])
    axes = classes(table, table[-3:]).axes[0]
    lines = [np.hypot(*line.get_data()) for line in axes.lines if line.get_zorder() == 0]
    assert len(lines) > 4
    assert 4700.0 < max(map(np.max, lines)) < 4875.0  # a chord of 5,000 km of the ground is 4,872


def test_values_are_in_per_cent_and_the_threshold_is_marked() -> None:
    table = findings().predictions
    shares = table["prevalence"].to_numpy()
    axes, bar = draw_values(table, shares, "prevalence", "YlOrBr", 0.1).axes
    np.testing.assert_array_equal(axes.collections[0].get_array(), shares)
    assert [line.get_xdata()[0] for line in bar.lines if len(line.get_xdata()) == 2] == [0.1]
    labels = [label.get_text() for label in bar.get_xticklabels()]
    assert labels[:2] == ["0 %", "1 %"]
    assert labels == [f"{100 * tick:.3g} %" for tick in bar.get_xticks()]


@pytest.mark.parametrize("count", [1, 2, 4000])
def test_of_any_number_of_sites(count: int) -> None:
    table = pd.concat([findings().predictions] * (count // 60 + 1), ignore_index=True)[:count]
    jitter = np.random.default_rng(0).random(count)
    table["longitude"] += jitter
    figure = draw_values(table, table["prevalence"].to_numpy(), "prevalence", "YlOrBr")
    figure.draw_without_rendering()
    assert len(drawn(figure)) == count


def test_charts_show_every_result_and_round() -> None:
    held_out = findings().held_out
    axes = draw_calibration(held_out).axes[0]
    inside, outside = (len(line.get_xdata()) for line in axes.lines[:2])
    assert inside + outside == len(held_out)
    between = held_out["positive"].between(held_out["low_95"], held_out["high_95"])
    assert inside == between.sum()
    line = draw_forecast(findings().forecast).axes[0].lines[0]
    assert line.get_xdata().tolist() == [0, 3, 6]
    assert line.get_ydata().tolist() == [1.0, 0.9, 0.85]
