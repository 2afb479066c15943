"""The ledger: a file that only grows, of which no confirmed line is ever lost."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from bo_stream.errors import UsageError
from bo_stream.loops.run import hold_folder
from bo_stream.loops.survey.ledger import RESULTS, TORN, SurveyLedger


@pytest.fixture
def ledger(tmp_path: Path) -> SurveyLedger:
    started = SurveyLedger()
    add(started, 1)
    started.move_to(tmp_path)
    add(started, 2)
    return started


def add(ledger: SurveyLedger, number: int) -> None:
    with ledger.writing():
        ledger.append("tell", {"results": [{"id": f"V{number}", "rain": 0.1 * number}]})


def told(ledger: SurveyLedger) -> list[str]:
    return [event.values["results"][0]["id"] for event in ledger.events]


def test_what_was_written_is_read(ledger: SurveyLedger, tmp_path: Path) -> None:
    assert SurveyLedger(tmp_path).events == ledger.events
    lines = (tmp_path / RESULTS).read_text().splitlines()
    content = [json.loads(line) for line in lines]
    assert [each["sequence"] for each in content] == [1, 2]
    assert content[1]["verb"] == "tell"
    assert content[1]["values"] == {"results": [{"id": "V2", "rain": 0.2}]}
    assert content[1]["time"].endswith("Z")


def test_lines_are_only_added(ledger: SurveyLedger, tmp_path: Path) -> None:
    before = (tmp_path / RESULTS).read_bytes()
    add(ledger, 3)
    assert (tmp_path / RESULTS).read_bytes().startswith(before)


def test_two_that_have_the_ledger_open_take_in_what_the_other_writes(
    ledger: SurveyLedger, tmp_path: Path
) -> None:
    other = SurveyLedger(tmp_path)
    add(other, 3)
    add(ledger, 4)
    with other.writing() as new:
        assert [event.sequence for event in new] == [4]
    assert told(ledger) == told(other) == told(SurveyLedger(tmp_path)) == ["V1", "V2", "V3", "V4"]


def test_who_writes_while_another_does_is_told(ledger: SurveyLedger, tmp_path: Path) -> None:
    with hold_folder(tmp_path), pytest.raises(UsageError, match="is in use by"):
        add(ledger, 3)
    assert told(SurveyLedger(tmp_path)) == ["V1", "V2"]


@pytest.mark.parametrize("cut", [1, 20, "all but one"])
def test_a_last_line_that_was_cut_short_is_said_and_set_aside(
    ledger: SurveyLedger, tmp_path: Path, cut: int | str
) -> None:
    add(ledger, 3)
    whole = (tmp_path / RESULTS).read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    keep = len(whole) - (last - 1 if cut == "all but one" else int(cut))
    (tmp_path / RESULTS).write_bytes(whole[:keep])
    opened = SurveyLedger(tmp_path)
    assert told(opened) == ["V1", "V2"]
    (note,) = opened.notes
    assert "was cut short" in note
    assert (tmp_path / RESULTS).read_bytes() == whole[:keep]  # opening changes nothing
    add(opened, 4)
    assert opened.notes == ()
    assert told(SurveyLedger(tmp_path)) == ["V1", "V2", "V4"]
    assert (tmp_path / TORN).read_bytes().rstrip(b"\n") == whole[-last:][: keep - len(whole) + last]


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [lines[0].replace(b'"V1"', b'"V9"'), lines[1]],
        lambda lines: [b"\n", lines[1]],
        lambda lines: [bytes(len(lines[0]) - 1) + b"\n", lines[1]],
        lambda lines: [lines[1]],
        lambda lines: [lines[0], lines[0]],
        lambda lines: [b"[]\n", lines[1]],
        lambda lines: [b'{"verb": "tell"}\n', lines[1]],
    ],
)
def test_a_damaged_line_is_named(ledger: SurveyLedger, tmp_path: Path, damage: object) -> None:
    path = tmp_path / RESULTS
    lines = damage(path.read_bytes().splitlines(keepends=True))  # type: ignore[operator]
    path.write_bytes(b"".join(lines))
    with pytest.raises(UsageError, match=r"results\.jsonl, line \d, is damaged .*from a copy"):
        SurveyLedger(tmp_path)


def test_a_ledger_that_was_shortened_or_removed(ledger: SurveyLedger, tmp_path: Path) -> None:
    path = tmp_path / RESULTS
    whole = path.read_bytes()
    path.write_bytes(whole.splitlines(keepends=True)[0])
    with pytest.raises(UsageError, match=r"results\.jsonl has become shorter"):
        add(ledger, 3)
    path.unlink()
    with pytest.raises(UsageError, match=r"has no results\.jsonl, which holds all results"):
        add(ledger, 3)
    with pytest.raises(UsageError, match=r"has no results\.jsonl"):
        SurveyLedger(tmp_path)


def test_a_full_disk_leaves_the_ledger_as_it_was(
    ledger: SurveyLedger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = (tmp_path / RESULTS).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            add(ledger, 3)
    assert (tmp_path / RESULTS).read_bytes() == before
    assert told(ledger) == ["V1", "V2"]
    add(ledger, 3)
    assert told(SurveyLedger(tmp_path)) == ["V1", "V2", "V3"]


class NearlyFull(io.FileIO):
    """A file on a disk with room for some bytes; after two errors there is room again."""

    room, errors = 0, 2

    def write(self, content: Any) -> int:
        if self.room == 0 and self.errors > 0:
            self.errors -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = super().write(bytes(content)[: self.room or None])
        self.room -= min(written, self.room)
        return written


def test_of_a_line_that_is_written_in_part_nothing_stays(
    ledger: SurveyLedger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk with room for some bytes more, which is freed before the file is closed."""
    before = (tmp_path / RESULTS).read_bytes()

    def nearly(path: Path, mode: str, buffering: int = -1) -> Any:
        raw = NearlyFull(path, mode.replace("b", ""))
        raw.room = 10
        return raw if buffering == 0 else io.BufferedRandom(raw)

    with ledger.writing(), monkeypatch.context() as patch:
        patch.setattr(Path, "open", nearly)
        with pytest.raises(OSError, match="No space left"):
            ledger.append("tell", {"results": [{"id": "V3"}]})
    assert (tmp_path / RESULTS).read_bytes() == before
    add(ledger, 3)
    assert told(SurveyLedger(tmp_path)) == ["V1", "V2", "V3"]
    assert not (tmp_path / TORN).exists()


def test_a_ledger_that_cannot_be_begun_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    started = SurveyLedger()
    add(started, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            started.move_to(tmp_path)
    assert [*tmp_path.iterdir()] == []
    started.move_to(tmp_path)
    assert told(SurveyLedger(tmp_path)) == ["V1"]


def test_a_folder_that_has_a_ledger_is_not_taken(ledger: SurveyLedger, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds a survey already"):
        SurveyLedger().move_to(tmp_path)
    assert told(SurveyLedger(tmp_path)) == ["V1", "V2"]
