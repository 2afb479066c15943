"""Nothing public is gone or has another signature unless that was meant."""

from __future__ import annotations

from tests.repository.public_api import SNAPSHOT, lines


def test_what_is_public_is_what_was_written_down() -> None:
    """Where a change is meant: ``python -m tests.repository.public_api``."""
    now, before = set(lines()), set(SNAPSHOT.read_text().splitlines())
    assert len(before) > 1000
    assert not sorted(before - now), "gone, or with other parameters"
    assert not sorted(now - before), "new: write the snapshot again"
