"""A tree of sums by number: the same for every order of arrival, and small at any time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from bo_stream.distributed.tasks import Part


@dataclass(frozen=True, order=True)
class Place:
    """A node of the tree.

    Attributes:
        start: Number of its first task.
        level: It holds ``2^level`` tasks.
    """

    start: int
    level: int

    @property
    def stop(self) -> int:
        """Number after that of its last task."""
        return self.start + (1 << self.level)

    @property
    def sibling(self) -> Place:
        """The node that it is merged with."""
        return Place(self.start ^ (1 << self.level), self.level)

    @property
    def parent(self) -> Place:
        """The node that both become."""
        return Place(min(self.start, self.sibling.start), self.level + 1)


@dataclass
class SumTree:
    """Parts of tasks, merged in pairs by their numbers.

    It holds O(log n + tasks that arrived early) parts of n tasks. The sum does not depend on the
    order in which tasks are done: its brackets are those of their numbers.

    Attributes:
        nodes: Parts that wait for others.
        keep: Called with each node that is new, and with those that it was made of.
    """

    nodes: dict[Place, Part] = field(default_factory=dict)
    keep: Callable[[Place, Part, tuple[Place, ...]], None] = lambda place, part, former: None

    def add(self, number: int, part: Part) -> None:
        """Put in the part of a task."""
        place, former = Place(number, 0), list[Place]()
        while (sibling := place.sibling) in self.nodes:
            other = self.nodes.pop(sibling)
            part = other.plus(part) if sibling < place else part.plus(other)
            former.append(sibling)
            place = place.parent
        self.nodes[place] = part
        self.keep(place, part, tuple(former))

    def holds(self, number: int) -> bool:
        """Say whether the part of a task is in."""
        return any(place.start <= number < place.stop for place in self.nodes)

    def total(self) -> Part | None:
        """Merge all parts in the order of their numbers; None without any."""
        whole: Part | None = None
        for _, part in sorted(self.nodes.items(), key=lambda item: item[0]):
            whole = part if whole is None else whole.plus(part)
        return whole
