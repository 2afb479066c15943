"""What a run takes of the product law x case x setting."""

from __future__ import annotations

from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

from tests.laws.product import PRODUCT
from tests.support.selection import Factors, covering

NAMES: dict[str, Factors] = {
    f"{law.__name__}-{stream}": (law.__name__, stream.case.name, str(stream.setting))
    for law, stream in PRODUCT
}


@cache
def share_of(rotation: int) -> set[str]:
    return covering(NAMES, rotation)


def pairs(names: set[str]) -> set[tuple[int, int, object, object]]:
    """All pairs of law and case, law and setting, and case and setting."""
    return {
        (i, j, NAMES[name][i], NAMES[name][j])
        for name in names
        for i, j in combinations(range(3), 2)
    }


def test_this_run_meets_every_pair(request: pytest.FixtureRequest) -> None:
    taken = {
        f"{item.callspec.params['law'].__name__}-{item.callspec.params['stream']}"
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == "test_law"
        if item.path == Path(__file__).with_name("test_laws.py")
    }
    option = request.config.option
    if option.keyword or option.markexpr or option.share > 1 or not taken:
        pytest.skip("of runs of all laws")
    assert taken <= NAMES.keys()
    assert pairs(taken) == pairs(set(NAMES))


@pytest.mark.parametrize("rotation", range(3))
def test_every_rotation_meets_every_pair_with_a_third_of_the_product(rotation: int) -> None:
    share = share_of(rotation)
    assert pairs(share) == pairs(set(NAMES))
    assert len(share) < 0.4 * len(NAMES)


def test_rotations_differ_and_repeat() -> None:
    shares = [share_of(rotation) for rotation in range(12)]
    assert covering(NAMES, 3) == shares[3]
    assert len(set().union(*shares)) > 0.9 * len(NAMES)
