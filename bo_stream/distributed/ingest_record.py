"""The record of an ingest in a folder: the fragments that are in, and their sums.

A folder has ``ingest.json``, and for each node of the tree of sums two files: the sums, and the
names and digests of their fragments. A node is written before the nodes that were merged into it
are removed, and its names after its sums: if the process ends at any time, all named sums are
whole. When an ingest ends, its sums become one *sealed* node, so that the next one adds only
further fragments.

Files are known by their contents: the names of a node include its record, ingest and node, and the
digest of its sums; the index has the digests of sealed nodes once more. So no file counts that was
copied from another record, has another name, or is older than the others.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from bo_stream.distributed.sources import ColumnNames, Fault, FileFragment, Fragment, digest_of
from bo_stream.distributed.sums import Sums, check_alike, merge
from bo_stream.distributed.tasks import Node, PartialSums, SumTree
from bo_stream.errors import UsageError
from bo_stream.loops.run import hold_folder
from bo_stream.models.base import StreamingGP
from bo_stream.storage.archive import (
    FileFormat,
    OtherVersionError,
    atomic_write,
    draft_of,
    read_index,
    write_index,
)
from bo_stream.storage.trusted import Trusted

_FORMAT = FileFormat("bo_stream record of an ingest", 2)
_INDEX = "ingest.json"
STREAM = "stream"
"""Plan of a source whose fragments are not known before they are read."""

_NODE = re.compile(r"sealed-\d+|node-\d+-\d+").fullmatch
_SUFFIXES = (".json", ".safetensors")
"""Of the files of a node, names first."""

_CURE = "Give another folder, or none, or restore this one from a copy."
_DAMAGE = (OSError, ValueError, TypeError, LookupError, AttributeError)


@dataclass(frozen=True)
class _State:
    """The content of the index.

    Attributes:
        record: Random name of the record, which is in its nodes, too.
        columns: Names of the columns that are read.
        begun: Number of observations that the model had before the first ingest.
        sealed: Number of observations and digest of the sums of each ingest that has ended.
        plan: Digest of the fragments of the ingest under way; empty: there is none.
    """

    record: str
    columns: dict[str, list[str]]
    begun: float
    sealed: tuple[tuple[float, str], ...] = ()
    plan: str = ""


class IngestRecord:
    """A folder that records what ingests have taken in; use :func:`opened_record`.

    Attributes:
        base: Sums that are in the record but not in the model.
    """

    def __init__(
        self, folder: Path, model: StreamingGP, columns: ColumnNames, trusted: Sequence[Trusted]
    ) -> None:
        """Read a folder, or begin one.

        Raises:
            UsageError: It is damaged, lacks its index or another part, or belongs to other columns,
                to another model, or to a model that has neither its first observations only nor
                these and the recorded ones.
        """
        self._folder, self._trusted = folder, trusted
        named = {name: list(value) for name, value in asdict(columns).items()}
        if (folder / _INDEX).is_file():
            try:
                content = read_index(folder / _INDEX, _FORMAT)
                sealed = tuple((float(n), str(digest)) for n, digest in content["sealed"])
                self._state = _State(**{**content, "sealed": sealed})
            except OtherVersionError as error:
                raise UsageError(
                    f"{error} Records of version 1 do not say which sums are theirs, and know "
                    "files by parts of their bytes: build the model again with another record."
                ) from error
            except _DAMAGE as error:
                raise UsageError(
                    f"{folder / _INDEX} is no record of an ingest: {error} {_CURE}"
                ) from error
        else:
            folder.mkdir(parents=True, exist_ok=True)
            left = sorted(each.name for each in folder.glob("*-*.json") if _NODE(each.stem))
            if left:
                raise UsageError(
                    f"{folder} has no {_INDEX}, but sums of an ingest ({', '.join(left[:3])}"
                    f"{', ...' if len(left) > 3 else ''}): going on would count their observations "
                    f"twice. Restore {_INDEX} from a copy, or give another folder and build the "
                    "model again."
                )
            self._write_state(_State(uuid4().hex, named, model.num_observations))
        if self._state.columns != named:
            raise UsageError(
                f"The record in {folder} is of the columns {self._state.columns}, got {named}. "
                f"{_CURE}"
            )
        self._columns = columns
        self._digests: dict[str, str] = {}  # of fragments of ingests that have ended, by key
        self._contents: dict[str, str] = {}  # keys of these, by digest
        self._under_way: dict[str, str] = {}  # of the ingest that was interrupted, by key
        self._checked: set[str] = set()  # fragments that are as they were
        self.base: Sums | None = None
        self._read_sealed(model)
        if not self._state.plan:
            self._remove("node-*")  # of an ingest that ended just before its process
        for path in folder.glob(".*"):
            name = Path(draft_of(path.name) or "")  # of a process that was killed while it wrote
            if str(name) == _INDEX or (name.suffix in _SUFFIXES and _NODE(name.stem)):
                path.unlink(missing_ok=True)

    # --- an ingest under way ------------------------------------------------------------------

    def is_in(self, fragment: Fragment) -> bool:
        """Return whether an ingest that has ended took a fragment in.

        All bytes of a fragment that any ingest took in are hashed, once.

        Raises:
            UsageError: It was taken in, and has changed since.
        """
        key = fragment.key
        previous = self._digests.get(key) or self._under_way.get(key)
        if previous is not None and key not in self._checked:
            if fragment.digest(self._columns) != previous:
                raise UsageError(
                    f"{key} has changed since it was taken in, by the record in {self._folder}: "
                    "what was taken in cannot be taken out. Restore the file, or build the model "
                    "again with another record."
                )
            self._checked.add(key)
        return key in self._digests

    def check_new(self, fragments: Sequence[Fragment], digests: Mapping[str, str]) -> None:
        """Check that no file of a task has the content of a recorded one under another name.

        Files without rows may: they are alike, and nothing of them counts twice.

        Args:
            fragments: Fragments of the task.
            digests: Digests of the fragments that the task read, by key.

        Raises:
            UsageError: A file has.
        """
        for each in fragments:
            same = self._contents.get(digests.get(each.key, ""))
            if same is None or not isinstance(each, FileFragment):
                continue
            if any(map(len, each.batches(self._columns))):
                raise UsageError(
                    f"{each.key} has the content of {same}, which is in by the record in "
                    f"{self._folder}: name the files as before, or leave this one out."
                )

    def begun(self, fragments: Sequence[Fragment] | None, start: Sums, task_rows: int) -> SumTree:
        """Return the tree of an ingest, with the nodes of an interrupted ingest.

        If fragments or tasks have changed since then, the sums of the interrupted one are sealed,
        and :meth:`is_in` is true of its fragments.

        Args:
            fragments: All fragments of the source; None: not known.
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
        for each in fragments or ():  # before anything is read
            self.is_in(each)
        self._write_state(replace(self._state, plan=plan))
        return SumTree(nodes, self._keep)

    def _plan(self, fragments: Sequence[Fragment] | None, task_rows: int) -> str:
        if fragments is None:
            return f"{STREAM}, {task_rows}"
        new = [each for each in fragments if each.key not in self._digests]
        return digest_of([task_rows, *((each.key, each.size, each.num_rows) for each in new)])

    def seal(self, part: PartialSums | None) -> None:
        """End an ingest: its sums become one node, and nothing is under way."""
        rows = 0.0 if part is None else part.sums.rows
        if part is not None and part.keys:
            digest = self._write(f"sealed-{len(self._state.sealed)}", part)
            self._took(part.digests)
            self.base = part.sums if self.base is None else merge(self.base, part.sums)
            sealed = (*self._state.sealed, (rows, digest))
            self._write_state(replace(self._state, sealed=sealed, plan=""))
        else:
            self._write_state(replace(self._state, plan=""))
        self._under_way = {}
        self._remove("node-*")

    def _took(self, digests: Mapping[str, str]) -> None:
        self._digests |= digests
        self._contents |= {digest: key for key, digest in digests.items()}

    def _keep(self, node: Node, part: PartialSums, merged: tuple[Node, ...]) -> None:
        self._write(_name(node), part)
        for each in merged:
            self._remove(_name(each))

    # --- files ----------------------------------------------------------------------------------

    def _write(self, name: str, part: PartialSums) -> str:
        """Write a node; return the digest of its sums."""
        content = part.sums.to_bytes()
        with atomic_write(self._folder / f"{name}.safetensors") as file:
            file.write(content)
        digest = hashlib.sha256(content).hexdigest()
        about = {
            **self._bears(name),
            "sums": digest,
            "digests": dict(part.digests),
            "faults": [asdict(fault) for fault in part.faults],
        }
        write_index(self._folder / f"{name}.json", _FORMAT, about)
        return digest

    def _bears(self, name: str) -> dict[str, Any]:
        """Return the entries by which a node is known, with those of an ingest under way."""
        own = {"record": self._state.record, "node": name}
        under_way = {"ingest": len(self._state.sealed), "plan": self._state.plan}
        return own if name.startswith("sealed-") else own | under_way

    def _read(self, name: str, model: StreamingGP, digest: str | None = None) -> PartialSums:
        """Read a node, and compare its sums with their digest where it is known."""
        try:
            about = read_index(self._folder / f"{name}.json", _FORMAT)
            for word, own in self._bears(name).items():
                if about[word] != own:
                    raise ValueError(
                        f"it says that it is of the {word} {about[word]!r}, expected {own!r}: it "
                        "was copied or renamed."
                    )
            content = (self._folder / f"{name}.safetensors").read_bytes()
            actual = hashlib.sha256(content).hexdigest()
            if actual != about["sums"] or actual != (digest or actual):
                raise ValueError("its sums are not those that were written with it.")
            sums = Sums.from_bytes(content, self._trusted)
            digests = dict[str, str](about["digests"])
            faults = tuple(Fault(**each) for each in about["faults"])
        except _DAMAGE as error:
            raise UsageError(
                f"The record in {self._folder} is damaged at {name}: {error} {_CURE}"
            ) from error
        check_alike(model, sums.model)
        return PartialSums(sums, tuple(digests), faults, digests)

    def _write_state(self, state: _State) -> None:
        write_index(self._folder / _INDEX, _FORMAT, asdict(state))
        self._state = state

    def _read_sealed(self, model: StreamingGP) -> None:
        """Read ingests that have ended, and add up those whose observations the model lacks."""
        counts = [self._state.begun]  # of observations after each ingest
        for rows, _ in self._state.sealed:
            counts.append(counts[-1] + rows)
        fits = [i for i, count in enumerate(counts) if abs(count - model.num_observations) < 0.5]
        if not fits:
            raise UsageError(
                f"The record in {self._folder} was begun for a model of {self._state.begun:,g} "
                f"observations and has put in {counts[-1] - counts[0]:,g}: expected a model of one "
                f"of {[round(count) for count in counts]} observations, got one of "
                f"{model.num_observations:,g}. {_CURE}"
            )
        ended = len(self._state.sealed)
        newer = self._folder / f"sealed-{ended}.json"
        if newer.exists() and not any(self._folder.glob("node-*.json")):
            raise UsageError(  # one whose process ended before the index was written has nodes
                f"{self._folder / _INDEX} is older than {newer.name} beside it: it knows of "
                f"{ended} ingests only. Restore all files from one copy, or give another folder "
                "and build the model again."
            )
        for number, (_, digest) in enumerate(self._state.sealed):
            part = self._read(f"sealed-{number}", model, digest)
            self._took(part.digests)
            if number >= fits[-1]:
                self.base = part.sums if self.base is None else merge(self.base, part.sums)

    def _read_nodes(self, start: Sums) -> dict[Node, PartialSums]:
        """Read the nodes of an interrupted ingest, and remove those that are in larger ones."""
        names = (path.stem.split("-") for path in self._folder.glob("node-*.json"))
        written = [Node(int(start), int(level)) for _, start, level in names]
        nodes = dict[Node, PartialSums]()
        for node in sorted(written, key=lambda node: -node.level):
            if SumTree(nodes).holds(node.start):
                self._remove(_name(node))
            else:
                nodes[node] = self._read(_name(node), start.model)
                self._under_way |= nodes[node].digests
        return nodes

    def _remove(self, nodes: str) -> None:
        """Remove the files of the nodes whose names match a pattern."""
        for suffix in _SUFFIXES:
            for path in sorted(self._folder.glob(nodes + suffix)):
                path.unlink(missing_ok=True)


def _name(node: Node) -> str:
    return f"node-{node.start}-{node.level}"


@contextmanager
def opened_record(
    folder: str | Path | None,
    model: StreamingGP,
    columns: ColumnNames,
    trusted: Sequence[Trusted],
) -> Iterator[IngestRecord | None]:
    """Lock a folder and read its record for the block; without a folder yield None.

    Raises:
        UsageError: Another process uses the folder; or as of :class:`IngestRecord`.
    """
    if folder is None:
        yield None
        return
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with hold_folder(path, "Wait until that ingest ends, stop it, or give another record."):
        yield IngestRecord(path, model, columns, trusted)
