"""The tree's brackets are those of the numbers, whatever arrives first; it holds few parts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from bo_stream.distributed.tasks import Node, SumTree


@dataclass(frozen=True)
class Spelled:
    """A part that spells how it was merged."""

    text: str

    def plus(self, other: Spelled) -> Spelled:
        return Spelled(f"({self.text}{other.text})")


def spelled(order: list[int]) -> str:
    tree: Any = SumTree()
    for number in order:
        tree.add(number, Spelled(str(number)))
    return tree.total().text


def test_brackets_pair_neighbours() -> None:
    assert spelled([0]) == "0"
    assert spelled(list(range(7))) == "((((01)(23))(45))6)"


def test_the_order_of_arrival_does_not_matter(seed: int) -> None:
    for size in (1, 2, 3, 8, 13, 31):
        order = list(range(size))
        random.Random(seed).shuffle(order)
        assert spelled(order) == spelled(list(range(size)))


def test_few_parts_are_held_of_many_in_order() -> None:
    tree: Any = SumTree()
    most = 0
    for number in range(1000):
        tree.add(number, Spelled("."))
        most = max(most, len(tree.nodes))
    assert most <= 10
    assert tree.total().text.count(".") == 1000


def test_each_node_that_is_new_is_kept_with_those_it_was_made_of() -> None:
    kept: dict[Node, str] = {}

    def keep(node: Node, part: Any, former: tuple[Node, ...]) -> None:
        for each in former:
            del kept[each]
        kept[node] = part.text

    tree: Any = SumTree(keep=keep)
    for number in (0, 2, 1, 3, 5):
        tree.add(number, Spelled(str(number)))
        assert kept == {node: part.text for node, part in tree.nodes.items()}
    assert kept == {Node(0, 2): "((01)(23))", Node(5, 0): "5"}


@pytest.mark.parametrize(("number", "held"), [(0, True), (3, True), (4, False), (5, True)])
def test_it_knows_which_tasks_are_in(number: int, held: bool) -> None:
    tree: Any = SumTree()
    for each in (0, 1, 2, 3, 5):
        tree.add(each, Spelled(""))
    assert tree.holds(number) == held
