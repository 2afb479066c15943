"""Fits that are counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from bo_stream.models.base import StreamingGP


@contextmanager
def evaluations() -> Iterator[list[None]]:
    """Of the objectives of our models, one entry for each."""
    counted: list[None] = []
    compute = StreamingGP.compute_custom_loss

    def counting(self: StreamingGP, *args: Any, **kwargs: Any) -> Tensor:
        counted.append(None)
        return compute(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamingGP, "compute_custom_loss", counting)
        yield counted
