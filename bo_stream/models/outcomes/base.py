"""The interface of outcomes: from a user's units to those of a memory and of the process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

from torch import Tensor

from bo_stream.models.memory import Measured, Targets
from bo_stream.models.outcomes.noise import NoiseFloor
from bo_stream.models.outcomes.transform import OutcomeChain


class Outcomes(ABC):
    """How outcomes are held in memory as targets, and what the process is told of these.

    A value: methods return what has changed, and leave this one as it is.

    Attributes:
        shift: Subtracted from outcomes after the fixed part of their transform, ``batch x m``.
        floor: How small known noise variances may be.
    """

    shift: Tensor
    floor: NoiseFloor

    @abstractmethod
    def encode(
        self, chain: OutcomeChain, Y: Tensor, Yvar: Tensor | None, infers_noise: bool
    ) -> Targets:
        """Transform outcomes and noise variances to the memory's units.

        Args:
            chain: The outcome transform.
            Y: ``batch x n x m``.
            Yvar: Known noise variances shaped as Y; NaN: unknown.
            infers_noise: Whether observations without a known variance have the inferred one.

        Returns:
            Targets and noise variances (1 where unknown), ``batch x m x n`` each, and where the
            noise is known, ``batch x 1 x n``.
        """

    @abstractmethod
    def standardized(
        self, chain: OutcomeChain, level: Tensor | None, data: Measured
    ) -> tuple[Tensor, Tensor]:
        """Return outcomes and noise variances as the process has them, ``batch x m x n`` each.

        Args:
            chain: The outcome transform.
            level: Noise variance of observations without a known one, ``batch x m``, if any.
            data: Targets and noise variances as :meth:`encode` gives them.
        """

    @abstractmethod
    def target_map(self, chain: OutcomeChain, mean: Tensor) -> Tensor:
        """Return C with ``[targets, 1] @ C`` the standardised outcomes less the prior mean.

        Args:
            chain: The outcome transform.
            mean: Of the process, ``batch x m``.

        Returns:
            ``batch x m x 2 x 1``.
        """

    @property
    @abstractmethod
    def awaits(self) -> bool:
        """Whether the next observations set the shift."""

    @abstractmethod
    def found(self, is_found: bool) -> Self:
        """Say whether the shift was taken from observations that are in memory."""

    @abstractmethod
    def begun(self, totals: Tensor, scale: Tensor, zeros_apart: bool) -> Self:
        """Set the floor of known noise by the variance of the first outcomes.

        Args:
            totals: ``[Y, 1]ᵀ [Y, 1]`` of these, ``batch x m x 2 x 2``.
            scale: Standard deviation by which the outcome transform divides, ``batch x m``.
            zeros_apart: Whether observations without noise are a group of their own.
        """

    @abstractmethod
    def forgotten(self) -> Self:
        """Take the shift anew from the next observations."""

    @abstractmethod
    def referring_to(self, targets: Tensor, scale: Tensor) -> Self:
        """Take the shift from the first observations that enter an empty model.

        Args:
            targets: Of these, less the present shift, ``batch x m x n``.
            scale: Standard deviation by which the outcome transform divides, ``batch x m``.
        """

    @abstractmethod
    def before_update(self, chain: OutcomeChain, Y: Tensor, Yvar: Tensor, totals: Tensor) -> Self:
        """Let the floor of known noise follow the stream before a batch enters; warn of raises.

        Args:
            chain: The outcome transform.
            Y: ``batch x n x m``.
            Yvar: Known noise variances shaped as Y; NaN: unknown.
            totals: ``[Y, 1]ᵀ [Y, 1]`` of the targets in memory, ``batch x m x 2 x 2``.
        """

    @abstractmethod
    def check_retractable(self, chain: OutcomeChain, Y: Tensor, Yvar: Tensor) -> None:
        """Check that it is known to what the variances of observations in memory were raised.

        Raises:
            UnsupportedError: It is not; see :meth:`NoiseFloor.check_retractable`.
        """

    @abstractmethod
    def settled(self, totals: Tensor) -> Self:
        """Let the noise of observations said to have none follow the outcomes' variance.

        Returns:
            These outcomes where that changes nothing.
        """

    @abstractmethod
    def merged(self, other: Outcomes) -> Self:
        """Return the outcomes of two memories together; the other's shift if this one has none."""

    @abstractmethod
    def map(self, rule: Callable[[Tensor], Tensor]) -> Self:
        """Apply a rule to all tensors."""
