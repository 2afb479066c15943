"""Whole runs of AutoGP over its hand-over, to 10,000 observations, beside the exact GP.

Levy-3 (noise of sd 10) and Hartmann-6 (sd 0.05) from 300 Sobol points, the same for both models, by
Thompson sampling in batches on candidates that the models share: Sobol points of the box, and
points around the observed one with the largest posterior mean. A model is refitted when the
observations have grown by 1.3, as in the loop. The exact GP takes part as far as it can be run; the
regret, of the observed point with the largest posterior mean by its value without noise, is
compared up to there. Each finished run is written to a file, so that an interrupted benchmark goes
on where it was; the file is removed at the end.

``SEEDS`` of the environment is the number of runs.
"""

from __future__ import annotations

import os
import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from botorch.generation.sampling import MaxPosteriorSampling
from botorch.models.model import Model
from scipy.stats import wilcoxon
from torch import Tensor
from torch.quasirandom import SobolEngine

from benchmarks.common.harness import processor_seconds, start
from benchmarks.common.report import Claim, at_least, finish, stated
from benchmarks.common.resume import Finished
from benchmarks.optimization.auto import DOUBT, STREAMS, TASKS, AutoPlayer
from benchmarks.optimization.problems import Problem, spelled
from benchmarks.peers.players import ExactPlayer, Player

SEEDS = int(os.environ.get("SEEDS", "5"))
GROWTH = 1.3
CHUNK = 500
NEAR = 0.05
"""Standard deviation of candidates around the best point, in sides of the box."""

PLAYERS: dict[str, Callable[[Tensor, Tensor], Player]] = {
    "exact": ExactPlayer,
    "AutoGP": AutoPlayer,
}


@dataclass(frozen=True)
class Sizes:
    """Numbers of observations and of candidates.

    Attributes:
        first: Sobol points that both models begin with.
        exact: Up to which the exact GP takes part.
        last: Up to which AutoGP goes on.
        batch: A step adds while the exact GP takes part.
        later: A step adds from then on.
        candidates: Sobol points that a step chooses from; beside them half as many near the best.
    """

    first: int = 300
    exact: int = 2_000
    last: int = 10_000
    batch: int = 50
    later: int = 200
    candidates: int = 1_000

    def numbers(self, player: str) -> list[int]:
        """Numbers of observations after each step of a model."""
        compared = list(range(self.first + self.batch, self.exact + 1, self.batch))
        later = range(self.exact + self.later, self.last + 1, self.later)
        return compared if player == "exact" else [*compared, *later]


@dataclass(frozen=True)
class Run:
    """One model on one function from one seed.

    Attributes:
        numbers: Of observations after each step.
        regrets: After each step.
        families: That the model was in after each step.
        seconds: Processor time of each step: a refit where one is due, the choice, the update.
        failed: Refits that raised.
    """

    numbers: list[int]
    regrets: list[float]
    families: list[str]
    seconds: list[float]
    failed: int

    @property
    def handed(self) -> int:
        """Number of observations of the first step after the hand-over; 0 without one."""
        steps = zip(self.numbers, self.families, strict=True)
        return next((n for n, family in steps if family != "exact"), 0)

    def until(self, n: int) -> list[float]:
        """Regrets of the steps to n observations."""
        return [r for number, r in zip(self.numbers, self.regrets, strict=True) if number <= n]


