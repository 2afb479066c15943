"""Counts of a survey predicted by models that have not seen them, and how many fell inside."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import torch
from torch import Tensor

from bo_stream.likelihoods.counts import counts
from bo_stream.loops.survey.predictions import ROWS
from bo_stream.models.base import StreamingGP

LEVELS = (50, 95)
"""Per cent of the central intervals."""

Fit = Callable[[Tensor, Tensor], StreamingGP]


@torch.no_grad()
def held_out_counts(fit: Fit, X: Tensor, Y: Tensor, folds: int = 10, seed: int = 0) -> pd.DataFrame:
    """Predict the count of each row by a model of the rows in other folds.

    Costs one fit a fold, and O(examined^1.5) a row.

    Args:
        fit: Makes a model of the logit of prevalence, with a ``BinomialLikelihood``, from X and Y.
        X: Inputs, ``n x d``.
        Y: Rows ``[positives, examined]``, ``n x 2``.
        folds: Number of folds, drawn at random; at most n.
        seed: Of the folds.

    Returns:
        A row a row of X, in its order: ``examined``, ``positive``, ``expected`` (mean of the
        predicted count), and for each of the levels 50 and 95 per cent ``low_50``, ``high_50``,
        the bounds of the central interval, both inside, and ``chance_50``, the probability that
        the model gives to it. Counts are whole numbers: it is more than the level.
    """
    n = len(X)
    generator = torch.Generator().manual_seed(seed)
    fold = torch.randperm(n, generator=generator) % min(folds, n)
    columns: dict[str, Tensor] = {}
    for number in fold.unique().tolist():
        held = fold == number
        with torch.enable_grad():  # a fit needs gradients
            model = fit(X[~held], Y[~held])
        for name, values in _predicted(model, X[held], Y[held, 1]).items():
            columns.setdefault(name, Y.new_empty(n))[held] = values
    told = {"examined": Y[:, 1].tolist(), "positive": Y[:, 0].tolist()}
    return pd.DataFrame(told | {name: values.tolist() for name, values in columns.items()})


def coverage(held_out: pd.DataFrame, level: int) -> tuple[float, float]:
    """Compute the share of counts inside their intervals, and the share the models expected.

    Args:
        held_out: Of ``held_out_counts``, with one row at least.
        level: 50 or 95, per cent.
    """
    inside = held_out["positive"].between(held_out[f"low_{level}"], held_out[f"high_{level}"])
    return float(inside.mean()), float(held_out[f"chance_{level}"].mean())


@torch.no_grad()
def log_scores(model: StreamingGP, X: Tensor, Y: Tensor) -> Tensor:
    """Compute the log probability, in nats, that a model gives to each count, ``n``.

    Args:
        model: Of the logit of prevalence.
        X: Inputs, ``n x d``.
        Y: Rows ``[positives, examined]``, ``n x 2``.
    """
    parts = [
        counts(model, inputs, rows[:, 1:]).log_prob(rows[:, :1])
        for inputs, rows in zip(X.split(ROWS), Y.split(ROWS), strict=True)
    ]
    return torch.cat(parts).squeeze(-1)


def _predicted(model: StreamingGP, X: Tensor, examined: Tensor) -> dict[str, Tensor]:
    """Compute mean, central intervals and their probabilities of counts, ``n`` each."""
    found = counts(model, X, examined.unsqueeze(-1))
    columns = {"expected": found.mean}
    for level in LEVELS:
        low, high = found.interval(level / 100.0)
        below = torch.where(low > 0.0, found.cdf((low - 1.0).clamp_min(0.0)), 0.0)
        columns |= {f"low_{level}": low, f"high_{level}": high}
        columns[f"chance_{level}"] = found.cdf(high) - below
    return {name: values.squeeze(-1) for name, values in columns.items()}
