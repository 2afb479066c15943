"""What more rows and more workers cost: the numbers of docs/scale/capacity.md, and a check of them.

Sums over observations on grids and at inducing points: rows a second of one process, bytes, and
seconds of merging two of them. Seconds of choosing a point, as many together as a driver of some
workers does, against outcomes and family. Seconds that a replica needs for each outcome of the
others. Processor time, one thread, medians. From these ``docs/figures/capacity.py`` computes what
some rows and some workers need. Its shares of busy workers are checked here by the simulated clock
of ``benchmarks.workers.many_workers`` at three sizes. ``--write`` puts the numbers into
docs/figures/capacity.json, ``--check`` checks those in there.
"""

from __future__ import annotations

import json
import statistics
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
from botorch.test_functions import Hartmann, Levy
from botorch.test_functions.synthetic import SyntheticTestFunction

from benchmarks.common.harness import Options, processor_seconds, start
from benchmarks.common.report import Claim, at_most, finish, stated
from benchmarks.workers.many_workers import SECONDS, SimulatedWorkers, optimizer_of, told
from bo_stream import OSGPR, WISKI
from bo_stream.distributed import MemoryStore, Replica, Sums, accumulate, merge, zero
from bo_stream.distributed.sources import READ_ROWS
from bo_stream.loops.optimization import OptimizationSettings, run_asynchronously
from bo_stream.models.base import StreamingGP
from docs.figures.capacity import NUMBERS, busy_with_driver, driver_choice

FUNCTIONS: dict[str, SyntheticTestFunction] = {"Levy-3": Levy(3), "Hartmann-6": Hartmann(6)}
OFF = 0.1
"""Largest difference of a predicted share of busy workers from a simulated one."""

TOGETHER = 8
"""A driver chooses points for an eighth of its workers at a time: half of those chosen ahead."""


@dataclass(frozen=True)
class SumCosts:
    """Costs of sums over observations.

    Attributes:
        model: What they are sums for.
        dim: Number of inputs.
        rows_a_second: That one process adds, as many at a time as ``ingest`` reads.
        bytes: Size of the sums, however many rows they are of.
        merge_seconds: Of merging two, the second as bytes.
    """

    model: str
    dim: int
    rows_a_second: float
    bytes: int
    merge_seconds: float


@dataclass(frozen=True)
class ChoiceCosts:
    """Costs of choosing points while others are being evaluated.

    Attributes:
        function: Whose outcomes the model has.
        family: Of the model.
        acquisition: That chooses.
        outcomes: In the model.
        workers: Number of points that are being evaluated; one in ``TOGETHER`` are chosen at once.
        seconds: Of choosing a point.
    """

    function: str
    family: str
    acquisition: str
    outcomes: int
    workers: int
    seconds: float


def models(options: Options) -> dict[str, StreamingGP]:
    """Models without data, by a name."""
    grids = options.pick({2: (36, 64, 128), 3: (20, 32), 4: (12,)}, {2: (8,)})
    found: dict[str, StreamingGP] = {
        " × ".join([str(size)] * d) + " grid": grid_model(d, size)
        for d, sizes in grids.items()
        for size in sizes
    }
    for count in options.pick((128, 512), (16,)):
        points = torch.rand(count, 8, generator=torch.Generator().manual_seed(0))
        none = torch.empty(0, 8), torch.empty(0, 1)
        found[f"{count} points"] = OSGPR(*none, inducing_points=points, window=0)
    return found


def grid_model(d: int, size: int) -> WISKI:
    """WISKI of no data over the unit cube."""
    bounds = torch.tensor([[0.0] * d, [1.0] * d])
    return WISKI(torch.empty(0, d), torch.empty(0, 1), bounds=bounds, grid_size=size)


def sum_costs(name: str, model: StreamingGP, options: Options) -> SumCosts:
    """Measure sums for a model."""
    d, batches = model._input_dim, options.pick(7, 2)
    parts, times = (zero(model), zero(model)), []
    for turn in range(batches + 1):
        X = torch.rand(options.pick(READ_ROWS, 400), d)
        Y = torch.sin(5.0 * X).sum(-1, keepdim=True)
        taken = [processor_seconds(lambda p=p, x=X, y=Y: accumulate(p, x, y)) for p in parts]
        if turn > 0:  # the first ones allocate
            times += [each / len(X) for each in taken]
    content = parts[1].to_bytes()
    merging = [
        processor_seconds(lambda: merge(parts[0], Sums.from_bytes(content)))
        for _ in range(options.pick(7, 1))
    ]
    rate = 1.0 / statistics.median(times)
    return SumCosts(name, d, rate, len(content), statistics.median(merging))