class Seeker:
    """A search by one model, from first points that its seed decides."""

    def __init__(self, name: str, problem: Problem, seed: int, sizes: Sizes) -> None:
        """Begin with the first points; nothing is learned yet."""
        self._problem, self._seed, self._sizes = problem, seed, sizes
        self._generator = torch.Generator().manual_seed(seed)
        self.dim = int(problem.function.dim)
        self._X = SobolEngine(self.dim, scramble=True, seed=seed).draw(
            sizes.first, dtype=torch.float64
        )
        self.player = PLAYERS[name](self._X, problem.measure(self._X, self._generator))
        self._fitted, self._best = 0, self._X[:1]

    def step(self, n: int) -> None:
        """Refit where that is due, choose points, evaluate them, and take the outcomes.

        Args:
            n: Observations afterwards.
        """
        if len(self._X) >= GROWTH * self._fitted:
            self.player.refit()
            self._fitted, self._best = len(self._X), self._incumbent()
        points = self._chosen(n - len(self._X))
        self.player.update(points, self._problem.measure(points, self._generator))
        self._X = torch.cat((self._X, points))
        self._best = self._incumbent()

    def regret(self) -> float:
        """Of the observed point with the largest posterior mean."""
        return float(self._problem.regret(self._best))

    @property
    def family(self) -> str:
        """That the model is in."""
        return str(getattr(self.player.model, "family", "exact"))

    @torch.no_grad()
    def _chosen(self, q: int) -> Tensor:
        """Points by Thompson sampling on candidates, ``q x d``."""
        seed = 100_000 * (self._seed + 1) + len(self._X)
        torch.manual_seed(seed)
        box = SobolEngine(self.dim, scramble=True, seed=seed)
        anywhere = box.draw(self._sizes.candidates, dtype=torch.float64)
        near = self._best + NEAR * torch.randn(self._sizes.candidates // 2, self.dim)
        candidates = torch.cat((anywhere, near.clamp(0.0, 1.0)))
        sampling = MaxPosteriorSampling(self.player.model, replacement=False)
        chosen: Tensor = sampling(candidates, q)
        return chosen

    def _incumbent(self) -> Tensor:
        """The observed point with the largest posterior mean, ``1 x d``."""
        means = means_at(self.player.model, self._X)
        return self._X[means.argmax()].unsqueeze(0)


@torch.no_grad()
def means_at(model: Model, X: Tensor) -> Tensor:
    """Posterior means at ``n x d`` points, some hundreds at a time."""
    return torch.cat([model.posterior(part).mean.reshape(-1) for part in X.split(CHUNK)])


def run(name: str, title: str, seed: int, sizes: Sizes) -> Run:
    """One run."""
    seeker = Seeker(name, TASKS[title].problem, seed, sizes)
    numbers = sizes.numbers(name)
    regrets, families, seconds = [], [], []
    for n in numbers:
        seconds.append(processor_seconds(lambda n=n: seeker.step(n)))
        regrets.append(seeker.regret())
        families.append(seeker.family)
    return Run(numbers, regrets, families, seconds, seeker.player.failed_fits)


def claims_of(title: str, runs: dict[str, list[Run]], sizes: Sizes) -> list[Claim]:
    """Paired differences of regret where both models took part, and what came after."""
    pairs = list(zip(runs["AutoGP"], runs["exact"], strict=True))
    spans = {
        f"mean over n = {sizes.first:,} to {sizes.exact:,}": [
            statistics.mean(ours.until(sizes.exact)) - statistics.mean(theirs.regrets)
            for ours, theirs in pairs
        ],
        f"after the hand-over to n = {sizes.exact:,}": [
            _mean_after(ours, ours.handed, sizes) - _mean_after(theirs, ours.handed, sizes)
            for ours, theirs in pairs
            if ours.handed and ours.handed <= sizes.exact
        ],
        f"at n = {sizes.exact:,}": [
            ours.until(sizes.exact)[-1] - theirs.regrets[-1] for ours, theirs in pairs
        ],
    }
    claims = []
    for span, differences in spans.items():
        if not differences:
            continue
        named = f"{title}: AutoGP's regret less the exact GP's, {span}"
        claims.append(
            stated(f"{named}, median", statistics.median(differences), "", spelled(differences))
        )
        same = all(value == 0.0 for value in differences)
        doubt = 1.0 if same else float(wilcoxon(differences, alternative="greater").pvalue)
        claims.append(at_least(f"{named}, p-value of no worse (Wilcoxon)", doubt, DOUBT))
    for name, n in (("exact", sizes.exact), ("AutoGP", sizes.exact), ("AutoGP", sizes.last)):
        ends = [each.until(n)[-1] for each in runs[name]]
        claims.append(
            stated(
                f"{title}: {name}, regret at n = {n:,}", statistics.median(ends), "", spelled(ends)
            )
        )
    handed = [float(each.handed) for each in runs["AutoGP"]]
    families = ", ".join(f"{each.families[-1]} by {each.handed:,}" for each in runs["AutoGP"])
    claims.append(
        stated(
            f"{title}: observations after the hand-over", statistics.median(handed), "", families
        )
    )
    return claims


def _mean_after(one: Run, n: int, sizes: Sizes) -> float:
    """Mean regret of the steps from n observations to the last that is compared."""
    compared = zip(one.numbers, one.regrets, strict=True)
    return statistics.mean(r for number, r in compared if n <= number <= sizes.exact)


def main() -> None:
    """Run it."""
    options = start(__doc__)
    warnings.simplefilter("ignore")
    sizes = options.pick(Sizes(), Sizes(20, 40, 60, 10, 20, 40))
    seeds = options.pick(SEEDS, 2)
    titles = options.pick(STREAMS, ("Levy-3",))
    kept = Finished(
        options.out / f"whole_runs.partial{options.pick('', '.smoke')}.json", asdict(sizes)
    )
    runs: dict[str, dict[str, list[Run]]] = {t: {name: [] for name in PLAYERS} for t in titles}
    for seed in range(seeds):
        for title in titles:
            for name in PLAYERS:
                key = f"{title}, {name}, {seed}"
                done = kept.part(key, Run, lambda n=name, t=title, s=seed: run(n, t, s, sizes))
                runs[title][name].append(done)
                print(
                    f"{key}: regret {done.until(sizes.exact)[-1]:.3g} at {sizes.exact:,}, "
                    f"{done.regrets[-1]:.3g} at the end, {sum(done.seconds):.0f} s",
                    flush=True,
                )
    claims = [claim for title in titles for claim in claims_of(title, runs[title], sizes)]
    records = {
        title: {n: [asdict(r) for r in rs] for n, rs in of.items()} for title, of in runs.items()
    }
    kept.remove()
    finish("whole_runs", claims, options, {"seeds": seeds, **asdict(sizes), "runs": records})


if __name__ == "__main__":
    main()
