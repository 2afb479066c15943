"""The table and the picture of docs/scale/devices.md, by ``python docs/figures/device.py``.

They show what ``python -m benchmarks.speed.device --device cuda --out docs/figures`` has measured,
in ``device.json``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from docs.figures.shared import save, write_part

HERE = Path(__file__).parent
NUMBERS = HERE / "device.json"
PICTURE = HERE / "device.svg"
PAGE = HERE.parent / "scale" / "devices.md"

FASTER, SLOWER = "#c8102e", "#777777"


def measured() -> list[dict[str, Any]]:
    """Read the verbs, in the order in which they were measured."""
    record = json.loads(NUMBERS.read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = record["settings"]["verbs"]
    return found


def table() -> str:
    """Write the table of all verbs, in markdown."""
    titles = "CPU, ms", "GPU, ms", "CPU over GPU", "operations", "waits", "roofline, ms"
    lines = [f"| model | what it does | {' | '.join(titles)} |", "|---" * 8 + "|"]
    for verb in measured():
        times = [1e3 * verb[name] for name in ("host", "there", "least")]
        host, there, least = (f"{time:,.0f}" if time >= 100 else f"{time:.2g}" for time in times)
        ratio = f"{verb['host'] / verb['there']:.2g}"
        counts = f"{verb['operations']:,} | {verb['waits']}"
        cells = (verb["model"], verb["verb"], host, there, ratio, counts, least)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def picture() -> Figure:
    """Draw how many times faster each verb is on the GPU, in the order of that."""
    verbs = sorted(measured(), key=lambda verb: verb["host"] / verb["there"])
    figure = Figure(figsize=(9.0, 0.2 * len(verbs) + 0.8), layout="constrained")
    axes = figure.subplots()
    ratios = [verb["host"] / verb["there"] for verb in verbs]
    colours = [FASTER if ratio > 1.0 else SLOWER for ratio in ratios]
    axes.barh(range(len(verbs)), [ratio - 1.0 for ratio in ratios], left=1.0, color=colours)
    axes.set_yticks(range(len(verbs)), [f"{v['model']}: {v['verb']}" for v in verbs], fontsize=7)
    axes.set_xscale("log")
    ticks = (0.5, 1, 2, 5, 10, 20, 50, 100)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    axes.minorticks_off()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_ylim(-0.7, len(verbs) - 0.3)
    axes.set_xlabel("seconds on the CPU (8 threads) over seconds on the GPU (H200)", fontsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure


if __name__ == "__main__":
    write_part(PAGE, "verbs", table())
    save(picture(), PICTURE, NUMBERS)
