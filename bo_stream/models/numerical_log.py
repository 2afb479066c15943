"""What a model had to do to stay in business: jitters, thinned points, refits that failed."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class NumericalEvent:
    """A jitter or fallback that a model used, once or several times.

    Attributes:
        what: Was done, in words.
        size: Of the matrix, or the number of points, that asked for it; the largest so far.
        jitter: Relative to the mean of the diagonal; 0 where none was the remedy.
        observations: In memory when it was first used.
        times: How often so far.
    """

    what: str
    size: int
    jitter: float
    observations: float
    times: int = 1

    def __str__(self) -> str:
        jitter = f", jitter {self.jitter:.0e}" if self.jitter else ""
        size = f" (size {self.size:,}{jitter})" if self.size else ""
        often = f", {self.times:,} times" if self.times > 1 else ""
        return f"{self.what}{size}, first at {self.observations:,.0f} observations{often}"


NumericalLog = tuple[NumericalEvent, ...]
"""Events in the order of their first use; as many as there are remedies, however long a stream."""


def with_event(log: NumericalLog, event: NumericalEvent) -> NumericalLog:
    """A log with one event more; one that differs in size and time only is counted."""
    for i, former in enumerate(log):
        if (former.what, former.jitter) == (event.what, event.jitter):
            again = replace(
                former, size=max(former.size, event.size), times=former.times + event.times
            )
            return (*log[:i], again, *log[i + 1 :])
    return (*log, event)
