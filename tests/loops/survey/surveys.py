"""Findings of a made-up survey, drawn without a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from scipy.special import expit, logit
from scipy.stats import binom, norm

from bo_stream.loops.survey.findings import SurveyFindings
from bo_stream.loops.survey.model import calls_table
from bo_stream.loops.survey.settings import SurveySettings


def findings(n: int = 60, surveyed: int = 20, q: int = 3, **changes: Any) -> SurveyFindings:
    """Findings of n sites, of which the first are surveyed and the last q are next."""
    random = np.random.default_rng(0)
    longitude, latitude = 30.0 + 4.0 * random.random(n), -4.0 + 3.0 * random.random(n)
    mean = -2.0 + np.sin(2.0 * longitude) + 0.5 * random.standard_normal(n)
    sd = np.where(np.arange(n) < surveyed, 0.15, 0.6)
    low, high = (expit(mean + side * 1.96 * sd) for side in (-1.0, 1.0))
    exceedance = norm.sf(logit(0.1), mean, sd)
    examined = np.where(np.arange(n) < surveyed, 50.0, np.nan)
    positive = np.where(np.arange(n) < surveyed, random.binomial(50, expit(mean)), np.nan)
    names = np.select([exceedance >= 0.9, exceedance <= 0.1], ["above", "below"], "uncertain")
    table = pd.DataFrame(
        {
            "id": [f"V{row}" for row in range(n)],
            "longitude": longitude,
            "latitude": latitude,
            "prevalence": expit(mean),
            "sd": (high - low) / 4.0,
            "lower": low,
            "upper": high,
            "exceedance": exceedance,
            "class": names,
            "examined": examined,
            "positive": positive,
            "date": np.where(np.arange(n) < surveyed // 2, "2026-01-17", ""),
        }
    )
    labels = pd.DataFrame(
        {
            "District": np.where(longitude < 32.0, "Muleba", "Ngara"),
            "Village": table["id"] + " town",
        }
    ).set_axis(pd.Index(table["id"], name="id"))
    chosen = table.loc[n - q :, ["id", "longitude", "latitude"]].reset_index(drop=True)
    chosen = chosen.assign(reason="near the threshold", gain=0.02, cost=1.0)
    values = {
        "name": "Kagera",
        "predictions": table,
        "chosen": chosen,
        "held_out": held_out_table(table[:surveyed]),
        "forecast": pd.DataFrame({"sites": [q, 2 * q], "remaining": [0.9, 0.85]}),
        "settings": SurveySettings(threshold=0.1, miss_cost=1.0),
        "texts": {"Goal": "sites above 10 %"},
        "labels": labels,
        "calls_made": calls_table(changes.get("predictions", table), labels),
    }
    return SurveyFindings(**{**values, **changes})


def held_out_table(surveyed: pd.DataFrame) -> pd.DataFrame:
    """Binomial predictions of the counts of surveyed sites, at their prevalence."""
    columns = {name: surveyed[name] for name in ("examined", "positive")}
    counts = binom(surveyed["examined"], surveyed["prevalence"])
    columns["expected"] = counts.mean()
    for level in (50, 95):
        tail = 0.5 - level / 200.0
        low, high = counts.ppf(tail), counts.ppf(1.0 - tail)
        columns |= {f"low_{level}": low, f"high_{level}": high}
        columns[f"chance_{level}"] = counts.cdf(high) - counts.cdf(low - 1.0)
    return pd.DataFrame(columns)
