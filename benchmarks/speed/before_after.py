"""Operations in this working tree and in an earlier commit: processor time, as a ratio.

``python -m benchmarks.speed.before_after COMMIT [--only NAME ...]``. The two versions live in
processes of their own, one thread each, and take turns; which is first alternates. The earlier one
is checked out into a folder that is removed at the end. Memory that is given back is kept by the
process (``KEPT_MEMORY``): glibc would hand large arrays to the system and take them again, or not,
by their order, and the page faults of an operation differ twofold.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.progress import track

from benchmarks.common.report import Claim, at_most, table
from benchmarks.speed.operations import BUILDERS

HERE = Path(__file__).parents[2]
SLOWER = 1.03
KEPT_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
"""Settings of glibc's malloc: no array has a mapping of its own, and no memory is given back."""
REPEATS = 5


class Version:
    """A process that runs operations with one version of the package."""

    def __init__(self, tree: Path) -> None:
        """Start it.

        Args:
            tree: Of the repository, of which the package and the benchmarks' helpers are taken.
        """
        surroundings = {
            **os.environ,
            **KEPT_MEMORY,
            "PYTHONPATH": str(tree),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(HERE / "benchmarks" / "speed" / "operations.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=surroundings,
            cwd=tree,
        )
        source = self._answer("package ")
        if not Path(source).is_relative_to(tree):
            raise RuntimeError(f"expected the package of {tree}, found that in {source}")

    def seconds(self, name: str) -> float:
        """Processor seconds of an operation.

        Raises:
            RuntimeError: The process ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        return float(self._answer("seconds "))

    def _answer(self, label: str) -> str:
        """What follows a label in the next line that begins with it; libraries may print, too."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(label):
                return line.removeprefix(label).strip()
        raise RuntimeError("an operation ended its process; what it wrote is above")

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A folder with the repository at a commit."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def compared(name: str, before: Version, after: Version, repeats: int) -> Claim:
    """The ratio of the medians of an operation's times."""
    times: dict[Version, list[float]] = {before: [], after: []}
    for version in (before, after):
        version.seconds(name)  # prepares it, and is not counted
    for turn in range(repeats):
        for version in (before, after) if turn % 2 == 0 else (after, before):
            times[version].append(version.seconds(name))
    was, now = (statistics.median(times[version]) for version in (before, after))
    least = min(times[after]) / min(times[before])
    detail = f"{was:.3f} s before, {now:.3f} s after; ratio of the least times {least:.3f}"
    return at_most(name, now / was, SLOWER, "of the time before", detail)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", help="the earlier version")
    parser.add_argument("--only", nargs="+", choices=list(BUILDERS), default=list(BUILDERS))
    parser.add_argument("--repeats", type=int, default=REPEATS)
    options = parser.parse_args()
    with ExitStack() as stack:
        before = Version(stack.enter_context(checked_out(options.commit)))
        after = Version(HERE)
        stack.callback(before.end)
        stack.callback(after.end)
        claims: list[Claim] = []
        try:
            claims.extend(
                compared(name, before, after, options.repeats)
                for name in track(options.only, "operations", transient=True)
            )
        finally:  # what was measured before an operation ended its process
            rows = [claim.row() for claim in claims]
            print(table(["operation", "ratio", "target", "", "from"], rows))
    sys.exit(any(claim.verdict == "FAIL" for claim in claims))


if __name__ == "__main__":
    main()
