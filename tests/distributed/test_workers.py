"""Tasks by processes, threads, Dask and Ray: lost ones are done again, the result is the same."""

from __future__ import annotations

import copy
import functools
import os
import signal
import subprocess
import sys
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

from bo_stream import WISKI
from bo_stream.distributed import Ingested, Sums, finish, ingest, sums, tasks, zero
from bo_stream.distributed.sources import ColumnNames, FileFragment
from bo_stream.distributed.tasks import PartialSums
from bo_stream.errors import UsageError
from bo_stream.executors import LostTaskError
from bo_stream.testing.streams import assert_same_contents, contents
from tests.distributed.streams import (
    COLUMNS,
    GROUPS,
    assert_same,
    grid_model,
    streamed,
    table,
)
from tests.repository.test_start import after as run_python
from tests.support.documents import ROOT, blocks
from tests.support.problems import Observations

DEADLY = "BO_STREAM_TEST_DEADLY"
"""Environment variable of :class:`Deadly`: the driver's process, and a file."""


def ingested(source: Any, **options: Any) -> tuple[WISKI, Ingested]:
    model = grid_model()
    done = ingest(model, source, **{**COLUMNS, "task_rows": 1, **options})
    return model, done


class Backwards(Executor):
    """Ends tasks last submitted first, and loses each of the first few."""

    def __init__(self, losses: int) -> None:
        self.losses, self.waiting = losses, list[Any]()

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, fn, args))
        if len(self.waiting) >= 4 or args[0].number >= GROUPS - 3:
            while self.waiting:
                self._end(*self.waiting.pop())
        return future

    def _end(self, future: Future[Any], fn: Any, args: Any) -> None:
        self.losses -= 1
        if self.losses >= 0:
            future.set_exception(LostTaskError("its worker died"))
        else:
            future.set_result(fn(*args))


def test_neither_order_nor_losses_change_a_bit(
    folder: Path, parts: list[Observations], X: torch.Tensor
) -> None:
    here, _ = ingested(folder)
    there, done = ingested(folder, executor=Backwards(losses=5), at_once=4)
    assert done.retried == 5
    assert done.rows == 350
    assert_same_contents(dict(contents(there._memory)), dict(contents(here._memory)))
    assert_same(there, streamed(grid_model(), parts), X)


def test_a_task_that_is_lost_again_and_again_ends_the_ingest(folder: Path) -> None:
    model = grid_model()
    with pytest.raises(UsageError, match=r"part-\d\d.parquet#\d was lost 3 times: .*worker died"):
        ingest(model, folder, **COLUMNS, executor=Backwards(losses=10**6), task_rows=1, at_once=4)
    assert model.num_observations == 0


