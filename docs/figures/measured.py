"""Measured numbers of README.md and of pages, by ``python -m docs.figures.measured``.

Tables, and single numbers between ``<!-- measured NAME: CLAIM -->`` and ``<!-- end -->``, show
claims of benchmarks. The folder ``measured`` holds a file of each: what ``python -m
benchmarks.GROUP.NAME`` writes to ``benchmarks/results/NAME.json``; what a picture shows lies beside
the script that draws it.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.common.report import Claim, table
from docs.figures import resolution
from docs.figures.shared import short, with_part, with_short_exponents

HERE = Path(__file__).parent
FOLDER = HERE / "measured"
README = HERE.parents[1] / "README.md"
PAGE = HERE.parent / "scale" / "measured.md"
TREES = HERE.parent / "papers" / "cover-tree.md"
SEARCHES = HERE.parent / "choosing" / "many-inputs.md"
BENCHMARKS = HERE.parents[1] / "benchmarks"
RESULTS = BENCHMARKS / "README.md"

MILLISECONDS = 0.5
"""Seconds below which a time is written in milliseconds."""


@dataclass(frozen=True)
class Row:
    """A task, and the claims that its cells show.

    Texts and names hold fields in braces: ``{n}`` is the benchmark's setting ``n``.

    Attributes:
        benchmark: Its module, as ``speed.update``.
        task: What was measured; ``{0}`` is the first claim of ``within``.
        ours: Names of the claims in the column of ``bo_stream``.
        theirs: Names of the claims in the column of the exact GP.
        within: Names of the claims that the task's text shows.
        decimals: Of each number; None: two significant digits.
    """

    benchmark: str
    task: str
    ours: tuple[str, ...]
    theirs: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    decimals: int | None = None

    @property
    def file(self) -> Path:
        """Where the benchmark's claims are."""
        return FOLDER / f"{self.benchmark.partition('.')[2]}.json"

    def names(self, settings: Mapping[str, Any]) -> list[str]:
        """List the names of all claims that the row shows."""
        return [name.format(**settings) for name in (*self.theirs, *self.ours, *self.within)]


# --- the rows -----------------------------------------------------------------------------------

UPDATE = "update and posterior at 3 points, {kernel}, default lengthscale, n = {{n:,}}: {model}"
FLAT = ("time of an update, RBF, n = {small:,}", "time of an update, RBF, n = {large:,}")
STEP = "one step, Levy, n = {large:,}"
AX = ("n = {n[0]:,}: get_next_trials", "n = {n[1]:,}: get_next_trials")
ACCURACIES = tuple(f"{country}, 10 at a time: accuracy" for country in ("CIV", "HTI", "PHL"))


def update(kernel: str, model: str) -> tuple[str]:
    """Name the time of an update by a model."""
    return (UPDATE.format(kernel=kernel, model=model),)


def each(names: Sequence[str], end: str) -> tuple[str, ...]:
    """Put the same end to all names."""
    return tuple(f"{name}{end}" for name in names)


SEARCHED = ("Hartmann-6 with noise 0.2", "Ackley-3 with noise 4")
REGRETS = each(SEARCHED, ": regret of the best point evaluated")
MANY = ("Ackley-20", "Levy-20", "Ackley-100")
TURBO, REGION = (each(MANY, f": {method}, median at n = 500") for method in ("TuRBO-1", "region"))
TURBO_COST, REGION_COST = (
    tuple(f"{method}, {d} inputs: a proposal after 1,000 outcomes" for d in (20, 100))
    for method in ("TuRBO-1", "region")
)

README_ROWS = (
    Row(
        "speed.update",
        "update of 3 points and the next posterior, n = {n:,}, 3-D "
        "(posterior at {test} points: {0} at n = {small:,}, {1} at n = {large:,})",
        update("RBF", "bo_stream"),
        update("RBF", "exact GP"),
        FLAT,
    ),
    Row(
        "optimization.optimization_step",
        "a step of optimization, refit included, n = {large:,}, 3-D",
        (f"{STEP}: bo_stream",),
        (f"{STEP}: exact GP",),
    ),
    Row(
        "optimization.ax_trials",
        "Ax's next trial by qLogNEI, n = {n[0]:,}, n = {n[1]:,}, 3-D",
        each(AX, " with WISKI, refits included"),
        each(AX, " by Ax's default"),
    ),
    Row(
        "optimization.ax_quality",
        "regret through Ax's client, Hartmann-6, noisy Ackley-3, 150 trials",
        REGRETS,
        each(REGRETS, ", Ax's default"),
    ),
    Row(
        "optimization.many_inputs",
        "regret after 500 evaluations, Ackley and Levy in 20 inputs, Ackley in 100, beside TuRBO",
        REGION,
        TURBO,
    ),
    Row(
        "optimization.many_inputs",
        "a proposal after 1,000 evaluations in 20 and in 100 inputs, beside TuRBO",
        REGION_COST,
        TURBO_COST,
    ),
    Row(
        "maps.survey",
        "villages rightly called above a threshold after 200 surveys: Côte d'Ivoire, Haiti, "
        "Philippines",
        ACCURACIES,
        each(ACCURACIES, ", published adaptive"),
        decimals=3,
    ),
    Row(
        "accuracy.streaming_points",
        "RMSE on kin40k in a stream, batch SVGP with three times the time",
        ("kin40k: RMSE, the stream",),
        ("kin40k: RMSE, the batch SVGP",),
        decimals=3,
    ),
)

