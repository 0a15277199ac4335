"""Folders that are built in place: concurrent, failed and killed builds, and the check that a folder is complete."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outrider.harnesses.build_in_place import BuildInputs, build_in_place, invalidate, is_complete
from support.disk import Disk

ONE = BuildInputs(("a==1",))
TWO = BuildInputs(("a==2",))


def test_many_at_once_build_it_once(tmp_path: Path) -> None:
    folder, start, built = tmp_path / "deep" / "a-1", threading.Barrier(64), []

    def ask(_: int) -> bool:
        start.wait()
        build_in_place(folder, ONE, lambda: built.append((folder / "file").write_text("x")))
        return (folder / "file").read_text() == "x" and is_complete(folder, ONE)

    with ThreadPoolExecutor(64) as pool:
        assert all(pool.map(ask, range(64)))
    assert len(built) == 1


def test_a_failed_build_leaves_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "a"

    def fail() -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("no network")

    with pytest.raises(RuntimeError, match="no network"):
        build_in_place(folder, ONE, fail)
    assert not folder.exists()
    build_in_place(folder, ONE, lambda: None)
    assert is_complete(folder, ONE)


def test_what_a_killed_build_left_is_built_again_from_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "half").write_text("x")
    assert not is_complete(folder, ONE)
    build_in_place(folder, ONE, lambda: None)
    assert is_complete(folder, ONE)
    assert not (folder / "half").exists()


def test_other_contents_do_not_count(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    build_in_place(folder, ONE, lambda: None)
    assert not is_complete(folder, TWO)
    build_in_place(folder, TWO, lambda: None)
    assert is_complete(folder, TWO)


def test_an_invalidated_or_garbled_folder_does_not_count(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    build_in_place(folder, ONE, lambda: None)
    invalidate(folder)
    assert not is_complete(folder, ONE)
    (folder / ".outrider-sealed.json").write_text("{")
    assert not is_complete(folder, ONE)


def test_what_is_complete_is_whole_after_a_loss_of_power(disk: Disk) -> None:
    folder = disk.folder / "a"

    def build() -> None:
        (folder / "file").write_bytes(b"x" * 100_000)

    build_in_place(folder, ONE, build)
    disk.write_names()
    disk.lose_power()
    assert is_complete(folder, ONE)
    assert (folder / "file").read_bytes() == b"x" * 100_000
