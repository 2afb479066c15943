"""Plants each mutant in a copy of the repository, and runs the default tests there.

Those that mirror the mutated file and the laws come first, all others if these pass. A test that
kills must pass without the mutant: at the end all of them run once more in a copy without one.
Exit code 1: fewer than ``LEAST`` of the list are killed (of some named: as many survive), or with
``--all-matrix`` the matrix kills one that the default does not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from tests.mutants import Mutant
from tests.mutants.listed import MUTANTS
from tests.support.selection import FAMILIES, rotation_of_today

ROOT = Path(__file__).resolve().parents[2]

LEAST = 40
"""Mutants of the list that the default must kill."""

NOT_COPIED = shutil.ignore_patterns(
    *(".git", ".*_cache", "__pycache__", "*.egg-info", "venv", ".venv", "build", "dist"),
    "test_mutants.py",  # it would kill each of them
)

PASSED, NOTHING_TAKEN = 0, 5
"""Exit codes of pytest."""


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    Attributes:
        mutant: Which.
        by: The test that failed; empty: none.
        stage: Tests that it was among.
        seconds: What it took.
    """

    mutant: Mutant
    by: str
    stage: str
    seconds: float

    @property
    def survives(self) -> bool:
        """Whether the default kills it not."""
        return self.stage not in ("near", "default")


@contextmanager
def copy_of_the_repository() -> Iterator[Path]:
    """Make a copy in a temporary folder, beside a link to the shared data."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy, shared = Path(folder) / "repository", ROOT.parent / "shared"
        shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
        if shared.exists():
            (Path(folder) / "shared").symlink_to(shared.resolve())
        yield copy


def failed(copy: Path, arguments: Sequence[str]) -> list[str]:
    """Run tests in a copy; the ids of those that fail, or of a file that cannot be collected."""
    options = ["-n", "0", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", "--color=no"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    lines = [line.split(" - ")[0].split(" ", 1) for line in run.stdout.splitlines()]
    found = [line[1] for line in lines if line[0] in ("FAILED", "ERROR") and len(line) > 1]
    if not found and run.returncode not in (PASSED, NOTHING_TAKEN):
        raise RuntimeError(f"pytest ended with {run.returncode}:\n{run.stdout}\n{run.stderr}")
    return found


def near(mutant: Mutant) -> list[str]:
    """Arguments of pytest: the tests that mirror a file, and the laws of its family."""
    path = Path(mutant.file)
    own = Path("tests") / path.with_suffix("")
    folder = next(f for f in (own, *own.parents) if (ROOT / f).is_dir())
    mirror = folder / f"test_{path.name}"
    others = [] if folder == Path("tests") else sorted((ROOT / folder).glob("test_*.py"))
    files = [*mutant.first, *([str(mirror)] if (ROOT / mirror).exists() else [])]
    files += [str(other.relative_to(ROOT)) for other in others]
    family = Path(path.parts[1]).stem if path.parts[0] == "models" else ""
    if family not in FAMILIES:
        return [*dict.fromkeys(files), "tests/laws"]
    names = [family, *(Path(test).stem for test in mutant.first)]
    return [*dict.fromkeys(files), "tests/laws", "-k", " or ".join(names)]


def verdict(mutant: Mutant, rotation: int, all_matrix: bool) -> Verdict:
    """Plant a mutant and look for a test that fails."""
    begin = time.monotonic()
    stages = {"near": near(mutant), "default": []}
    if all_matrix:
        stages["matrix"] = ["-m", "matrix"]
    with copy_of_the_repository() as copy:
        mutant.apply(copy)
        for stage, arguments in stages.items():
            found = failed(copy, ["-x", "--rotation", str(rotation), *arguments])
            if found:
                return Verdict(mutant, found[0], stage, time.monotonic() - begin)
    return Verdict(mutant, "", "", time.monotonic() - begin)


def failing_anyway(verdicts: Sequence[Verdict], rotation: int) -> set[str]:
    """The killing tests that fail without any mutant."""
    tests = sorted({each.by for each in verdicts if each.by})
    if not tests:
        return set()
    with copy_of_the_repository() as copy:
        options = ["--rotation", str(rotation), "--continue-on-collection-errors"]
        return set(failed(copy, [*options, *tests]))


def table(verdicts: Sequence[Verdict], anyway: set[str]) -> Table:
    """What killed each mutant."""
    result = Table("mutant", "file", "killed by", "among", "s")
    for each in verdicts:
        by = f"{each.by} (fails without it, too)" if each.by in anyway else each.by or "survives"
        result.add_row(each.mutant.name, each.mutant.file, by, each.stage, f"{each.seconds:.0f}")
    return result


def main() -> int:
    """Run some mutants or all."""
    parser = argparse.ArgumentParser(
        "python -m tests.mutants", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants; all if left out")
    parser.add_argument(
        "--all-matrix", action="store_true", help="give what survives the whole matrix, too"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="how many at once")
    parser.add_argument("--rotation", type=int, help="as pytest's; that of the commit if left out")
    asked = parser.parse_args()
    unknown = set(asked.names) - {each.name for each in MUTANTS}
    if unknown:
        parser.error(f"no mutants named {', '.join(sorted(unknown))}")
    chosen = [each for each in MUTANTS if not asked.names or each.name in asked.names]
    rotation = rotation_of_today()[0] if asked.rotation is None else asked.rotation
    console, verdicts = Console(soft_wrap=True), list[Verdict]()
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar, ThreadPoolExecutor(asked.workers) as pool:
        task = bar.add_task(f"rotation {rotation}", total=len(chosen))
        jobs = [pool.submit(verdict, each, rotation, asked.all_matrix) for each in chosen]
        for job in as_completed(jobs):
            verdicts.append(job.result())
            console.print(
                f"{verdicts[-1].mutant.name}: {verdicts[-1].by or 'survives'}", markup=False
            )
            bar.advance(task)
    anyway = failing_anyway(verdicts, rotation)
    order = [each.name for each in chosen]
    verdicts.sort(key=lambda each: order.index(each.mutant.name))
    console.print(table(verdicts, anyway))
    alive = [each for each in verdicts if each.survives or each.by in anyway]
    console.print(f"{len(chosen) - len(alive)} of {len(chosen)} killed by the default")
    missed = [each for each in alive if each.stage == "matrix"]
    return int(len(alive) > len(MUTANTS) - LEAST or bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
