"""Mistakes planted in the library one at a time, to see that the default tests notice each.

python -m tests.mutants [NAME ...] [--all-matrix] [--workers N]
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """A mistake at one place.

    Attributes:
        name: What is wrong.
        file: In ``bo_stream``.
        right: What the file says, there only.
        wrong: What it says with the mistake.
        first: Tests to begin with, beside those of the file's mirror.
    """

    name: str
    file: str
    right: str
    wrong: str
    first: tuple[str, ...] = ()

    def apply(self, root: Path) -> None:
        """Plant the mistake in a copy of the repository."""
        path = root / "bo_stream" / self.file
        path.write_text(self.in_source(path.read_text(encoding="utf-8")), encoding="utf-8")

    def in_source(self, source: str) -> str:
        """The text of the file with the mistake."""
        before, found, after = source.partition(self.right)
        if not found or self.right in after:
            raise ValueError(f"Expected {self.right!r} once in {self.file}, for {self.name}.")
        return before + self.wrong + after
