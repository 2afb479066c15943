"""A grid model's outcomes and noise, in the units of its memory and of its process."""

from __future__ import annotations

from copy import deepcopy

import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.means import ConstantMean
from torch import Tensor

from bo_stream.models.grid_base import GridBase
from bo_stream.models.known_noise import NOISE_FLOOR, known_noise
from bo_stream.models.memory import Observations
from bo_stream.models.validation import check_finite, check_observations


class GridOutcomes(GridBase):
    """A grid model that knows observations in its units: targets, noise and prior mean."""

    def _check_observations(self, X: Tensor, Y: Tensor, Yvar: Tensor | None) -> None:
        check_observations(
            X,
            Y,
            Yvar,
            dim=self._input_dim,
            outputs=self.num_outputs,
            batch_shape=self.batch_shape,
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
        return shifted, *known_noise(shifted, variances, self._noise_floor, learns)

    def _measured(self, Y: Tensor, Yvar: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Targets less the shift, noise variances, and where these are known."""
        return self._with_noise(Y, Yvar, isinstance(self.likelihood, GaussianLikelihood))

    def _as_outcomes(self, targets: Tensor, noise: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Outcomes and actual noise variances in transformed units, ``batch x m x n`` each."""
        offset, scale = (t.unsqueeze(-1) for t in self._outcomes.offset_and_scale(self._shift))
        outcomes = (targets + self._shift.unsqueeze(-1) - offset) / scale
        variances = noise / scale.square()
        if not isinstance(self.likelihood, GaussianLikelihood):
            return outcomes, variances
        return outcomes, torch.where(known, variances, self.noise_level().unsqueeze(-1))

    def _residual(self) -> Tensor:
        """``[Y, 1] @ residual`` are the standardised outcomes less the prior mean."""
        offset, scale = self._outcomes.offset_and_scale(self._counts())
        constant = (self._shift - offset) / scale - self._prior_mean()
        return torch.stack((scale.reciprocal().expand_as(constant), constant), -1).unsqueeze(-1)

    def _prior_mean(self) -> Tensor:
        if isinstance(self.mean_module, ConstantMean):
            return self._per_output(self.mean_module.constant)
        return torch.zeros_like(self._counts())

    def noise_level(self) -> Tensor:
        """The learned noise variance, or the mean of the known ones, ``batch_shape x m``."""
        if isinstance(self.likelihood, GaussianLikelihood):
            return self._per_output(self.likelihood.noise.squeeze(-1))
        return self._mean_known_noise()

    def _mean_known_noise(self) -> Tensor:
        scale = self.outcome_scale()
        mean = self._memory.mean_known_noise()
        if mean is None:
            return torch.full_like(scale, NOISE_FLOOR)
        return (mean / scale.square()).clamp_min(NOISE_FLOOR)

    def _refresh_fixed_noise(self) -> None:
        """Keep a fixed-noise likelihood at the mean known variance, for BoTorch's fantasies."""
        if isinstance(self.likelihood, FixedNoiseGaussianLikelihood):
            level = self._from_per_output(self._mean_known_noise()).unsqueeze(-1)
            self.likelihood.noise_covar.noise = level.to(self._dtype)

    def _standardize_by(self, totals: Tensor) -> None:
        """Learn the standardisation, in a copy: models that suppose data keep their own."""
        if "outcome_transform" in self._modules:
            self.outcome_transform = deepcopy(self.outcome_transform)
        self._outcomes.learn(totals, self._shift)

    def _counts(self) -> Tensor:
        return self._memory.counts
