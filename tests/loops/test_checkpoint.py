from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from bo_stream.loops.campaign import Campaign
from bo_stream.loops.checkpoint import read_checkpoint
from bo_stream.loops.errors import UsageError
from bo_stream.loops.settings import Strategy
from tests.loops.small import QUICK, small_map, write_npz

pytestmark = pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short")

BOTH: tuple[Strategy, ...] = ("nipv", "random")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_npz(tmp_path / "map.npz", small_map())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def begin(path: Path) -> Campaign:
    return Campaign.begin(path, None, None, QUICK, BOTH)


def finish(campaign: Campaign) -> Campaign:
    for _ in campaign.run():
        pass
    return campaign


def advance(campaign: Campaign, steps: int) -> Campaign:
    for _, _step in zip(range(steps), campaign.run(), strict=False):
        pass
    return campaign


def outcome(campaign: Campaign) -> dict[str, Any]:
    return {
        name: (loop.state.picks, loop.state.refits, [s.rmse for s in loop.state.curve])
        for name, loop in campaign.loops.items()
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def edit(folder: Path, **changes: Any) -> None:
    index = folder / "checkpoint.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), **changes}))


def test_stopped_after_every_step_a_run_makes_the_same_choices(path: Path, folder: Path) -> None:
    expected = outcome(finish(begin(path)))
    campaign = begin(path)
    while not campaign.finished:
        advance(campaign, 1).save(folder)
        campaign = Campaign.resume(folder)
    result = outcome(campaign)
    for name in BOTH:
        assert result[name][:2] == expected[name][:2]
        assert result[name][2] == pytest.approx(expected[name][2], rel=1e-9)


def test_strategies_step_in_turn(path: Path) -> None:
    turns = [(name, step.number) for name, step in begin(path).run()]
    assert turns == [(name, number) for number in range(5) for name in BOTH]


def test_a_finished_run_can_be_asked_for_more(path: Path, folder: Path) -> None:
    campaign = finish(begin(path))
    campaign.save(folder)
    longer = finish(Campaign.resume(folder, steps=6))
    assert longer.main.steps_done == 6
    assert longer.main.state.picks[:17] == campaign.main.state.picks
    assert len(set(longer.main.state.picks)) == 23
    with pytest.raises(UsageError, match="has done 4 steps already"):
        Campaign.resume(folder, steps=3)


def test_time_goes_on(path: Path, folder: Path) -> None:
    campaign = advance(begin(path), 2)
    campaign.seconds += 1000.0
    campaign.save(folder)
    assert finish(Campaign.resume(folder)).seconds > campaign.seconds


def test_only_the_last_models_are_kept(path: Path, folder: Path) -> None:
    campaign = begin(path)
    for _ in campaign.run():
        campaign.save(folder)
    assert sorted(contents(folder)) == [
        "checkpoint.json",
        "model-nipv-0000017.pt",
        "model-random-0000017.pt",
    ]


def test_the_data_may_move_but_not_change(path: Path, folder: Path, tmp_path: Path) -> None:
    advance(begin(path), 3).save(folder)
    moved = path.rename(tmp_path / "moved.npz")
    with pytest.raises(UsageError, match=r"No such file: .*map\.npz"):
        Campaign.resume(folder)
    assert finish(Campaign.resume(folder, moved)).finished
    other = write_npz(tmp_path / "other.npz", small_map(seed=1))
    before = contents(folder)
    with pytest.raises(UsageError, match=r"another data set than other\.npz"):
        Campaign.resume(folder, other)
    assert contents(folder) == before


def test_checkpoints_that_cannot_be_used(path: Path, folder: Path) -> None:
    with pytest.raises(UsageError, match=r"no run to resume in .*: it has no checkpoint\.json"):
        read_checkpoint(folder)
    advance(begin(path), 1).save(folder)
    good = (folder / "checkpoint.json").read_bytes()
    edit(folder, format=0)
    with pytest.raises(UsageError, match=r"checkpoint format 0.*Resume it with that version"):
        read_checkpoint(folder)
    (folder / "checkpoint.json").write_bytes(good)
    edit(folder, bo_stream="0.0.1")
    with pytest.raises(UsageError, match=r"written by bo_stream 0\.0\.1"):
        read_checkpoint(folder)
    for damaged in (good[:-20], b"", b"[]", b"{}", b"\xff\x00", b'"text"'):
        (folder / "checkpoint.json").write_bytes(damaged)
        with pytest.raises(UsageError, match="damaged or no checkpoint"):
            read_checkpoint(folder)


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "text"])
def test_a_model_that_cannot_be_read(path: Path, folder: Path, damage: str) -> None:
    advance(begin(path), 2).save(folder)
    file = folder / "model-random-0000005.pt"
    whole = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "text": b"?"}[damage])
    with pytest.raises(UsageError, match=r"model-random-0000005\.pt.*cannot be read"):
        Campaign.resume(folder)


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_full_disk_leaves_the_checkpoint_before(
    path: Path, folder: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models and the index are written; any of them may be the one that fails."""
    campaign = advance(begin(path), 4)
    campaign.save(folder)
    before = contents(folder)
    advance(campaign, 2)
    calls = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        campaign.save(folder)
    assert contents(folder) == before
    monkeypatch.undo()
    assert outcome(finish(Campaign.resume(folder))) == outcome(finish(campaign))
