from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bo_stream.errors import UsageError
from bo_stream.loops.run import StopRequest, run_with_checkpoints
from bo_stream.loops.sampling.campaign import Campaign
from bo_stream.loops.sampling.settings import Strategy
from bo_stream.models.base import StreamingGP
from bo_stream.storage.archive import archive_bytes, describe_file, read_archive
from tests.loops.small import LONG, QUICK, map_with_an_artefact, small_map, write_npz

pytestmark = pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short")

BOTH: tuple[Strategy, ...] = ("chosen", "random")
ALL = 10
"""Steps of both strategies, the first observations included."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_npz(tmp_path_factory.mktemp("data") / "map.npz", small_map())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def begin(path: Path) -> Campaign:
    return Campaign.begin(path, None, None, QUICK, BOTH)


@cache
def begun(path: Path, steps: int) -> Campaign:
    return advance(after(path, steps - 1), 1) if steps else begin(path)


def after(path: Path, steps: int) -> Campaign:
    """A run of its own after some steps, which are made once."""
    return copy.deepcopy(begun(path, steps))


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
        name: (loop.state.picks, loop.state.refits, [s.rmse for s in loop.curve])
        for name, loop in campaign.loops.items()
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def edit(folder: Path, **changes: Any) -> None:
    """Change an index as if the run had written other values."""
    index = folder / "checkpoint.json"
    content = {**json.loads(index.read_text()), **changes}
    rest = {k: v for k, v in content.items() if k != "sha256"}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    index.write_text(json.dumps({**content, "sha256": digest}))


def test_stopped_after_every_step_a_run_makes_the_same_choices(path: Path, folder: Path) -> None:
    expected = outcome(after(path, ALL))
    campaign = begin(path)
    while not campaign.finished:
        advance(campaign, 1).save(folder)
        campaign = Campaign.resume(folder)
    result = outcome(campaign)
    for loop in campaign.loops.values():
        assert loop.state.validation.rows == 12  # of 17 picks, five before the model
        assert [test.seen for test in loop.state.validation.drift] == [12]
    for name in BOTH:
        assert result[name][:2] == expected[name][:2]
        assert result[name][2] == pytest.approx(expected[name][2], rel=1e-9)


def test_a_longer_run_has_no_score_at_the_end_of_the_shorter_one(path: Path, folder: Path) -> None:
    shorter = finish(Campaign.begin(path, None, None, replace(QUICK, steps=3), BOTH))
    assert [score.observations for score in shorter.main.curve] == [5, 11, 14]
    shorter.save(folder)
    assert Campaign.resume(folder).main.curve == shorter.main.curve
    longer = finish(Campaign.resume(folder, steps=4))
    for loop in longer.loops.values():
        assert [score.observations for score in loop.curve] == [5, 11, 17]


def test_a_run_goes_on_without_its_outliers(folder: Path, tmp_path: Path) -> None:
    data, row = map_with_an_artefact(LONG)
    path = write_npz(tmp_path / "map.npz", data)
    campaign = Campaign.begin(path, None, None, LONG, ("chosen",))
    advance(campaign, 3).save(folder)
    resumed = Campaign.resume(folder)
    assert resumed.main.outlying_rows() == [row]
    assert outcome(finish(resumed)) == outcome(finish(campaign))
    advance(campaign, 9).save(folder)
    for outliers in ([], [50, 51], [120], [51, 50], [50, 50]):
        good = (folder / "checkpoint.json").read_bytes()
        edit_run(folder, outliers=outliers)
        refused(folder, "contradicts itself: 120 picks, 120 of them distinct, . outliers")
        (folder / "checkpoint.json").write_bytes(good)


def test_strategies_step_in_turn(path: Path) -> None:
    campaign = begin(path)
    turns = [(name, campaign.loops[name].steps_done) for name in campaign.run()]
    assert turns == [(name, number) for number in range(5) for name in BOTH]


def test_a_finished_run_can_be_asked_for_more(path: Path, folder: Path) -> None:
    campaign = after(path, ALL)
    campaign.save(folder)
    longer = finish(Campaign.resume(folder, steps=6))
    assert longer.main.steps_done == 6
    assert longer.main.state.picks[:17] == campaign.main.state.picks
    assert len(set(longer.main.state.picks)) == 23
    with pytest.raises(UsageError, match="has done 4 steps already"):
        Campaign.resume(folder, steps=3)


def test_time_goes_on(path: Path, folder: Path) -> None:
    campaign = after(path, ALL - 2)
    campaign.seconds += 1000.0
    campaign.save(folder)
    assert finish(Campaign.resume(folder)).seconds > campaign.seconds


def test_only_the_last_models_are_kept(path: Path, folder: Path) -> None:
    campaign = after(path, ALL - 4)
    for _ in campaign.run():
        campaign.save(folder)
    index, *models = sorted(contents(folder))
    assert index == "checkpoint.json"
    assert [name.rpartition("-")[0] for name in models] == [
        "model-chosen-0000017",
        "model-random-0000017",
    ]


def test_the_data_may_move_but_not_change(folder: Path, tmp_path: Path) -> None:
    path = write_npz(tmp_path / "map.npz", small_map())
    advance(begin(path), 3).save(folder)
    moved = path.rename(tmp_path / "moved.npz")
    with pytest.raises(UsageError, match=r"No such file: .*map\.npz"):
        Campaign.resume(folder)
    assert advance(Campaign.resume(folder, moved), 2).steps_done == 2
    other = write_npz(tmp_path / "other.npz", small_map(seed=1))
    before = contents(folder)
    with pytest.raises(UsageError, match=r"another data set than other\.npz"):
        Campaign.resume(folder, other)
    assert contents(folder) == before


def test_checkpoints_that_cannot_be_used(path: Path, folder: Path) -> None:
    with pytest.raises(UsageError, match=r"no run to resume in .*: it has no checkpoint\.json"):
        Campaign.resume(folder)
    after(path, 1).save(folder)
    good = (folder / "checkpoint.json").read_bytes()
    edit(folder, version=0)
    with pytest.raises(UsageError, match=r"version 0 of the format.*Read it with that version"):
        Campaign.resume(folder)
    (folder / "checkpoint.json").write_bytes(good)
    edit(folder, bo_stream="0.0.1")
    with pytest.raises(UsageError, match=r"written by bo_stream 0\.0\.1"):
        Campaign.resume(folder)
    for damaged in (good[:-20], b"", b"[]", b"{}", b"\xff\x00", b'"text"'):
        (folder / "checkpoint.json").write_bytes(damaged)
        with pytest.raises(UsageError, match="damaged or no checkpoint"):
            Campaign.resume(folder)


def zeroed(content: bytes) -> bytes:
    """The same with 4 KiB of zeros in its middle, where there are tensors."""
    middle = len(content) // 2
    return content[:middle] + bytes(4096) + content[middle + 4096 :]


def refused(folder: Path, message: str) -> None:
    """Resuming fails in one line, and changes nothing."""
    before = contents(folder)
    with pytest.raises(UsageError, match=message) as error:
        Campaign.resume(folder)
    assert "\n" not in str(error.value)
    assert contents(folder) == before


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "text", "zeros", "foreign"])
def test_a_model_that_cannot_be_read(path: Path, folder: Path, damage: str) -> None:
    after(path, 2).save(folder)
    (file,), (other,) = folder.glob("model-random-0000005-*"), folder.glob("model-chosen-*")
    whole = file.read_bytes()
    assert len(whole) > 3 * 4096
    file.unlink()
    if damage != "missing":
        content = {"empty": b"", "cut": whole[: len(whole) // 2], "text": b"?"}
        content |= {"zeros": zeroed(whole), "foreign": other.read_bytes()}
        file.write_bytes(content[damage])
    refused(folder, r"cannot be read: .*model-random-0000005-.*\.safetensors")


def test_a_planted_model_is_not_run(path: Path, folder: Path, tmp_path: Path) -> None:
    """Not even one whose digest the index names."""
    campaign, mark = after(path, 2), tmp_path / "mark"
    campaign.save(folder)
    (file,) = folder.glob("model-chosen-*")
    about, arrays = read_archive(file)
    document = json.loads(arrays["objects.json"].numpy().tobytes())
    document["names"]["it"] = "os.system"
    call = {"partial": {"function": "it"}, "args": [f"touch {mark}"], "keywords": {}}
    document["model"]["state"]["planted"] = call
    content = json.dumps(document).encode()
    arrays["objects.json"] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    file.write_bytes(archive_bytes({"class": about["class"]}, arrays))
    edit_model(folder, sha256=describe_file(file)["sha256"])
    refused(folder, r"names os\.system.*not trusted")
    assert not mark.exists()


def edit_run(folder: Path, **changes: Any) -> None:
    runs = json.loads((folder / "checkpoint.json").read_text())["runs"]
    edit(folder, runs={**runs, "chosen": {**runs["chosen"], **changes}})


def edit_model(folder: Path, **changes: Any) -> None:
    models = json.loads((folder / "checkpoint.json").read_text())["models"]
    edit(folder, models={**models, "chosen": {**models["chosen"], **changes}})


@pytest.mark.parametrize("where", ["above", "absolute", "below"])
def test_a_model_elsewhere_is_not_read(
    path: Path, folder: Path, tmp_path: Path, where: str
) -> None:
    after(path, 2).save(folder)
    (file,) = folder.glob("model-chosen-*")
    (folder / "sub").mkdir()
    for place in (tmp_path, folder / "sub"):
        (place / "model.safetensors").write_bytes(file.read_bytes())
    names = {
        "above": "../model.safetensors",
        "absolute": str(tmp_path / "model.safetensors"),
        "below": "sub/model.safetensors",
    }
    edit_model(folder, name=names[where])
    (folder / "sub" / "model.safetensors").rename(tmp_path / "other.safetensors")
    (folder / "sub").rmdir()
    refused(folder, "expected the name of a file in that folder")


def test_picks_that_are_not_the_model_s(path: Path, folder: Path) -> None:
    after(path, 6).save(folder)
    good = (folder / "checkpoint.json").read_bytes()
    run = json.loads(good)["runs"]["chosen"]
    picks, outcomes = run["picks"], run["outcomes"]
    assert len(picks) == len(outcomes) == 11
    for chosen, observations, message in (
        (picks[:-3], 11, "contradicts itself: 8 picks"),
        ([*picks[:-3], *picks[:3]], 11, "contradicts itself: 11 picks, 8 of them distinct"),
        (picks, 12, "contradicts itself: 11 picks"),
        (picks[:8], 8, "a model of 11 observations, the checkpoint says 8"),
    ):
        (folder / "checkpoint.json").write_bytes(good)
        edit_run(folder, picks=chosen, outcomes=outcomes[: len(chosen)])
        edit_model(folder, observations=observations)
        refused(folder, message)
    (folder / "checkpoint.json").write_bytes(good)
    assert finish(Campaign.resume(folder)).finished


def test_an_index_that_was_changed_anywhere(path: Path, folder: Path) -> None:
    after(path, 2).save(folder)
    index = folder / "checkpoint.json"
    good = json.loads(index.read_text())
    for place in places(good):
        for junk in (None, "text", -1, [], {}, 1e300):
            changed = replaced(good, place, junk)
            if changed == good:
                continue
            index.write_text(json.dumps(changed))
            with pytest.raises(UsageError) as error:
                Campaign.resume(folder)
            assert "\n" not in str(error.value)


def places(content: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all values within a content of JSON, of lists to their first."""
    yield before
    if isinstance(content, dict):
        for key, value in content.items():
            yield from places(value, (*before, key))
    elif isinstance(content, list) and content:
        yield from places(content[0], (*before, 0))


