"""The journal: of trials that cannot be written whole nothing stays."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from bo_stream.loops.optimization.trials import JOURNAL, Journal, Trial, journaled_trials


def test_trials_that_cannot_be_written_leave_the_journal_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    journal = Journal(tmp_path)
    journal.begin(0)
    journal.add([Trial(0, (0.5,), "sobol")])
    before = (tmp_path / JOURNAL).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            journal.add([Trial(1, (0.25,), "sobol")])
    assert (tmp_path / JOURNAL).read_bytes() == before
    journal.add([Trial(2, (0.75,), "sobol")])
    journal.close()
    assert [trial.key for trial in journaled_trials(tmp_path, journal.name)] == [0, 2]
