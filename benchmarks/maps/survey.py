"""Adaptive surveys by the published protocol: which villages are above a threshold of prevalence?

Andrade-Pacheco et al. (2020), Scientific Reports 10:10939. Of 1,500 villages 100 random ones are
surveyed first, 100 people examined in each, then 100 more, one, ten or fifty at a time. A village
without a survey is called above the threshold if the probability of that is above one half. The
published results, of 50 seeds, stand beside ours, with ours of a random design.

The villages of a round reduce the expected cost of wrong calls, where missing a village above the
threshold costs as much as ``MISS_COST`` false alarms. This is a matter of the design alone: calls
are scored by the published rule, and, clearly apart, by that of those costs.

Ten and fifty at a time the model is fitted anew after each round; one at a time after ten results,
and takes in those between as they come.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import asdict, dataclass

import pandas as pd
import torch
from torch import Tensor

from benchmarks.common.data import FOLDER, real
from benchmarks.common.harness import Options, peak_growth, start
from benchmarks.common.report import Claim, at_least, at_most, finish, stated
from bo_stream import Misclassification, prevalence, select_sites
from bo_stream.loops.survey.model import SurveyModelSettings, survey_model
from bo_stream.models.base import StreamingGP

THRESHOLDS = {"civ": 0.10, "hti": 0.02, "phl": 0.02}
TO_REACH = {"civ": (0.890, 0.76), "hti": (0.905, 0.86), "phl": (0.998, 0.99)}
"""Accuracy and sensitivity after all villages, ten at a time."""

EXAMINED = 100
MISS_COST = 2.0
"""Of a design that finds most of the villages above a threshold."""

REFIT = 10
"""Results after which the model is fitted anew."""

SECONDS, MINUTE, GIB = 5.0, 60.0, 4.0


@dataclass(frozen=True)
class Sizes:
    """Of one run.

    Attributes:
        seeds: Of each country and number at a time.
        first: Random villages.
        more: Villages after them.
        batches: Villages at a time.
        candidates: Of the large pool.
    """

    seeds: int
    first: int
    more: int
    batches: tuple[int, ...]
    candidates: int


@dataclass(frozen=True)
class Course:
    """One seed's survey.

    Attributes:
        surveyed: Number of villages at each point of the course.
        accuracy: Share of the villages without a survey that are rightly called.
        sensitivity: The same of those above the threshold.
        seconds: Of each round: model, choice and the probabilities of all villages.
        at_cost: Accuracy and sensitivity at the end by another rule, the cheaper call: above where
            the probability of that is more than ``1 / (1 + MISS_COST)``.
    """

    surveyed: list[int]
    accuracy: list[float]
    sensitivity: list[float]
    seconds: list[float]
    at_cost: tuple[float, float]


@dataclass(frozen=True)
class Villages:
    """A country with one outcome of a survey in each village.

    Attributes:
        X: Position in degrees, then covariates, ``N x d``.
        above: Whether the true prevalence exceeds the threshold, ``N``.
        Y: Positives and examined, ``N x 2``.
        order: Of the random design, ``N``.
        threshold: Of prevalence.
    """

    X: Tensor
    above: Tensor
    Y: Tensor
    order: list[int]
    threshold: float

    @classmethod
    def of(cls, country: str, seed: int) -> Villages:
        """Draw order and counts."""
        X, rate = real(f"hotspots_{country}")
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(X), generator=generator).tolist()
        examined = torch.full((len(X),), float(EXAMINED))
        positives = torch.binomial(examined, rate.squeeze(-1), generator=generator)
        cut = THRESHOLDS[country]
        return cls(X, rate.squeeze(-1) > cut, torch.stack((positives, examined), -1), order, cut)


class Design:
    """A survey that goes on: its villages so far and the model of them."""

    def __init__(self, villages: Villages, first: int) -> None:
        self.villages = villages
        self.rows = villages.order[:first]
        self.model: StreamingGP | None = None
        self.fitted = 0

    def learn(self) -> StreamingGP:
        """The model of all results: fitted anew once there are ``REFIT`` more than at the last."""
        X, Y, known = self.villages.X, self.villages.Y, len(self.rows)
        if self.model is None or known - self.fitted >= REFIT:
            self.model = survey_model(X, X[self.rows], Y[self.rows], former=self.model)
            self.fitted = known
        else:
            new = self.rows[round(float(self.model.num_observations)) :]
            self.model.update(X[new], Y[new])
        return self.model

    def choose(self, q: int) -> list[int]:
        """The next villages: least expected cost of calls of those that stay without a survey."""
        villages = self.villages
        choice = select_sites(
            self.learn(),
            villages.X,
            q,
            Misclassification(villages.threshold, "prevalence", MISS_COST),
            exclude=torch.tensor(self.rows),
            trials=EXAMINED,
            settles=True,
        )
        return choice.indices.tolist()

    def scores(self, least: float = 0.5) -> tuple[float, float]:
        """Accuracy and sensitivity where villages without a survey are above from a chance on."""
        model = self.learn()
        with torch.no_grad():
            rate = prevalence(model, self.villages.X)
            called = rate.exceedance(self.villages.threshold).squeeze(-1) > least
        left = torch.ones(len(called), dtype=torch.bool)
        left[self.rows] = False
        called, above = called[left], self.villages.above[left]
        sensitivity = called[above].double().mean() if bool(above.any()) else torch.ones(())
        return float((called == above).double().mean()), float(sensitivity)


def course(country: str, seed: int, batch: int, sizes: Sizes) -> Course:
    """An adaptive survey, scored wherever the published one ten at a time is."""
    design = Design(Villages.of(country, seed), sizes.first)
    scored = [(sizes.first, *design.scores())]
    seconds = []
    for done in range(0, sizes.more, batch):
        begin = time.perf_counter()
        design.rows = design.rows + design.choose(batch)
        if (done + batch) % REFIT == 0:
            scored.append((len(design.rows), *design.scores()))
        seconds.append(time.perf_counter() - begin)
    surveyed, accuracy, sensitivity = (list(column) for column in zip(*scored, strict=True))
    at_cost = design.scores(1.0 / (1.0 + MISS_COST))
    return Course(surveyed, accuracy, sensitivity, seconds, at_cost)


def random_end(country: str, seed: int, sizes: Sizes) -> tuple[float, float]:
    """Accuracy and sensitivity of our model after as many random villages."""
    return Design(Villages.of(country, seed), sizes.first + sizes.more).scores()


# --- claims -------------------------------------------------------------------------------------


def published() -> pd.DataFrame:
    """Published results at the last step, a row a seed."""
    table = pd.read_csv(FOLDER / "hotspots_published.csv.gz")
    last = table.groupby(["iso", "batch"])["step"].transform("max")
    return table[table["step"] == last].set_index(["iso", "batch", "approach"]).sort_index()


def spread(values: list[float]) -> str:
    """Mean with its standard error, and median."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.mean(values):.3f} ± {error:.3f}, median {statistics.median(values):.3f}"


