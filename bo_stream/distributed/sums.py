"""Sums over observations of which a model can be made anywhere: zero, accumulate, merge, finish.

A sum over a stream is the sum of sums over its parts, so that parts can be summed by any engine:
``merge`` is associative, ``zero`` its neutral element. The sums of a model are held as a model of
the same hyperparameters with no other observations.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from bo_stream.distributed.additivity import check_additive, empty_copy
from bo_stream.distributed.likeness import check_alike
from bo_stream.models.base import StreamingGP
from bo_stream.models.construction import restore_products
from bo_stream.storage.objects import model_bytes, read_model_bytes
from bo_stream.storage.trusted import Trusted

M = TypeVar("M", bound=StreamingGP)


@dataclass(frozen=True)
class Sums:
    """Sums over observations, at one state of a model's hyperparameters.

    They can be pickled. Of a grid model of at most ``bo_stream.models.wiski.rows.MOST_ROWS``
    observations they are the observations themselves, beyond that O(7^d) numbers a cell of the
    grid, however many observations there are.

    Attributes:
        model: The hyperparameters, and the observations as the model's memory has them.
    """

    model: StreamingGP

    @property
    def rows(self) -> float:
        """Number of observations."""
        return self.model.num_observations

    def to_bytes(self) -> bytes:
        """Return the content of a file that :func:`bo_stream.describe_file` describes.

        Raises:
            ValueError: The model holds what is neither a tensor, a plain value nor an object of an
                importable class, such as a lambda.
        """
        return model_bytes(self.model, self.model._description())

    @classmethod
    def from_bytes(cls, content: bytes, trusted: Sequence[Trusted] = ()) -> Sums:
        """Read sums that :meth:`to_bytes` wrote, without running anything that they bring.

        Args:
            content: The bytes.
            trusted: Classes and functions of your own that they may name; see
                :meth:`StreamingGP.load`.

        Raises:
            ValueError: The bytes are of another format or version, damaged, or name what is not
                trusted.
        """
        kind: Any = StreamingGP
        model: StreamingGP = read_model_bytes(content, "The content", kind, trusted)
        restore_products(model)
        return cls(model)


def zero(model: StreamingGP) -> Sums:
    """Make sums of no observations at the hyperparameters that a model has now.

    Known noise variances of zero, or below 1e-10 of the outcomes' variance (on a grid 1e-6), are
    raised by what the sums have seen so far: with such ones the parts of a stream differ a little
    from the whole.

    Args:
        model: Whose kernel, basis, bounds, transforms and units the sums are for; it does not
            change, and may change later. An ``AutoGP`` must have left the exact family; rows that
            it still holds beside it are not in the sums, and it holds none after :func:`finish`.

    Raises:
        UnsupportedError: Sums over parts of its stream cannot be merged; the message says why, and
            which models' can. Or it is conditioned on hypothetical observations.

    Warns:
        ProjectionWarning: Merged parts are an approximation of the whole stream; it says how.
    """
    check_additive(model)
    return Sums(deepcopy(empty_copy(model)).eval())


def accumulate(sums: Sums, X: Tensor, Y: Tensor, Yvar: Tensor | None = None) -> Sums:
    """Add n observations to sums, in place, and return them.

    The cost is that of the model's ``update``: on a grid, batches of many rows a cell are fastest.

    Args:
        sums: Changed by this; bad input leaves them as they were.
        X: ``batch_shape x n x d``, as for the model's ``update``.
        Y: ``batch_shape x n x m``, or labels.
        Yvar: Known noise variances shaped as Y; NaN: unknown.

    Raises:
        BotorchTensorDimensionError: Shapes do not fit the model.
        InputDataError: Dtype, device, NaN, infinity, negative variance; on a grid, inputs too far
            outside.
    """
    sums.model.update(X, Y, Yvar)
    return sums


def merge(sums: Sums, other: Sums) -> Sums:
    """Return the sums over the observations of both; neither changes.

    Grids that have grown differently are joined exactly. Cost O(size of the sums).

    Raises:
        UnsupportedError: They are of different classes, hyperparameters or bases, which is named.
    """
    check_alike(sums.model, other.model)
    both = sums.model._shallow_copy()
    both.likelihood = deepcopy(both.likelihood)  # where noise is known, it holds its mean
    return Sums(both.merge(other.model))


def finish(model: M, sums: Sums) -> M:
    """Put all observations of sums into a model, in place, and return it.

    A call that raises leaves the model as it was.

    Raises:
        UnsupportedError: The sums are of another class, other hyperparameters or another basis,
            which is named; or the model is conditioned on hypothetical observations.
        InputDataError: The grid would become too wide.
    """
    check_alike(model, sums.model)
    return model.merge(sums.model)


def rebased(sums: Sums, model: StreamingGP) -> Sums:
    """Express sums in the hyperparameters that a model has now; the sums stay as they are.

    Exact for models on a grid, whose sums do not depend on the hyperparameters. At inducing points
    it is a congruence: what was observed acts as observations of the process at the points.

    Args:
        sums: Of the same class, inputs, outputs and transforms.
        model: Whose hyperparameters are taken.

    Raises:
        UnsupportedError: The class, the number of inputs or outputs, or a transform differs.
    """
    empty = zero(model)
    return Sums(empty.model.merge(sums.model))
