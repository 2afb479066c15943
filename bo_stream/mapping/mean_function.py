"""Predictions of another regressor as one more input of a model."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Regressor(Protocol):
    """An object with scikit-learn's two methods."""

    def fit(self, X: Any, y: Any) -> Self:
        """Learn from ``n x d`` inputs and n outcomes, anew at each call."""

    def predict(self, X: Any) -> Any:
        """Predict n outcomes."""


R = TypeVar("R", bound=Regressor)


def out_of_fold(
    regressor: R, X: ArrayLike, y: ArrayLike, folds: int | Sequence[int] = 10
) -> tuple[NDArray[np.float64], R]:
    """Predict each row by a regressor that has not seen its fold.

    These predictions are one more input of the rows that a model learns from: those of a regressor
    that has seen a row would promise more than it holds elsewhere. At sites without outcomes the
    input is the prediction of the second value.

    Args:
        regressor: Not changed; each fold fits a copy.
        X: ``n x d`` inputs.
        y: n outcomes, such as logits of prevalence.
        folds: Number of folds, to which row i belongs by i modulo that number, or the fold of each
            row, such as a spatial block.

    Returns:
        Predictions, n, and a copy of the regressor fitted to all rows.

    Raises:
        ValueError: The rows of X, y and folds differ in number, or there is one fold only.
    """
    inputs, outcomes = np.asarray(X, dtype=np.float64), np.asarray(y, dtype=np.float64).ravel()
    rows = np.arange(len(inputs))
    labels = rows % folds if isinstance(folds, int) else np.asarray(folds)
    if not len(inputs) == len(outcomes) == len(labels):
        raise ValueError(
            f"Expected as many rows of X, y and folds, got {len(inputs)}, {len(outcomes)} and "
            f"{len(labels)}."
        )
    if len(np.unique(labels)) < 2:
        raise ValueError(f"Expected folds to be two at least, got {folds!r}.")
    predictions = np.empty(len(inputs))
    for fold in np.unique(labels):
        held = labels == fold
        fitted = deepcopy(regressor).fit(inputs[~held], outcomes[~held])
        predictions[held] = np.asarray(fitted.predict(inputs[held])).ravel()
    return predictions, deepcopy(regressor).fit(inputs, outcomes)
