"""The command ``bo-stream benchmark``: run the repository's benchmarks, and put all on one page.

A benchmark is a module of the folder ``benchmarks``, which is no part of the package. Each runs in
a process of its own and writes what it claims, what it measured and on which machine as JSON.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bo_stream.cli.running import ERR, OUT, app, escape, option, parse_folder, reported_problems
from bo_stream.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUICK = (
    "speed.update",
    "speed.ingest",
    "speed.cached_baseline",
    "speed.evidence_gradient",
    "accuracy.accuracy",
    "accuracy.low_rank_root",
    "accuracy.small_n",
    "accuracy.hand_overs",
    "accuracy.oips",
    "accuracy.cover_tree",
)
"""Benchmarks that take less than ten minutes together."""

PAGE, PICTURE, END = "results.md", "results.png", "end.json"
_ROW = re.compile(r"^\| `(\w+)/(\w+)\.py` \| (.+?) \|", re.MULTILINE)
_MISSED = 1  # what a benchmark ends with that missed a target
_LINES, _WIDE = 12, 80


@app.command()
def benchmark(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME...",
            show_default=False,
            help="Benchmarks, as in speed.update or update. None: list what there is.",
        ),
    ] = None,
    quick: Annotated[bool, option("Which", "Those of less than ten minutes together.")] = False,
    again: Annotated[
        bool, option("Which", "Those too that the folder has results of, by this commit.")
    ] = False,
    out: Annotated[
        Path,
        option("Results", "Folder of the results.", parser=parse_folder, metavar="PATH"),
    ] = Path("benchmark-results"),
) -> None:
    """Check what is claimed: run benchmarks of the repository, with their peers beside.

    Run it where the repository is. Each benchmark runs alone and has a folder in OUT: what it
    claims and measured as JSON, and what it said. A benchmark that fails or is killed is a result,
    too, and the others go on. `results.md` and `results.png` show all of OUT. Ctrl-C ends the one
    at hand; run again, those that ended on this commit are kept.

    • bo-stream benchmark

    • bo-stream benchmark --quick

    • OMP_NUM_THREADS=1 bo-stream benchmark update nipv --out here
    """
    from bo_stream.storage.archive import atomic_write

    with reported_problems():
        listed = benchmarks_in(Path.cwd())
        chosen = [*(QUICK if quick else ()), *(one_of(listed, name) for name in names or ())]
        if not chosen:
            for name, claim in listed.items():
                OUT.print(
                    f"[bold]{name}[/]: {escape(shorten(claim, _WIDE, placeholder='…'))}",
                    soft_wrap=True,
                )
            return
        commit = commit_of(Path.cwd())
        for name in dict.fromkeys(chosen):
            folder = out / name
            if not again and commit is not None and end_of(folder).get("commit") == commit:
                OUT.print(f"{name}: kept from before")
                continue
            code = run_alone(name, folder)
            end = {"benchmark": name, "code": code, "commit": commit}
            with atomic_write(folder / END) as file:
                file.write(json.dumps(end).encode() + b"\n")
            OUT.print(f"{name}: {outcome(code)}")
        runs = list(runs_in(out))
        with atomic_write(out / PAGE) as file:
            file.write(page(runs).encode())
        if (figure := picture(runs)) is not None:
            with atomic_write(out / PICTURE) as file:
                figure.savefig(file, format="png", dpi=150)
        OUT.print(f"{PAGE} and all results are in [bold]{escape(str(out))}[/].")
        if any(run.code != 0 for run in runs if run.name in chosen):
            raise typer.Exit(1)


def benchmarks_in(repository: Path) -> dict[str, str]:
    """Read the names and claims of all benchmarks from ``benchmarks/README.md``.

    Raises:
        UsageError: There is no such file.
    """
    readme = repository / "benchmarks" / "README.md"
    if not readme.is_file():
        raise UsageError(
            f"Expected the repository's folder benchmarks in {repository}, got none: benchmarks "
            "are not in the package. Go to a copy of the repository, and run the command there."
        )
    rows = _ROW.findall(readme.read_text(encoding="utf-8"))
    return {f"{group}.{stem}": claim for group, stem, claim in rows}


def one_of(listed: Mapping[str, str], name: str) -> str:
    """Find a benchmark by its name, with its group or without.

    Raises:
        UsageError: There is none, or more than one.
    """
    found = [each for each in listed if name in (each, each.partition(".")[2])]
    if len(found) != 1:
        several = f" It may be {' or '.join(found)}." if found else ""
        raise UsageError(
            f"Expected the name of a benchmark, got {name!r}.{several} `bo-stream benchmark` "
            "lists all."
        )
    return found[0]


def commit_of(repository: Path) -> str | None:
    """Return the commit that is checked out; None where files differ from it, or without git."""
    git = ["git", "-C", str(repository)]
    try:
        changed, commit = (
            subprocess.run(
                [*git, *words], capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (("status", "--porcelain", "--untracked-files=no"), ("rev-parse", "HEAD"))
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return None if changed else commit


def run_alone(name: str, folder: Path) -> int:
    """Run a benchmark in a process of its own, with a clock beside; return its exit code.

    What it writes and says goes to the folder. The process is killed if this one is interrupted.
    """
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    folder.mkdir(parents=True, exist_ok=True)
    for former in folder.glob("*.json"):
        former.unlink()
    asked = [sys.executable, "-m", f"benchmarks.{name}", "--out", str(folder.resolve())]
    columns = SpinnerColumn(), TextColumn(name), TimeElapsedColumn()
    with (
        Progress(*columns, console=ERR, transient=True) as clock,
        (folder / "said.txt").open("w", encoding="utf-8") as said,
        subprocess.Popen(asked, stdout=said, stderr=subprocess.STDOUT) as process,
    ):
        clock.add_task("", total=None)
        try:
            return process.wait()
        except BaseException:
            process.kill()
            raise


def outcome(code: int) -> str:
    """Say how a benchmark ended."""
    if code == 0:
        return "all targets met"
    return "targets missed" if code == _MISSED else f"died, exit code {code}"


# --- what was measured, on one page ---------------------------------------------------------------


@dataclass(frozen=True)
class BenchmarkRun:
    """A benchmark as it ended.

    Attributes:
        name: With its group.
        code: Exit code.
        commit: Of the repository; None if it was not known.
        records: What it wrote.
        last: The last lines that it said.
    """

    name: str
    code: int
    commit: str | None
    records: tuple[Mapping[str, Any], ...]
    last: str


def end_of(folder: Path) -> dict[str, Any]:
    """Read how the benchmark of a folder ended; nothing if it has not."""
    file = folder / END
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


def runs_in(out: Path) -> Iterator[BenchmarkRun]:
    """Read all benchmarks that ended, by name."""
    for folder in sorted(path.parent for path in out.glob(f"*/{END}")):
        end = end_of(folder)
        files = [path for path in sorted(folder.glob("*.json")) if path.name != END]
        read = [json.loads(path.read_text(encoding="utf-8")) for path in files]
        records = tuple(one for one in read if isinstance(one, dict) and "claims" in one)
        said = (folder / "said.txt").read_text(encoding="utf-8", errors="replace").splitlines()
        last = "\n".join(said[-_LINES:])
        yield BenchmarkRun(end["benchmark"], end["code"], end["commit"], records, last)


def page(runs: Sequence[BenchmarkRun]) -> str:
    """Write all that was measured, in markdown."""
    parts = ["# Measured\n", f"![Measured over target]({PICTURE})\n"]
    for run in runs:
        parts.append(f"## {run.name}: {outcome(run.code)}\n")
        for record in run.records:
            machine = {**record["machine"], "commit": run.commit or "not known"}
            parts.append(", ".join(f"{key} {value}" for key, value in machine.items()) + "\n")
            parts.append("| claim | measured | target | | from |\n|---|---|---|---|---|")
            for claim in record["claims"]:
                goal = "" if claim["target"] is None else f"{claim['sense']} {claim['target']:.4g}"
                measured = f"{claim['measured']:.4g} {claim['unit']}".strip()
                cells = claim["name"], measured, goal, claim["verdict"], claim["detail"]
                parts.append(f"| {' | '.join(cells)} |")
            parts.append("")
        if not run.records or run.code not in (0, _MISSED):
            parts.append(f"```text\n{run.last}\n```\n")
    return "\n".join(parts)


def picture(runs: Sequence[BenchmarkRun]) -> Figure | None:
    """Draw by what factor each target is met or missed; None where there is no target."""
    from matplotlib.figure import Figure

    factors: dict[str, float] = {}
    for run in runs:
        for record in run.records:
            for claim in record["claims"]:
                measured, target = claim["measured"], claim["target"]
                if target and measured and measured / target > 0.0:
                    up = claim["sense"] == ">="
                    label = f"{run.name}: {shorten(claim['name'], _WIDE, placeholder='…')}"
                    factors[label] = measured / target if up else target / measured
    if not factors:
        return None
    figure = Figure(figsize=(9.0, 0.22 * len(factors) + 0.9), layout="constrained")
    axes = figure.subplots()
    values = list(factors.values())[::-1]
    colours = ["#1f77b4" if value >= 1.0 else "#c8102e" for value in values]
    axes.barh(range(len(values)), [value - 1.0 for value in values], left=1.0, color=colours)
    axes.set_yticks(range(len(values)), list(factors)[::-1], fontsize=7)
    axes.set_xscale("log")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_ylim(-0.7, len(values) - 0.3)
    axes.set_xlabel("factor by which the target is met (right of 1) or missed", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    return figure
