"""Kernels of maps: which villages are above a threshold, from 200 random ones of 1,500.

100 people are examined in each of the 200. The kernels are compared in two models: an exact GP on
empirical logits with one learned noise variance, and one under the binomial likelihood by penalised
quasi-likelihood (working outcomes at the posterior mode, hyperparameters fitted to them, twice). A
village is called above the threshold if the mean of its logit is.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms.outcome import Standardize
from gpytorch.kernels import AdditiveKernel, Kernel, MaternKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.priors import LogNormalPrior
from torch import Tensor

from benchmarks.data import real
from benchmarks.harness import start
from benchmarks.report import Claim, at_least, finish, stated
from bo_stream.mapping import empirical_logits, map_inputs, map_kernel, out_of_fold

THRESHOLDS = {"civ": 0.10, "hti": 0.02, "phl": 0.02}
EXAMINED = 100.0
FARTHEST = 8.0
"""Largest logit at which working outcomes are formed."""
FITS = {"empirical logits": 1, "binomial": 2}
"""Fits of hyperparameters in each model; before the second come outcomes that the first implies."""


@dataclass(frozen=True)
class Sizes:
    """Of one run: random designs a country, villages in each, steps of a fit."""

    seeds: int
    villages: int
    steps: int


def ard(columns: tuple[int, ...], nu: float) -> ScaleKernel:
    """One Matérn kernel over standardised columns, with BoTorch's prior of length scales."""
    prior = LogNormalPrior(math.sqrt(2.0) + 0.5 * math.log(len(columns)), math.sqrt(3.0))
    return ScaleKernel(
        MaternKernel(nu, ard_num_dims=len(columns), active_dims=columns, lengthscale_prior=prior),
        outputscale_prior=LogNormalPrior(math.log(0.5), 1.0),
    )


def one(sites: Tensor, nu: float) -> Kernel:
    """One kernel over kilometres, in units of 100, and covariates."""
    kernel = ard(tuple(range(sites.shape[-1])), nu)
    lengths = torch.ones(sites.shape[-1])
    lengths[:2] = 100.0
    kernel.base_kernel.lengthscale_prior = _in_kilometres(lengths)
    kernel.base_kernel.lengthscale = lengths
    return kernel


def _in_kilometres(lengths: Tensor) -> LogNormalPrior:
    median = math.sqrt(2.0) + 0.5 * math.log(len(lengths))
    return LogNormalPrior(median + lengths.log(), torch.full_like(lengths, math.sqrt(3.0)))


def two(sites: Tensor, nu: float) -> Kernel:
    """A sum of one kernel over position and one over all covariates."""
    position = map_kernel(sites, linear=range(2, sites.shape[-1]), nu=nu).kernels[0]
    return AdditiveKernel(position, ard(tuple(range(2, sites.shape[-1])), nu))


KERNELS: dict[str, Callable[[Tensor], Kernel]] = {
    "one ARD, 3/2": lambda sites: one(sites, 1.5),
    "one ARD, 5/2": lambda sites: one(sites, 2.5),
    "position + ARD, 3/2": lambda sites: two(sites, 1.5),
    "position + ARD, 5/2": lambda sites: two(sites, 2.5),
    "map_kernel, 3/2": map_kernel,
    "map_kernel, 5/2": lambda sites: map_kernel(sites, nu=2.5),
}
HOOK = "map_kernel, 3/2, with a random forest's predictions"
DEFAULT, PLAIN = "map_kernel, 3/2", "one ARD, 3/2"


