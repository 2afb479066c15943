"""Two models on the same problems: runs, what they reach, and the file to go on from.

Both see the same first points and the same noise, are refitted by the same rule and are asked by
the same acquisition function.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from botorch.models.model import Model
from torch import Tensor

from benchmarks.common.report import Claim, at_most, stated, table
from benchmarks.optimization.problems import Problem, best_mean, first_points, spelled
from benchmarks.peers.players import Player

MEASURES = {
    "best": "best point evaluated",
    "recommended": "point of the best posterior mean",
}


@dataclass(frozen=True)
class Sizes:
    """Steps of a run, steps between records, seeds, functions."""

    steps: int
    every: int
    seeds: int
    functions: tuple[str, ...]


@dataclass(frozen=True)
class Contest:
    """What two models are compared on.

    Attributes:
        problems: By name.
        players: By name: ours, then the one that it is judged by.
        acquire: The next points of a model, ``q x d``, given a seed.
        first: Random points to begin with.
        few: Up to this many a refit starts from the default hyperparameters too.
        growth: A refit is due when the observations are this many times those at the last.
    """

    problems: Mapping[str, Problem]
    players: Mapping[str, Callable[[Tensor, Tensor], Player]]
    acquire: Callable[[Model, int], Tensor]
    first: int
    few: int
    growth: float = 1.3


@dataclass(frozen=True)
class Point:
    """A moment of a run.

    Attributes:
        step: Done.
        best: Least regret among the points evaluated.
        recommended: Regret at the evaluated point of the best posterior mean.
    """

    step: int
    best: float
    recommended: float


@dataclass(frozen=True)
class Run:
    """One model on one function from one seed.

    Attributes:
        curve: Its moments.
        refits: How many there were.
        failed: Of those, how many raised.
        seconds: All of it.
    """

    curve: list[Point]
    refits: int
    failed: int
    seconds: float


Runs = dict[tuple[str, str, int], Run]
"""By function, model and seed."""


def run(contest: Contest, name: str, player: str, seed: int, sizes: Sizes) -> Run:
    """One run."""
    began, problem = time.perf_counter(), contest.problems[name]
    X, Y, noise = first_points(problem, contest.first, seed)
    contender = contest.players[player](X, Y)
    contender.refit()
    fitted_at, refits, curve = len(X), 1, []
    for step in range(1, sizes.steps + 1):
        picked = contest.acquire(contender.model, 1_000 * seed + step)
        X = torch.cat((X, picked))
        contender.update(picked, problem.measure(picked, noise))
        if len(X) >= contest.growth * fitted_at:
            (contender.search if len(X) <= contest.few else contender.refit)()
            fitted_at, refits = len(X), refits + 1
        if step % sizes.every == 0:
            curve.append(moment(step, problem, contender, X))
    return Run(curve, refits, contender.failed_fits, time.perf_counter() - began)


def moment(step: int, problem: Problem, contender: Player, X: Tensor) -> Point:
    """Where a run stands."""
    recommended = problem.regret(best_mean(contender.model, X))
    return Point(step, float(problem.regret(X).min()), float(recommended))


def all_runs(contest: Contest, sizes: Sizes, file: Path) -> Runs:
    """Every run; those in the file, to which each is written, are not repeated."""
    runs = read(file, sizes)
    for seed in range(sizes.seeds):
        for name in sizes.functions:
            for player in contest.players:
                if (name, player, seed) not in runs:
                    runs[name, player, seed] = run(contest, name, player, seed, sizes)
                    write(file, sizes, runs)
                    print(said(name, player, seed, runs[name, player, seed]), flush=True)
    return runs


def said(name: str, player: str, seed: int, done: Run) -> str:
    """A line on a finished run."""
    last = done.curve[-1]
    return (
        f"{name}, {player}, seed {seed}: {done.seconds:.0f} s, {done.refits} refits "
        f"({done.failed} failed), regret {last.best:.3g}, recommended {last.recommended:.3g}"
    )


def write(file: Path, sizes: Sizes, runs: Runs) -> None:
    """Keep what is finished."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"key": key, **asdict(done)} for key, done in runs.items()]
    file.write_text(json.dumps({"sizes": asdict(sizes), "runs": rows}))


def read(file: Path, sizes: Sizes) -> Runs:
    """What is finished of a benchmark of the same sizes."""
    content = json.loads(file.read_text()) if file.is_file() else {}
    if content.get("sizes") != {**asdict(sizes), "functions": list(sizes.functions)}:
        return {}
    return {
        tuple(row.pop("key")): Run(**{**row, "curve": curve_of(row)}) for row in content["runs"]
    }


def curve_of(row: dict[str, list[dict[str, float]]]) -> list[Point]:
    """A run's moments, read again."""
    return [Point(int(p["step"]), p["best"], p["recommended"]) for p in row["curve"]]


def finals(runs: Runs, name: str, player: str, field: str) -> list[float]:
    """A field of the last moments, one number a seed."""
    ends = [done.curve[-1] for (n, p, _), done in runs.items() if (n, p) == (name, player)]
    return [getattr(end, field) for end in ends]


def judged(contest: Contest, runs: Runs, name: str, field: str, what: str) -> Claim:
    """Our mean over seeds against the other's worst seed."""
    us, them = contest.players
    ours, theirs = (finals(runs, name, player, field) for player in (us, them))
    detail = f"{us} {spelled(ours)}; {them} {spelled(theirs)}, mean {statistics.fmean(theirs):.3g}"
    return at_most(f"{name}: {what}", statistics.fmean(ours), max(theirs), "regret", detail)


def claims_of(contest: Contest, runs: Runs) -> list[Claim]:
    """Both measures on each function, and what failed."""
    claims = []
    for name in sorted({name for name, _, _ in runs}):
        for field, what in MEASURES.items():
            claims.append(judged(contest, runs, name, field, what))
    for player in contest.players:
        failed = [float(done.failed) for (_, p, _), done in runs.items() if p == player]
        refits = sum(done.refits for (_, p, _), done in runs.items() if p == player)
        claims.append(stated(f"refits that raised, {player}", sum(failed), f"of {refits}"))
    return claims


def regrets(contest: Contest, runs: Runs, sizes: Sizes) -> str:
    """Mean regret of the best point evaluated at some moments, by function and model."""
    last = sizes.steps // sizes.every
    moments = sorted({math.ceil(last * part) - 1 for part in (0.1, 0.25, 0.5, 1.0)})
    rows = [
        [name, player, *(mean_at(runs, name, player, moment) for moment in moments)]
        for name in sizes.functions
        for player in contest.players
    ]
    steps = [f"{(moment + 1) * sizes.every} steps" for moment in moments]
    return table(["function", "model", *steps], rows)


def mean_at(runs: Runs, name: str, player: str, moment: int) -> str:
    """Mean over seeds of the least regret at a moment."""
    values: Sequence[float] = [
        done.curve[moment].best for (n, p, _), done in runs.items() if (n, p) == (name, player)
    ]
    return f"{statistics.fmean(values):.3g}"


def settings_of(contest: Contest, sizes: Sizes, runs: Runs) -> dict[str, object]:
    """For the file of results, with every run."""
    kept = {", ".join(map(str, key)): asdict(done) for key, done in runs.items()}
    rules = {"first": contest.first, "growth": contest.growth, "few": contest.few}
    return {**asdict(sizes), **rules, "runs": kept}
