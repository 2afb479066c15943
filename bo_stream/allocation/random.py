"""A uniform sample of the stream."""

from __future__ import annotations

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.allocation.allocator import Allocator
from bo_stream.allocation.numbers import checked_number


class Random(Allocator):
    """At most ``max_points``, every input seen as likely as every other: reservoir sampling.

    It counts what it has seen, so one allocator serves one stream. Cost O(n) an update. Source:
    Vitter (1985), algorithm R.
    """

    def __init__(self, max_points: int, seed: int = 0) -> None:
        """Set the number.

        Args:
            max_points: Largest number M.
            seed: Of the draws.

        Raises:
            ValueError: The number is not positive.
        """
        self.max_points = checked_number("max_points", max_points)
        self.seed = seed
        self._seen = 0
        self._state = torch.Generator().manual_seed(seed).get_state()

    def fresh(self) -> Random:
        """An allocator of the same settings that has seen nothing."""
        return Random(self.max_points, self.seed)

    def _update(self, Z: Tensor, X_new: Tensor, kernel: Kernel) -> Tensor:
        room = max(0, self.max_points - len(Z))
        kept = torch.cat((Z, X_new[:room]))
        self._seen = max(self._seen, len(Z)) + min(room, len(X_new))
        generator = torch.Generator()
        generator.set_state(self._state.cpu())  # a file loaded elsewhere has moved it
        for row in X_new[room:]:
            self._seen += 1
            place = int(torch.randint(self._seen, (), generator=generator))
            if place < len(kept):
                kept[place] = row
        self._state = generator.get_state()  # copies of the allocator keep their own
        return kept
