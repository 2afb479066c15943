"""A data set of the user's own, which steps of learning draw from."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError, UnsupportedError
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from bo_stream.models.replay import Batch, Replay


@dataclass(frozen=True)
class DatasetReplay(Replay):
    """A data set of pairs ``(x, y)``, read a minibatch at a time: it may be larger than memory.

    Attributes:
        dataset: Has a length; item i is an input, ``d``, and an outcome, ``m`` or a number.
        like: No rows of these, but their dtypes and device.
        outputs: Columns of the outcomes.
    """

    dataset: Dataset[Any]
    like: Batch
    outputs: tuple[int, ...]

    @classmethod
    def of(cls, dataset: Dataset[Any]) -> DatasetReplay:
        """Of all its pairs.

        Raises:
            UnsupportedError: It can only be iterated.
            InputDataError: It is empty, or its items are no pairs of tensors.
            BotorchTensorDimensionError: An item is of another shape.
        """
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            raise UnsupportedError(
                f"Expected a Dataset with a length and items, got {type(dataset).__name__}. Give "
                "what it iterates over to update, batch by batch."
            )
        if len(dataset) == 0:
            raise InputDataError("Expected a Dataset of at least one observation, got none.")
        first = _pair(dataset, 0)
        return cls(dataset, first.rows(slice(0, 0)), tuple(range(first.Y.shape[-1])))

    @property
    def count(self) -> int:
        """Length of the data set."""
        return len(cast(Sized, self.dataset))

    @property
    def held(self) -> int:
        """All of it."""
        return self.count

    def at(self, index: Tensor) -> Batch:
        """Read rows by their places."""
        pairs = [_pair(self.dataset, i) for i in index.tolist()]
        X, Y = (torch.cat(part) for part in ([p.X for p in pairs], [p.Y for p in pairs]))
        return Batch(X.to(self.like.X), Y[:, list(self.outputs)].to(self.like.Y))

    def plus(self, new: Batch) -> DatasetReplay:
        """Refused, but for no observations."""
        if len(new) == 0:
            return self
        raise UnsupportedError(
            "A model of a Dataset takes no further observations. Build it from tensors and update "
            "it batch by batch, or add to the Dataset (torch.utils.data.ConcatDataset)."
        )

    def select(self, outputs: list[int]) -> DatasetReplay:
        """With some of the outputs only."""
        return replace(self, outputs=tuple(self.outputs[i] for i in outputs))

    def to(self, device: torch.device) -> DatasetReplay:
        """Rows are put there when they are read."""
        return replace(self, like=self.like.map(lambda t: t.to(device)))


def _pair(dataset: Dataset[Any], i: int) -> Batch:
    """Observation i as a batch of one."""
    item = dataset[i]
    if not (isinstance(item, tuple | list) and len(item) == 2):
        raise InputDataError(
            f"Expected items (x, y) of the Dataset, got a {type(item).__name__} for item {i}."
        )
    x, y = (torch.as_tensor(part) for part in item)
    if x.ndim != 1 or y.ndim > 1:
        raise BotorchTensorDimensionError(
            f"Expected item {i} of the Dataset to be an input `d` and an outcome `m`, got "
            f"{tuple(x.shape)} and {tuple(y.shape)}."
        )
    return Batch(x.unsqueeze(0), y.reshape(1, -1))
