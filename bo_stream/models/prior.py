"""What the hyperparameters of a model say before any data: of its process, and of the noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.means import ConstantMean, Mean
from torch import Tensor

from bo_stream.models.hyperparameters import Hyperparameters
from bo_stream.models.memory import Measured, WhitenedMemory
from bo_stream.models.objective import NoiseGroup, combine
from bo_stream.models.outcomes.base import Outcomes
from bo_stream.models.outcomes.transform import OutcomeChain
from bo_stream.tensors import State, is_in, state_of
from bo_stream.weights import GaussianEvidence

if TYPE_CHECKING:
    from bo_stream.models.base import StreamingGP


@dataclass(frozen=True)
class Prior:
    """The hyperparameters as they are now, and the units of the outcomes: a view, no copy.

    All that is computed from it is differentiable in the hyperparameters.

    Attributes:
        kernel: Of batch shape ``batch_shape``, or ``batch_shape x m`` for m > 1 outputs.
        mean_module: Of the same batch shape; a constant, or zero.
        likelihood: Of the outcomes.
        chain: The outcome transform.
        outcomes: Units of what the memory holds.
        batch_shape: Of the data.
        num_outputs: m.
        model: Whose hyperparameters these are, and where numerical events are put on record.
    """

    kernel: Kernel
    mean_module: Mean
    likelihood: Likelihood
    chain: OutcomeChain
    outcomes: Outcomes
    batch_shape: torch.Size
    num_outputs: int
    model: StreamingGP

    def state(self) -> State:
        """Copy all that the prior depends on, to see later whether it has changed."""
        return state_of(self.model)

    def is_in(self, state: State) -> bool:
        """Say whether nothing has changed since."""
        return is_in(self.model, state)

    def copied(self) -> Hyperparameters:
        """Copy the hyperparameters in float64, to move them apart from the model."""
        return Hyperparameters(self.kernel, self.mean_module, self.likelihood)

    def take_over(self, hyper: Hyperparameters) -> None:
        """Set the model's hyperparameters to others, which are rounded to its dtype."""
        hyper.rounded(next(self.kernel.parameters()).dtype).copy_to(self.model)

    @property
    def shape(self) -> torch.Size:
        """``batch_shape x m``."""
        return torch.Size((*self.batch_shape, self.num_outputs))

    def per_output(self, value: Tensor) -> Tensor:
        """Bring ``batch_shape (x m if m > 1)`` to ``batch_shape x m``, float64."""
        value = value.to(torch.float64)
        value = value.unsqueeze(-1) if self.num_outputs == 1 else value
        return value.expand(self.shape)

    @property
    def mean(self) -> Tensor:
        """Prior mean of the process, ``batch_shape x m``."""
        if isinstance(self.mean_module, ConstantMean):
            return self.per_output(self.mean_module.constant)
        return torch.zeros_like(self.outcomes.shift)

    @property
    def scale(self) -> Tensor:
        """Standard deviation by which the outcome transform divides, ``batch_shape x m``."""
        return self.chain.offset_and_scale(self.outcomes.shift)[1]

    @property
    def is_gaussian(self) -> bool:
        """Whether the likelihood is Gaussian with a noise variance to learn."""
        return isinstance(self.likelihood, GaussianLikelihood)

    @property
    def inferred_noise(self) -> Tensor | None:
        """The likelihood's noise variance where it learns one, ``batch_shape x m``."""
        if self.is_gaussian:
            return self.per_output(self.likelihood.noise.squeeze(-1))
        return None

    @property
    def zero_noise(self) -> Tensor:
        """Noise variance of observations that are said to have none, ``batch_shape x m``."""
        return self.outcomes.floor.zero / self.scale.square()

    @property
    def common_noise(self) -> Tensor | None:
        """Noise variance of all observations without a known one, ``batch_shape x m``.

        The inferred one, or that of zeros; None where every observation has a known one.
        """
        inferred = self.inferred_noise
        if inferred is None and self.outcomes.floor.any_zero:
            return self.zero_noise
        return inferred

    def standardized(self, data: Measured) -> tuple[Tensor, Tensor]:
        """Return outcomes and noise variances as the process has them, ``batch x m x n`` each."""
        return self.outcomes.standardized(self.chain, self.common_noise, data)

    def target_map(self) -> Tensor:
        """See :meth:`Outcomes.target_map`."""
        return self.outcomes.target_map(self.chain, self.mean)

    def noise_groups(
        self, memory: WhitenedMemory, truncated: Tensor | float = 0.0
    ) -> list[NoiseGroup]:
        """Return the statistics of observations with inferred and with known noise, at its level.

        Args:
            memory: Of both.
            truncated: Prior variance that the features leave out, added to an inferred noise.
        """
        groups, level = [], self.common_noise
        if level is not None:
            groups.append(NoiseGroup(memory.learned, level + truncated))
        if memory.known is not None:
            groups.append(NoiseGroup(memory.known, self.scale.square().reciprocal()))
        return groups or [NoiseGroup(memory.learned, torch.ones_like(self.scale))]

    def evidence(self, memory: WhitenedMemory) -> GaussianEvidence:
        """Return what the statistics say of the standardised outcomes less the prior mean."""
        return self.evidence_of(self.noise_groups(memory))

    def evidence_of(self, groups: Sequence[NoiseGroup]) -> GaussianEvidence:
        """Return the same from statistics at their noise levels."""
        return combine(groups, self.target_map())
