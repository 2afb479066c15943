"""Deltas: what some observations add to a model, as replicas exchange it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Self

import torch
from torch import Tensor

from bo_stream.distributed.sums import Sums, accumulate, finish, merge, rebased, zero
from bo_stream.loops.optimization.optimizer import SHORTLIST
from bo_stream.loops.optimization.trials import LARGEST
from bo_stream.models.base import StreamingGP

MOST_ROWS = 1024
"""Up to this many observations travel as themselves: they are smaller than their statistics."""


@dataclass(frozen=True)
class BestPoints:
    """The ``SHORTLIST`` observations of the largest outcomes, in an order that all agree on.

    Attributes:
        X: Inputs in the unit cube, ``k x d``.
        Y: Outcomes of which large ones are good, ``k``, the largest first; of equal ones the first
            in the order of their inputs.
    """

    X: Tensor
    Y: Tensor

    @classmethod
    def of(cls, X: Tensor, Y: Tensor) -> Self:
        """Take the best of n observations, ``n x d`` and ``n``."""
        order = torch.arange(len(Y), device=Y.device)
        for column in (*X.T.flip(0), -Y):  # the last sort is of the first importance
            order = order[column[order].sort(stable=True).indices]
        first = order[:SHORTLIST]
        return cls(X[first], Y[first])

    @classmethod
    def joined(cls, parts: Sequence[BestPoints]) -> Self:
        """Take the best of some sets of them."""
        return cls.of(torch.cat([part.X for part in parts]), torch.cat([part.Y for part in parts]))


@dataclass(frozen=True)
class Delta:
    """What some observations add to a model: these themselves while they are few, else their sums.

    A value, of which any number add up in any order. Outcomes are those of which large ones are
    good.

    Attributes:
        X: Inputs of observations that are not in ``sums``, in the unit cube, ``n x d``.
        Y: Their outcomes, ``n x 1``.
        sums: Statistics of all others, at the hyperparameters that a search begins with; None if
            there are no others.
        best_summed: The best points of these.
    """

    X: Tensor
    Y: Tensor
    sums: Sums | None = None
    best_summed: BestPoints | None = None

    @property
    def observations(self) -> int:
        """Number of observations."""
        return len(self.X) + (0 if self.sums is None else round(self.sums.rows))

    def best(self) -> BestPoints:
        """Return the best points of all."""
        rows = BestPoints.of(self.X, self.Y.squeeze(-1))
        return rows if self.best_summed is None else BestPoints.joined((rows, self.best_summed))

    def plus(self, others: Iterable[Delta]) -> Delta:
        """Add further deltas.

        Raises:
            UnsupportedError: The sums of one are of another model.
        """
        deltas = (self, *others)
        X, Y = (torch.cat([getattr(delta, name) for delta in deltas]) for name in ("X", "Y"))
        sums = [delta.sums for delta in deltas if delta.sums is not None]
        best = [delta.best_summed for delta in deltas if delta.best_summed is not None]
        if not sums:
            return Delta(X, Y)
        return Delta(X, Y, reduce(merge, sums), BestPoints.joined(best))

    def settled(self, template: StreamingGP) -> Delta:
        """Put observations into sums where they are more than ``MOST_ROWS``.

        Args:
            template: The model without observations that all replicas of a search begin with.
        """
        return self if len(self.X) <= MOST_ROWS else self._summed(template)

    def _summed(self, template: StreamingGP) -> Delta:
        rows = accumulate(zero(template), self.X, self.Y)
        sums = rows if self.sums is None else merge(self.sums, rows)
        return Delta(self.X[:0], self.Y[:0], sums, self.best())

    def put_into(self, model: StreamingGP, template: StreamingGP) -> None:
        """Put all observations into a model, whose hyperparameters may differ; all or none.

        Raises:
            UnsupportedError: The sums are of another model.
        """
        if self.sums is None:
            model.update(self.X, self.Y)
            return
        sums = self._summed(template).sums if len(self.X) > 0 else self.sums
        if sums is not None:
            finish(model, rebased(sums, model))

    # --- as arrays ------------------------------------------------------------------------------

    def arrays(self) -> dict[str, Tensor]:
        """Return the delta as arrays in main memory."""
        arrays = {"X": self.X, "Y": self.Y}
        if self.sums is not None and self.best_summed is not None:
            packed = zlib.compress(self.sums.to_bytes())
            arrays["sums"] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
            arrays |= {"best_X": self.best_summed.X, "best_Y": self.best_summed.Y}
        return {name: array.detach().cpu().clone() for name, array in arrays.items()}

    @classmethod
    def of_arrays(
        cls, arrays: Mapping[str, Tensor], template: StreamingGP, most_bytes: int
    ) -> Delta:
        """Build a delta of what :meth:`arrays` returned.

        Args:
            arrays: As they were read: of any shapes and types.
            template: The model without observations that all replicas of a search begin with.
            most_bytes: Most bytes of its sums, as of :func:`most_bytes_of_sums`; of more no more
                are unpacked.

        Raises:
            ValueError: They are of other shapes, or not finite.
            UnsupportedError: The sums are of another model.
        """
        try:
            X, Y = _rows(arrays["X"], arrays["Y"], template)
            if "sums" not in arrays:
                return cls(X, Y)
            unpacking = zlib.decompressobj()
            content = unpacking.decompress(arrays["sums"].numpy().tobytes(), most_bytes)
            if not unpacking.eof:
                raise ValueError(
                    f"its sums are cut short, or of more than {most_bytes:,} bytes, which sums of "
                    "this search are not"
                )
            best_X, best_Y = _rows(arrays["best_X"], arrays["best_Y"].unsqueeze(-1), template)
        except (LookupError, zlib.error) as error:
            raise ValueError(f"it is no delta ({error!r})") from error
        sums = merge(zero(template), Sums.from_bytes(content))
        return cls(X, Y, sums, BestPoints(best_X, best_Y.squeeze(-1)))


def most_bytes_of_sums(template: StreamingGP) -> int:
    """Return a number of bytes that no sums of a search exceed: twice those of some of its sums.

    Statistics have the same size however many observations they are of.

    Args:
        template: The model without observations that all replicas of a search begin with.
    """
    like = next(template.parameters())
    X = (
        torch.linspace(0.0, 1.0, MOST_ROWS + 1)
        .unsqueeze(-1)
        .to(like)
        .repeat(1, template._input_dim)
    )
    return 2 * len(accumulate(zero(template), X, X[:, :1]).to_bytes()) + 2**20


def _rows(X: Tensor, Y: Tensor, template: StreamingGP) -> tuple[Tensor, Tensor]:
    """Check observations, and bring them to the model's dtype and device.

    Raises:
        ValueError: They are not ``n x d`` in the unit cube and ``n x 1``, or not finite.
    """
    fits = X.ndim == 2 and X.shape[-1] == template._input_dim and Y.shape == (len(X), 1)
    if not fits or not X.is_floating_point() or not Y.is_floating_point():
        raise ValueError(
            f"expected numbers of shapes (n, {template._input_dim}) and (n, 1), got "
            f"{tuple(X.shape)} of {X.dtype} and {tuple(Y.shape)} of {Y.dtype}"
        )
    if not bool(((X >= 0.0) & (X <= 1.0)).all() and (Y.abs() <= LARGEST).all()):
        raise ValueError(
            f"it has inputs outside the unit cube, or outcomes that are not at most {LARGEST:g}"
        )
    like = next(template.parameters())
    return X.to(like), Y.to(like)
