"""Counts of a survey predicted by models that have not seen them, and how many fell inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pandas as pd
import torch
from botorch.posteriors.gpytorch import GPyTorchPosterior
from torch import Tensor

from bo_stream.likelihoods.binomial import BinomialLikelihood, log_marginal
from bo_stream.models.base import StreamingGP

LEVELS = (50, 95)
"""Per cent of the central intervals."""

Fit = Callable[[Tensor, Tensor], StreamingGP]


@torch.no_grad()
def held_out_counts(fit: Fit, X: Tensor, Y: Tensor, folds: int = 10, seed: int = 0) -> pd.DataFrame:
    """Predict the count of each row by a model of the rows in other folds.

    Costs one fit a fold, and O(examined) a row.

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
    counts = {"examined": Y[:, 1].tolist(), "positive": Y[:, 0].tolist()}
    return pd.DataFrame(counts | {name: values.tolist() for name, values in columns.items()})


def coverage(held_out: pd.DataFrame, level: int) -> tuple[float, float]:
    """Compute the share of counts inside their intervals, and the share the models expected.

    Args:
        held_out: Of ``held_out_counts``, with one row at least.
        level: 50 or 95, per cent.
    """
    inside = held_out["positive"].between(held_out[f"low_{level}"], held_out[f"high_{level}"])
    return float(inside.mean()), float(held_out[f"chance_{level}"].mean())


def _predicted(model: StreamingGP, X: Tensor, examined: Tensor) -> dict[str, Tensor]:
    latent = cast(GPyTorchPosterior, model.posterior(X))
    likelihood = cast(BinomialLikelihood, model.likelihood)
    moments = zip(latent.mean.squeeze(-1), latent.variance.squeeze(-1), examined, strict=True)
    rows = [_summary(count_probabilities(*row, likelihood.concentration)) for row in moments]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def count_probabilities(
    mean: Tensor, variance: Tensor, examined: Tensor, concentration: Tensor | None = None
) -> Tensor:
    """Compute the probabilities of 0, 1, ..., n positives among n examined, ``n + 1``.

    Args:
        mean: Mean of the normal logit of prevalence, a scalar.
        variance: Its variance.
        examined: n.
        concentration: Of the beta-binomial; None: binomial.
    """
    positives = torch.arange(int(examined) + 1).to(mean)
    log = log_marginal(positives, examined.to(mean), mean, variance, concentration)
    return log.softmax(-1)


def _summary(probabilities: Tensor) -> dict[str, Tensor]:
    """Compute mean, central intervals and their probabilities of a distribution of counts."""
    below = probabilities.cumsum(-1).clamp(max=1.0)
    below[-1] = 1.0
    counts = torch.arange(len(probabilities)).to(probabilities)
    summary = {"expected": (counts * probabilities).sum()}
    for level in LEVELS:
        tail = 0.5 - level / 200.0
        low, high = (int(torch.searchsorted(below, at)) for at in (tail, 1.0 - tail))
        summary[f"low_{level}"], summary[f"high_{level}"] = counts[low], counts[high]
        summary[f"chance_{level}"] = probabilities[low : high + 1].sum()
    return summary
