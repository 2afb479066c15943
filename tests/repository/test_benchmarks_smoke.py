"""Every benchmark runs at tiny sizes and measures finite numbers; what they claim is not judged."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from bo_stream.cli.benchmark import benchmarks_in
from docs.figures import measured
from tests.laws.devices import pretend

ROOT = Path(__file__).parents[2]
GROUPS = ("accuracy", "maps", "optimization", "speed", "workers")
HELPERS = {
    "before_after",
    "cost_measurements",
    "dask_cluster",
    "many_input_problems",
    "many_input_results",
    "operations",
    "problems",
    "simulators",
    "stream_peers",
}
BENCHMARKS = sorted(
    f"{group}.{path.stem}"
    for group in GROUPS
    for path in (ROOT / "benchmarks" / group).glob("*.py")
    if path.stem not in {"__init__", *HELPERS}
)


FULL_ONLY = {
    "accuracy.streaming_points",
    "maps.survey",
    "optimization.ax_trials",
    "optimization.many_inputs",
}
"""Benchmarks whose smoke runs have other sets, sizes or functions than the tables of pages show."""


def smoke(name: str, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--smoke", "--out", str(out), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.integration
@pytest.mark.parametrize("name", BENCHMARKS)
def test_runs_and_measures(name: str, tmp_path: Path) -> None:
    result = smoke(name, tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    record = json.loads((tmp_path / f"{name.partition('.')[2]}.smoke.json").read_text())
    claims = record["claims"]
    assert claims
    for claim in claims:
        assert math.isfinite(claim["measured"]), claim
        assert claim["name"] in result.stdout
    rows = [row for row in (*measured.README_ROWS, *measured.SPEED_ROWS) if row.benchmark == name]
    if name not in FULL_ONLY:
        names = {claim["name"] for claim in claims}
        assert names >= {shown for row in rows for shown in row.names(record["settings"])}


def test_the_readme_lists_every_benchmark() -> None:
    assert set(benchmarks_in(ROOT)) == set(BENCHMARKS)


@pytest.mark.integration
def test_verbs_are_measured_on_a_pretend_device(tmp_path: Path) -> None:
    if reason := pretend.why_missing():
        pytest.skip(reason)
    result = smoke("speed.device", tmp_path, "--device", "pretend")
    assert result.returncode == 0, result.stderr[-2000:]
    settings = json.loads((tmp_path / "device.smoke.json").read_text())["settings"]
    assert settings["device"] == "pretend"
    for verb in settings["verbs"]:
        assert 0 < verb["waits"] < verb["operations"], verb
        assert verb["least"] > 0.0, verb


@pytest.mark.integration
def test_two_versions_are_compared() -> None:
    """The commit with itself: the ratio is a number, whatever it is."""
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    found = subprocess.run(git, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        pytest.skip("needs a git checkout")
    name, commit = "fantasies, OSGPR", found.stdout.strip()
    asked = [sys.executable, "-m", "benchmarks.speed.before_after", commit, "--only", name]
    result = subprocess.run(
        [*asked, "--repeats", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    row = next(line for line in result.stdout.splitlines() if line.startswith(f"| {name} |"))
    assert float(row.split("|")[2].split()[0]) > 0.0, result.stderr[-2000:]
    assert result.returncode in (0, 1)
