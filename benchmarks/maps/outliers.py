"""The share of outliers in the model of surveys: none, one in a hundred, or one in ten.

Three maps of prevalence with binomial counts of 50 examined, and two surveys with their real
counts. Eighty sites are learned from, at random or in blocks of neighbours (k-means of their
positions), as they are or with 2 or 5 % of them entered wrongly: in turn negatives for positives,
ten times the positives (at most all), ten times the examined. Scored is the log probability of the
counts at other sites, which are right. Each number is a mean over sites of a difference to the
model with the default share, then over splits and seeds; its error is that of this last mean.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product

import pandas as pd
import torch
from scipy.cluster.vq import kmeans2
from torch import Tensor

from benchmarks.common.data import FOLDER, real
from benchmarks.common.harness import Options, start
from benchmarks.common.report import Claim, at_least, finish
from benchmarks.maps.prevalence import tanzania
from bo_stream.loops.survey.model import SurveyModelSettings, log_scores, survey_model

BLOCKS = 10
EXAMINED = 50
FEWEST = 3
"""Examined at a site of the Kenyan survey."""

CORRUPTED = (0.0, 0.02, 0.05)
SHARES = (0.0, 0.01, 0.1)
DEFAULT = SurveyModelSettings().outliers
ERRORS = 2.0
"""Standard errors by which the default share may be behind another."""


@dataclass(frozen=True)
class Sizes:
    """Of one run: seeds, sites to learn from, and sites to score on at most."""

    seeds: int
    learned: int
    scored: int


def hotspots(country: str) -> tuple[Tensor, Tensor]:
    """Inputs, and counts drawn from the map of a country."""
    X, rates = real(f"hotspots_{country}")
    examined = torch.full((len(X),), float(EXAMINED))
    generator = torch.Generator().manual_seed(0)
    return X, torch.stack((torch.binomial(examined, rates[:, 0], generator), examined), -1)


def kenya() -> tuple[Tensor, Tensor]:
    """Position and elevation, and counts, of the places where a few people or more were tested."""
    people = pd.read_csv(FOLDER / "malkenya.csv.gz").groupby(["Long", "Lat"])
    sites = people.agg(p=("RDT", "sum"), n=("RDT", "count"), e=("elevation", "mean"))
    sites = sites[sites["n"] >= FEWEST].reset_index()
    return (
        torch.tensor(sites[["Long", "Lat", "e"]].to_numpy(dtype=float)),
        torch.tensor(sites[["p", "n"]].to_numpy(dtype=float)),
    )


SURVEYS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "Côte d'Ivoire": partial(hotspots, "civ"),
    "Haiti": partial(hotspots, "hti"),
    "Philippines": partial(hotspots, "phl"),
    "Tanzania": partial(tanzania, 387),
    "Kenya": kenya,
}


def corrupted(Y: Tensor, share: float) -> Tensor:
    """Counts of which the first are entered wrongly, in one of three ways in turn."""
    Y = Y.clone()
    for row in range(round(share * len(Y))):
        positives, examined = Y[row].tolist()
        wrong = (
            (examined - positives, examined),
            (min(examined, 10.0 * max(positives, 1.0)), examined),
            (positives, 10.0 * examined),
        )
        Y[row] = Y.new_tensor(wrong[row % len(wrong)])
    return Y


def divided(X: Tensor, blocks: bool, sizes: Sizes, seed: int) -> tuple[Tensor, Tensor]:
    """Rows to learn from and rows to score on, in random order."""
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))
    learned = torch.arange(len(X)) < max(sizes.learned, len(X) // 2)
    if blocks:
        _, block = kmeans2(X[order, :2].numpy(), BLOCKS, minit="++", seed=seed)
        learned = torch.as_tensor(block % 2 == 0)
    return order[learned][: sizes.learned], order[~learned][: sizes.scored]


@dataclass(frozen=True)
class Trial:
    """One split: the mean log probability of a count, by share."""

    survey: str
    wrong: float
    scores: dict[float, float]

    def gain(self, share: float) -> float:
        """Of a share over the default one, in nats a count."""
        return self.scores[share] - self.scores[DEFAULT]


def trial(survey: str, wrong: float, blocks: bool, seed: int, sizes: Sizes) -> Trial:
    """Fit all models of one split."""
    X, Y = SURVEYS[survey]()
    learned, scored = divided(X, blocks, sizes, seed)
    counts, scores = corrupted(Y[learned], wrong), {}
    for share in SHARES:
        model = survey_model(X, X[learned], counts, SurveyModelSettings(outliers=share))
        scores[share] = float(log_scores(model, X[scored], Y[scored]).mean())
    return Trial(survey, wrong, scores)


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean of values and its standard error."""
    return statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5


def claims_on(name: str, trials: list[Trial]) -> list[Claim]:
    """What the default share gains over each other one."""
    claims = []
    for share in SHARES:
        if share != DEFAULT:
            mean, error = mean_and_error([-one.gain(share) for one in trials])
            label = f"{name}: {DEFAULT:g} over {share:g}"
            claims.append(at_least(label, mean, -ERRORS * error, "nats", f"± {error:.3f}"))
    return claims


def main(options: Options) -> None:
    """Run it."""
    sizes = options.pick(Sizes(5, 80, 100), Sizes(1, 25, 25))
    surveys = list(SURVEYS)[-options.pick(len(SURVEYS), 1) :]
    cases = product(range(sizes.seeds), surveys, (False, True), CORRUPTED)
    trials = [trial(name, wrong, blocks, seed, sizes) for seed, name, blocks, wrong in cases]
    claims = []
    for wrong in CORRUPTED:
        claims += claims_on(f"{wrong:.0%} wrong", [one for one in trials if one.wrong == wrong])
    for name in surveys:
        claims += claims_on(name, [one for one in trials if one.survey == name])
    finish("outliers", claims, options, {"sizes": asdict(sizes), "shares": SHARES})


if __name__ == "__main__":
    main(start(__doc__))