def fitted(sites: Tensor, rows: Tensor, y: Tensor, kernel: Kernel, fits: int, steps: int):  # type: ignore[no-untyped-def]
    """The model of the logit after so many fits, the second on the outcomes of the first."""
    outcomes, noise = empirical_logits(y, torch.full_like(y, EXAMINED))[0], None
    for turn in range(fits):
        for step in range(1 if turn == 0 else 5):
            model = SingleTaskGP(
                sites[rows],
                outcomes.unsqueeze(-1),
                noise,
                covar_module=kernel,
                input_transform=map_inputs(sites),
                outcome_transform=Standardize(1),
            )
            if step == 0:
                mll = ExactMarginalLogLikelihood(model.likelihood, model)
                fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": steps}})
            with torch.no_grad():
                logit = model.eval().posterior(sites[rows]).mean.squeeze(-1)
            share = logit.clamp(-FARTHEST, FARTHEST).sigmoid()
            weight = EXAMINED * share * (1.0 - share)
            if fits > 1:
                outcomes = share.logit() + (y - EXAMINED * share) / weight
                noise = weight.reciprocal().unsqueeze(-1)
    return model


def with_forest(sites: Tensor, rows: Tensor, y: Tensor, seed: int) -> Tensor | None:
    """Sites with a random forest's predictions as a last column; None without scikit-learn."""
    try:
        from sklearn.ensemble import RandomForestRegressor
    except ImportError:
        return None
    logits = empirical_logits(y, torch.full_like(y, EXAMINED))[0]
    forest = RandomForestRegressor(100, min_samples_leaf=5, random_state=seed)
    held, whole = out_of_fold(forest, sites[rows].numpy(), logits.numpy())
    column = torch.as_tensor(whole.predict(sites.numpy()))
    column[rows] = torch.as_tensor(held)
    return torch.cat((sites, column.unsqueeze(-1)), -1)


def accuracies(country: str, seed: int, sizes: Sizes) -> dict[tuple[str, str], float]:
    """Share of the villages without a survey that are rightly called, by model and kernel."""
    sites, prevalence = real(f"hotspots_{country}")
    truth = prevalence.squeeze(-1)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(sites), generator=generator)[: sizes.villages]
    y = torch.binomial(torch.full((len(rows),), EXAMINED), truth[rows], generator=generator)
    rest = torch.ones(len(sites), dtype=torch.bool)
    rest[rows] = False
    threshold = THRESHOLDS[country]
    found = {}
    wide = with_forest(sites, rows, y, seed)
    for model_name, fits in FITS.items():
        for name in [*KERNELS, *([HOOK] if wide is not None else [])]:
            hooked = name == HOOK
            inputs = wide if hooked and wide is not None else sites
            last = (inputs.shape[-1] - 1,)
            kernel = map_kernel(inputs, linear=last) if hooked else KERNELS[name](inputs)
            model = fitted(inputs, rows, y, kernel, fits, sizes.steps)
            with torch.no_grad():
                mean = model.posterior(inputs[rest]).mean.squeeze(-1)
            right = (mean > math.log(threshold / (1.0 - threshold))) == (truth[rest] > threshold)
            found[model_name, name] = float(right.double().mean())
    return found


def claims(runs: dict[str, list[dict[tuple[str, str], float]]]) -> list[Claim]:
    """Mean accuracies, and that the default is no worse than one kernel over all."""
    result = []
    means: dict[tuple[str, str], float] = {}
    for key in next(iter(runs.values()))[0]:
        each = {c: statistics.mean(run[key] for run in found) for c, found in runs.items()}
        means[key] = statistics.mean(each.values())
        detail = ", ".join(f"{country.upper()} {value:.3f}" for country, value in each.items())
        result.append(stated(f"accuracy, {key[0]}: {key[1]}", means[key], detail=detail))
    for model in FITS:
        gain = 100.0 * (means[model, DEFAULT] - means[model, PLAIN])
        result.append(at_least(f"gain on one ARD kernel, {model}", gain, 0.0, "points"))
    return result


def main() -> None:
    """Run it."""
    options = start(__doc__)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    sizes = options.pick(Sizes(6, 200, 200), Sizes(1, 30, 3))
    countries = options.pick(list(THRESHOLDS), ["civ"])
    seeds = range(100, 100 + sizes.seeds)
    runs = {c: [accuracies(c, seed, sizes) for seed in seeds] for c in countries}
    finish("map_kernels", claims(runs), options, asdict(sizes))


if __name__ == "__main__":
    main()
