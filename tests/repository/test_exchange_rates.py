"""The picture of exchange rates can be drawn, and the benchmark says where its data are missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.accuracy import exchange_rates as benchmark
from benchmarks.common import data
from docs.figures import exchange_rates


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore::bo_stream.GridResolutionWarning")
@pytest.mark.filterwarnings("ignore::bo_stream.CoarsePointsWarning")
def test_a_row_of_panels_for_each_model() -> None:
    figure = exchange_rates.picture(*benchmark.simulated(14), 8, (8, 11))
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == [f"{name} order, n = {n}" for name in ("time", "random") for n in (8, 11)]
    assert all(len(axes.lines) == 2 for axes in figure.axes)


def test_missing_rates_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    with pytest.raises(FileNotFoundError, match="The data set fx2007 is missing"):
        benchmark.rates(40)
