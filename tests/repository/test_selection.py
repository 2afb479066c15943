"""Which tests of a product a run takes."""

from __future__ import annotations

from itertools import product

import pytest

from tests.support import selection
from tests.support.selection import covering, factors_of, position, varying

WIDE = {f"{a}-{b}": (a, b) for a, b in product("abcdef", range(3))}


def test_of_two_factors_each_value_is_taken() -> None:
    taken = [WIDE[name] for name in covering(WIDE, 0)]
    assert {a for a, _ in taken} == set("abcdef")
    assert {b for _, b in taken} == {0, 1, 2}
    assert len(taken) <= 8


def test_of_one_factor_one_value_is_taken() -> None:
    group = {name: (name,) for name in WIDE}
    shares = [covering(group, rotation) for rotation in range(100)]
    assert {len(share) for share in shares} == {1}
    assert set().union(*shares) == set(WIDE)


@pytest.mark.parametrize("group", [{}, {"alone": ()}])
def test_what_has_no_factors_is_taken(group: dict[str, tuple[()]]) -> None:
    assert covering(group, 0) == set(group)


def test_factors_that_say_nothing_are_left_out() -> None:
    group = {name: (a, "same", b, a) for name, (a, b) in WIDE.items()}
    assert varying(group) == WIDE
    assert varying({}) == {}


@pytest.mark.parametrize("word", ["a", "b", "c"])
@pytest.mark.parametrize(("number", "flag"), [(0.5, True), (1.5, True), (2.5, False)])
def test_each_parameter_is_a_factor(
    word: str, number: float, flag: bool, request: pytest.FixtureRequest
) -> None:
    own = dict(zip(request.node.callspec.params, factors_of(request.node), strict=True))
    for other in request.session.items:
        if getattr(other, "originalname", None) == "test_each_parameter_is_a_factor":
            assert isinstance(other, pytest.Function)
            params, factors = other.callspec.params, factors_of(other)
            for name, factor in zip(params, factors, strict=True):
                same = params[name] == request.getfixturevalue(name)
                assert (factor == own[name]) == same


def test_places_are_the_same_in_every_process() -> None:
    assert position(7, "a") == 9200829425988378282
    assert position(7, "a") != position(8, "a")


@pytest.mark.parametrize(("loop", "most"), [(0.01, 6.0), (0.04, 6.0), (0.1, 15.0)])
def test_a_slow_machine_may_take_longer(
    loop: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "loop_seconds", lambda: loop)
    selection.most_seconds.cache_clear()
    assert selection.most_seconds() == pytest.approx(most)
    selection.most_seconds.cache_clear()


def test_a_loop_takes_some_time() -> None:
    assert 1e-3 < selection.loop_seconds() < 10.0
