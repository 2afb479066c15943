"""Every benchmark runs at tiny sizes and measures finite numbers; what they claim is not judged."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HELPERS = {
    "__init__",
    "ax_client",
    "command",
    "contest",
    "data",
    "exact_learning",
    "harness",
    "label_peer",
    "optimization",
    "peers",
    "placements",
    "players",
    "report",
    "resume",
    "small_multiples",
    "sparse_problem",
    "stem_peer",
    "stream_peers",
    "svgp_peer",
}
BENCHMARKS = sorted({path.stem for path in (ROOT / "benchmarks").glob("*.py")} - HELPERS)


def smoke(name: str, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--smoke", "--out", str(out)],
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
    claims = json.loads((tmp_path / f"{name}.smoke.json").read_text())["claims"]
    assert claims
    for claim in claims:
        assert math.isfinite(claim["measured"]), claim
        assert claim["name"] in result.stdout
