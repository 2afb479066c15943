"""Claims, their table and their file."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import botorch
import gpytorch
import torch

from benchmarks.common.harness import Options

BUSY = 0.5
"""Load average at the start above which times are not to be trusted."""

Verdict = Literal["pass", "FAIL", "stated"]


@dataclass(frozen=True)
class Claim:
    """One measured number and what it must reach.

    Attributes:
        name: What is claimed.
        measured: The number.
        target: What it must reach; None if it is only stated.
        sense: Whether the number must be at least or at most the target.
        unit: Of both.
        detail: What the number was made from.
    """

    name: str
    measured: float
    target: float | None = None
    sense: Literal[">=", "<="] = ">="
    unit: str = ""
    detail: str = ""

    @property
    def verdict(self) -> Verdict:
        """Whether the target is met; a measurement that is not finite never meets one."""
        if self.target is None:
            return "stated"
        return "pass" if math.isfinite(self.measured) and self._reached(self.target) else "FAIL"

    def _reached(self, target: float) -> bool:
        return self.measured >= target if self.sense == ">=" else self.measured <= target

    def row(self) -> list[str]:
        """The cells of the claim's row."""
        goal = "" if self.target is None else f"{self.sense} {_number(self.target)} {self.unit}"
        measured = f"{_number(self.measured)} {self.unit}"
        return [self.name, measured.strip(), goal.strip(), self.verdict, self.detail]


def at_least(name: str, measured: float, target: float, unit: str = "", detail: str = "") -> Claim:
    """A claim that a number reaches a target."""
    return Claim(name, measured, target, ">=", unit, detail)


def at_most(name: str, measured: float, target: float, unit: str = "", detail: str = "") -> Claim:
    """A claim that a number stays below a target."""
    return Claim(name, measured, target, "<=", unit, detail)


def stated(name: str, measured: float, unit: str = "", detail: str = "") -> Claim:
    """A number without a target."""
    return Claim(name, measured, None, ">=", unit, detail)


def times(task: str, exact: float, ours: float) -> list[Claim]:
    """State the seconds of a task by the exact GP and by a model of this package."""
    return [stated(f"{task}: exact GP", exact, "s"), stated(f"{task}: bo_stream", ours, "s")]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def finish(
    name: str, claims: Sequence[Claim], options: Options, settings: Mapping[str, object]
) -> None:
    """Print the claims, write them to ``NAME.json``, and exit: 1 if a full run misses a target.

    Args:
        name: Of the benchmark.
        claims: All it measured.
        options: Of the command line; a smoke run writes ``NAME.smoke.json``.
        settings: Sizes and seeds, kept in the file.
    """
    if options.load > BUSY:
        print(f"Other processes were running (load {options.load:.1f}): times are unreliable.\n")
    print(table(["claim", "measured", "target", "", "from"], [claim.row() for claim in claims]))
    record = {
        "benchmark": name,
        "smoke": options.smoke,
        "settings": dict(settings),
        "machine": {**_machine(), "load_at_start": options.load, "commit": options.commit},
        "claims": [{**asdict(claim), "verdict": claim.verdict} for claim in claims],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"{name}{'.smoke' if options.smoke else ''}.json"
    file.write_text(json.dumps(record, indent=2) + "\n")
    failed = any(claim.verdict == "FAIL" for claim in claims)
    sys.exit(1 if failed and not options.smoke else 0)


def _machine() -> dict[str, object]:
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "architecture": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "torch": torch.__version__,
        "gpytorch": gpytorch.__version__,
        "botorch": botorch.__version__,
    }


def _processor() -> str:
    """Name the model of the first processor (Linux), else what Python knows of it."""
    file = Path("/proc/cpuinfo")
    listed = file.read_text(encoding="utf-8") if file.is_file() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", listed, re.MULTILINE)
    return found[1].strip() if found else platform.processor()
