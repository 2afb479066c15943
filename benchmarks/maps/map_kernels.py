"""Kernels of maps: which villages are above a threshold, from 200 random ones of 1,500.

100 people are examined in each of the 200. The model is an exact GP on empirical logits with one
learned noise variance; a village is called above the threshold if the mean of its logit is.
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
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import AdditiveKernel, Kernel, MaternKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.priors import LogNormalPrior
from torch import Tensor

from benchmarks.common.data import real
from benchmarks.common.harness import start
from benchmarks.common.report import Claim, finish, stated
from bo_stream.mapping import empirical_logits, map_inputs, map_kernel, out_of_fold

THRESHOLDS = {"civ": 0.10, "hti": 0.02, "phl": 0.02}
EXAMINED = 100.0


@dataclass(frozen=True)
class Sizes:
    """Of one run: random designs a country, villages in each, steps of a fit."""

    seeds: int
    villages: int
    steps: int


def ard(columns: tuple[int, ...], units: Tensor) -> ScaleKernel:
    """One Matérn-3/2 kernel over columns, with BoTorch's prior of length scales in these units.

    Parameters are logarithms above a floor, as those of ``map_kernel`` are, lest the comparison be
    one of parametrisations.
    """
    medians = math.sqrt(2.0) + 0.5 * math.log(len(columns)) + units.log()
    return ScaleKernel(
        MaternKernel(
            1.5,
            ard_num_dims=len(columns),
            active_dims=columns,
            lengthscale_prior=LogNormalPrior(medians, torch.full_like(medians, math.sqrt(3.0))),
            lengthscale_constraint=_above(1e-3 * medians.exp(), medians.exp()),
        ),
        outputscale_prior=LogNormalPrior(math.log(0.5), 1.0),
        outputscale_constraint=_above(torch.tensor(1e-3), torch.tensor(0.5)),
    )


def _above(least: Tensor, start: Tensor) -> GreaterThan:
    return GreaterThan(least, transform=torch.exp, inv_transform=torch.log, initial_value=start)


def one(sites: Tensor, nu: float) -> Kernel:
    """One kernel over position, in units of the sites' root mean square radius, and covariates."""
    places = map_inputs(sites)(sites)[:, :2]
    units = torch.ones(sites.shape[-1])
    units[:2] = (places - places.mean(0)).square().sum(-1).mean().sqrt()
    kernel = ard(tuple(range(sites.shape[-1])), units)
    kernel.base_kernel.nu = nu
    return kernel


def two(sites: Tensor, nu: float) -> Kernel:
    """A sum of one kernel over position and one over all covariates."""
    position = map_kernel(sites, linear=range(2, sites.shape[-1]), nu=nu).kernels[0]
    covariates = tuple(range(2, sites.shape[-1]))
    rest = ard(covariates, torch.ones(len(covariates)))
    rest.base_kernel.nu = nu
    return AdditiveKernel(position, rest)


KERNELS: dict[str, Callable[[Tensor], Kernel]] = {
    "one ARD, 3/2": lambda sites: one(sites, 1.5),
    "one ARD, 5/2": lambda sites: one(sites, 2.5),
    "position + ARD, 3/2": lambda sites: two(sites, 1.5),
    "position + ARD, 5/2": lambda sites: two(sites, 2.5),
    "map_kernel, 3/2": map_kernel,
    "map_kernel, 5/2": lambda sites: map_kernel(sites, nu=2.5),
}
HOOK = "map_kernel, 3/2, with a random forest's predictions"
PLAIN = "one ARD, 3/2"


def fitted(sites: Tensor, rows: Tensor, y: Tensor, kernel: Kernel, steps: int) -> SingleTaskGP:
    """An exact GP of empirical logits with one learned noise variance."""
    model = SingleTaskGP(
        sites[rows],
        empirical_logits(y, torch.full_like(y, EXAMINED))[0].unsqueeze(-1),
        covar_module=kernel,
        input_transform=map_inputs(sites),
        outcome_transform=Standardize(1),
    )
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": steps}})
    return model.eval()


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


def accuracies(country: str, seed: int, sizes: Sizes) -> dict[str, float]:
    """Share of the villages without a survey that are rightly called, by kernel."""
    sites, prevalence = real(f"hotspots_{country}")
    truth = prevalence.squeeze(-1)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(sites), generator=generator)[: sizes.villages]
    y = torch.binomial(torch.full((len(rows),), EXAMINED), truth[rows], generator=generator)
    rest = torch.ones(len(sites), dtype=torch.bool)
    rest[rows] = False
    cut = THRESHOLDS[country]
    inputs = {name: (sites, kernel(sites)) for name, kernel in KERNELS.items()}
    wide = with_forest(sites, rows, y, seed)
    if wide is not None:
        inputs[HOOK] = wide, map_kernel(wide, linear=[wide.shape[-1] - 1])
    found = {}
    for name, (X, kernel) in inputs.items():
        torch.manual_seed(seed)  # a fit that fails begins again at values drawn from the prior
        model = fitted(X, rows, y, kernel, sizes.steps)
        with torch.no_grad():
            mean = model.posterior(X[rest]).mean.squeeze(-1)
        right = (mean > math.log(cut / (1.0 - cut))) == (truth[rest] > cut)
        found[name] = float(right.double().mean())
    return found


def claims(runs: dict[str, list[dict[str, float]]]) -> list[Claim]:
    """Mean accuracies, and paired differences from one kernel over all."""
    result = []
    pairs = [run for found in runs.values() for run in found]
    for name in pairs[0]:
        each = {c: statistics.mean(run[name] for run in found) for c, found in runs.items()}
        gains = [100.0 * (run[name] - run[PLAIN]) for run in pairs]
        error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
        detail = ", ".join(f"{country.upper()} {value:.3f}" for country, value in each.items())
        gain = f"{statistics.mean(gains):+.2f} ± {error:.2f} points on {PLAIN}"
        mean = statistics.mean(each.values())
        result.append(stated(f"accuracy, {name}", mean, detail=f"{detail}; {gain}"))
    return result


def main() -> None:
    """Run it."""
    options = start(__doc__)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    sizes = options.pick(Sizes(12, 200, 200), Sizes(1, 30, 3))
    countries = options.pick(list(THRESHOLDS), ["civ"])
    seeds = range(100, 100 + sizes.seeds)
    runs = {c: [accuracies(c, seed, sizes) for seed in seeds] for c in countries}
    finish("map_kernels", claims(runs), options, asdict(sizes))


if __name__ == "__main__":
    main()