def replaced(content: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    changed = copy.copy(content)
    changed[place[0]] = replaced(content[place[0]], place[1:], value)
    return changed


def run_until_interrupted(
    campaign: Campaign, folder: Path, on_step: Callable[[Strategy], None]
) -> None:
    save = partial(campaign.save, folder)
    with StopRequest(lambda: None) as stop, pytest.raises(KeyboardInterrupt):
        run_with_checkpoints(campaign.run(), save, stop, on_step, seconds_between_checkpoints=1e9)


def test_an_interrupt_between_steps_saves_them(path: Path, folder: Path) -> None:
    def interrupt_the_sixth(_: Strategy) -> None:
        if len(campaign.loops["random"].state.picks) == 11:
            raise KeyboardInterrupt

    campaign = begin(path)
    run_until_interrupted(campaign, folder, interrupt_the_sixth)
    assert outcome(Campaign.resume(folder)) == outcome(campaign)


def test_an_interrupt_within_a_step_leaves_the_checkpoint_before(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(model: StreamingGP) -> None:
        raise KeyboardInterrupt

    def from_the_second_step_on(_: Strategy) -> None:
        monkeypatch.setattr("bo_stream.loops.sampling.sampling.relearn", interrupt)

    campaign = begin(path)
    run_until_interrupted(campaign, folder, from_the_second_step_on)
    monkeypatch.undo()
    resumed = Campaign.resume(folder)
    assert resumed.loops["chosen"].state.refits == [5]
    assert outcome(finish(resumed)) == outcome(after(path, ALL))


@pytest.mark.matrix
@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_full_disk_leaves_the_checkpoint_before(
    path: Path, folder: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models and the index are written; any of them may be the one that fails."""
    campaign = after(path, 4)
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
