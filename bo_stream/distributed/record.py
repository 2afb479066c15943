"""The record of an ingest in a folder: which fragments are in, and their sums.

A folder holds ``ingest.json``, and for each node of the tree of sums two files: the sums, and the
names of their fragments. A node is written before those that it was made of are removed, and its
names after its sums: whatever ends the process, what is named is whole. When an ingest ends, its
sums become one *sealed* node, so that the next one adds only what came later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bo_stream.distributed.fragments import Columns, FileFragment, Fragment, digest_of
from bo_stream.distributed.likeness import check_alike
from bo_stream.distributed.sources import Fault
from bo_stream.distributed.sums import Sums, merge
from bo_stream.distributed.tasks import Part
from bo_stream.distributed.tree import Place, SumTree
from bo_stream.errors import UsageError
from bo_stream.loops.run import hold_folder
from bo_stream.models.base import StreamingGP
from bo_stream.storage.archive import FileFormat, atomic_write, read_index, write_index
from bo_stream.storage.trusted import Trusted

FORMAT = FileFormat("bo_stream record of an ingest", 1)
INDEX = "ingest.json"
STREAM = "stream"
"""Plan of a source whose fragments are not known before they are read."""

_CURE = "Give another folder, or none, or restore this one from a copy."
_DAMAGE = (OSError, ValueError, TypeError, LookupError, AttributeError)


@dataclass(frozen=True)
class _State:
    """The content of the index.

    Attributes:
        columns: Names of the columns that are read.
        begun: Number of observations that the model had before the first ingest.
        sealed: Number of observations of each ingest that has ended.
        plan: Digest of the fragments of the one under way; empty: there is none.
    """

    columns: dict[str, list[str]]
    begun: float
    sealed: tuple[float, ...] = ()
    plan: str = ""


class Record:
    """A folder in which an ingest keeps what is in; use :func:`opened_record`.

    Attributes:
        base: Sums that are in the record and not in the model.
    """

    def __init__(
        self, folder: Path, model: StreamingGP, columns: Columns, trusted: Sequence[Trusted]
    ) -> None:
        """Read a folder, or begin one.

        Raises:
            UsageError: It is damaged, or of other columns, of another model, or of one that holds
                neither what it held at the start nor that and what is recorded.
        """
        self._folder, self._trusted = folder, trusted
        named = {name: list(value) for name, value in asdict(columns).items()}
        if (folder / INDEX).is_file():
            self._state = self._read_state()
        else:
            folder.mkdir(parents=True, exist_ok=True)
            self._write_state(_State(named, model.num_observations))
        if self._state.columns != named:
            raise UsageError(
                f"The record in {folder} is of the columns {self._state.columns}, got {named}. "
                f"{_CURE}"
            )
        self._columns = columns
        self._digests: dict[str, str] = {}  # of fragments of ingests that have ended, by key
        self._contents: dict[str, str] = {}  # keys of these, by digest
        self._seen: dict[str, str] = {}  # of all others
        self.base: Sums | None = None
        self._read_sealed(model)
        if not self._state.plan:
            self._remove(folder.glob("node-*"))  # of an ingest that ended just before its process

    # --- an ingest under way ------------------------------------------------------------------

    def is_in(self, fragment: Fragment) -> bool:
        """Say whether an ingest that has ended took a fragment in.

        Raises:
            UsageError: It did, and the fragment has changed since; or it took in the same content
                of a file under another name.
        """
        former, now = self._digests.get(fragment.key), self._seen.get(fragment.key)
        if now is None:
            now = self._seen[fragment.key] = fragment.digest(self._columns)
        if former is not None and former != now:
            raise UsageError(
                f"{fragment.key} has changed since it was taken in, by the record in "
                f"{self._folder}: what was taken in cannot be taken out. Restore the file, or "
                "build the model anew with another record."
            )
        if former is None and isinstance(fragment, FileFragment) and now in self._contents:
            raise UsageError(
                f"{fragment.key} has the content of {self._contents[now]}, which is in by the "
                f"record in {self._folder}: name the files as before, or leave this one out."
            )
        return former is not None

    def begun(self, fragments: Sequence[Fragment] | None, start: Sums, task_rows: int) -> SumTree:
        """Return the tree of an ingest, with the nodes of one that was interrupted.

        If fragments or tasks are others, what it took in is sealed, and :meth:`is_in` says so.

        Args:
            fragments: All of the source; None: not known.
            start: Sums of no observations.
            task_rows: Rows of a task: nodes are known by the numbers of their tasks.

        Raises:
            UsageError: Nodes are damaged, or of another model; or a fragment has changed.
        """
        plan = self._plan(fragments, task_rows)
        if self._state.plan and self._state.plan != plan:
            self.seal(SumTree(self._read_nodes(start)).total())
            plan = self._plan(fragments, task_rows)
        nodes = self._read_nodes(start) if self._state.plan else {}
        self._write_state(replace(self._state, plan=plan))
        return SumTree(nodes, self._keep)

    def _plan(self, fragments: Sequence[Fragment] | None, task_rows: int) -> str:
        if fragments is None:
            return f"{STREAM}, {task_rows}"
        new = [each.key for each in fragments if not self.is_in(each)]
        return digest_of([task_rows, *((key, self._seen[key]) for key in new)])

    def seal(self, part: Part | None) -> None:
        """End an ingest: its sums become one node, and nothing is under way."""
        rows = 0.0 if part is None else part.sums.rows
        if part is not None and part.keys:
            self._write(f"sealed-{len(self._state.sealed)}", part)
            self._took({key: self._seen[key] for key in part.keys})
            self.base = part.sums if self.base is None else merge(self.base, part.sums)
            sealed = (*self._state.sealed, rows)
            self._write_state(replace(self._state, sealed=sealed, plan=""))
        else:
            self._write_state(replace(self._state, plan=""))
        self._seen = {}  # files may have changed since they were taken in: look again
        self._remove(self._folder.glob("node-*"))

    def _took(self, digests: Mapping[str, str]) -> None:
        self._digests |= digests
        self._contents |= {digest: key for key, digest in digests.items()}

    def _keep(self, place: Place, part: Part, former: tuple[Place, ...]) -> None:
        self._write(_name(place), part)
        for each in former:
            self._remove([self._names(_name(each)), self._sums(_name(each))])

    # --- files ----------------------------------------------------------------------------------

    def _names(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _sums(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"

    def _write(self, name: str, part: Part) -> None:
        with atomic_write(self._sums(name)) as file:
            file.write(part.sums.to_bytes())
        digests = {key: self._seen[key] for key in part.keys}
        faults = [asdict(fault) for fault in part.faults]
        write_index(self._names(name), FORMAT, {"digests": digests, "faults": faults})

    def _read(self, name: str, model: StreamingGP) -> tuple[Part, dict[str, str]]:
        try:
            about = read_index(self._names(name), FORMAT)
            sums = Sums.from_bytes(self._sums(name).read_bytes(), self._trusted)
            digests = dict[str, str](about["digests"])
            faults = tuple(Fault(**each) for each in about["faults"])
        except _DAMAGE as error:
            raise UsageError(
                f"The record in {self._folder} is damaged at {name}: {error} {_CURE}"
            ) from error
        check_alike(model, sums.model)
        return Part(sums, tuple(digests), faults), digests

    def _read_state(self) -> _State:
        path = self._folder / INDEX
        try:
            content = read_index(path, FORMAT)
            content["sealed"] = tuple(content["sealed"])
            return _State(**content)
        except _DAMAGE as error:
            raise UsageError(f"{path} is no record of an ingest: {error} {_CURE}") from error

    def _write_state(self, state: _State) -> None:
        write_index(self._folder / INDEX, FORMAT, asdict(state))
        self._state = state

    def _read_sealed(self, model: StreamingGP) -> None:
        """Read ingests that have ended, and add up those that the model does not hold."""
        held = self._held_by(model)
        for number in range(len(self._state.sealed)):
            part, digests = self._read(f"sealed-{number}", model)
            self._took(digests)
            if number >= held:
                self.base = part.sums if self.base is None else merge(self.base, part.sums)

    def _held_by(self, model: StreamingGP) -> int:
        """Count the ingests whose observations a model holds."""
        counts = [self._state.begun]
        for rows in self._state.sealed:
            counts.append(counts[-1] + rows)
        fits = [i for i, count in enumerate(counts) if abs(count - model.num_observations) < 0.5]
        if not fits:
            raise UsageError(
                f"The record in {self._folder} was begun for a model of {self._state.begun:,g} "
                f"observations and has put in {counts[-1] - counts[0]:,g}: expected a model of one "
                f"of {[round(count) for count in counts]} observations, got one of "
                f"{model.num_observations:,g}. {_CURE}"
            )
        return fits[-1]

    def _read_nodes(self, start: Sums) -> dict[Place, Part]:
        """Read the nodes of an interrupted ingest; those that are in larger ones are removed."""
        found = sorted(map(_place, self._folder.glob("node-*.json")), key=lambda p: -p.level)
        nodes = dict[Place, Part]()
        for place in found:
            if any(each.start <= place.start < each.stop for each in nodes):
                self._remove([self._names(_name(place)), self._sums(_name(place))])
            else:
                nodes[place], digests = self._read(_name(place), start.model)
                self._seen |= digests
        return nodes

    def _remove(self, paths: Iterable[Path]) -> None:
        for path in sorted(paths, key=lambda p: p.suffix):  # names first
            path.unlink(missing_ok=True)


def _name(place: Place) -> str:
    return f"node-{place.start}-{place.level}"


def _place(path: Path) -> Place:
    _, start, level = path.stem.split("-")
    return Place(int(start), int(level))


@contextmanager
def opened_record(
    folder: str | Path | None,
    model: StreamingGP,
    columns: Columns,
    trusted: Sequence[Trusted],
) -> Iterator[Record | None]:
    """Lock a folder and read its record while the block runs; None: nothing is recorded.

    Raises:
        UsageError: Another process uses the folder; or as of :class:`Record`.
    """
    if folder is None:
        yield None
        return
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with hold_folder(path, "Wait until that ingest ends, stop it, or give another record."):
        yield Record(path, model, columns, trusted)
