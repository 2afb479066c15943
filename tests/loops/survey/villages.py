"""Made-up villages, and results of surveys in them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from bo_stream.loops.survey.settings import SurveySettings

SETTINGS = SurveySettings(threshold=0.1, covariates=("rain", "night_lights"), trials=50)


def villages(count: int = 40, seed: int = 0) -> pd.DataFrame:
    """Villages V000 to V039 in some 200 km, with two covariates."""
    generator = np.random.default_rng(seed)
    longitude, latitude = generator.uniform((34.0, -6.0), (36.0, -4.0), (count, 2)).T
    return pd.DataFrame(
        {
            "village": [f"V{row:03d}" for row in range(count)],
            "Longitude (deg)": longitude,
            "Lat": latitude,
            "rain": 600.0 + 200.0 * np.sin(2.0 * longitude) + generator.normal(0.0, 20.0, count),
            "night_lights": generator.gamma(1.0, 2.0, count),
        }
    )


def prevalence_at(longitude: np.ndarray, latitude: np.ndarray) -> np.ndarray:
    """A smooth prevalence between 2 and 40 per cent."""
    rates: np.ndarray = 0.21 + 0.19 * np.sin(3.0 * longitude) * np.cos(2.0 * latitude)
    return rates


def results_of(ids: Iterable[str], count: int = 40, seed: int = 0) -> pd.DataFrame:
    """Results of surveys of 50 people in some of the villages, the same for a village each time."""
    table = villages(count, seed)
    rates = prevalence_at(table["Longitude (deg)"].to_numpy(), table["Lat"].to_numpy())
    positive = np.random.default_rng(seed + 1).binomial(50, rates)
    counts = dict(zip(table["village"], positive.tolist(), strict=True))
    chosen = list(ids)
    return pd.DataFrame(
        {"village": chosen, "tested": 50, "positives": [counts[site] for site in chosen]}
    )
