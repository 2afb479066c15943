"""The stopping rule of a survey: is it reached after as many villages as it says?

Replays of 800 villages, half of them on real maps (Cote d'Ivoire and Haiti, true prevalence known),
half in countries drawn at random, one smooth and one rough. After 80 random villages the survey
says how many more it takes until the expected share of wrong calls is two thirds of today's. Then
it goes on, twenty at a time, as ``bo-stream survey next`` does, with a model fitted anew to each
round, until that is reached. Reached in good time: within a factor of 1.5 of the forecast. Beside
it stand the same for a forecast three rounds later, and the share of calls that are wrong in truth,
before and after.
"""

from __future__ import annotations

import itertools
import math
import statistics
import warnings
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import pandas as pd
from scipy.special import expit

from benchmarks.common.data import real
from benchmarks.common.harness import Options, start
from benchmarks.common.report import Claim, at_least, finish, stated
from benchmarks.common.resume import Finished
from bo_stream.loops.survey import Survey, SurveySettings

THRESHOLDS = {"civ": 0.10, "hti": 0.02, "smooth": 0.10, "rough": 0.10}
EXAMINED = 100
FACTOR = 1.5
FRESH = 15
"""First seed: those before it were looked at when the forecast and the fits were made."""


@dataclass(frozen=True)
class Sizes:
    """Of one run.

    Attributes:
        seeds: Of each country.
        villages: In the list.
        first: Random villages.
        batch: Villages at a time.
        rounds: Rounds of so many until a second forecast.
        most: Villages after the first ones at which a replay ends anyway.
        part: Of today's expected share of wrong calls, to be reached.
    """

    seeds: int
    villages: int
    first: int
    batch: int
    rounds: int
    most: int
    part: float


@dataclass(frozen=True)
class Replay:
    """What was forecast and what came.

    Attributes:
        forecast: Further villages until the rule is reached, as said after the first ones.
        needed: Those that it took, interpolated within a round; infinite if not reached.
        later: The second forecast, and the villages that it took from then on.
        expected: Share of wrong calls that the model expected at first and at the end.
        wrong: Share of wrong calls at both.
    """

    forecast: float
    needed: float
    later: tuple[float, float]
    expected: tuple[float, float]
    wrong: tuple[float, float]


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
    """Survey, forecast, and survey on until the rule is reached."""
    table = country(name, seed, sizes.villages)
    truth = table.set_index("id")["truth"]
    counts = table[["id", "positive"]].assign(examined=EXAMINED).set_index("id", drop=False)
    covariates = tuple(column for column in table if column.startswith("c"))
    settings = SurveySettings(threshold=THRESHOLDS[name], covariates=covariates)
    survey = Survey(table.drop(columns=["truth", "positive"]), settings)
    chosen = np.random.default_rng(seed + 1).permutation(table["id"])[: sizes.first]
    shares: list[float] = []
    wrong: list[float] = []
    forecasts: list[float] = []
    while True:
        survey.tell(counts.loc[chosen])
        shares.append(survey.stopping(0.499).share)
        wrong.append(wrong_share(survey, truth, settings))
        done = len(shares) - 1
        if done in (0, sizes.rounds):
            more = survey.stopping(sizes.part * shares[-1]).more
            forecasts.append(math.inf if more is None else float(more))
        ends = [rounds_until(shares[begun:], sizes.part) for begun in (0, sizes.rounds)]
        if max(ends) < math.inf or done * sizes.batch >= sizes.most:
            break
        chosen = survey.ask(sizes.batch)["id"].to_numpy()
    first, second = (sizes.batch * rounds for rounds in ends)
    later = (forecasts[1], second)
    return Replay(forecasts[0], first, later, (shares[0], shares[-1]), (wrong[0], wrong[-1]))


def rounds_until(shares: list[float], part: float) -> float:
    """Return after how many rounds a part of the first share is reached; infinite if never."""
    target = part * (shares[0] if shares else 0.0)
    for number, (former, share) in enumerate(itertools.pairwise(shares)):
        if share <= target:
            return number + (former - target) / (former - share)
    return math.inf


def in_time(forecast: float, needed: float) -> bool:
    """Whether a forecast holds within ``FACTOR``; one that never ends does not."""
    return math.isfinite(forecast) and 1.0 / FACTOR <= needed / forecast <= FACTOR


def claims(options: Options, sizes: Sizes, finished: Finished) -> list[Claim]:
    """How many replays reach the rule in good time."""
    found: list[Claim] = []
    every: list[Replay] = []
    for name in list(THRESHOLDS)[: 1 if options.smoke else None]:
        replays = [
            finished.part(f"{name} {seed}", Replay, partial(replay, name, seed, sizes))
            for seed in range(FRESH, FRESH + sizes.seeds)
        ]
        every += replays
        texts = [f"{one.forecast:.0f}: {one.needed:.0f}" for one in replays]
        wrong = [statistics.mean(one.wrong[i] for one in replays) for i in (0, 1)]
        expected = [statistics.mean(one.expected[i] for one in replays) for i in (0, 1)]
        detail = (
            f"forecast: needed {', '.join(texts)}; wrong calls expected {expected[0]:.3f}, then "
            f"{expected[1]:.3f}; in truth {wrong[0]:.3f}, then {wrong[1]:.3f}"
        )
        middle = statistics.median(one.needed / one.forecast for one in replays)
        found.append(stated(f"{name}: villages needed, of those forecast", middle, "", detail))
        print(found[-1], flush=True)
    later = [one.later for one in every]
    ratios = sorted(needed / forecast for forecast, needed in later)
    detail = f"needed, of those forecast: {', '.join(f'{ratio:.2f}' for ratio in ratios)}"
    title = f"of {len(every)} forecasts after {sizes.rounds} rounds, within {FACTOR:g}"
    found.append(stated(title, sum(in_time(*one) for one in later), "", detail))
    good = sum(in_time(one.forecast, one.needed) for one in every)
    goal = 0.75 * len(every)
    title = f"replays of {len(every)} that reach the rule within a factor of {FACTOR:g}"
    return [*found, at_least(title, good, 0.0 if options.smoke else goal, "")]


def main() -> None:
    """Run it."""
    options = start(__doc__)
    warnings.simplefilter("ignore")
    sizes = options.pick(Sizes(5, 800, 80, 20, 3, 240, 0.67), Sizes(1, 60, 20, 5, 1, 20, 0.9))
    finished = Finished(options.out / "stopping.replays.json", asdict(sizes))
    finish("stopping", claims(options, sizes, finished), options, asdict(sizes))
    finished.remove()


if __name__ == "__main__":
    main()
