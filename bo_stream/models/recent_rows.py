"""The latest observations of a stream, with what a basis makes of their inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bo_stream.bases.inducing import InducingBasis
from bo_stream.models.memory import Observations


@dataclass(frozen=True)
class Rows:
    """Observations with what a basis makes of their inputs.

    Attributes:
        data: n of them.
        features: ``... x m x n x M``.
        residual: Variance that these miss, ``... x m x n``.
    """

    data: Observations
    features: Tensor
    residual: Tensor

    @classmethod
    def of(cls, data: Observations, basis: InducingBasis, batch: torch.Size) -> Rows:
        """In a basis, for a model of batch shape and outputs ``batch``. Cost O(n M²)."""
        features = basis.features(data.X).expand(*batch, -1, -1)
        return cls(data, features, basis.residual_variance(data.X, features))

    def grown(self, basis: InducingBasis) -> Rows:
        """In a basis with points more, after this one's. Cost O(n M g) for g of them."""
        former, features = self.features.shape[-1], basis.continued(self.data.X, self.features)
        gained = features[..., former:].square().sum(-1)
        return Rows(self.data, features, (self.residual - gained).clamp_min(0.0))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, which: slice | Tensor) -> Rows:
        """Some of them."""
        return Rows(self.data.rows(which), self.features[..., which, :], self.residual[..., which])

    def followed_by(self, others: Rows) -> Rows:
        """Both, in one basis."""
        return Rows(
            Observations.joined([self.data, others.data]),
            torch.cat((self.features, others.features), -2),
            torch.cat((self.residual, others.residual), -1),
        )

    def taken_out(self) -> Rows:
        """The same, to leave a memory."""
        return replace(self, data=replace(self.data, sign=-1.0))

    def select(self, outputs: list[int]) -> Rows:
        """Of some of the outputs."""
        return Rows(
            self.data.select(outputs),
            self.features[..., outputs, :, :],
            self.residual[..., outputs, :],
        )

    def to(self, device: torch.device) -> Rows:
        """On another device."""
        return Rows(self.data.to(device), self.features.to(device), self.residual.to(device))


def no_rows(like: Tensor, batch: torch.Size, outputs: int) -> Observations:
    """No observations of inputs as wide as ``like``, ``M x d``."""
    none = like.new_zeros(*batch, outputs, 0)
    known = torch.zeros(*batch, 1, 0, dtype=torch.bool, device=like.device)
    return Observations(like.new_zeros(*batch, 0, like.shape[-1]), none, none, known, 1.0)


def staying(rows: Observations, data: Observations) -> Tensor:
    """Which rows stay when a batch is taken out, each of its observations once, ``n``."""
    stay = torch.ones(len(rows), dtype=torch.bool, device=rows.X.device)
    for i in range(len(data)):
        found = torch.nonzero(stay & _equal(rows, data.rows(slice(i, i + 1)))).flatten()
        stay[found[:1]] = False
    return stay


def _equal(rows: Observations, one: Observations) -> Tensor:
    """Which rows are the same observation as one, in all batch elements and outputs, ``n``."""
    inputs = (rows.X == one.X).all(-1).unsqueeze(-2)
    same = inputs & (rows.targets == one.targets) & (rows.noise == one.noise)
    same = same & (rows.known == one.known)
    return same.movedim(-1, 0).flatten(1).all(-1)
