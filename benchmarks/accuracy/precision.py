"""What data in float32 cost: every model on the same values as float32 and as float64.

Values are rounded to float32 first, so that both models are given the same numbers; what differs
is where a model's own arithmetic is not in float64, and the rounding of what it returns. Streams of
5,000 rows of two inputs, a thousand at a time; hyperparameters stay as they are. Errors are the
largest over 500 test points and over an RBF and a Matérn-5/2 kernel at two levels of noise: of the
mean in posterior standard deviations, of the variance relative to it. ``ClusteredGP`` and ``QSGP``
compute in float32 where asked to (``arithmetic=torch.float32``): with the same float64 models these
are compared too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from botorch.models.model import Model
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

from benchmarks.common.harness import Options, start
from benchmarks.common.report import Claim, at_most, finish, stated
from bo_stream import (
    OSGPR,
    QSGP,
    WISKI,
    AutoGP,
    BayesianLastLayer,
    ClusteredGP,
    DecoupledGP,
    FourierFeatures,
    HeteroscedasticWISKI,
    LocalGP,
)

MOST = 1e-3
"""Of an error, but where a model learns from logarithms of squared residuals, near zero too."""

LEAST = 1e-6
"""GPyTorch raises smaller variances to it in float32."""

LENGTHSCALES: dict[type[Kernel], float] = {RBFKernel: 0.25, MaternKernel: 0.1}
NOISES = (2.0**-7, 2.0**-13)
"""Numbers that float32 has, about 0.01 and 0.0001 of the outcomes' variance."""

Case = Callable[..., Any]
"""Makes a model of inputs and outcomes, with the options that models share."""


def wiski(X: Tensor, Y: Tensor, **options: Any) -> Model:
    """On a grid over the unit square."""
    return WISKI(X, Y, bounds=unit(X), **options)


def heteroscedastic(X: Tensor, Y: Tensor, likelihood: object, **options: Any) -> Model:
    """Its noise is a process of its own: the likelihood's is not used."""
    return HeteroscedasticWISKI(X, Y, bounds=unit(X), **options)


def osgpr(X: Tensor, Y: Tensor, **options: Any) -> Model:
    """At the first 100 inputs."""
    return OSGPR(X, Y, inducing_points=X[:100], **options)


def exact(X: Tensor, Y: Tensor, **options: Any) -> Model:
    """All rows, whatever their number."""
    return AutoGP(X, Y, families="exact", bounds=unit(X), **options)


def last_layer(X: Tensor, Y: Tensor, covar_module: object, **options: Any) -> Model:
    """A network that has not learned yet, in place of a kernel."""
    return BayesianLastLayer(X, Y, **options)


CASES: dict[str, Case] = {
    "WISKI": wiski,
    "HeteroscedasticWISKI": heteroscedastic,
    "OSGPR": osgpr,
    "AutoGP, exact": exact,
    "LocalGP": LocalGP,
    "ClusteredGP": partial(ClusteredGP, resolution=0.03),
    "BayesianLastLayer": last_layer,
    # Adam's first step of a hyperparameter has the length of its rate even where the slope is but
    # rounding: two runs that learn part there.
    "DecoupledGP": partial(DecoupledGP, learning_rate=0.0),
    "QSGP": partial(QSGP, basis=FourierFeatures(500)),
}
SINGLE: dict[str, Case] = {
    f"{name}, arithmetic in float32": partial(CASES[name], arithmetic=torch.float32)
    for name in ("ClusteredGP", "QSGP")
}


def unit(like: Tensor) -> Tensor:
    """Return the bounds of the unit square."""
    return torch.stack((torch.zeros_like(like[0]), torch.ones_like(like[0])))


def problem(n: int, noise: float) -> tuple[Tensor, Tensor, Tensor]:
    """Draw inputs, outcomes and test inputs, float64 with values that float32 has."""
    generator = torch.Generator().manual_seed(0)
    X, T = (torch.rand(size, 2, generator=generator) for size in (n, 500))
    f = (6.0 * X[:, :1]).sin() * (5.0 * X[:, 1:]).cos()
    Y = f + noise**0.5 * torch.randn(f.shape, generator=generator, dtype=f.dtype)
    return X.float().double(), Y.float().double(), T.float().double()


def predicted(
    case: Case, kind: type[Kernel], noise: float, n: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Stream rows of a dtype into a model; return mean and variance at the test inputs."""
    X, Y, T = (values.to(dtype) for values in problem(n, noise))
    kernel = ScaleKernel(kind(ard_num_dims=2)).to(dtype)
    kernel.base_kernel.lengthscale, kernel.outputscale = LENGTHSCALES[kind], 1.0
    likelihood = GaussianLikelihood(noise_constraint=GreaterThan(1e-9)).to(dtype)
    likelihood.noise = noise
    options = {"covar_module": kernel, "likelihood": likelihood, "outcome_transform": None}
    first, *others = (slice(i, i + n // 5) for i in range(0, n, n // 5))
    model = case(X[first], Y[first], **options)
    for rows in others:
        model.update(X[rows], Y[rows])
    with torch.no_grad():
        posterior = model.eval().posterior(T)
        return posterior.mean.double(), posterior.variance.double().clamp_min(LEAST)


def errors(
    case: Case, single: Case, kind: type[Kernel], noise: float, n: int
) -> tuple[float, float]:
    """Compare a model of float32 rows with one of float64 rows: mean and variance."""
    mean, variance = predicted(case, kind, noise, n, torch.float64)
    rounded_mean, rounded_variance = predicted(single, kind, noise, n, torch.float32)
    off = (rounded_mean - mean).abs() / variance.sqrt()
    return float(off.max()), float((rounded_variance / variance - 1.0).abs().max())


def claims_of(n: int) -> Iterator[Claim]:
    """Compare each model, over kernels and noise; then those that compute in float32."""
    settings = [(kind, noise) for kind in LENGTHSCALES for noise in NOISES]
    for name, single in (CASES | SINGLE).items():
        case = CASES[name.split(", arithmetic")[0]]
        found = [errors(case, single, kind, noise, n) for kind, noise in settings]
        for what, values in zip(("mean", "variance"), zip(*found, strict=True), strict=True):
            claim, detail = f"{what}: {name}", ", ".join(f"{value:.0e}" for value in values)
            if case is heteroscedastic or name in SINGLE:
                yield stated(claim, max(values), detail=detail)
            else:
                yield at_most(claim, max(values), MOST, detail=detail)


def main() -> None:
    """Run it."""
    options: Options = start(__doc__)
    n = 100 if options.smoke else 5_000
    finish("precision", list(claims_of(n)), options, {"n": n})


if __name__ == "__main__":
    main()
