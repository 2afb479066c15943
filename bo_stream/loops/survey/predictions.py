"""Predictions of prevalence at sites, as tables and as words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from bo_stream.likelihoods.prevalence import prevalence
from bo_stream.loops.survey.settings import SurveySettings
from bo_stream.models.base import StreamingGP

ROWS = 4096
"""Number of sites that are predicted at a time."""

QUANTILES = {"lower": 0.025, "q25": 0.25, "q75": 0.75, "upper": 0.975}


@torch.no_grad()
def predict_prevalence(model: StreamingGP, X: Tensor, settings: SurveySettings) -> pd.DataFrame:
    """Predict prevalence at sites.

    Args:
        model: Of the logit of prevalence.
        X: Sites, ``n x d``.
        settings: Of the survey: threshold, certainty and miss cost.

    Returns:
        A row a site: prevalence (mean), sd, lower, q25, q75, upper (quantiles), and with a
        threshold exceedance (probability of a prevalence above it) and class (above, below or
        uncertain).
    """
    parts = [_predict(model, part, settings.threshold) for part in X.split(ROWS)]
    table = pd.concat(parts, ignore_index=True)
    if settings.threshold is None:
        return table
    chance, (below, above) = table["exceedance"], settings.calls
    classes = np.select([chance >= above, chance <= below], ["above", "below"], "uncertain")
    return table.assign(**{"class": classes})


def _predict(model: StreamingGP, X: Tensor, threshold: float | None) -> pd.DataFrame:
    rates = prevalence(model, X)
    quantiles = rates.quantile(torch.tensor(list(QUANTILES.values())))
    values = {
        "prevalence": rates.mean,
        "sd": rates.variance.clamp_min(0.0).sqrt(),
        **dict(zip(QUANTILES, quantiles.unbind(), strict=True)),
    }
    if threshold is not None:
        values["exceedance"] = rates.exceedance(threshold)
    return pd.DataFrame({name: value.reshape(-1).numpy() for name, value in values.items()})


@torch.no_grad()
def exceedances(model: StreamingGP, X: Tensor, threshold: float) -> NDArray[np.float64]:
    """Compute the probability of a prevalence above a threshold at sites, ``n x d``, alone."""
    parts = [prevalence(model, part).exceedance(threshold).reshape(-1) for part in X.split(ROWS)]
    found: NDArray[np.float64] = torch.cat(parts).numpy()
    return found


def reasons(predictions: pd.DataFrame, threshold: float | None) -> list[str]:
    """Say of each predicted site what is not known about it."""
    columns = ("prevalence", "lower", "upper")
    spans = [
        f"prevalence {percent(mean)} ({percent(low)} to {percent(high)})"
        for mean, low, high in zip(*(predictions[name] for name in columns), strict=True)
    ]
    if threshold is None:
        return spans
    chances: Sequence[float] = predictions["exceedance"].tolist()
    return [
        f"{span}; above {percent(threshold)} with probability {chance:.2f}"
        for span, chance in zip(spans, chances, strict=True)
    ]


def percent(share: float) -> str:
    """Write a share in per cent, to two digits."""
    return f"{float(f'{100.0 * share:.2g}'):g} %"
