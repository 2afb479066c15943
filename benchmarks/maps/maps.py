"""What ``bo-stream sample`` learns from 310 and 610 sites of two real maps, chosen and random.

Errors are in units of the target's sd, at sites that were held out, of replays as the command does
them. Chosen and random sites are learned by the same model, exact there, with a smoothness of its
own choice. Beside them stand sites chosen by a model on a grid from the first one on, a product of
Matérn-5/2 kernels, as the command did once. The seeds are others than those that settings were
chosen by. Finished replays are kept, and a run that was stopped goes on. ``SEEDS=3`` does fewer.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.data import real_file, write_small_field
from benchmarks.common.harness import start
from benchmarks.common.report import Claim, at_most, finish, stated
from benchmarks.common.resume import Finished
from bo_stream.loops.datasets import read_dataset
from bo_stream.loops.sampling.campaign import PoolSplit, SamplingReplay
from bo_stream.loops.sampling.settings import Settings

MAPS = ("nigeria_pf", "modis_lst")
SITES = (310, 610)
SMALL_SITES = (22, 34)
MOST = {310: 0.90, 610: 0.92}
"""Ratio to random choice that was aimed at."""
BETTER = 0.96
"""Ratio to the errors on the grid that was aimed at."""

FIRST = 10
"""First seed: those before it were looked at."""

PLAYERS: dict[str, dict[str, Any]] = {
    "chosen": {},
    "random": {"strategy": "random"},
    "grid": {"kernel": "matern52", "grid": (60, 60)},
}
"""What each has instead of the command's defaults."""


@dataclass
class Replayed:
    """Errors of a replay at the numbers of sites, and its last kernel."""

    rmse: list[float]
    mae: list[float]
    kernel: str


def replayed(data: Path, settings: Settings, sites: Sequence[int]) -> Replayed:
    """Replay a map, and score it at some numbers of sites."""
    dataset = read_dataset(data)
    resolved = settings.resolved(*dataset.X.shape)
    replay = SamplingReplay(PoolSplit.of(dataset, resolved), resolved)
    for _ in replay.run():
        pass
    scores = {score.observations: score for score in replay.curve}
    found = [scores[n] for n in sites]
    kernel = replay.state.kernel
    return Replayed([s.rmse_sd for s in found], [s.mae_sd for s in found], kernel)


def claims_of(name: str, runs: Sequence[dict[str, Replayed]], sites: Sequence[int]) -> list[Claim]:
    """Errors of chosen sites, and their ratio to those of random ones and to those on the grid."""
    claims = []
    for i, n in enumerate(sites):
        rmse = {player: [run[player].rmse[i] for run in runs] for player in PLAYERS}
        error = {player: statistics.mean(values) for player, values in rmse.items()}
        ratios = [
            ours / theirs for ours, theirs in zip(rmse["chosen"], rmse["random"], strict=True)
        ]
        mae = [run["chosen"].mae[i] / run["random"].mae[i] for run in runs]
        each = ", ".join(f"{value:.3f}" for value in rmse["chosen"])
        where, least = f"{name}, {n} sites", MOST.get(n, 1.5)
        claims += [
            stated(f"{where}: RMSE of chosen", error["chosen"], "sd", detail=each),
            at_most(f"{where}: RMSE over the grid's", error["chosen"] / error["grid"], BETTER),
            at_most(f"{where}: RMSE over random choice's", statistics.mean(ratios), least),
            stated(f"{where}: MAE over random choice's", statistics.mean(mae)),
        ]
    return claims


def main() -> None:
    """Run it."""
    options = start(__doc__)
    seeds = range(FIRST, FIRST + options.pick(int(os.environ.get("SEEDS", "10")), 1))
    sites = options.pick(SITES, SMALL_SITES)
    settings = options.pick(
        Settings(steps=100, score_every=50), Settings(steps=4, score_every=2, pool=60, test=40)
    )
    finished = Finished(options.out / "maps.parts.json", asdict(settings))
    claims: list[Claim] = []
    with tempfile.TemporaryDirectory() as folder:
        small = write_small_field(Path(folder) / "small.npz", 120)
        for name in MAPS:
            data = small if options.smoke else real_file(name)
            runs = [_played(finished, name, data, settings, seed, sites) for seed in seeds]
            claims += claims_of(name, runs, sites)
    finished.remove()
    finish("maps", claims, options, {"seeds": len(seeds), **asdict(settings)})


def _played(
    finished: Finished, name: str, data: Path, settings: Settings, seed: int, sites: Sequence[int]
) -> dict[str, Replayed]:
    """All players on the split of a seed."""
    found: dict[str, Replayed] = {}
    for player, changes in PLAYERS.items():
        own = replace(settings, seed=seed, **changes)
        key = f"{name}-{seed}-{player}"
        found[player] = finished.part(key, Replayed, partial(replayed, data, own, sites))
    return found


if __name__ == "__main__":
    main()
