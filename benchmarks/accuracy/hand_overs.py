"""How far hand-overs of AutoGP are from the exact posterior: of a grid, and of the family taken.

Twelve models fitted to functions in two to four inputs: squared-exponential or product Matern-5/2,
with noise from 0.3 of the outcomes' standard deviation down to none, rows spread over the box or
crowded, n where AutoGP hands over by default and 1,000 at most. The largest differences are those
of ``AutoGP.history``: at rows, in the middle between neighbours, and in the box.
"""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import NamedTuple

import torch
from botorch.fit import fit_gpytorch_mll
from botorch.test_functions import Ackley, Branin, Hartmann, Levy
from botorch.test_functions.base import BaseTestProblem
from gpytorch.kernels import ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from benchmarks.common.harness import Options, start
from benchmarks.common.report import Claim, at_most, finish, stated
from benchmarks.optimization.problems import unit_cube
from bo_stream import AutoGP, ProductMatern
from bo_stream.models.auto.families import MEAN_ERROR, VARIANCE_RATIO
from bo_stream.models.auto.inference import HandOver

OLD = 0.05
"""Error of the mean at rows, in prior standard deviations, by which hand-overs were once judged."""


class Case(NamedTuple):
    """A function, the deviation of its noise in that of the outcomes, and where rows are."""

    function: BaseTestProblem
    noise: float
    rough: bool = False
    crowded: bool = False

    def __str__(self) -> str:
        name = f"{type(self.function).__name__}-{self.function.dim}, noise {self.noise:g}"
        rough, crowded = ", Matern" * self.rough, ", crowded" * self.crowded
        return f"{name}{rough}{crowded}"


CASES = (
    Case(Branin(), 0.1),
    Case(Branin(), 0.1, rough=True),
    Case(Branin(), 0.0),
    Case(Branin(), 0.0, rough=True),
    Case(Levy(2), 0.1),
    Case(Levy(2), 0.01, rough=True),
    Case(Levy(3), 0.3),
    Case(Levy(3), 0.01, rough=True),
    Case(Hartmann(3), 0.1),
    Case(Hartmann(3), 0.01, crowded=True),
    Case(Hartmann(3), 0.01, rough=True, crowded=True),
    Case(Ackley(4), 0.1),
)


def fitted(case: Case, most: int) -> tuple[AutoGP, Tensor, Tensor, Tensor | None]:
    """An exact model of as many rows as AutoGP holds, and one row more."""
    torch.manual_seed(0)
    d = case.function.dim
    kernel = ScaleKernel(ProductMatern(nu=2.5, ard_num_dims=d)) if case.rough else None
    options = {"covar_module": kernel, "bounds": unit_cube(d)}
    n = min(AutoGP(torch.rand(2, d), torch.rand(2, 1), **deepcopy(options)).max_exact, most)
    X = torch.rand(n + 1, d)
    if case.crowded:
        X[200:] = (0.5 + 0.05 * torch.randn(n - 199, d)).clamp(0.0, 1.0)
    low, high = case.function.bounds.double()
    Y = case.function(low + (high - low) * X).unsqueeze(-1)
    Y = (Y - Y.mean()) / Y.std() + case.noise * torch.randn(n + 1, 1)
    Yvar = None if case.noise > 0.0 else torch.zeros_like(Y)
    model = AutoGP(X[:n], Y[:n], None if Yvar is None else Yvar[:n], max_exact=n, **options)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": 40}})
    return model, X[n:], Y[n:], None if Yvar is None else Yvar[n:]


def told(move: HandOver) -> str:
    """What a move changed, in words."""
    return (
        f"{move.after} at {move.observations:.0f}: variances {move.least_ratio:.3g} to "
        f"{move.largest_ratio:.3g} times, {move.mean_error:.1e} prior sd at rows"
    )


def hand_over(case: Case, options: Options) -> tuple[list[Claim], HandOver, HandOver]:
    """Compare a grid, and the family that AutoGP takes, with the exact posterior."""
    model, X, Y, Yvar = fitted(case, options.pick(1000, 40))
    model.update(X, Y, Yvar)
    (taken,) = model.history
    (*_, grid) = model.move_to("WISKI").history
    far = max(1.0 / taken.least_ratio, taken.largest_ratio)
    claims = [
        stated(f"{case}: a grid's mean", grid.deviation, "posterior sd", told(grid)),
        at_most(f"{case}: mean", taken.deviation, MEAN_ERROR, "posterior sd", told(taken)),
        at_most(f"{case}: ratio of variances, or inverse", far, VARIANCE_RATIO, "times"),
    ]
    for claim in claims:
        print(claim.row(), flush=True)
    return claims, grid, taken


def main() -> None:
    """Run it."""
    options = start(__doc__)
    warnings.simplefilter("ignore")
    found = [hand_over(case, options) for case in options.pick(CASES, CASES[:1])]
    grids = [grid for _, grid, _ in found]
    claims = [claim for own, _, _ in found for claim in own]
    far = [grid for grid in grids if grid.excess > 1.0]
    claims += [
        stated("grids that are far off", len(far), "", f"of {len(grids)}"),
        stated("of these once taken", sum(grid.mean_error <= OLD for grid in far), ""),
    ]
    finish("hand_overs", claims, options, {"cases": len(found)})


if __name__ == "__main__":
    main()
