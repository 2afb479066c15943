"""How much a chosen design of 600 sites gains on random ones, over many splits of the Nigeria map.

Hyperparameters are fixed at good ones, so that only the choice of sites differs. Beside the error
on held-out sites stands the one that the model itself expects there: what could be gained if the
map were a draw from it.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common.data import real_file, write_small_field
from benchmarks.common.harness import Options, start
from benchmarks.common.report import Claim, finish, stated
from bo_stream import WISKI, PoolSelector
from bo_stream.loops.datasets import read_dataset
from bo_stream.loops.models import KERNELS
from bo_stream.loops.run import from_record, predict, score
from bo_stream.loops.sampling.campaign import PoolSplit
from bo_stream.loops.sampling.settings import STRATEGIES, Settings, Strategy

LENGTHSCALES = (0.055, 0.060)
NOISE = 0.094
"""Of the target's variance."""
ARTEFACT = 0.8
"""Three pixels of the map have a prevalence above this, far above all their neighbours."""


@dataclass(frozen=True)
class Outcome:
    """What one design came to, errors in units of the target's sd.

    Attributes:
        error: RMSE on the held-out sites.
        expected: Root mean predictive variance there.
        artefacts: How many of the artefacts it holds.
    """

    error: float
    expected: float
    artefacts: int


def fixed_model(split: PoolSplit, first: list[int], grid_size: int) -> WISKI:
    """At the fixed hyperparameters, standardised by the whole pool."""
    kernel = KERNELS["matern52"](2).to(split.pool_X)
    kernel.base_kernel.lengthscale = torch.tensor([LENGTHSCALES])
    kernel.outputscale = 1.0
    model = WISKI(
        split.pool_X[first],
        standardised(split, split.pool_Y[first]),
        covar_module=kernel,
        outcome_transform=None,
        bounds=torch.tensor([[0.0, 0.0], [1.0, 1.0]]),
        grid_size=grid_size,
    )
    model.likelihood.noise = NOISE
    return model


def standardised(split: PoolSplit, Y: Tensor) -> Tensor:
    """In units of the pool."""
    return (Y - split.pool_Y.mean()) / split.pool_Y.std()


def outcome(split: PoolSplit, settings: Settings, strategy: Strategy, grid_size: int) -> Outcome:
    """Choose, observe, and score once at the end."""
    picks = list(range(settings.initial))
    model = fixed_model(split, picks, grid_size)
    selector = PoolSelector(model, split.pool_X, split.test_X)
    for _ in range(settings.steps or 0):
        chosen = list(range(len(picks), len(picks) + settings.q))
        if strategy == "chosen":
            chosen = selector.select(settings.q, exclude=torch.tensor(picks)).tolist()
        model.update(split.pool_X[chosen], standardised(split, split.pool_Y[chosen]))
        picks.extend(chosen)
    test_Y = standardised(split, split.test_Y)
    variance = predict(model, split.test_X)[1].mean() + NOISE
    return Outcome(
        score(model, split.test_X, test_Y).rmse_sd,
        float(variance.sqrt() / test_Y.std()),
        int((split.pool_Y[picks] > ARTEFACT).sum()),
    )


def outcomes(data: Path, settings: Settings, grid_size: int) -> dict[Strategy, Outcome]:
    """Both designs on the split of one seed."""
    dataset = read_dataset(data)
    resolved = settings.resolved(*dataset.X.shape)
    split = PoolSplit.of(dataset, resolved)
    return {name: outcome(split, resolved, name, grid_size) for name in STRATEGIES}


def claims_of(splits: list[dict[Strategy, Outcome]]) -> list[Claim]:
    """Ratios of chosen to random."""
    ratios = [found["chosen"].error / found["random"].error for found in splits]
    expected = [found["chosen"].expected / found["random"].expected for found in splits]
    clean = [
        ratio
        for ratio, found in zip(ratios, splits, strict=True)
        if not any(design.artefacts for design in found.values())
    ]
    errors = ", ".join(f"{s['chosen'].error:.3f}/{s['random'].error:.3f}" for s in splits)
    return [
        stated("error over random choice's, median", statistics.median(ratios), detail=errors),
        stated("the same, least", min(ratios)),
        stated("the same, largest", max(ratios)),
        stated(
            "the same, median of splits without an artefact",
            statistics.median(clean or ratios),
            detail=f"{len(clean)} of {len(splits)} splits",
        ),
        stated("the same as the model expects it, median", statistics.median(expected)),
        stated("the same as the model expects it, least", min(expected)),
    ]


def inputs(options: Options, folder: Path) -> tuple[Path, Settings, int]:
    """Data, settings without the seed, and the grid."""
    if options.smoke:
        small = Settings(q=2, steps=6, pool=60, test=40)
        return write_small_field(folder / "small.npz", 120), small, 10
    return real_file("nigeria_pf"), Settings(steps=100, pool=12_000, test=10_000), 72


def main() -> None:
    """Run it."""
    options = start(__doc__)
    seeds = options.pick(20, 2)
    with tempfile.TemporaryDirectory() as name:
        data, settings, grid_size = inputs(options, Path(name))
        splits = [
            outcomes(data, from_record(Settings, {**asdict(settings), "seed": seed}), grid_size)
            for seed in range(seeds)
        ]
    finish("design", claims_of(splits), options, {"seeds": seeds, **asdict(settings)})


if __name__ == "__main__":
    main()
