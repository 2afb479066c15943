"""Files of parquet put into WISKI by one and by two processes: rows a second, memory, equality.

And what a record costs, by which all bytes of the files are hashed.

``--large`` streams 10⁸ rows besides, once (2.4 GB of files in the temporary folder).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from concurrent.futures import Executor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet

from benchmarks.common.harness import Options, processor_seconds, seconds, start, timings
from benchmarks.common.report import Claim, at_least, at_most, finish, stated
from bo_stream import WISKI
from bo_stream.distributed import ingest
from bo_stream.executors import executor_of

CASES = ((2, 36, 1_000_000.0), (3, 20, None))
"""Dimension, nodes a dimension, and rows a second to reach with two processes."""

GAIN = 1.7
FLAT = 1.1
SAME = 1e-10
FILE_ROWS = 1_000_000
GROUP_ROWS = 250_000
REPEATS = 3


def write(folder: Path, d: int, files: int, rows: int) -> list[Path]:
    """Files of so many rows each, of noisy values of a smooth function in the unit cube."""
    folder.mkdir(parents=True)
    paths = []
    for number in range(files):
        generator = np.random.default_rng(number)
        X = generator.random((rows, d))
        y = np.sin(3.0 * X.sum(1)) + 0.1 * generator.standard_normal(rows)
        columns = {f"x{i}": X[:, i] for i in range(d)} | {"y": y}
        paths.append(folder / f"{number:04d}.parquet")
        parquet.write_table(pa.table(columns), paths[-1], row_group_size=GROUP_ROWS)
    return paths


def empty_model(d: int, grid_size: int) -> WISKI:
    """WISKI in the unit box before any data."""
    bounds = torch.tensor([[0.0] * d, [1.0] * d])
    return WISKI(torch.empty(0, d), torch.empty(0, 1), bounds=bounds, grid_size=grid_size)


def ingested(files: list[Path], d: int, grid_size: int, executor: Executor | None) -> WISKI:
    """A model that took in files."""
    model = empty_model(d, grid_size)
    names = [f"x{i}" for i in range(d)]
    ingest(model, files, x=names, y="y", executor=executor, progress=False)
    return model


def peak(pause: float) -> int:
    """Largest memory of the process so far, in bytes, after a pause in which others are asked."""
    time.sleep(pause)
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def worker_peak(executor: Executor, workers: int) -> float:
    """Largest memory of any worker."""
    asked = [executor.submit(peak, 0.2) for _ in range(2 * workers)]
    return float(max(each.result() for each in asked))


def streamed(files: list[Path], d: int, grid_size: int) -> WISKI:
    """A model that took in files by ``update``, in this process."""
    model = empty_model(d, grid_size)
    for file in files:
        for batch in parquet.ParquetFile(file).iter_batches(4096):
            rows = torch.from_numpy(np.column_stack([column.to_numpy() for column in batch]))
            model.update(rows[:, :d], rows[:, d:])
    return model


def difference(a: WISKI, b: WISKI, d: int) -> float:
    """Largest difference of posterior means and variances, relative to the largest of each."""
    X = torch.rand(20, d)
    pairs = [(m.posterior(X).mean, m.posterior(X).variance) for m in (a, b)]
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(*pairs, strict=True))


def case(
    folder: Path, d: int, grid_size: int, target: float | None, options: Options
) -> list[Claim]:
    """Claims in one dimension."""
    files = write(folder, d, options.pick(10, 2), options.pick(FILE_ROWS, 2_000))
    rows = options.pick(10 * FILE_ROWS, 4_000)
    where, sizes = f"{d}-D, {grid_size}^{d}", f"{rows:,} rows"
    with ExitStack() as stack:
        pools = {n: stack.enter_context(executor_of(f"processes:{n}")) for n in (1, 2)}
        for pool in pools.values():  # which starts the processes
            ingested(files[:1], d, grid_size, pool)
        few = worker_peak(pools[2], 2)
        tasks = {
            str(n): (lambda pool=pool: ingested(files, d, grid_size, pool))
            for n, pool in pools.items()
        }
        times = timings(tasks, options.pick(REPEATS, 1), warmup=0)
        many = worker_peak(pools[2], 2)
        apart = difference(
            ingested(files[:1], d, grid_size, pools[2]), streamed(files[:1], d, grid_size), d
        )
    rate = rows / statistics.median(times["2"])
    gains = [one / two for one, two in zip(times["1"], times["2"], strict=True)]
    name = f"rows a second, two processes, {where}"
    claims = [
        stated(name, rate, "rows/s", sizes)
        if target is None
        else at_least(name, rate, target, "rows/s", sizes),
        at_least(f"gain of two processes, {where}", statistics.median(gains), GAIN, "", sizes),
        at_most(f"memory of a worker, {where}", many / few, FLAT, "", f"{sizes}, against a tenth"),
        at_most(f"difference from one stream, {where}", apart, SAME, "", "of a tenth"),
    ]
    here = processor_seconds(lambda: ingested(files[:1], d, grid_size, None))
    per = rows / len(files) / here
    return [*claims, stated(f"rows a second of processor time, {where}", per, "rows/s", "here")]


def recorded(folder: Path, options: Options) -> list[Claim]:
    """Claims on a record: what it costs to keep one, and to look at all files again."""
    files = write(folder / "files", 2, 2, options.pick(FILE_ROWS, 2_000))
    ratios, again = [], []
    for number in range(options.pick(5, 1)):
        model, kept = empty_model(2, 36), folder / f"record-{number}"
        arguments: dict[str, Any] = {"x": ["x0", "x1"], "y": "y", "progress": False}
        plain = processor_seconds(lambda: ingested(files, 2, 36, None))
        first = processor_seconds(partial(ingest, model, files, record=kept, **arguments))
        second = processor_seconds(partial(ingest, model, files, record=kept, **arguments))
        ratios.append(first / plain)
        again.append(second / plain)
    size = f"{sum(file.stat().st_size for file in files) / 1e6:.0f} MB of parquet, 2-D, one process"
    return [
        stated(
            "processor time with a record, of that without", statistics.median(ratios), "", size
        ),
        stated("the same of a second ingest, nothing new", statistics.median(again), "", size),
    ]


def large(folder: Path, options: Options) -> list[Claim]:
    """10⁸ rows, once."""
    files = write(folder, 2, options.pick(100, 2), options.pick(FILE_ROWS, 2_000))
    rows = options.pick(100 * FILE_ROWS, 4_000)
    with executor_of("processes:2") as pool:
        ingested(files[:1], 2, 36, pool)
        few = worker_peak(pool, 2)
        taken = seconds(lambda: ingested(files, 2, 36, pool))
        many = worker_peak(pool, 2)
    detail = f"{rows:,} rows in {taken:.0f} s"
    return [
        at_least("rows a second, 2-D, once", rows / taken, 1_000_000.0, "rows/s", detail),
        at_most("memory of a worker, 2-D, once", many / few, FLAT, "", detail),
    ]


def main() -> None:
    """Run it."""
    options = start(__doc__, flags={"large": "stream 10^8 rows besides, once"})
    with tempfile.TemporaryDirectory() as folder:
        claims = [
            claim
            for d, grid_size, target in CASES
            for claim in case(Path(folder) / f"{d}", d, grid_size, target, options)
        ]
        claims += recorded(Path(folder) / "recorded", options)
        if "large" in options.flags:
            claims += large(Path(folder) / "large", options)
    finish("ingest_files", claims, options, {"cases": CASES})


if __name__ == "__main__":
    main()
