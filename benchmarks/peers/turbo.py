"""TuRBO (Eriksson et al., 2019), with one region as in BoTorch's tutorial, or several."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import final

import gpytorch
import torch
from botorch.exceptions.errors import ModelFittingError
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from gpytorch.constraints import Interval
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor
from torch.quasirandom import SobolEngine

from benchmarks.peers.searchers import Searcher

FIRST_SIDE, LEAST_SIDE, LARGEST_SIDE = 0.8, 0.5**7, 1.6
SUCCESSES = 10
"""Better batches in a row after which a region's side is doubled: the tutorial's number."""

BETTER = 1e-3
"""What a success gains at least, in absolute values of the best outcome."""

NOISE, MUCH_NOISE = (1e-8, 1e-3), (5e-4, 0.2)
"""Noise variance of standardized outcomes: the tutorial's, and that of the authors' own code."""


@dataclass
class Region:
    """A trust region.

    Attributes:
        X: Its rows, ``n x d``.
        Y: Their outcomes, ``n``.
        side: Length of a side before it is stretched by the lengthscales.
        successes: Better batches in a row.
        failures: Evaluations in a row that were no better.
        model: Of these rows; None until it is wanted.
    """

    X: Tensor
    Y: Tensor
    side: float = FIRST_SIDE
    successes: int = 0
    failures: int = 0
    model: SingleTaskGP | None = field(default=None, repr=False)


@final
class Turbo(Searcher):
    """Thompson sampling in m trust regions, each with an exact GP of the rows it has asked for.

    Kernel, constraints, fit, candidates and tolerances are the tutorial's. As in the authors' code
    a batch goes to the regions whose draws are least, failures are counted in evaluations, which
    with one region is the same, and a region that has become too small begins anew from 2d points.
    With noise the variance may be larger, and the centre is the row of the least posterior mean,
    which the authors advise.
    """

    def __init__(self, dim: int, q: int, seed: int, regions: int, noisy: bool) -> None:
        """Begin with 2d Sobol points a region.

        Args:
            dim: Inputs d.
            q: Points at a time.
            seed: Of everything.
            regions: Their number m.
            noisy: Whether outcomes have noise.
        """
        self._dim, self._q, self._noisy = dim, q, noisy
        self._first = 2 * dim
        self._candidates = min(5_000, max(2_000, 200 * dim))
        self._tolerance = q * math.ceil(max(4.0 / q, dim / q))
        self._generator = torch.Generator().manual_seed(seed)
        self._queue: list[tuple[int, Tensor]] = []
        self._regions = [self._begun(i) for i in range(regions)]
        self._owners: list[int] = []
        self._ended: list[tuple[Tensor, float]] = []  # best points of regions that have ended

    def _begun(self, i: int) -> Region:
        """An empty region, whose first points are put into the queue."""
        self._queue += [(i, x) for x in self._sobol().draw(self._first, dtype=torch.float64)]
        return Region(torch.empty(0, self._dim).double(), torch.empty(0).double())

    def _sobol(self) -> SobolEngine:
        seed = int(torch.randint(2**31, (), generator=self._generator))
        return SobolEngine(self._dim, scramble=True, seed=seed)

    def ask(self) -> Tensor:
        """Return first points while there are any, else those whose draws are least."""
        if self._queue:
            asked, self._queue = self._queue[: self._q], self._queue[self._q :]
            self._owners = [i for i, _ in asked]
            return torch.stack([x for _, x in asked])
        whole = gpytorch.settings.max_cholesky_size(math.inf)
        with torch.random.fork_rng([]), torch.no_grad(), whole:
            torch.manual_seed(int(torch.randint(2**31, (), generator=self._generator)))
            found = [self._drawn(region) for region in self._regions]
        candidates = torch.cat([C for C, _ in found])
        draws = torch.cat([each for _, each in found], -1)
        chosen: list[int] = []
        for draw in draws:
            draw[chosen] = math.inf  # each candidate once
            chosen.append(int(draw.argmin()))
        self._owners = [j // self._candidates for j in chosen]
        return candidates[chosen]

    def _drawn(self, region: Region) -> tuple[Tensor, Tensor]:
        """Candidates ``c x d`` of a region, and q joint draws ``q x c`` of their values."""
        model = self._model(region)
        centre = region.X[self._best_row(region)]
        lengthscale = model.covar_module.base_kernel.lengthscale.reshape(-1)
        sides = region.side * lengthscale / lengthscale.log().mean().exp()
        low, high = (centre - sides / 2.0).clamp(0.0, 1.0), (centre + sides / 2.0).clamp(0.0, 1.0)
        size = (self._candidates, self._dim)
        inside = low + (high - low) * self._sobol().draw(size[0], dtype=torch.float64)
        moved = torch.rand(size, generator=self._generator) <= min(20.0 / self._dim, 1.0)
        none = (~moved.any(-1)).nonzero().reshape(-1)
        moved[none, torch.randint(self._dim, (len(none),), generator=self._generator)] = True
        candidates = torch.where(moved, inside, centre)
        return candidates, -model.posterior(candidates).rsample(torch.Size([self._q])).squeeze(-1)

    def _model(self, region: Region) -> SingleTaskGP:
        """The model of a region's rows, fitted from the start where these have changed.

        It standardizes the outcomes, which it is to maximise; its posterior has their units.
        """
        if region.model is None:
            matern = MaternKernel(
                nu=2.5, ard_num_dims=self._dim, lengthscale_constraint=Interval(0.005, 4.0)
            )
            interval = Interval(*(MUCH_NOISE if self._noisy else NOISE))
            model = SingleTaskGP(
                region.X,
                -region.Y.unsqueeze(-1),
                covar_module=ScaleKernel(matern),
                likelihood=GaussianLikelihood(noise_constraint=interval),
            )
            mll = ExactMarginalLogLikelihood(model.likelihood, model)
            with (
                torch.enable_grad(),
                gpytorch.settings.max_cholesky_size(math.inf),
                suppress(ModelFittingError),  # the values that it has reached are kept
            ):
                fit_gpytorch_mll(mll)
            region.model = model.eval()
        return region.model

    def _best_row(self, region: Region) -> int:
        if not self._noisy:
            return int(region.Y.argmin())
        with torch.no_grad():
            return int(self._model(region).posterior(region.X).mean.argmax())

    def tell(self, X: Tensor, Y: Tensor) -> None:
        """Give each region its rows; its side changes after successes and failures."""
        owners = torch.tensor(self._owners)
        for i in sorted(set(self._owners)):
            region, y = self._regions[i], Y[owners == i]
            if len(region.X) >= self._first:
                self._count(region, y)
            if region.side < LEAST_SIDE:
                if self._noisy:
                    self._ended.append(self._best_point(region))
                self._regions[i] = self._begun(i)
                continue
            region.X = torch.cat((region.X, X[owners == i]))
            region.Y = torch.cat((region.Y, y))
            region.model = None

    def _count(self, region: Region, y: Tensor) -> None:
        """Count successes and failures, and change the side where they are enough."""
        best = float(region.Y.min())
        if float(y.min()) < best - BETTER * abs(best):
            region.successes, region.failures = region.successes + 1, 0
        else:
            region.successes, region.failures = 0, region.failures + len(y)
        if region.successes == SUCCESSES:
            region.side, region.successes = min(2.0 * region.side, LARGEST_SIDE), 0
        elif region.failures >= self._tolerance:
            region.side, region.failures = region.side / 2.0, 0

    def take(self, X: Tensor, Y: Tensor) -> None:
        """Give the regions rows in turn; no first points are wanted any more."""
        self._queue = []
        for i, region in enumerate(self._regions):
            step = slice(i, None, len(self._regions))
            region.X, region.Y, region.model = X[step], Y[step], None

    def recommended(self) -> Tensor | None:
        """Return the row of the best posterior mean with noise; else None: the best observed.

        Of all regions, those that have ended included.
        """
        ready = [region for region in self._regions if len(region.X) >= self._first]
        found = [*self._ended, *map(self._best_point, ready)] if self._noisy else []
        return max(found, key=lambda pair: pair[1])[0] if found else None

    def _best_point(self, region: Region) -> tuple[Tensor, float]:
        """Return the row of a region's best posterior mean, ``1 x d``, and that mean."""
        row = self._best_row(region)
        x = region.X[row : row + 1]
        with torch.no_grad():
            return x, float(self._model(region).posterior(x).mean)
