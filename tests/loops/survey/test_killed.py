"""A process that is killed at any moment leaves a campaign that opens, with all that was told."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from bo_stream.loops.survey.survey import Survey, load_survey, save_survey
from tests.loops.survey.villages import SETTINGS, results_of, villages

pytestmark = pytest.mark.integration

SITES = [f"V{row:03d}" for row in range(40)]
TELL = """
import sys
from pathlib import Path
from bo_stream.loops.survey.survey import load_survey
from tests.loops.survey.villages import results_of

survey = load_survey(Path(sys.argv[1]))
for number in range(10**6):
    site = f"V{number % 40:03d}"
    survey.tell(results_of([site]).assign(positives=number // 40 % 50))
    print(number, flush=True)
"""
DIE = """
import os, signal, sys
from pathlib import Path
from bo_stream.loops.survey.survey import save_survey
from tests.loops.survey.test_killed import begin
from tests.loops.survey.villages import results_of

fsync = os.fsync

def live(folder, moment):
    calls = 0

    def count(descriptor):
        nonlocal calls
        calls += 1
        if calls == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)

    os.fsync = count
    survey = begin()
    save_survey(folder, survey)
    print("saved", end=" ", flush=True)
    for site in ("V001", "V002"):
        survey.tell(results_of([site]))
        print(site, end=" ", flush=True)
    survey.ask(2)
    print("asked", flush=True)
    os._exit(0)

for moment in range(1, 30):
    child = os.fork()
    if child == 0:
        live(Path(sys.argv[1]) / str(moment), moment)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        break
    print(flush=True)
"""


def begin() -> Survey:
    return Survey(villages(), SETTINGS)


def test_killed_while_it_tells(tmp_path: Path) -> None:
    save_survey(tmp_path / "campaign", begin())
    command = [sys.executable, "-c", TELL, str(tmp_path / "campaign")]
    for wait in (0.0, 0.05, 0.17):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"
        time.sleep(wait)
        process.kill()
        confirmed = [0, *map(int, process.communicate()[0].split())][-1]
        survey = load_survey(tmp_path / "campaign")
        told = survey.results.set_index("id")["positive"]
        for number in range(confirmed + 1):
            latest = max(n for n in range(number, confirmed + 1) if (n - number) % 40 == 0)
            assert told[SITES[number % 40]] in (latest // 40 % 50, (latest // 40 + 1) % 50)
        survey.tell(results_of(SITES))
    assert load_survey(tmp_path / "campaign").status().surveyed == 40


def test_killed_at_each_moment_at_which_it_writes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DIE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    *killed, last = done.stdout.splitlines()
    assert last.split() == ["saved", "V001", "V002", "asked"]
    assert len(killed) > 7
    for moment, line in enumerate(killed, start=1):
        folder, said = tmp_path / str(moment), set(line.split())
        if "saved" not in said:
            save_or_load(folder)
            continue
        assert said - {"saved"} <= {*load_survey(folder).results["id"]}
        load_survey(folder).tell(results_of(["V001", "V002", "V003"]))
        assert len(load_survey(folder).results) == 3


def save_or_load(folder: Path) -> None:
    """A survey that was not confirmed is there as a whole or can be begun."""
    if (folder / "survey.json").exists():
        assert load_survey(folder).results.empty
    else:
        save_survey(folder, begin())
    assert load_survey(folder).status().sites == 40