def end_claims(country: str, batch: int, courses: list[Course], table: pd.DataFrame) -> list[Claim]:
    """Accuracy and sensitivity at the end of surveys."""
    theirs = table.loc[(country, batch)]
    claims = []
    for i, measure in enumerate(("accuracy", "sensitivity")):
        ours = [getattr(one, measure)[-1] for one in courses]
        other = {name: theirs.loc[name, measure].tolist() for name in ("covp", "rand")}
        goal = TO_REACH[country][i] if batch == 10 else statistics.mean(other["covp"])
        detail = (
            f"{spread(ours)}; published {spread(other['covp'])}; random {spread(other['rand'])}"
        )
        name = f"{country.upper()}, {batch} at a time: {measure}"
        claims.append(at_least(name, statistics.mean(ours), goal, "", detail))
        claims.append(stated(f"{name}, published adaptive", statistics.mean(other["covp"])))
    return [*claims, cost_claim(country, batch, courses)]


def cost_claim(country: str, batch: int, courses: list[Course]) -> Claim:
    """Sensitivity and accuracy at the end by the rule of the cheaper call."""
    accuracy, sensitivity = ([one.at_cost[i] for one in courses] for i in range(2))
    name = f"{country.upper()}, {batch} at a time: sensitivity, called from 1 in {1 + MISS_COST:g}"
    detail = f"{spread(sensitivity)}; accuracy {spread(accuracy)}"
    return stated(name, statistics.mean(sensitivity), "", detail)