SPEED_ROWS = (
    Row(
        "speed.update",
        "update of 3 points and the next posterior, n = {n:,}, 3-D, RBF",
        update("RBF", "bo_stream"),
        update("RBF", "exact GP"),
    ),
    Row(
        "speed.update",
        "the same, Matérn-5/2",
        update("Matern-5/2", "bo_stream"),
        update("Matern-5/2", "exact GP"),
    ),
    Row(
        "speed.update",
        "the same update and the posterior at {test} points, n = {small:,} and n = {large:,}, RBF",
        FLAT,
    ),
    Row(
        "speed.ingest",
        "observations taken in a second, 2-D (30 × 30), 3-D (20 × 20 × 20)",
        ("ingest, 2-D, grid 30 x 30", "ingest, 3-D, grid 20 x 20 x 20"),
    ),
    Row(
        "speed.refit",
        "refit by `fit_gpytorch_mll`, n = {n:,}, 3-D, RBF",
        ("refit, RBF, n = {n:,}: bo_stream",),
        ("refit, RBF, n = {n:,}: exact GP",),
    ),
    Row(
        "speed.nipv",
        "qNIPV with gradient, 4 batches of 6, {mc:,} points, n = {n:,}, RBF: BoTorch's own on "
        "`WISKI`",
        ("BoTorch's qNIPV, RBF: bo_stream",),
        ("BoTorch's qNIPV, RBF: exact GP",),
    ),
    Row(
        "speed.nipv",
        "the same by `FeatureNIPV` with {mc:,} points, and with {many:,} (exact GP: {mc:,})",
        (
            "FeatureNIPV, RBF: bo_stream",
            "FeatureNIPV, 100 times the points, RBF: bo_stream",
        ),
        ("BoTorch's qNIPV, RBF: exact GP",),
    ),
    Row(
        "optimization.optimization_step",
        "a step of Bayesian optimization at n = {large:,}, 3-D: {q} outcomes taken, refit, qUCB "
        "with 10 restarts and 512 raw samples",
        (f"{STEP}: bo_stream",),
        (f"{STEP}: exact GP",),
    ),
    Row(
        "optimization.ax_trials",
        "Ax's `get_next_trials` with qLogNEI, n = {n[0]:,} and n = {n[1]:,}, 3-D, refits included "
        "(Ax's default on the left)",
        each(AX, " with WISKI, refits included"),
        each(AX, " by Ax's default"),
    ),
    Row(
        "speed.trust",
        "`report` after {n:,} rows, 3-D, picture included, by the clock: `WISKI`, `OSGPR`",
        ("report, wall-clock time, WISKI", "report, wall-clock time, OSGPR"),
    ),
    Row(
        "speed.thompson",
        "Thompson sampling of {q} points, n = {n:,}, 3-D",
        ("ask for {q} points, n = {n:,}",),
    ),
    Row(
        "maps.malaria",
        "`bo-stream sample` on a map of Nigeria, 500 choices of 6 sites from 12,000, refits "
        "included ({0} with `--outliers 0`)",
        ("bo-stream sample, seconds",),
        within=("bo-stream sample --outliers 0, seconds",),
    ),
)

ACCURACY = Row("accuracy.accuracy", "", ())
"""All claims of the errors at default grids."""

SEARCHED_BOX = Row("optimization.few_inputs", "", ())
"""Medians of searches of the box, of a region, and of both in turn."""


# --- the numbers --------------------------------------------------------------------------------


def missing() -> list[str]:
    """Say of each file that is not there which command makes it."""
    files = {row.file for row in (*README_ROWS, *SPEED_ROWS, ACCURACY, SEARCHED_BOX)}
    return [command_for(file.stem) for file in sorted(files) if not file.is_file()]