def choice_costs(
    case: tuple[str, str, int], acquisition: str, workers: int, options: Options
) -> ChoiceCosts:
    """Measure choices by a model of some outcomes, for some workers.

    Args:
        case: Names of the function and of the model, and the number of outcomes.
        acquisition: That chooses.
        workers: Points that are being evaluated.
        options: Of the command line.
    """
    name, model, n = case
    optimizer = told(FUNCTIONS[name], acquisition, n, workers, model)
    q = max(1, workers // TOGETHER)
    times = [processor_seconds(lambda: optimizer.ask(q)) / q for _ in range(options.pick(3, 1))]
    held = optimizer.surrogate.model
    family = str(getattr(held, "family", type(held).__name__))
    return ChoiceCosts(name, family, acquisition, n, workers, statistics.median(times))


def replica_seconds(options: Options) -> float:
    """Measure how long a replica is at each outcome of others, taken one delta an outcome."""
    function, store = Levy(3), MemoryStore()
    bounds = tuple((low, high) for low, high in function.bounds.T.tolist())
    settings = OptimizationSettings(bounds=bounds, acquisition="TS")
    first, second = (Replica(settings, store, name) for name in ("a", "b"))
    generator = torch.Generator().manual_seed(0)

    def send(count: int) -> None:
        X = torch.rand(count, function.dim, generator=generator)
        box = function.bounds.to(X)
        points = box[0] + (box[1] - box[0]) * X
        first.tell(points.tolist(), function.evaluate_true(points).tolist())
        first.exchange()

    send(options.pick(1_000, 50))
    second.exchange()
    deltas = options.pick(200, 5)
    for _ in range(deltas):
        send(1)
    return processor_seconds(second.exchange) / deltas


def measured(options: Options) -> dict[str, Any]:
    """Measure everything, as docs/figures/capacity.json has it."""
    sums = []
    for name, model in models(options).items():
        sums.append(asdict(sum_costs(name, model, options)))
        print(sums[-1], flush=True)
    cases = options.pick(
        [
            ("Levy-3", "auto", 500),
            ("Levy-3", "wiski", 3_000),
            ("Levy-3", "wiski", 30_000),
            ("Hartmann-6", "auto", 500),
            ("Hartmann-6", "osgpr", 3_000),
        ],
        [("Levy-3", "auto", 30), ("Levy-3", "wiski", 40)],
    )
    choices = []
    for case in cases:
        for acquisition, workers in options.pick(
            [("TS", 100), ("TS", 500), ("TS", 2_000), ("qLogEI", 500)], [("TS", 8), ("qLogEI", 8)]
        ):
            choices.append(asdict(choice_costs(case, acquisition, workers, options)))
            print(choices[-1], flush=True)
    return {"sums": sums, "choices": choices, "replica_seconds": replica_seconds(options)}


def simulated(workers: int, each: int, costs: dict[str, Any]) -> Claim:
    """Compare the share of busy workers with the one that the seconds of a choice predict."""
    function = FUNCTIONS["Levy-3"]
    with SimulatedWorkers(function, workers) as evaluator:
        run_asynchronously(optimizer_of(function, "TS"), evaluator, workers * each, workers)
        share = evaluator.busy()
    predicted = busy_with_driver(workers, SECONDS, driver_choice(costs, workers))
    return at_most(
        f"{workers:,} workers, evaluations of {SECONDS:g} s: predicted share of busy ones off",
        abs(predicted - share),
        OFF,
        "",
        f"predicted {predicted:.3f}, simulated {share:.3f}",
    )


def claims_of(numbers: dict[str, Any], options: Options) -> list[Claim]:
    """State the numbers, and check the shares that follow from them."""
    claims = [
        stated(f"{each['model']}: rows a second", each["rows_a_second"], "", f"{each['bytes']:,} B")
        for each in numbers["sums"]
    ]
    claims += [
        stated(
            f"choosing a point, {each['acquisition']}, {each['function']}, {each['family']} of "
            f"{each['outcomes']:,}, {each['workers']:,} workers",
            1000.0 * each["seconds"],
            "ms",
        )
        for each in numbers["choices"]
    ]
    claims.append(
        stated("an outcome of another replica", 1000.0 * numbers["replica_seconds"], "ms")
    )
    for workers, each in options.pick(((100, 10), (500, 5), (2_000, 3)), ((8, 3),)):
        claims.append(simulated(workers, each, numbers))
        print(claims[-1], flush=True)
    return claims


def main() -> None:
    """Run it."""
    flags = {"write": "put the numbers into docs", "check": "check the numbers that are there"}
    options = start(__doc__, flags=flags)
    warnings.simplefilter("ignore")
    given = "check" in options.flags
    numbers = json.loads(NUMBERS.read_text()) if given else measured(options)
    if "write" in options.flags:
        NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n")
    finish("capacity", claims_of(numbers, options), options, {"numbers": numbers})


if __name__ == "__main__":
    main()
