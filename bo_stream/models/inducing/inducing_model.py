"""The models at inducing points: what each of them has besides the verbs of all models."""

from __future__ import annotations

from abc import ABC
from copy import deepcopy
from dataclasses import replace

from botorch.utils.types import _DefaultType
from torch import Tensor

from bo_stream.allocation.allocator import Allocator, checked_number
from bo_stream.allocation.oips import Novelty
from bo_stream.models.base import StreamingGP
from bo_stream.models.checks import check_type
from bo_stream.models.inducing.inference import (
    check_allocator,
    check_points,
    check_points_fit,
    empty_memory,
)
from bo_stream.models.inducing.memory import InducingMemory


class InducingModel(StreamingGP, ABC):
    """A streaming Gaussian process whose memory is at M inducing points Z, ``M x d``. Abstract."""

    _memory: InducingMemory

    @property
    def inducing_points(self) -> Tensor:
        """Inducing points Z, ``M x d``, in transformed inputs: a copy."""
        return self._memory.values.Z.to(self.train_targets, copy=True)

    @property
    def allocator(self) -> Allocator | None:
        """Allocator that places the points as the stream goes by; None: they stay. May be set."""
        return self._memory.allocator

    @allocator.setter
    def allocator(self, allocator: Allocator | None) -> None:
        check_allocator(allocator)
        self._memory = replace(self._memory, allocator=deepcopy(allocator))

    def _first_memory(
        self,
        inducing_points: Tensor | None,
        allocator: Allocator | _DefaultType | None,
        max_points: int,
        X: Tensor,
    ) -> InducingMemory:
        """Move to the device of X, and make an empty memory; arguments as of :class:`OSGPR`."""
        self.to(X)
        default = Novelty(checked_number("max_points", max_points))
        if isinstance(allocator, _DefaultType):
            allocator = default if inducing_points is None else None
        check_allocator(allocator)
        if inducing_points is not None:
            check_points("inducing_points", inducing_points, X.shape[-1], max_points)
            check_type("inducing_points", inducing_points, X)
        elif allocator is None:
            raise ValueError(
                "Expected inducing_points or an allocator, got neither: nothing could be learned."
            )
        Z, prior = X.new_zeros(0, self._process_dim), self.prior
        if inducing_points is not None and len(inducing_points) > 0:
            check_points_fit(len(inducing_points), prior.shape.numel())
            Z = self.coordinates(inducing_points.detach().clone())
        return empty_memory(Z, prior, deepcopy(allocator))