def command_for(stem: str) -> str:
    """Say which command makes a benchmark's file."""
    modules = [f"{file.parent.name}.{stem}" for file in BENCHMARKS.glob(f"*/{stem}.py")]
    command = " or ".join(f"`python -m benchmarks.{module}`" for module in modules) or "no command"
    return f"{stem}.json is missing: run {command}, then copy benchmarks/results/{stem}.json there."


def two_digits(value: float) -> str:
    """Round to two significant digits, zeros at the end included."""
    if value == 0.0 or not math.isfinite(value):
        return f"{value:g}"
    digits = 1 - int(f"{value:.1e}".partition("e")[2])
    return f"{round(value, digits):,.{max(0, digits)}f}"


def shown(claim: Mapping[str, Any], decimals: int | None) -> str:
    """Write a claim's number, a time with its unit."""
    value = float(claim["measured"])
    if decimals is not None:
        return f"{value:.{decimals}f}"
    if claim["unit"] not in ("s", "ms"):
        return two_digits(value)
    seconds = value if claim["unit"] == "s" else 1e-3 * value
    return (
        f"{two_digits(seconds)} s" if seconds >= MILLISECONDS else f"{two_digits(1e3 * seconds)} ms"
    )


def cells(row: Row) -> list[str]:
    """Write a row's task, the exact GP's numbers, those of this package, and their ratios.

    Raises:
        KeyError: The benchmark's file has no claim of a name.
    """
    record = json.loads(row.file.read_text(encoding="utf-8"))
    settings, claims = record["settings"], {claim["name"]: claim for claim in record["claims"]}

    def found(names: Sequence[str]) -> list[Mapping[str, Any]]:
        return [claims[name.format(**settings)] for name in names]

    theirs, ours = found(row.theirs), found(row.ours)
    within = [shown(claim, row.decimals) for claim in found(row.within)]
    peers = theirs * len(ours) if len(theirs) == 1 else theirs
    pairs = zip(peers, ours, strict=True) if peers else ()
    ratios = [peer["measured"] / own["measured"] for peer, own in pairs]
    return [
        row.task.format(*within, **settings),
        ", ".join(shown(claim, row.decimals) for claim in theirs),
        ", ".join(shown(claim, row.decimals) for claim in ours),
        ", ".join(two_digits(ratio) for ratio in ratios),
    ]


# --- the tables ---------------------------------------------------------------------------------


def readme_table() -> str:
    """Write README's table, in markdown."""
    lines = [
        "| task | exact GP, Ax's default, TuRBO, or published | bo_stream | measured by |",
        "|---|---|---|---|",
    ]
    for row in README_ROWS:
        task, theirs, ours, _ = cells(row)
        group, _, name = row.benchmark.partition(".")
        source = f"[{name}.py](benchmarks/{group}/{name}.py)"
        lines.append(f"| {task} | {theirs} | {ours} | {source} |")
    return "\n".join(lines) + "\n"


def speed_table() -> str:
    """Write the table of speed of measured.md, in markdown."""
    lines = ["| task | exact GP | bo_stream | ratio | command |", "|---|---|---|---|---|"]
    former = ""
    for row in SPEED_ROWS:
        same = row.benchmark == former
        former = row.benchmark
        command = "the same" if same else f"`python -m benchmarks.{row.benchmark}`"
        lines.append(f"| {' | '.join([*cells(row), command])} |")
    return "\n".join(lines) + "\n"


def results_table() -> str:
    """Write all claims with a target, of every run whose file was kept, in markdown."""
    rows = []
    for file in FOLDER.glob("*.json"):
        record = json.loads(file.read_text(encoding="utf-8"))
        (module,) = BENCHMARKS.glob(f"*/{file.stem}.py")
        for claim in record["claims"] if record["machine"] else ():
            columns = {key: value for key, value in claim.items() if key != "verdict"}
            task, found, goal, verdict, detail = Claim(**columns).row()
            if goal:
                name = f"`{module.parent.name}.{file.stem}`"
                rows.append([f"{name}: {task}", goal, found, verdict, detail])
    rows.sort(key=lambda row: row[0].partition(":")[0])
    return table(["claim", "target", "measured", "", "from"], rows) + "\n"


