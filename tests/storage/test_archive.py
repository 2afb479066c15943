"""A file is the old one or the new one, whatever happens in between."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest

from bo_stream.storage.archive import atomic_write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    path.write_bytes(b"old")
    return path


def assert_untouched(path: Path) -> None:
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("exists", [True, False])
def test_replaces_the_file(path: Path, exists: bool) -> None:
    if not exists:
        path.unlink()
    with atomic_write(path) as file:
        file.write(b"new")
        assert path.exists() == exists
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_a_new_file_can_be_read_by_those_the_umask_lets(path: Path) -> None:
    path.unlink()
    with atomic_write(path) as file:
        file.write(b"new")
    plain = path.with_name("plain")
    plain.write_bytes(b"")
    assert path.stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_crash_leaves_the_old_file_whole(path: Path, error: type[BaseException]) -> None:
    def crash() -> None:
        with atomic_write(path) as file:
            file.write(b"half of the n")
            raise error

    with pytest.raises(error):
        crash()
    assert_untouched(path)


def test_a_full_disk_leaves_the_old_file_whole(path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"), atomic_write(path) as file:
            file.write(b"new" * 1024)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert_untouched(path)


def test_a_symbolic_link_stays_and_its_file_is_replaced(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "links"
    folder.mkdir()
    link = folder / "latest"
    link.symlink_to(path)
    with atomic_write(link) as file:
        file.write(b"new")
        assert list(folder.iterdir()) == [link]  # a rename is whole only within a file system
    assert link.is_symlink()
    assert path.read_bytes() == b"new"
    assert list(folder.iterdir()) == [link]


@pytest.mark.parametrize("name", ["n" * 255, "é" * 127])
def test_the_longest_names_are_written(tmp_path: Path, name: str) -> None:
    with atomic_write(tmp_path / name) as file:
        file.write(b"new")
    assert (tmp_path / name).read_bytes() == b"new"


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "nowhere" / "model.pt"):
        pass
