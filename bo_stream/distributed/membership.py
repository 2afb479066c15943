"""Who takes part in a search: the runs of replicas, other searches, and names that are taken."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from typing import Any

from bo_stream.distributed.clock import Dot
from bo_stream.distributed.records import (
    Listing,
    Store,
    UnusableError,
    VanishedError,
    name_of,
    opened,
    sealed,
)
from bo_stream.distributed.search import Search
from bo_stream.errors import UsageError


class Membership:
    """A run's place among the runs in a store.

    A run that starts later takes over the name of an earlier one, as when a replica died and comes
    back. If the earlier one is alive, it is told so at its next exchange, and the later one at the
    exchange in which it sees a delta that the earlier one has sent since.

    Attributes:
        run: The run.
    """

    def __init__(self, run: str, search: Search, store: Store) -> None:
        """Enter the list of runs.

        Raises:
            UsageError: The store has another search.
        """
        self.run, self._store = run, store
        listing = Listing.of(store)
        for other in listing.runs:
            about = self._about(other)
            if about and about.get("search") != search.digest:
                raise UsageError(
                    f"The store has another search, that of replica {name_of(other)!r}; they "
                    f"differ in {search.difference(about.get('facts', {}))}. Use the same settings "
                    "and model, or another store."
                )
        self._former = [other for other in listing.runs if name_of(other) == name_of(run)]
        self._sent = self._of_former(listing)
        about = {
            "facts": dict(search.facts),
            "host": platform.node(),
            "process": os.getpid(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        key = f"replica/{run}"
        store[key] = sealed(key, search.digest, about, {})

    def _about(self, run: str) -> dict[str, Any]:
        """Read what a run says of itself; nothing where that cannot be read."""
        try:
            return opened(self._store, f"replica/{run}", None)[0]
        except (VanishedError, UnusableError):
            return {}

    def place(self) -> tuple[int, int]:
        """Return the place of this replica's name among all names, and their number."""
        names = sorted({*Listing.of(self._store).names, name_of(self.run)})
        return names.index(name_of(self.run)), len(names)

    def _of_former(self, listing: Listing) -> set[Dot]:
        return {dot for dot in listing.deltas if dot[0] in self._former}

    def still_alive(self, listing: Listing) -> list[str]:
        """Name former runs that have sent deltas since this run has begun, once for each delta."""
        new = self._of_former(listing) - self._sent
        self._sent |= new
        return [
            f"Another replica of the name {name_of(run)!r}, {self._spelled(run)}, still sends "
            "deltas. Nothing is lost; give each replica a name of its own."
            for run in sorted({run for run, _ in new})
        ]

    def check_alone(self, listing: Listing) -> None:
        """Check that no other replica has taken this name since; else it is a ``UsageError``."""
        name = name_of(self.run)
        for run in listing.runs:
            if name_of(run) == name and run not in (*self._former, self.run):
                raise UsageError(
                    f"Another replica of the name {name!r} has started after this one: "
                    f"{self._spelled(run)}. Its outcomes and those of this one are all in the "
                    "store. Give each replica a name of its own."
                )

    def _spelled(self, run: str) -> str:
        about = self._about(run)
        where = (about.get(name, "?") for name in ("process", "host", "started"))
        return "process {} on {}, started {}".format(*where)
