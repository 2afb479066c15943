"""A model's outcomes and noise, in the units of its memory and of its process."""

from __future__ import annotations

from abc import abstractmethod
from copy import deepcopy
from typing import Protocol

import torch
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform, Standardize
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from botorch.utils.types import _DefaultType
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.means import ConstantMean, Mean
from gpytorch.models.gp import GP
from torch import Tensor

from bo_stream.bases.kernels import TransformedKernel
from bo_stream.models.base import StreamingGP
from bo_stream.models.checks import check_finite, check_kernel, check_observations
from bo_stream.models.construction import (
    check_first_observations,
    check_mean,
    check_outputs,
    choose_likelihood,
    first_totals,
    first_transformed,
    learn_bounds,
    observed_inputs,
    reference_outcome,
)
from bo_stream.models.input_transforms import adapt_priors, check_learned
from bo_stream.models.memory import Observations, WhitenedMemory
from bo_stream.models.noise import (
    LEAST_NOISE,
    NOISE_FLOOR,
    NoiseFloor,
    known_noise,
    outcome_variance,
    warn_of_zeros,
    zero_rows,
)
from bo_stream.models.objective import NoiseGroup
from bo_stream.sufficient_statistics import target_columns


class Memory(Protocol):
    """What a model must be able to ask a memory, whatever it holds."""

    @property
    def totals(self) -> Tensor:
        """``[Y, 1]ᵀ [Y, 1]`` of all observations, ``... x m x 2 x 2``."""
        ...

    @property
    def counts(self) -> Tensor:
        """Number of observations, ``... x m``."""
        ...

    def mean_known_noise(self) -> Tensor | None:
        """Mean of the known noise variances, ``... x m``, or None without any."""
        ...