def needed_claim(country: str, courses: list[Course], table: pd.DataFrame) -> Claim:
    """Villages after the first ones at which the mean accuracy is the published random design's."""
    goal = statistics.mean(table.loc[(country, 10, "rand"), "accuracy"])
    means = [statistics.mean(one.accuracy[i] for one in courses) for i in range(11)]
    needed = next((10.0 * i for i, mean in enumerate(means) if mean >= goal), math.inf)
    detail = f"{goal:.3f}, which took it 100; ours {', '.join(f'{mean:.3f}' for mean in means)}"
    name = f"{country.upper()}: villages after the first until published random's last accuracy"
    return at_most(name, needed, 50.0, "", detail)


def random_claim(country: str, sizes: Sizes) -> Claim:
    """Our model with the random design."""
    ends = [random_end(country, seed, sizes) for seed in range(sizes.seeds)]
    accuracy, sensitivity = ([end[i] for end in ends] for i in range(2))
    detail = f"{spread(accuracy)}; sensitivity {spread(sensitivity)}"
    return stated(
        f"{country.upper()}, our model, random villages: accuracy",
        statistics.mean(accuracy),
        "",
        detail,
    )


def country_claims(country: str, sizes: Sizes) -> list[Claim]:
    """All claims of a country; its sizes are those of the protocol."""
    table, claims = published(), []
    for batch in sizes.batches:
        courses = [course(country, seed, batch, sizes) for seed in range(sizes.seeds)]
        claims += end_claims(country, batch, courses, table)
        if batch == 10:
            longest = max(max(one.seconds) for one in courses)
            claims.append(needed_claim(country, courses, table))
            claims.append(
                at_most(f"{country.upper()}: longest round of ten", longest, SECONDS, "s")
            )
    return [*claims, random_claim(country, sizes)]


def large_pool_claims(sizes: Sizes) -> list[Claim]:
    """A round of ten of very many candidates with eight covariates, after 200 results."""
    generator = torch.Generator().manual_seed(0)
    sites = torch.rand(sizes.candidates, 10, generator=generator)
    sites[:, :2] = 5.0 * sites[:, :2] + torch.tensor([33.0, -9.0])
    rate = (3.0 * (5.0 * sites[:, 2]).sin() + sites[:, 0] - 37.0).sigmoid()[:200]
    examined = torch.full((200,), float(EXAMINED))
    Y = torch.stack((torch.binomial(examined, rate, generator=generator), examined), -1)
    model = survey_model(sites, sites[:200], Y)
    criterion, taken = Misclassification(0.1, "prevalence"), torch.arange(200)
    times = []

    def choose() -> None:
        begin = time.perf_counter()
        select_sites(model, sites, 10, criterion, exclude=taken, trials=EXAMINED, settles=True)
        times.append(time.perf_counter() - begin)

    gib = peak_growth(choose) / 2**30
    name = f"ten of {sizes.candidates:,} candidates, 8 covariates"
    return [
        at_most(f"{name}: time", times[0], MINUTE, "s"),
        at_most(f"{name}: peak memory", gib, GIB, "GiB"),
    ]


def claims(options: Options, sizes: Sizes) -> list[Claim]:
    """All of them; a smoke run has one country and one short course."""
    if options.smoke:
        one = course("phl", 0, 10, sizes)
        found = [stated("PHL: accuracy after a short course", one.accuracy[-1])]
    else:
        found = [claim for c in THRESHOLDS for claim in country_claims(c, sizes)]
    return found + large_pool_claims(sizes)


def main() -> None:
    """Run it."""
    options = start(__doc__)
    sizes = options.pick(
        Sizes(20, 100, 100, (10, 1, 50), 1_000_000), Sizes(1, 30, 10, (10,), 3_000)
    )
    settings = {**asdict(sizes), "model": asdict(SurveyModelSettings())}
    finish("survey", claims(options, sizes), options, settings)


if __name__ == "__main__":
    main()
