"""Held-out counts of the Tanzanian malaria survey of 2015, by blocks of neighbouring clusters.

Ten folds are groups of clusters that lie together (k-means of their positions), so that a cluster
is predicted from others at some distance. The model of surveys stands beside a binomial regression
on the same covariates, without and with position, and an exact Gaussian process of empirical logits
with one learned noise variance, whose counts are binomial given its logit, with that noise in the
logit or without.

Scored are the log probability of each held-out count, and how many counts are in intervals of 95 %:
the shortest ones with at least that probability; central ones, which for a rare disease hold 97.5 %
and more, for they begin at no positive; and the share of a randomised probability integral
transform between 0.025 and 0.975, which is 95 % if the predictions are right.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass

import pandas as pd
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms.outcome import Standardize
from botorch.posteriors.gpytorch import GPyTorchPosterior
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import ExactMarginalLogLikelihood
from linear_operator.operators import DiagLinearOperator
from scipy.cluster.vq import kmeans2
from scipy.optimize import minimize
from torch import Tensor

from benchmarks.common.data import FOLDER
from benchmarks.common.harness import start
from benchmarks.common.report import Claim, at_least, at_most, finish, stated
from bo_stream import counts
from bo_stream.likelihoods.counts import CountPosterior, PrevalencePosterior
from bo_stream.loops.survey.model import survey_model
from bo_stream.mapping import empirical_logits, fill_missing, map_inputs, map_kernel

COLUMNS = ["Long", "Lat", "EVI", "Temperature", "Precipitation", "Population", "ITN", "NTL"]
LEVEL = 0.95
NEVER = 1e-12
"""Variance of a logit that is known."""


@dataclass(frozen=True)
class Sizes:
    """Of one run: clusters of people, of which the first are taken; folds; steps of a fit."""

    clusters: int
    folds: int
    steps: int


@dataclass(frozen=True)
class Split:
    """Clusters to learn from and held-out ones: inputs, and positives and examined."""

    X: Tensor
    Y: Tensor
    held_X: Tensor
    held_Y: Tensor
    sites: Tensor


def tanzania(most: int) -> tuple[Tensor, Tensor]:
    """Inputs, with missing covariates from the nearest cluster, and counts."""
    table = pd.read_csv(FOLDER / "tz_malaria.csv").head(most)
    X = fill_missing(torch.tensor(table[COLUMNS].to_numpy(dtype=float)))
    return X, torch.tensor(table[["Pf", "Ex"]].to_numpy(dtype=float))


def splits(sizes: Sizes) -> list[Split]:
    """One for each block."""
    X, Y = tanzania(sizes.clusters)
    _, block = kmeans2(X[:, :2].numpy(), sizes.folds, minit="++", seed=0)
    held = [torch.as_tensor(block == fold) for fold in range(sizes.folds)]
    return [Split(X[~h], Y[~h], X[h], Y[h], X) for h in held if bool(h.any())]


def of_logits(mean: Tensor, variance: Tensor, Y: Tensor) -> CountPosterior:
    """The distribution of counts whose logits are independent and normal."""
    latent = MultivariateNormal(mean, DiagLinearOperator(variance))
    return CountPosterior(PrevalencePosterior(GPyTorchPosterior(latent)), Y[:, 1:])


def survey(split: Split) -> CountPosterior:
    """Ours."""
    model = survey_model(split.sites, split.X, split.Y)
    return counts(model, split.held_X, split.held_Y[:, 1:])


def regression(split: Split, columns: list[int]) -> CountPosterior:
    """Binomial regression by maximum likelihood."""
    standard = map_inputs(split.sites)
    scale = standard(split.sites)[:, columns].std(0)

    def design(X: Tensor) -> Tensor:
        return torch.cat((torch.ones(len(X), 1), standard(X)[:, columns] / scale), -1)

    inputs, (positives, examined) = design(split.X), split.Y.unbind(-1)

    def loss(weights: object) -> tuple[float, object]:
        w = torch.as_tensor(weights).requires_grad_()
        logit = inputs @ w
        softplus = torch.nn.functional.softplus(logit)
        value = (examined * softplus - positives * logit).sum()
        value.backward()
        return float(value.detach()), w.grad.numpy()

    found = minimize(loss, torch.zeros(len(columns) + 1).numpy(), jac=True, method="L-BFGS-B")
    mean = design(split.held_X) @ torch.as_tensor(found.x)
    return of_logits(mean, torch.full_like(mean, NEVER), split.held_Y)


def exact(split: Split, steps: int, noisy: bool) -> CountPosterior:
    """An exact GP of empirical logits."""
    logits = empirical_logits(*split.Y.unbind(-1))[0].unsqueeze(-1)
    model = SingleTaskGP(
        split.X,
        logits,
        covar_module=map_kernel(split.sites),
        input_transform=map_inputs(split.sites),
        outcome_transform=Standardize(1),
    )
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": steps}})
    with torch.no_grad():
        found = model.posterior(split.held_X, observation_noise=noisy)
    return of_logits(found.mean.squeeze(-1), found.variance.squeeze(-1), split.held_Y)


@dataclass(frozen=True)
class Scores:
    """Of held-out counts, one number each: log probability, and coverings of three kinds."""

    log: list[float]
    shortest: list[float]
    central: list[float]
    randomised: list[float]

    @classmethod
    @torch.no_grad()
    def of(cls, posterior: CountPosterior, Y: Tensor) -> Scores:
        """Score counts."""
        positives, examined = Y[:, :1], Y[:, 1:]
        log = posterior.log_prob(positives)
        every = torch.arange(float(examined.max()) + 1.0).reshape(-1, 1, 1)
        chance = posterior.log_prob(every.minimum(examined)).exp() * (every <= examined)
        likelier = (chance * (chance > (1.0 + 1e-9) * log.exp())).sum(0)
        low, high = posterior.interval(LEVEL)
        central = (low <= positives) & (positives <= high)
        upper, tail = posterior.cdf(positives), 0.5 * (1.0 - LEVEL)
        lower = upper - log.exp()
        within = upper.clamp_max(1.0 - tail) - lower.clamp_min(tail)
        randomised = within.clamp_min(0.0) / (upper - lower)
        columns = log, (likelier < LEVEL).double(), central.double(), randomised
        return cls(*(column.squeeze(-1).tolist() for column in columns))

    def __add__(self, other: Scores) -> Scores:
        return Scores(
            *(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    @property
    def coverage(self) -> str:
        """Coverings in per cent."""
        shares = (
            100.0 * statistics.mean(x) for x in (self.shortest, self.central, self.randomised)
        )
        return "95 % intervals hold {:.1f} %, central {:.1f} %, randomised {:.1f} %".format(*shares)


OURS = "survey_model"


def measured(sizes: Sizes) -> dict[str, Scores]:
    """Scores of all counts by each model."""
    covariates = list(range(2, len(COLUMNS)))
    models: dict[str, Callable[[Split], CountPosterior]] = {
        OURS: survey,
        "binomial regression": lambda split: regression(split, covariates),
        "binomial regression, with position": lambda split: regression(split, [0, 1, *covariates]),
        "exact GP of empirical logits": lambda split: exact(split, sizes.steps, False),
        "the same, noise in the logit": lambda split: exact(split, sizes.steps, True),
    }
    found = {name: Scores([], [], [], []) for name in models}
    for split in splits(sizes):
        for name, model in models.items():
            found[name] = found[name] + Scores.of(model(split), split.held_Y)
    return found


def claims(found: dict[str, Scores]) -> list[Claim]:
    """Ours against each other's, and the coverage of its intervals."""
    ours = found[OURS]
    mean = statistics.mean(ours.log)
    result = [stated("log score of a held-out count", mean, "nats", ours.coverage)]
    for name, theirs in found.items():
        if name == OURS:
            continue
        gains = [a - b for a, b in zip(ours.log, theirs.log, strict=True)]
        error = statistics.stdev(gains) / len(gains) ** 0.5
        detail = f"± {error:.3f}; {mean:.3f} and {statistics.mean(theirs.log):.3f}; its "
        title = f"nats a count gained on {name}"
        gain = statistics.mean(gains)
        result.append(at_least(title, gain, 0.0, "nats", detail + theirs.coverage))
    share = 100.0 * statistics.mean(ours.shortest)
    return [
        *result,
        at_least("counts in intervals of 95 %", share, 92.0, "%"),
        at_most("counts in intervals of 95 %, at most", share, 98.0, "%"),
    ]


def main() -> None:
    """Run it."""
    options = start(__doc__)
    warnings.simplefilter("ignore")
    sizes = options.pick(Sizes(387, 10, 200), Sizes(60, 2, 5))
    finish("prevalence", claims(measured(sizes)), options, asdict(sizes))


if __name__ == "__main__":
    main()
