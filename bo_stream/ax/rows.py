"""Observations as a multiset of rows, and the difference between two of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from botorch.utils.datasets import SupervisedDataset
from torch import Tensor

from bo_stream.models.outcomes.noise import NOISE_FLOOR


@dataclass(frozen=True)
class Rows:
    """Observations of an experiment; rows of equal values are equal, whichever trials they are of.

    Attributes:
        X: Inputs, ``n x d``.
        Y: Outcomes, ``n x m``.
        Yvar: Noise variances, ``n x m``; NaN: unknown.
    """

    X: Tensor
    Y: Tensor
    Yvar: Tensor

    @classmethod
    def of(cls, data: SupervisedDataset, floor: float) -> Rows:
        """Take the observations of a data set, with known noise variances raised to a floor."""
        unknown = torch.full_like(data.Y, torch.nan)
        return cls(data.X, data.Y, unknown if data.Yvar is None else data.Yvar.clamp_min(floor))

    def as_dataset(self, like: SupervisedDataset) -> SupervisedDataset:
        """Return the observations as a data set with the names of another."""
        return SupervisedDataset(
            self.X,
            self.Y,
            Yvar=self.known_noise,
            feature_names=like.feature_names,
            outcome_names=like.outcome_names,
        )

    def __len__(self) -> int:
        """Return the number n of observations."""
        return len(self.X)

    def __getitem__(self, index: list[int] | Tensor) -> Rows:
        """Return some observations, by indices or a mask."""
        return Rows(self.X[index], self.Y[index], self.Yvar[index])

    @property
    def known_noise(self) -> Tensor | None:
        """Return the noise variances as models take them: None where none is known."""
        return None if bool(self.Yvar.isnan().all()) else self.Yvar

    @cached_property
    def keys(self) -> list[bytes]:
        """Return each row's values as bytes; the sign of a NaN or of a zero does not count.

        They are kept: the rows wanted at one trial are those held at the next.
        """
        values = torch.cat((self.X, self.Y, self.Yvar), -1).detach().cpu().double() + 0.0
        array = np.ascontiguousarray(torch.where(values.isnan(), torch.nan, values).numpy())
        return [row.tobytes() for row in array]


def noise_floor(data: SupervisedDataset) -> float:
    """Return what known noise variances of zero are raised to, given a stream's first observations.

    It is ten times what a model raises them to. So a model that is built of more data does not
    raise them further, and equals one that has followed the stream.
    """
    variance = float(data.Y.var(correction=0))
    return 10.0 * NOISE_FLOOR * (variance if variance > 0.0 else 1.0)


@dataclass(frozen=True)
class Difference:
    """The change from the rows that a model holds to those that it should hold.

    Attributes:
        fresh: Rows to be put in.
        gone: Rows to be taken out.
    """

    fresh: Rows
    gone: Rows


def difference(held: Rows, wanted: Rows) -> Difference:
    """Return the difference between two multisets of rows, whatever their order. Cost O(n)."""
    return Difference(
        wanted[_beyond(wanted.keys, held.keys)], held[_beyond(held.keys, wanted.keys)]
    )


def _beyond(keys: Iterable[bytes], others: Iterable[bytes]) -> list[int]:
    """Return places of the keys left when each of the others has struck out one equal to it."""
    left = Counter(others)
    places = []
    for place, key in enumerate(keys):
        if left[key] > 0:
            left[key] -= 1
        else:
            places.append(place)
    return places