@pytest.mark.parametrize("executor", [None, "threads:2"])
def test_an_error_of_the_model_is_not_done_again(
    executor: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[Any]()

    def accumulate(*arguments: Any) -> Sums:
        calls.append(arguments)
        raise RuntimeError("a bug")

    monkeypatch.setattr(tasks, "accumulate", accumulate)
    with pytest.raises(RuntimeError, match="a bug"):
        ingested(folder, executor=executor, task_rows=10**6, on_error="skip")
    assert len(calls) == 1


def test_a_reader_whose_worker_is_lost_is_asked_again(
    folder: Path, parts: list[Observations], X: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, losses = FileFragment.batches, [LostTaskError("its worker died")]

    def batches(fragment: FileFragment, columns: ColumnNames) -> Any:
        if losses:
            raise losses.pop()
        return read(fragment, columns)

    monkeypatch.setattr(FileFragment, "batches", batches)
    model, done = ingested(folder, executor="threads:1")
    assert (done.rows, done.retried) == (350, 1)
    assert_same(model, streamed(grid_model(), parts), X)


class Closed(Executor):
    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[PartialSums]:
        raise RuntimeError("cannot schedule new futures after shutdown")


def test_an_executor_that_takes_nothing_is_said_to_be_so(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"takes no more tasks: .*after shutdown"):
        ingested(folder, executor=Closed())


def test_threads(folder: Path, parts: list[Observations], X: torch.Tensor) -> None:
    here, _ = ingested(folder)
    with ThreadPoolExecutor(2) as executor:
        there, _ = ingested(folder, executor=executor)
    assert_same_contents(dict(contents(there._memory)), dict(contents(here._memory)))


def test_a_model_that_cannot_be_pickled_is_named(folder: Path) -> None:
    model = grid_model()
    model.covar_module.mine = lambda: None
    with pytest.raises(UsageError, match=r"model.* cannot be pickled.*lambda"):
        ingest(model, folder, **COLUMNS, executor="processes:1")


class Deadly(RBFKernel):
    """A kernel that ends the first process that reads it from a pickle, but for the driver."""

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        driver, grave = os.environ[DEADLY].split(":", 1)
        if os.getpid() != int(driver):
            with suppress(FileExistsError), Path(grave).open("x"):
                os._exit(9)


@pytest.mark.integration
def test_a_process_that_dies_is_replaced_and_its_task_done_again(
    folder: Path,
    parts: list[Observations],
    X: torch.Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grave = tmp_path / "grave"
    monkeypatch.setenv(DEADLY, f"{os.getpid()}:{grave}")
    model = grid_model(covar_module=ScaleKernel(Deadly(ard_num_dims=2)))
    expected = streamed(model, parts)
    done = ingest(model, folder, **COLUMNS, task_rows=1, executor="processes:2")
    assert grave.exists()
    assert (done.retried, done.rows) == (1, 350)
    assert_same(model, expected, X)


KILLED = """
import os, signal, sys
from bo_stream.distributed import ingest
from bo_stream.distributed.tasks import SumTree
from tests.distributed.streams import COLUMNS, grid_model

add = SumTree.add


def counted(self, number, part):
    add(self, number, part)
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    SumTree.add = counted
    folder, kept = sys.argv[1:]
    ingest(grid_model(), folder, **COLUMNS, task_rows=1, record=kept, executor="processes:2")
"""


@pytest.mark.integration
def test_a_driver_that_is_killed_goes_on(
    folder: Path, parts: list[Observations], X: torch.Tensor, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}"}
    kept = tmp_path / "kept"
    command = [sys.executable, str(script), str(folder), str(kept)]
    ended = subprocess.run(command, env=environment, cwd=root, timeout=600, check=False)
    assert ended.returncode == -signal.SIGKILL
    model, done = ingested(folder, record=kept)
    assert 1 <= done.resumed < GROUPS
    assert done.resumed + done.fragments == GROUPS
    assert_same(model, streamed(grid_model(), parts), X)


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:The inplace keyword")  # of Dask's reader
def test_a_dask_cluster_sums_files_and_its_own_tables(
    folder: Path, parts: list[Observations], X: torch.Tensor
) -> None:
    frames = pytest.importorskip("dask.dataframe")
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster),  # which a table in the memory of the cluster belongs to
    ):
        frame = frames.read_parquet(folder)
        for source in (folder, frame, frame.persist()):
            model, done = ingested(source, executor=f"dask:{cluster.scheduler_address}")
            assert done.rows == 350
            assert_same(model, streamed(grid_model(), parts), X)


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray, within it
def test_a_ray_cluster_sums_a_ray_data_set(parts: list[Observations], X: torch.Tensor) -> None:
    ray, data = (pytest.importorskip(name) for name in ("ray", "ray.data"))
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        source = data.from_arrow([table(part) for part in parts])
        model, done = ingested(source, executor="ray")
        assert done.rows == 350
        assert_same(model, streamed(grid_model(), parts), X)
        with pytest.raises(UsageError, match=r"no record with a Ray Dataset"):
            ingested(source, record="kept")
        model = grid_model()
        from ray.data.aggregate import AggregateFnV2
        from ray.data.block import BlockAccessor

        names: dict[str, Any] = {**vars(sums), "start": zero(model), "model": model}
        names |= {"AggregateFnV2": AggregateFnV2, "BlockAccessor": BlockAccessor}
        exec(shown("AggregateFnV2"), names | {"torch": torch, "dataset": source})
        assert_same(model, streamed(grid_model(), parts), X)
    finally:
        ray.shutdown()


# --- engines of others, as the page shows them --------------------------------------------------


def shown(word: str) -> str:
    """The example of the page that has a word."""
    page = ROOT / "docs" / "scale" / "ingest.md"
    (found,) = (
        block.code for block in blocks(page) if block.language == "py" and word in block.code
    )
    return found


class Beam:
    """What the page's class derives from: Beam itself is not installed."""

    class CombineFn:
        pass


def test_the_pages_combiner_for_beam(parts: list[Observations], X: torch.Tensor) -> None:
    model = grid_model()
    names: dict[str, Any] = {
        **vars(sums),
        "start": zero(model),
        "functools": functools,
        "apache_beam": Beam,
    }
    exec(shown("CombineFn"), names)
    combiner = names["Summed"]()
    pieces = [combiner.add_input(combiner.create_accumulator(), (p.X, p.Y)) for p in parts]
    whole = combiner.extract_output(combiner.merge_accumulators(pieces))
    finish(model, Sums.from_bytes(whole))
    assert_same(model, streamed(grid_model(), parts), X)


class Batches:
    """An RDD of two partitions, as far as the page asks it."""

    def __init__(self, partitions: list[list[Any]]) -> None:
        self.partitions = partitions

    def treeAggregate(self, zero: Sums, add: Any, merge: Any) -> Sums:
        done = [functools.reduce(add, each, copy.deepcopy(zero)) for each in self.partitions]
        return functools.reduce(merge, done, copy.deepcopy(zero))


def test_the_pages_aggregation_for_spark(parts: list[Observations], X: torch.Tensor) -> None:
    model = grid_model()
    rows = [(part.X, part.Y) for part in parts]
    names = {"batches": Batches([rows[:2], rows[2:]]), "start": zero(model), "model": model}
    exec(shown("treeAggregate"), {**vars(sums), **names})
    assert_same(model, streamed(grid_model(), parts), X)


@pytest.mark.integration
def test_importing_the_names_needs_neither_torch_nor_an_engine() -> None:
    program = """
import bo_stream.distributed, bo_stream.executors
assert "ingest" in dir(bo_stream.distributed)
heavy = ("torch", "pandas", "pyarrow", "dask", "distributed", "ray")
before = [name for name in heavy if name in sys.modules]
from bo_stream.distributed import *
names = [name for name in bo_stream.distributed.__all__ if name not in globals()]
after = [name for name in ("dask", "distributed", "ray", "pyarrow") if name in sys.modules]
result = [before, names, after]
"""
    assert run_python(program) == [[], [], []]