class MeasuredGP(StreamingGP):
    """A model that knows observations in its units: targets, noise and prior mean."""

    _memory: Memory
    _shift: Tensor
    _noise_floor: NoiseFloor
    _has_reference: bool
    _finds_reference: bool
    _knows_zeros: bool = True

    def _begin(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        train_Yvar: Tensor | None,
        outcome_transform: OutcomeTransform | _DefaultType | None,
    ) -> None:
        """Check the first observations; take shapes and outcome transform from them."""
        check_first_observations(train_X, train_Y, train_Yvar)
        GP.__init__(self)
        self._supposed = None
        self._num_outputs = train_Y.shape[-1]
        self._batch_shape = train_X.shape[:-2]
        self._input_dim = train_X.shape[-1]
        if isinstance(outcome_transform, _DefaultType):
            outcome_transform = Standardize(m=self._num_outputs, batch_shape=self._batch_shape)
        if outcome_transform is not None:
            check_outputs(outcome_transform, self._num_outputs)
            self.outcome_transform = outcome_transform
        targets, _ = self._outcomes.to_targets(train_Y, train_Yvar)
        self._shift = reference_outcome(targets)
        self._has_reference = train_Y.shape[-2] > 0
        self._finds_reference = True

    def _first_inputs(self, X: Tensor, transform: InputTransform | None) -> Tensor:
        """Let the input transform, if any, learn its bounds, and apply it."""
        inputs = X
        if transform is not None:
            self.input_transform = transform
            inputs = first_transformed(X, transform)
        self._process_dim = inputs.shape[-1]
        return inputs

    def _set_modules(
        self,
        dim: int,
        Yvar: Tensor | None,
        likelihood: _GaussianLikelihoodBase | None,
        covar_module: Kernel | None,
        mean_module: Mean | None,
    ) -> None:
        """Kernel, mean and likelihood, or BoTorch's defaults for ``dim`` inputs."""
        aug_batch = self._parameter_shape
        if covar_module is not None:
            check_kernel(covar_module, dim, aug_batch)
        self.covar_module = (
            get_covar_module_with_dim_scaled_prior(dim, batch_shape=aug_batch)
            if covar_module is None
            else covar_module
        )
        self.mean_module = (
            ConstantMean(batch_shape=aug_batch) if mean_module is None else mean_module
        )
        self.likelihood = choose_likelihood(likelihood, Yvar, aug_batch)
        check_mean(self.mean_module, aug_batch)

    def _learn_transform(self, learned: InputTransform | None, inputs: Tensor) -> Tensor:
        """Make a learnable input transform a part of the kernel, as which memory follows it.

        Args:
            learned: What :func:`split_transform` left of the user's, or None.
            inputs: As the process takes them.

        Returns:
            Inputs as the user's kernel has them.
        """
        if learned is None:
            return inputs
        learn_bounds(inputs, learned)
        transformed = observed_inputs(inputs, learned)
        check_learned(learned, inputs, transformed)
        adapt_priors(learned)
        self.covar_module = TransformedKernel(self.covar_module, learned)
        return transformed

    def _standardize_first(self, X: Tensor, Y: Tensor, Yvar: Tensor | None) -> None:
        """Move to the first observations' dtype and device; learn the standardisation."""
        targets, _ = self._outcomes.to_targets(Y, Yvar)
        self.to(X)
        totals = first_totals(targets, self._shift)
        self._standardize_by(totals)
        self._noise_floor = self._first_noise_floor(totals)

    def _first_noise_floor(self, totals: Tensor) -> NoiseFloor:
        scale = self.outcome_scale().square()
        variance = outcome_variance(totals)
        return NoiseFloor.of(torch.where(variance > 0.0, variance.minimum(scale), scale))

    def _without_reference(self) -> None:
        """Keep outcomes as they are in the process: there is no shift to find."""
        self._shift = torch.zeros_like(self._shift)
        self._finds_reference = False

    def _refer_to(self, targets: Tensor) -> None:
        """Take the reference outcome of an empty model from the first that enter.

        Args:
            targets: Of these, less the present reference, ``batch_shape x m x n``.
        """
        self._shift = self._shift + targets.mean(-1)
        centred = target_columns(targets - targets.mean(-1, keepdim=True))
        self._noise_floor = self._first_noise_floor(centred.mT @ centred)
        self._has_reference = True

    def _settle_noise_floor(self, Y: Tensor, Yvar: Tensor | None, sign: float) -> None:
        """Let the floor of known noise follow the stream, before a batch enters or leaves."""
        if Yvar is None:
            return
        targets, variances = self._outcomes.to_targets(Y.detach(), Yvar)
        if variances is None:
            return
        noise = variances.detach().double().mT
        if self._sets_zeros_apart:
            zeros = zero_rows(noise)
            noise = torch.where(zeros, torch.inf, noise)
            if sign > 0.0 and bool(zeros.any()):
                totals = self._memory.totals + first_totals(targets, self._shift)
                self._noise_floor = self._noise_floor.with_zeros(totals)
                warn_of_zeros(int(zeros.sum()), self._noise_floor.zero)
        if sign < 0.0:
            self._noise_floor.check_retractable(noise)
            return
        if not bool(self._noise_floor.below(noise).any()):
            return
        totals = self._memory.totals + first_totals(targets, self._shift)
        self._noise_floor = self._noise_floor.for_update(noise, totals)

    @torch.no_grad()
    def coordinates(self, X: Tensor) -> Tensor:
        """Inputs of observations as they enter memory now, ``... x d -> ... x k``."""
        return self._projected(observed_inputs(X, self._input_transform).detach())

    @abstractmethod
    def _projected(self, inputs: Tensor) -> Tensor:
        """Transformed inputs as they enter memory."""

    def _check_observations(self, X: Tensor, Y: Tensor, Yvar: Tensor | None) -> None:
        check_observations(
            X,
            Y,
            Yvar,
            dim=self._input_dim,
            outputs=self.num_outputs,
            batch_shape=self._batch_shape,
            like=self.train_targets,
        )

    @torch.no_grad()
    def standardized(
        self, X: Tensor, Y: Tensor, Yvar: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Outcomes and noise variances as the process has them, ``batch x m x n`` each, float64.

        Args:
            X: ``batch_shape x n x d``.
            Y: ``batch_shape x n x m``.
            Yvar: Known noise variances shaped as Y; NaN: unknown.
        """
        self._check_observations(X, Y, Yvar)
        return self._as_outcomes(*self._measured(Y, Yvar))

    def _observations(self, X: Tensor, Y: Tensor, Yvar: Tensor | None, sign: float) -> Observations:
        targets, noise, known = self._measured(Y, Yvar)
        return Observations(self.coordinates(X).to(torch.float64), targets, noise, known, sign)

    def _with_noise(
        self, Y: Tensor, Yvar: Tensor | None, learns: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        targets, variances = self._outcomes.to_targets(Y.detach(), Yvar)
        check_finite("Y after its outcome transform", targets)
        shifted = targets.to(torch.float64).mT - self._shift.unsqueeze(-1)
        apart = self._sets_zeros_apart and not learns
        return shifted, *known_noise(shifted, variances, self._noise_floor, learns, apart)

    @property
    def _sets_zeros_apart(self) -> bool:
        """Whether observations without noise are a group: where no noise level is learned."""
        return self._knows_zeros and isinstance(self.likelihood, FixedNoiseGaussianLikelihood)

    def _zero_level(self) -> Tensor:
        """Noise variance of observations that are said to have none, ``batch_shape x m``."""
        return self._noise_floor.zero / self.outcome_scale().square()

    def _common_level(self) -> Tensor | None:
        """Noise variance that all observations without a known one have, ``batch_shape x m``.

        The learned one, or that of zeros; None where every observation has a known one.
        """
        if isinstance(self.likelihood, GaussianLikelihood):
            return self.noise_level()
        return self._zero_level() if self._noise_floor.any_zero else None

    def _measured(self, Y: Tensor, Yvar: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Targets less the shift, noise variances, and where these are known."""
        return self._with_noise(Y, Yvar, isinstance(self.likelihood, GaussianLikelihood))

    def _as_outcomes(self, targets: Tensor, noise: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Outcomes and actual noise variances in transformed units, ``batch x m x n`` each."""
        offset, scale = (t.unsqueeze(-1) for t in self._outcomes.offset_and_scale(self._shift))
        outcomes = (targets + self._shift.unsqueeze(-1) - offset) / scale
        variances = noise / scale.square()
        level = self._common_level()
        if level is None:
            return outcomes, variances
        return outcomes, torch.where(known, variances, level.unsqueeze(-1))

    def _residual(self) -> Tensor:
        """``[Y, 1] @ residual`` are the standardised outcomes less the prior mean."""
        offset, scale = self._outcomes.offset_and_scale(self._shift)
        constant = (self._shift - offset) / scale - self._prior_mean()
        return torch.stack((scale.reciprocal().expand_as(constant), constant), -1).unsqueeze(-1)

    def _noise_groups(
        self, memory: WhitenedMemory, left_out: Tensor | float = 0.0
    ) -> list[NoiseGroup]:
        groups, level = [], self._common_level()
        if level is not None:
            groups.append(NoiseGroup(memory.learned, level + left_out))
        if memory.known is not None:
            groups.append(NoiseGroup(memory.known, self.outcome_scale().square().reciprocal()))
        return groups or [NoiseGroup(memory.learned, torch.ones_like(self.outcome_scale()))]

    def _prior_mean(self) -> Tensor:
        if isinstance(self.mean_module, ConstantMean):
            return self._per_output(self.mean_module.constant)
        return torch.zeros_like(self._counts())

    def noise_level(self) -> Tensor:
        """The learned noise variance, or the mean of the positive known ones, ``batch_shape x m``.

        Where all that are known are zero: what they are raised to.
        """
        if isinstance(self.likelihood, GaussianLikelihood):
            return self._per_output(self.likelihood.noise.squeeze(-1))
        return self._mean_known_noise()

    def _mean_known_noise(self) -> Tensor:
        scale = self.outcome_scale()
        mean = self._memory.mean_known_noise()
        if mean is None:
            zeros = self._noise_floor.any_zero
            return self._zero_level() if zeros else torch.full_like(scale, NOISE_FLOOR)
        return (mean / scale.square()).clamp_min(LEAST_NOISE)

    def _refresh_fixed_noise(self) -> None:
        """Keep a fixed-noise likelihood at the mean known variance, for BoTorch's fantasies."""
        if isinstance(self.likelihood, FixedNoiseGaussianLikelihood):
            level = self._from_per_output(self._mean_known_noise()).unsqueeze(-1)
            self.likelihood.noise_covar.noise = level.to(self._dtype)

    def _standardize_by(self, totals: Tensor) -> None:
        """Learn the standardisation, in a copy: models that suppose data keep their own."""
        if "outcome_transform" in self._modules:
            self.outcome_transform = deepcopy(self.outcome_transform).eval()
        self._outcomes.learn(totals, self._shift)

    def _counts(self) -> Tensor:
        return self._memory.counts
