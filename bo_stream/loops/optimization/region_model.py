"""The local model of a region: an exact one, of outcomes on a logarithmic scale below the best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from gpytorch.constraints import GreaterThan
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.priors import LogNormalPrior
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from bo_stream.loops.models import many_input_kernel, unit_cube
from bo_stream.loops.optimization.trials import OptimizationSettings
from bo_stream.loops.run import predict_mean
from bo_stream.models.auto.auto import AutoGP
from bo_stream.models.fitting import fit_to_stall, hyperparameters, set_hyperparameters

LEAST_NOISE, FIRST_NOISE, MOST_NOISE = 1e-6, math.exp(-5.0), 1e6
"""Noise variances of the local model: at least, at first, and at most where they are known; over
the variance of its outcomes."""


@dataclass(frozen=True)
class LogScale:
    """Outcomes on a logarithmic scale below the best one, so that steep ones far off are near.

    ``−log(1 + (best − y) / unit)``, standardised; linear above the best.

    Attributes:
        best: Largest outcome.
        unit: Difference of the largest and the median outcome.
        mean: Of the logarithms.
        sd: Of the logarithms.
    """

    best: float
    unit: float
    mean: float = 0.0
    sd: float = 1.0

    @classmethod
    def of(cls, Y: Tensor) -> LogScale:
        """Choose the scale of outcomes, ``n``; if they are all equal any unit will do."""
        best = float(Y.max())
        unit = best - float(Y.quantile(0.5))
        raw = cls(best, unit if unit > 0.0 else max(best - float(Y.min()), 1e-12))
        logs = raw.to_scale(Y)
        sd = float(logs.std(correction=0))
        return replace(raw, mean=float(logs.mean()), sd=sd if sd > 0.0 else 1.0)

    def to_scale(self, Y: Tensor) -> Tensor:
        """Transform outcomes."""
        below = (self.best - Y) / self.unit
        logs = torch.where(below > 0.0, -below.clamp_min(0.0).log1p(), -below)
        return (logs - self.mean) / self.sd

    def noise_to_scale(self, Y: Tensor, Yvar: Tensor) -> Tensor:
        """Transform noise variances of outcomes, by the slope there (delta method); NaN stays."""
        below = ((self.best - Y) / self.unit).clamp_min(0.0)
        return Yvar / (self.unit * (1.0 + below) * self.sd) ** 2

    def to_outcome(self, value: float) -> float:
        """Transform a value of the scale to an outcome."""
        log = self.mean + self.sd * value
        return self.best + self.unit * (log if log > 0.0 else -math.expm1(-log))


@dataclass(frozen=True)
class LocalFit:
    """An exact model of the outcomes in and about a region.

    Attributes:
        model: Of outcomes on ``scale`` at points of the unit cube.
        scale: Of the outcomes.
        keys: Keys of the outcomes.
        Yvar: Their known noise variances on the scale, ``n x 1``, NaN where unknown; None: of all.
        means: Posterior means at their points, on the scale.
        best: Key of the largest mean.
        value: That mean, as an outcome: the posterior median there.
    """

    model: AutoGP
    scale: LogScale
    keys: list[int]
    Yvar: Tensor | None
    means: Tensor
    best: int
    value: float

    @classmethod
    def of(
        cls,
        settings: OptimizationSettings,
        X: Tensor,
        Y: Tensor,
        Yvar: Tensor | None,
        keys: list[int],
        scale: LogScale,
        values: Mapping[str, list[float]] | None,
        iterations: int,
    ) -> LocalFit:
        """Build the model, and learn its hyperparameters.

        Args:
            settings: Of the optimization.
            X: Points of the outcomes, then of failed trials, ``n x d``.
            Y: Their outcomes on the scale, ``n x 1``.
            Yvar: Their known noise variances on the scale, ``n x 1``, NaN where unknown; None: all.
            keys: Of the outcomes.
            scale: Of the outcomes.
            values: Hyperparameters, which stay where none better can be learned; None: the first.
            iterations: Most iterations of L-BFGS-B; 0: nothing is learned.

        Raises:
            NotPSDError: No posterior can be computed with the hyperparameters.
        """
        noise = GreaterThan(
            LEAST_NOISE, transform=torch.exp, inv_transform=torch.log, initial_value=FIRST_NOISE
        )
        likelihood = GaussianLikelihood(LogNormalPrior(-4.0, 1.0), noise_constraint=noise)
        model = AutoGP(
            X,
            Y,
            Yvar,
            likelihood=likelihood.to(X),
            covar_module=many_input_kernel(settings.kernel, settings.dim).to(X),
            outcome_transform=None,
            bounds=unit_cube(X),
            families="exact",
        )
        former = hyperparameters(model)
        if values is not None:
            former = {
                name: torch.tensor(values[name], dtype=torch.float64).reshape(each.shape)
                for name, each in former.items()
            }
            set_hyperparameters(model, former)
        if iterations > 0:
            mll = ExactMarginalLogLikelihood(model.likelihood, model)
            mll.train()
            try:
                fit_to_stall(mll, options={"maxiter": iterations, "ftol": 1e-7})
            except NotPSDError:
                set_hyperparameters(model, former)
                model.log_event("a refit that failed")
            mll.eval()
        means = predict_mean(model, X)[: len(keys)].to("cpu", torch.float64)
        value = scale.to_outcome(float(means.max()))
        known = None if Yvar is None else Yvar[: len(keys)]
        return cls(model, scale, keys, known, means, keys[int(means.argmax())], value)

    def noise(self) -> Tensor:
        """Return the noise variances of the outcomes on the scale, known or learned, ``n``."""
        learned = self.model.likelihood.noise.detach().expand(len(self.keys))
        if self.Yvar is None:
            return learned
        return torch.where(self.Yvar.isnan(), learned.unsqueeze(-1), self.Yvar).squeeze(-1)
