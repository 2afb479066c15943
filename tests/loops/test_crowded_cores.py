"""Threads that spin while they wait, beside another busy process."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from bo_stream.loops.run import CoreWatch, CrowdedCoresWarning, usage_of_this_thread

SPINNING = (1.5, 0.9, 90, 3)
"""In 1.5 s: it wanted a core all the time and had one for 0.9 s."""


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say that there are two: where OpenMP began with one, more break MKL's batched LU for good."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def watch_of(*pieces: tuple[float, ...]) -> CoreWatch:
    """A watch, after pieces of work that took so much."""
    now = np.array([100.0, 50.0, 1000.0, 1000.0])
    readings = []
    for piece in pieces:
        readings += [now, now + piece]
        now = now + piece
    following = iter(readings)
    watch = CoreWatch(lambda: next(following))
    for _ in pieces:
        with watch:
            pass
    return watch


def test_it_is_said_once() -> None:
    with pytest.warns(CrowdedCoresWarning, match="OMP_WAIT_POLICY=PASSIVE") as said:
        watch_of(SPINNING, SPINNING, SPINNING)
    assert len(said) == 1
    assert "had 60 % of a core, and its 2 threads" in str(said[0].message)


def test_short_pieces_of_work_add_up() -> None:
    piece = (0.4, 0.2, 30, 1)
    watch_of(piece, piece)
    with pytest.warns(CrowdedCoresWarning):
        watch_of(piece, piece, piece)


@pytest.mark.parametrize(
    "usage",
    [
        (1.5, 1.45, 90, 3),  # a core of its own
        (1.5, 0.9, 90, 5000),  # threads that sleep while they wait
        (1.5, 0.1, 1, 3),  # waiting for a disk
        (0.5, 0.1, 90, 3),  # too short to tell
        (0.0, 0.0, 0.0, 0.0),  # a system that does not tell
    ],
)
def test_of_anything_else_nothing_is_said(usage: tuple[float, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch_of(usage)


@pytest.mark.parametrize("way", ["one thread", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_who_has_done_it_is_not_told(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "one thread":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    else:
        monkeypatch.setenv(way, {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}[way])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch_of(SPINNING)


def test_what_a_thread_used_grows() -> None:
    first = usage_of_this_thread()
    torch.rand(200, 200).inverse()
    assert bool((usage_of_this_thread() >= first).all())
