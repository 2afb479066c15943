"""Fixtures of the tests of loops and commands: runs whose fits and pictures are drafts.

What these tests assert is what a run does with a model and with its pictures, not how well it fits
or how sharp they are. A test of that asks for ``whole_fits`` or ``whole_pictures``; integration
tests have both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from matplotlib.figure import Figure

from bo_stream.models import fitting

WHOLE = dict(fitting._FIT_OPTIONS)
SHORT = {**WHOLE, "maxiter": 3}
"""Options of a refit: all its iterations, and as few as tell a fitted model from one as built."""

SMALL = 25
"""Dots per inch of a draft."""

_savefig = Figure.savefig


def _save_small(figure: Figure, file: Any, **options: Any) -> None:
    """Save without the layout, which costs as much as all of the rest."""
    figure.set_layout_engine("none")
    _savefig(figure, file, **{**options, "dpi": SMALL})


@pytest.fixture(autouse=True, scope="module")
def drafts() -> Iterator[None]:
    """Let refits of a run end after few iterations, and save small pictures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "_FIT_OPTIONS", SHORT)
        patch.setattr(Figure, "savefig", _save_small)
        yield


@pytest.fixture(autouse=True)
def whole_in_integration(request: pytest.FixtureRequest) -> None:
    """Run integration tests as a user runs the loops."""
    if request.node.get_closest_marker("integration") is not None:
        request.getfixturevalue("whole_fits")
        request.getfixturevalue("whole_pictures")


@pytest.fixture
def whole_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let refits take all their iterations."""
    monkeypatch.setattr(fitting, "_FIT_OPTIONS", WHOLE)


@pytest.fixture
def whole_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save pictures as a user gets them."""
    monkeypatch.setattr(Figure, "savefig", _savefig)
