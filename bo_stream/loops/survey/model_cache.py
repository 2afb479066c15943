"""The model of a survey, kept in memory and in the survey's folder until the facts change."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import bo_stream
from bo_stream.loops.run import CheckpointFormat, ModelFile, from_record
from bo_stream.models.base import StreamingGP
from bo_stream.storage.archive import FileFormat, describe_file, read_index

MODEL = CheckpointFormat("model.json", "model", FileFormat("bo_stream survey model", 1, True))


class ModelCache:
    """A model and the fingerprint of the facts that it was built from.

    A file that is missing, damaged, of other facts or of another version is passed over: the model
    is a function of the facts.

    Attributes:
        folder: Where the model is kept; None: in memory only.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Begin without a model in memory; the folder is read when a model is asked for."""
        self.folder = folder
        self._kept: tuple[str, StreamingGP] | None = None

    def model(self, facts: str, build: Callable[[], StreamingGP]) -> StreamingGP:
        """Return the model of the facts of a fingerprint, built if it is not kept."""
        if self._kept is None or self._kept[0] != facts:
            stored = self._read(facts)
            self._kept = facts, build() if stored is None else stored
            if stored is None:
                self._write()
        return self._kept[1]

    def move_to(self, folder: Path) -> None:
        """Keep the model in a folder from now on."""
        self.folder = folder
        self._write()

    def _write(self) -> None:
        """Write the model; if that fails it will be built anew another time."""
        if self.folder is None or self._kept is None:
            return
        facts, model = self._kept
        try:
            MODEL.save(self.folder, {"facts": facts}, {"survey": model})
        except OSError as error:
            reason = error.strerror or str(error)
            warnings.warn(
                f"The model could not be kept in {self.folder} ({reason}).",
                RuntimeWarning,
                stacklevel=2,
            )

    def _read(self, facts: str) -> StreamingGP | None:
        if self.folder is None:
            return None
        try:
            content = read_index(self.folder / MODEL.name, MODEL.format)
            if content["facts"] != facts:
                return None
            file = from_record(ModelFile, content["models"]["survey"])
            kind = getattr(bo_stream, describe_file(self.folder / file.name)["class"])
            return file.read(self.folder, kind, "cpu") if issubclass(kind, StreamingGP) else None
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None
