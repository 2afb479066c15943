"""An experiment in one JSON file."""

from __future__ import annotations

from pathlib import Path

from ax.api.client import Client

from bo_stream.storage import atomic_write


def save_snapshot(client: Client, path: str | Path) -> None:
    """As ``client.save_to_json_file``, but a process killed meanwhile leaves the former file whole.

    Call it after each trial that must not be lost. It writes the whole experiment, some
    milliseconds for each trial in it: O(n) for n trials. From some hundred trials on take
    :func:`storage_config`, which writes what is new only.

    Args:
        client: With an experiment.
        path: Of the file, for ``Client.load_from_json_file``.

    Raises:
        OSError: The file cannot be written; a former one is left whole.
    """
    with atomic_write(path) as file:
        client.save_to_json_file(file.name)
