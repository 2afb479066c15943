"""The stopping rule of a survey: is it reached after as many villages as it says?

Replays of 800 villages, half of them on real maps (Cote d'Ivoire and Haiti, true prevalence known),
half in countries drawn at random, one smooth and one rough. After the first random villages the
survey says how many more it takes until the expected share of wrong calls is a given part of
today's. Then it goes on, twenty at a time, as ``bo-stream survey next`` does, with a model fitted
anew to each round, until that is reached. Reached in good time: within a factor of 1.5 of the
forecast. Beside it stands the share of calls that are wrong in truth, before and after.
"""

from __future__ import annotations

import math
import statistics
import warnings
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd
from scipy.special import expit

from benchmarks.data import real
from benchmarks.harness import Options, start
from benchmarks.report import Claim, at_least, finish, stated
from bo_stream.loops.survey import Survey, SurveySettings

THRESHOLDS = {"civ": 0.10, "hti": 0.02, "smooth": 0.10, "rough": 0.10}
EXAMINED = 100
FACTOR = 1.5
FRESH = 5
"""First seed: those before it were looked at when the forecast was made (``SOONER``)."""


@dataclass(frozen=True)
class Sizes:
    """Of one run.

    Attributes:
        seeds: Of each country.
        villages: In the list.
        first: Random villages.
        batch: Villages at a time.
        most: Villages after the first ones at which a replay ends anyway.
        part: Of today's expected share of wrong calls, to be reached.
    """

    seeds: int
    villages: int
    first: int
    batch: int
    most: int
    part: float


@dataclass(frozen=True)
class Replay:
    """What was forecast and what came.

    Attributes:
        forecast: Further villages until the rule is reached, as said after the first ones.
        needed: Those that it took, interpolated within a round; infinite if not reached.
        expected: Share of wrong calls that the model expected at first and at the end.
        wrong: Share of wrong calls at both.
    """

    forecast: float
    needed: float
    expected: tuple[float, float]
    wrong: tuple[float, float]

    @property
    def ratio(self) -> float:
        """Villages needed, as a multiple of those forecast."""
        return self.needed / self.forecast


def country(name: str, seed: int, villages: int) -> pd.DataFrame:
    """Draw villages, their true prevalence, and one outcome of a survey in each."""
    random = np.random.default_rng(seed)
    if name in ("civ", "hti"):
        X, rate = real(f"hotspots_{name}")
        rows = random.permutation(len(X))[:villages]
        inputs, truth = X.numpy()[rows], rate.numpy()[rows, 0]
    else:
        inputs, truth = drawn(random, villages, 2.0 if name == "smooth" else 6.0)
    columns = ["longitude", "latitude", *(f"c{i}" for i in range(2, inputs.shape[1]))]
    table = pd.DataFrame(inputs, columns=columns)
    table.insert(0, "id", [f"V{row}" for row in range(len(table))])
    return table.assign(truth=truth, positive=random.binomial(EXAMINED, truth))


def drawn(
    random: np.random.Generator, villages: int, frequency: float
) -> tuple[np.ndarray, np.ndarray]:
    """Draw a country of some 400 km with a covariate: inputs and prevalence."""
    place = random.uniform((30.0, -3.0), (34.0, 1.0), (villages, 2))
    waves = frequency * random.standard_normal((300, 2)) / 2.0
    phase, size = random.uniform(0.0, 2.0 * np.pi, 300), random.standard_normal(300)
    field = np.cos(place @ waves.T + phase) @ size / np.sqrt(150.0)
    rain = random.standard_normal(villages)
    logit = -2.2 + 1.0 * field + 0.5 * rain + 0.2 * random.standard_normal(villages)
    return np.column_stack((place, rain)), expit(logit)


def wrong_share(survey: Survey, truth: pd.Series, settings: SurveySettings) -> float:
    """The share of all villages that are called wrongly, each by the cheaper call."""
    chance = survey.predictions().set_index("id")["exceedance"].loc[truth.index]
    above = truth > (settings.threshold or 0.0)
    return float(((chance >= settings.cheaper_above) != above).mean())


def replay(name: str, seed: int, sizes: Sizes) -> Replay:
    """Forecast, then survey until the rule is reached."""
    table = country(name, seed, sizes.villages)
    truth = table.set_index("id")["truth"]
    counts = table[["id", "positive"]].assign(examined=EXAMINED).set_index("id", drop=False)
    covariates = tuple(column for column in table if column.startswith("c"))
    settings = SurveySettings(threshold=THRESHOLDS[name], covariates=covariates)
    survey = Survey(table.drop(columns=["truth", "positive"]), settings)
    first = np.random.default_rng(seed + 1).permutation(table["id"])[: sizes.first]
    survey.tell(counts.loc[first])
    today = survey.stopping(0.499).share
    target = sizes.part * today
    ahead = survey.stopping(target).more
    before = wrong_share(survey, truth, settings)
    done, share, needed = 0, today, math.inf
    while share > target and done < sizes.most:
        former = share
        survey.tell(counts.loc[survey.ask(sizes.batch)["id"]])
        done += sizes.batch
        share = survey.stopping(0.499).share
        if share <= target:
            needed = done - sizes.batch * (target - share) / (former - share)
    forecast = math.inf if ahead is None else float(ahead)
    return Replay(forecast, needed, (today, share), (before, wrong_share(survey, truth, settings)))


def claims(options: Options, sizes: Sizes) -> list[Claim]:
    """How many replays reach the rule in good time."""
    found, ratios = [], []
    for name in list(THRESHOLDS)[: 1 if options.smoke else None]:
        replays = [replay(name, seed, sizes) for seed in range(FRESH, FRESH + sizes.seeds)]
        ratios += [one.ratio for one in replays]
        texts = [f"{one.forecast:.0f}: {one.needed:.0f}" for one in replays]
        wrong = [statistics.mean(one.wrong[i] for one in replays) for i in (0, 1)]
        expected = [statistics.mean(one.expected[i] for one in replays) for i in (0, 1)]
        detail = (
            f"forecast: needed {', '.join(texts)}; wrong calls expected {expected[0]:.3f}, then "
            f"{expected[1]:.3f}; in truth {wrong[0]:.3f}, then {wrong[1]:.3f}"
        )
        middle = statistics.median(one.ratio for one in replays)
        found.append(stated(f"{name}: villages needed, of those forecast", middle, "", detail))
        print(found[-1], flush=True)
    good = sum(1.0 / FACTOR <= ratio <= FACTOR for ratio in ratios)
    goal = 0.75 * len(ratios)
    title = f"replays of {len(ratios)} that reach the rule within a factor of {FACTOR:g}"
    return [*found, at_least(title, good, 0.0 if options.smoke else goal, "")]


def main() -> None:
    """Run it."""
    options = start(__doc__)
    warnings.simplefilter("ignore")
    sizes = options.pick(Sizes(5, 800, 80, 20, 400, 0.67), Sizes(1, 60, 20, 10, 20, 0.9))
    finish("stopping", claims(options, sizes), options, asdict(sizes))


if __name__ == "__main__":
    main()
