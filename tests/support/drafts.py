"""Fixtures of the tests of loops, commands, Ax and replicas: rough fits, searches and pictures.

What these tests assert is what a run does with a model and with the points that it chooses, not
how well it fits, how good they are, or what its pictures show: those are blank. A test of that asks
for ``whole_fits``, ``whole_searches`` and ``whole_pictures``, which integration tests have, or for
``small_pictures``, which are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from typing import IO, Any

import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from bo_stream import OSVGP
from bo_stream.loops.optimization import acquisition, region_search
from bo_stream.loops.survey import model as survey
from bo_stream.models import fitting
from bo_stream.models.fitting import relearn, total_loss

__all__ = [
    "drafts",
    "small_pictures",
    "whole_fits",
    "whole_in_integration",
    "whole_pictures",
    "whole_searches",
]

WHOLE = dict(fitting._FIT_OPTIONS)
SHORT = {**WHOLE, "maxiter": 2}
"""Options of a refit: all its iterations, and as few as tell a fitted model from one as built."""

ROUNDS = {name: getattr(survey, name) for name in ("FIRST_ROUNDS", "ROUNDS", "_round")}
"""Rounds of a survey's fit, of which a draft takes the first, and what happens in one."""


def _round(model: OSVGP, X: Tensor, Y: Tensor) -> tuple[OSVGP, float]:
    """Learn hyperparameters as a round does, but leave the sites as they were for the first."""
    relearn(model)
    return model, total_loss(model)


BRIEF_ROUNDS = {"FIRST_ROUNDS": 1, "ROUNDS": 1, "_round": _round}

FEW = {
    "_SAMPLES": 16,
    "_THOMPSON_SAMPLES": 64,
    "_JOINT_SAMPLES": 64,
    "_CANDIDATES": 64,
    "_DRAWN": 8,
    "_SOBOL_BEFORE_DRAWS": 64,
    "_DRAWS": 64,
}
"""Points and draws of a search."""

MANY = {name: getattr(acquisition, name) for name in FEW}

FEW_OF_A_REGION = {"CANDIDATES": 60, "CLIMB": 3}
"""Candidates and iterations of a search in a region."""

MANY_OF_A_REGION = {name: getattr(region_search, name) for name in FEW_OF_A_REGION}

BRIEF_FITS = {"FIRST_FIT": 2, "LATER_FIT": 1}
"""Iterations of a region's fits."""

LONG_FITS = {name: getattr(region_search, name) for name in BRIEF_FITS}

MOST_ITERATIONS = 2
"""Iterations of a search from its starts."""

SMALL = 25
"""Dots per inch of a small picture."""

_savefig = Figure.savefig


_search_options = acquisition._search_options


def _few_iterations(dtype: torch.dtype, maxiter: int = MOST_ITERATIONS) -> dict[str, Any]:
    return _search_options(dtype, min(maxiter, MOST_ITERATIONS))


def _blank() -> bytes:
    file = BytesIO()
    Image.new("RGB", (8, 8), "white").save(file, "png")
    return file.getvalue()


BLANK = _blank()


def _save_blank(figure: Figure, file: IO[bytes], **options: Any) -> None:
    """Save a picture of nothing."""
    assert options["format"] == "png"
    file.write(BLANK)


def save_small(figure: Figure, file: Any, **options: Any) -> None:
    """Save without the layout, which costs as much as all of the rest."""
    figure.set_layout_engine("none")
    _savefig(figure, file, **{**options, "dpi": SMALL})


@pytest.fixture(autouse=True, scope="module")
def drafts() -> Iterator[None]:
    """Let refits and searches of a run end after few iterations, and save blank pictures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "_FIT_OPTIONS", SHORT)
        for name, value in BRIEF_ROUNDS.items():
            patch.setattr(survey, name, value)
        patch.setattr(acquisition, "_search_options", _few_iterations)
        for name, value in FEW.items():
            patch.setattr(acquisition, name, value)
        for name, value in {**FEW_OF_A_REGION, **BRIEF_FITS}.items():
            patch.setattr(region_search, name, value)
        patch.setattr(Figure, "savefig", _save_blank)
        yield


@pytest.fixture(autouse=True)
def whole_in_integration(request: pytest.FixtureRequest) -> None:
    """Run integration tests as a user runs the loops."""
    if request.node.get_closest_marker("integration") is not None:
        request.getfixturevalue("whole_fits")
        request.getfixturevalue("whole_searches")
        request.getfixturevalue("whole_pictures")


@pytest.fixture
def whole_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let refits take all their iterations."""
    monkeypatch.setattr(fitting, "_FIT_OPTIONS", WHOLE)
    for name, value in ROUNDS.items():
        monkeypatch.setattr(survey, name, value)
    for name, value in LONG_FITS.items():
        monkeypatch.setattr(region_search, name, value)


@pytest.fixture
def whole_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let searches for points be as long as a user's."""
    monkeypatch.setattr(acquisition, "_search_options", _search_options)
    for name, value in MANY.items():
        monkeypatch.setattr(acquisition, name, value)
    for name, value in MANY_OF_A_REGION.items():
        monkeypatch.setattr(region_search, name, value)


@pytest.fixture
def small_pictures() -> Iterator[None]:
    """Draw pictures, of few pixels."""
    with pytest.MonkeyPatch.context() as patch:  # which a test's own does not undo
        patch.setattr(Figure, "savefig", save_small)
        yield


@pytest.fixture
def whole_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save pictures as a user gets them."""
    monkeypatch.setattr(Figure, "savefig", _savefig)