def searches_table() -> str:
    """Write the medians of searches of the box, of both in turn and of a region, in markdown."""
    record = json.loads(SEARCHED_BOX.file.read_text(encoding="utf-8"))
    cells: dict[str, dict[str, dict[str, float]]] = {}
    for claim in record["claims"]:
        if named := re.fullmatch(r"(.+), (\d+ at a time, \d+) evaluations: (\w+)", claim["name"]):
            function, when, method = named.groups()
            cells.setdefault(function, {}).setdefault(when, {})[method] = claim["measured"]
    columns = list(next(iter(cells.values())))
    rows = []
    for function, found in cells.items():
        texts = (map(short, found[when].values()) for when in columns)
        rows.append([function, *map(" / ".join, texts)])
    return table([" / ".join(cells[function][columns[0]]), *columns], rows) + "\n"


def accuracy_table() -> str:
    """Write errors of mean and variance at default grids, a kernel a row, in markdown."""
    record = json.loads(ACCURACY.file.read_text(encoding="utf-8"))
    cells: dict[str, dict[str, list[str]]] = {}
    for claim in record["claims"]:
        dim, kernel, lengthscale = claim["name"].partition(":")[0].split(", ")
        column = f"{dim}, {lengthscale.removeprefix('lengthscale ')}"
        found = cells.setdefault(kernel.replace("Matern", "Matérn"), {}).setdefault(column, [])
        found.append(with_short_exponents(f"{claim['measured']:.1e}"))
    columns = list(next(iter(cells.values())))
    rows = [[kernel, *(", ".join(found[c]) for c in columns)] for kernel, found in cells.items()]
    return table(["kernel", *columns], rows) + "\n"


TABLES: dict[Path, dict[str, Callable[[], str]]] = {
    README: {"measured": readme_table},
    PAGE: {"measured": speed_table},
    RESULTS: {"measured": results_table, "accuracy": accuracy_table},
    SEARCHES: {"measured": searches_table},
    TREES: {"resolution": resolution.costs_table, "sizes": resolution.sizes_table},
}
"""What makes the tables of each page, by the name of the part."""

PAGES = tuple(
    page
    for page in (README, RESULTS, *sorted(HERE.parent.rglob("*.md")))
    if "<!-- measured" in page.read_text(encoding="utf-8")
)
"""Pages with a table or with single numbers."""


def number(mark: str) -> str:
    """Write the number that stands after a mark.

    Args:
        mark: The stem of a benchmark's file, perhaps a format in brackets, a colon, and a claim's
            name: ``cover_tree: a point more``, ``clustered[.3f]: RBF: ...``. Formats are those of
            Python, or ``detail``: what the claim says of where it comes from. Without one as
            :func:`shown`. A name with stars means all claims that it matches: the least and the
            largest are written.

    Raises:
        FileNotFoundError: There is no such file; the message has the command that makes it.
        KeyError: It has no claim of that name.
    """
    source, _, name = mark.partition(": ")
    stem, _, form = source.removesuffix("]").partition("[")
    file = FOLDER / f"{stem}.json"
    file = file if file.is_file() else HERE / file.name
    if not file.is_file():
        raise FileNotFoundError(command_for(stem))
    claims = json.loads(file.read_text(encoding="utf-8"))["claims"]
    if "*" in name:
        chosen = [claim for claim in claims if fnmatchcase(claim["name"], name)]
        ends = min(chosen, key=itemgetter("measured")), max(chosen, key=itemgetter("measured"))
        return " to ".join(formatted(claim, form) for claim in ends)
    return formatted({claim["name"]: claim for claim in claims}[name], form)


def formatted(claim: Mapping[str, Any], form: str) -> str:
    """Write a claim in a format of :func:`number`."""
    if form == "detail":
        return str(claim["detail"])
    if not form:
        return shown(claim, None)
    return with_short_exponents(format(claim["measured"], form).replace("%", " %"))


def renewed(page: Path) -> str:
    """Put its table and its single numbers into a page's text.

    Raises:
        FileNotFoundError: A benchmark's file is missing; the message has the commands.
        KeyError: The page asks for a claim that is not there.
    """
    if problems := missing():
        raise FileNotFoundError("\n".join(problems))
    text = page.read_text(encoding="utf-8")
    for name, written in TABLES.get(page, {}).items():
        text = with_part(text, name, written())
    pattern = r"<!-- measured (.+?) -->.*?<!-- end -->"
    return re.sub(pattern, lambda m: f"<!-- measured {m[1]} -->{number(m[1])}<!-- end -->", text)


def main() -> None:
    """Write the tables and numbers of all pages."""
    if problems := missing():
        sys.exit("\n".join(problems))
    for page in PAGES:
        page.write_text(renewed(page), encoding="utf-8")


if __name__ == "__main__":
    main()
