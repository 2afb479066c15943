"""Stores: whole values under keys that never change."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

import pytest

from bo_stream.distributed import FolderStore, MemoryStore
from bo_stream.errors import UsageError

Store = MutableMapping[str, bytes]


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else FolderStore(tmp_path / "deep" / "store")


def test_a_store_is_a_mapping_with_sorted_keys(store: Store) -> None:
    assert [*store] == []
    for key in ("b/2", "a", "b/1", "c/d/e"):
        store[key] = key.encode()
    assert [*store] == ["a", "b/1", "b/2", "c/d/e"]
    assert len(store) == 4
    assert store["c/d/e"] == b"c/d/e"
    assert "b" not in store
    del store["b/1"]
    assert [*store] == ["a", "b/2", "c/d/e"]
    for key in ("b/1", "b", "a/x"):
        with pytest.raises(KeyError):
            store[key]
    with pytest.raises(KeyError):
        del store["b/1"]


def test_values_do_not_change(store: Store) -> None:
    store["a/b"] = b"first"
    store["a/b"] = b"first"
    with pytest.raises(UsageError, match="holds another value at a/b"):
        store["a/b"] = b"second"
    assert store["a/b"] == b"first"


@pytest.mark.parametrize(
    "key", ["", "/etc/passwd", "a//b", "../a", "a/../../b", ".a", "a/.b", "a\\b"]
)
def test_keys_stay_in_the_folder(key: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="key of names"):
        FolderStore(tmp_path / "store")[key] = b"value"
    assert [*tmp_path.rglob("*")] == [tmp_path / "store"]


def test_what_is_half_written_is_no_value(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store["delta/a"] = b"value"
    (tmp_path / "delta" / ".b.0123").write_bytes(b"half")
    assert [*store] == ["delta/a"]


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be used as a folder"):
        FolderStore(tmp_path / "file")
