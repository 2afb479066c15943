"""The local model of a region search, and the trials that it learns from, as tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from gpytorch.constraints import GreaterThan
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.priors import LogNormalPrior
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from bo_stream.loops.models import many_input_kernel, unit_cube
from bo_stream.loops.optimization.region import LogScale
from bo_stream.loops.optimization.trials import Ledger, OptimizationSettings
from bo_stream.loops.run import predict_mean
from bo_stream.models.auto.auto import AutoGP
from bo_stream.models.fitting import hyperparameters, set_hyperparameters
from bo_stream.models.lbfgs import fit_to_stall

LEAST_NOISE, FIRST_NOISE, MOST_NOISE = 1e-6, math.exp(-5.0), 1e6
"""Noise variances of the local model: at least, at first, and at most where they are known; over
the variance of its outcomes."""

DOUBT = 1.0
"""Noise variance of failed trials and of outliers, likewise: a model passes over one of them among
good outcomes, and not over several together."""


class TrialRows:
    """The trials of a ledger as tensors by key, on the CPU, in float64.

    Attributes:
        X: Points in the unit cube, ``n x d``.
        Y: Outcomes, larger being better, ``n``; NaN where there is none.
        Yvar: Known noise variances of the outcomes, ``n``; NaN where there is none.
    """

    def __init__(self, settings: OptimizationSettings) -> None:
        """Begin without trials."""
        self._settings = settings
        self._room = torch.empty(0, settings.dim + 2, dtype=torch.float64)
        self._set_length(0)

    def read(self, ledger: Ledger, keys: Sequence[int]) -> list[int]:
        """Read trials that were added or changed, so that these are the trials of the ledger.

        Returns:
            The keys of those that have another outcome or noise variance than before.
        """
        if len(ledger) > len(self._room):
            added = 2 * len(ledger) - len(self._room)
            self._room = torch.nn.functional.pad(self._room, (0, 0, 0, added), value=math.nan)
        self._set_length(len(ledger))
        trials, sign = [ledger[key] for key in keys], self._settings.sign
        X = self._settings.to_unit_cube([trial.X for trial in trials]).to(self._room)
        outcomes = [math.nan if trial.Y is None else sign * trial.Y for trial in trials]
        noise = [math.nan if trial.Yvar is None else trial.Yvar for trial in trials]
        columns = torch.tensor((outcomes, noise), dtype=torch.float64).mT
        former = self._room[list(keys), -2:]
        same = (columns == former) | (columns.isnan() & former.isnan())
        self._room[list(keys)] = torch.cat((X, columns), -1)
        return [key for key, alike in zip(keys, same.all(-1).tolist(), strict=True) if not alike]

    def with_outcome(self, first: int = 0) -> Tensor:
        """Return the keys from the first one on that have an outcome."""
        return (~self.Y[first:].isnan()).nonzero().squeeze(-1) + first

    def _set_length(self, length: int) -> None:
        self.X, self.Y, self.Yvar = self._room[:length].split((self._settings.dim, 1, 1), -1)
        self.Y, self.Yvar = self.Y.squeeze(-1), self.Yvar.squeeze(-1)


@dataclass(frozen=True)
class LocalFit:
    """An exact model of the outcomes in and about a region.

    Attributes:
        model: Of outcomes on ``scale`` at points of the unit cube.
        scale: Of the outcomes.
        keys: Keys of the outcomes.
        Yvar: Their noise variances in the model, ``n x 1``, NaN where learned; None: all are.
        doubtful: Whether that of an outcome is ``DOUBT``, ``n``.
        means: Posterior means at their points, on the scale.
        best: Key of the largest mean.
        value: That mean, as an outcome: the posterior median there.
    """

    model: AutoGP
    scale: LogScale
    keys: list[int]
    Yvar: Tensor | None
    doubtful: Tensor
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
            X: Points of the n outcomes, then of f failed trials, ``n+f x d``.
            Y: Their outcomes on the scale, ``n+f x 1``.
            Yvar: Known noise variances of the outcomes on the scale, ``n x 1``, NaN where unknown;
                None: of all.
            keys: Of the outcomes.
            scale: Of the outcomes.
            values: Hyperparameters, which stay where none better can be learned; None: the first.
            iterations: Most iterations of L-BFGS-B; 0: nothing is learned.

        Raises:
            NotPSDError: No posterior can be computed with the hyperparameters.
        """
        n, variances = len(keys), torch.full_like(Y, DOUBT)
        variances[:n] = math.nan if Yvar is None else Yvar
        floor = -math.inf if scale.floor is None else scale.floor
        doubtful = variances[:n].isnan() & (Y[:n] <= floor)
        variances[:n][doubtful] = DOUBT
        noise = GreaterThan(
            LEAST_NOISE, transform=torch.exp, inv_transform=torch.log, initial_value=FIRST_NOISE
        )
        likelihood = GaussianLikelihood(LogNormalPrior(-4.0, 1.0), noise_constraint=noise)
        model = AutoGP(
            X,
            Y,
            None if bool(variances.isnan().all()) else variances,
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
        means = predict_mean(model, X)[:n].to("cpu", torch.float64)
        value = scale.to_outcome(float(means.max()))
        of_outcomes = None if bool(variances[:n].isnan().all()) else variances[:n]
        best = keys[int(means.argmax())]
        return cls(model, scale, keys, of_outcomes, doubtful.squeeze(-1), means, best, value)

    def noise(self) -> Tensor:
        """Return the noise variances of the outcomes on the scale, known or learned, ``n``."""
        learned = self.model.likelihood.noise.detach().expand(len(self.keys))
        if self.Yvar is None:
            return learned
        Yvar = self.Yvar.squeeze(-1)
        return torch.where(Yvar.isnan() | self.doubtful, learned, Yvar)
