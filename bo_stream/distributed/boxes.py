"""Boxes of inputs that are known before rows are read: of a source, and of a model's grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from botorch.exceptions.errors import BotorchError
from torch import Tensor

from bo_stream.distributed.additivity import inner_memory, set_inner_memory
from bo_stream.distributed.fragments import Array, Columns, Fragment
from bo_stream.distributed.sources import Fault, Format, Listing, listed, refuse, streamed
from bo_stream.distributed.sums import Sums
from bo_stream.errors import UsageError
from bo_stream.models.wiski.memory import OnGrid
from bo_stream.storage.archive import one_line


def bounds_of(source: Any, x: str | Sequence[str], file_format: Format | None = None) -> Tensor:
    """Return the least and the largest inputs of a source, ``2 x d`` in float64.

    Of parquet files they are in the footers, so that no rows are read; others are read once.

    Args:
        source: As of :func:`~bo_stream.distributed.ingest`; an iterable is used up.
        x: Names of the columns of the inputs.
        file_format: Of files; None: by their names.

    Raises:
        UsageError: A fragment cannot be read or lacks a column, or there are no rows.

    Example:
        >>> model = WISKI(X, Y, bounds=bounds_of("data/*.parquet", ["lon", "lat"]))
    """
    columns = Columns.of(x, None, None)
    found = listed(source, columns, file_format)
    refuse(found.faults if found is not None else ())
    fragments = streamed(source, columns) if found is None else found.fragments
    boxes = [box for fragment in fragments for box in _boxes(fragment, columns)]
    if not boxes:
        raise UsageError("Expected a source of at least one row, got none.")
    ends = np.stack(boxes)
    return torch.from_numpy(np.stack((ends[:, 0].min(0), ends[:, 1].max(0))))


def _boxes(fragment: Fragment, columns: Columns) -> Iterator[Array]:
    known = fragment.box(columns)
    if known is not None:
        yield known
        return
    try:
        for batch in fragment.batches(columns):
            if len(batch):
                yield np.stack((np.nanmin(batch.X, 0), np.nanmax(batch.X, 0)))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{fragment.key}: {one_line(error)}") from error


def grown_over(sums: Sums, found: Listing, columns: Columns) -> tuple[Sums, Listing]:
    """Grow the grid of sums of no observations over the boxes that fragments are known to have.

    So that all workers begin with the grid that they end with, and fragments too far outside are
    found before any is read. Nothing is done for models without a grid.

    Args:
        sums: Sums of no observations.
        found: The fragments.
        columns: Of the inputs.

    Returns:
        The sums, and the fragments; those too far outside are among the faults.
    """
    memory = inner_memory(sums.model)
    if not isinstance(memory, OnGrid) or not sums.model.maps_boxes:
        return sums, found
    kept, faults = list[Fragment](), list(found.faults)
    like = next(sums.model.covar_module.parameters())
    for fragment in found.fragments:
        box = fragment.box(columns)
        try:
            if box is not None and box.shape[1] == sums.model._input_dim:
                corners = sums.model.coordinates(torch.from_numpy(box).to(like))
                memory = memory.covering(corners.to(torch.float64))
            kept.append(fragment)
        except (BotorchError, ValueError) as error:
            faults.append(Fault(fragment.key, one_line(error)))
    model = sums.model._shallow_copy()
    set_inner_memory(model, memory)
    return Sums(model), replace(found, fragments=tuple(kept), faults=tuple(faults))
