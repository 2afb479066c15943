"""The interface of outcomes: from a user's units to those of a memory and of the process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

from torch import Tensor

from bo_stream.models.checks import checked_observations
from bo_stream.models.memory import Measured, Memory, Targets
from bo_stream.models.outcomes.noise import NoiseFloor
from bo_stream.models.outcomes.transform import OutcomeChain
from bo_stream.process.process import PosteriorProcess

if TYPE_CHECKING:
    from bo_stream.models.prior import Prior


class NoiseAtInputs(Protocol):
    """Noise variance that depends on the inputs, in units of the process; differentiable."""

    def __call__(self, inputs: Tensor, /) -> Tensor:
        """Map inputs of the process, ``... x q x d``, to ``... x m x q``."""
        ...

    def select(self, outputs: list[int], /) -> NoiseAtInputs:
        """Return that of some of the outputs."""
        ...


Drawing = Callable[[Tensor, int], tuple[Tensor, Tensor | None]]
"""Maps values of the process, ``S x ... x m x q``, and a seed to outcomes of the same shape, with
their noise variances where these are not the model's own.
"""


class Outcomes(ABC):
    """How outcomes are held in memory as targets, and what the process is told of these.

    A value: methods return what has changed, and leave this one as it is.

    Attributes:
        shift: Subtracted from outcomes after the fixed part of their transform, ``batch x m``.
        floor: How small known noise variances may be.
    """

    shift: Tensor
    floor: NoiseFloor
    columns: ClassVar[int] = 1
    """Columns of Y for an output: two for counts."""

    # --- what is observed ------------------------------------------------------------------

    checked = checked_observations

    @abstractmethod
    def encode(self, prior: Prior, Y: Tensor, Yvar: Tensor | None, infers_noise: bool) -> Targets:
        """Transform outcomes and noise variances to the memory's units.

        Args:
            prior: The hyperparameters.
            Y: ``batch x n x m``, of fitting shape, dtype and device.
            Yvar: Known noise variances shaped as Y; NaN: unknown.
            infers_noise: Whether observations without a known variance have the inferred one.

        Returns:
            Targets (see there) and noise variances (1 where unknown), ``batch x m x n`` each, and
            where the noise is known, ``batch x 1 x n``.

        Raises:
            InputDataError: The likelihood cannot have such outcomes; a variance is missing.
            UnsupportedError: The likelihood takes no known variances.
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

    # --- what is predicted, and what a fantasy observes ---------------------------------------

    @abstractmethod
    def noise_level(self, prior: Prior, memory: Memory) -> Tensor:
        """Return the variance of Gaussian noise, inferred or the mean known one, ``batch x m``.

        Raises:
            UnsupportedError: The likelihood has no Gaussian noise.
        """

    @abstractmethod
    def noise_variance(self, prior: Prior, memory: Memory) -> Tensor:
        """Return the variance of a real outcome given the process, ``batch x m``.

        Raises:
            UnsupportedError: Outcomes are labels or counts.
        """

    @abstractmethod
    def moments(
        self, prior: Prior, mean: Tensor, variance: Tensor, noise: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return mean and variance of outcomes at single points, in units of the process.

        Args:
            prior: The hyperparameters.
            mean: Of the process there, ``... x m x q``.
            variance: Of the process there, shaped as mean.
            noise: Gives the noise variances there.
        """

    @abstractmethod
    def log_density(
        self,
        prior: Prior,
        targets: Tensor,
        mean: Tensor,
        variance: Tensor,
        noise: Callable[[], Tensor],
    ) -> Tensor:
        """Return the log density of outcomes at single points, ``... x m x q``.

        Args:
            prior: The hyperparameters.
            targets: Outcomes in units of the process, ``...' x m x q``.
            mean: As for :meth:`moments`.
            variance: As there.
            noise: As there.

        Raises:
            InputDataError: The likelihood cannot have such outcomes.
        """

    @abstractmethod
    def pseudo_observations(
        self,
        prior: Prior,
        memory: Memory,
        process: PosteriorProcess,
        inputs: Tensor,
        targets: Tensor,
        noise: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return Gaussian outcomes and noise variances that a fantasy conditions the process on.

        Args:
            prior: The hyperparameters.
            memory: Of real observations.
            process: That is conditioned.
            inputs: Transformed, ``... x q x d``.
            targets: Hypothetical outcomes in units of the process, ``... x m x q``.
            noise: Their variances, or None for the model's noise level.

        Returns:
            Two tensors that broadcast to ``... x m x q``.
        """

    @abstractmethod
    def drawing(self, prior: Prior, observation_noise: Tensor | None) -> Drawing | None:
        """Return how outcomes are drawn given the process; None: by adding Gaussian noise.

        Args:
            prior: The hyperparameters.
            observation_noise: Variances to add, or None for the model's own.

        Raises:
            UnsupportedError: Variances are given for outcomes that have none to add.
        """

    # --- outputs that come and go --------------------------------------------------------------

    def outputs_with(self, other: object) -> int:
        """Return the number of outputs after a merge, for which one of the two may get more.

        Args:
            other: Outcomes of the other model, if it is one.

        Raises:
            UnsupportedError: The two cannot be merged.
        """
        return self.shift.shape[-1]

    def grown(self, outputs: int) -> Self:
        """Return the units of more outputs, which all observations had and none named."""
        return self

    def select(self, outputs: list[int]) -> Self:
        """Return the units of some of the outputs."""
        return self.map(lambda value: value[..., outputs])

    # --- the units of the memory, as they follow a stream ----------------------------------------

    rescales: ClassVar[bool]
    """Whether targets in memory can be standardised anew."""

    @abstractmethod
    def begun(self, targets: Tensor, scale: Tensor, zeros_apart: bool, share: float) -> Self:
        """Set the floor of known noise by the variance of the first outcomes.

        Args:
            targets: These, after the fixed part of their transform, ``batch x n x m``.
            scale: Standard deviation by which the outcome transform divides, ``batch x m``.
            zeros_apart: Whether observations without noise are a group of their own.
            share: Smallest positive known noise variance, in parts of the outcomes' variance.
        """

    @abstractmethod
    def before(
        self, prior: Prior, memory: Memory, Y: Tensor, Yvar: Tensor | None, sign: float
    ) -> Self:
        """Let shift and floor follow the stream before a batch enters or leaves; warn of raises.

        Args:
            prior: The hyperparameters.
            memory: That the batch is put into, or taken out of.
            Y: ``batch x n x m``.
            Yvar: Known noise variances shaped as Y; NaN: unknown.
            sign: 1 to put in, −1 to take out.

        Raises:
            UnsupportedError: It is not known to what variances that are taken out were raised; see
                :meth:`NoiseFloor.check_retractable`.
        """

    @abstractmethod
    def found(self, is_found: bool) -> Self:
        """Say whether there are observations in memory; else the next ones set the shift."""

    @abstractmethod
    def settled(self, totals: Tensor) -> Self:
        """Let the noise of observations said to have none follow the outcomes' variance.

        Returns:
            These outcomes where that changes nothing.
        """

    @abstractmethod
    def merged(self, other: Self) -> Self:
        """Return the outcomes of two memories together; the other's shift if this one has none."""

    @abstractmethod
    def map(self, rule: Callable[[Tensor], Tensor]) -> Self:
        """Apply a rule to all tensors."""
