"""What a model has taken of an experiment's data, as a multiset of rows."""

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
    """Observations: inputs ``n x d``, outcomes ``n x m``, noise variances ``n x m``, NaN: unknown.

    Two rows of equal values are the same, whichever trials they are of.
    """

    X: Tensor
    Y: Tensor
    Yvar: Tensor

    @classmethod
    def of(cls, data: SupervisedDataset, floor: float) -> Rows:
        """Of a data set.

        Args:
            data: Whose noise variances may be zero.
            floor: What known noise variances are raised to.
        """
        unknown = torch.full_like(data.Y, torch.nan)
        return cls(data.X, data.Y, unknown if data.Yvar is None else data.Yvar.clamp_min(floor))

    def as_dataset(self, like: SupervisedDataset) -> SupervisedDataset:
        """As a data set with the names of another."""
        return SupervisedDataset(
            self.X,
            self.Y,
            Yvar=self.known_noise,
            feature_names=like.feature_names,
            outcome_names=like.outcome_names,
        )

    def __len__(self) -> int:
        """Number n of observations."""
        return len(self.X)

    def __getitem__(self, index: list[int]) -> Rows:
        """Some of them."""
        return Rows(self.X[index], self.Y[index], self.Yvar[index])

    @property
    def known_noise(self) -> Tensor | None:
        """Noise variances as models take them: None where none is known."""
        return None if bool(self.Yvar.isnan().all()) else self.Yvar

    @cached_property
    def keys(self) -> list[bytes]:
        """A row's values as they are in memory; the sign of a NaN or of a zero does not count.

        Kept: what a model should have is what it has at the next trial.
        """
        values = torch.cat((self.X, self.Y, self.Yvar), -1).detach().cpu().double() + 0.0
        array = np.ascontiguousarray(torch.where(values.isnan(), torch.nan, values).numpy())
        return [row.tobytes() for row in array]


def noise_floor(data: SupervisedDataset) -> float:
    """What a known noise variance of zero is raised to, given a stream's first observations.

    Ten times what a model raises it to, so that one that is built of more data does not raise it
    further, and equals one that has followed them.
    """
    variance = float(data.Y.var(correction=0))
    return 10.0 * NOISE_FLOOR * (variance if variance > 0.0 else 1.0)


@dataclass(frozen=True)
class Difference:
    """What data have that a model has not, and what a model has that they have no longer.

    Attributes:
        fresh: To be put in.
        gone: To be taken out.
    """

    fresh: Rows
    gone: Rows


def difference(held: Rows, wanted: Rows) -> Difference:
    """Between two multisets of rows, whatever their order. Cost O(n).

    Args:
        held: What a model has.
        wanted: What it should have.
    """
    return Difference(
        wanted[_beyond(wanted.keys, held.keys)], held[_beyond(held.keys, wanted.keys)]
    )


def _beyond(keys: Iterable[bytes], others: Iterable[bytes]) -> list[int]:
    """Places of keys that are left when each of the others has struck out one equal to it."""
    left = Counter(others)
    places = []
    for place, key in enumerate(keys):
        if left[key] > 0:
            left[key] -= 1
        else:
            places.append(place)
    return places
