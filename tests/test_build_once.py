"""Entries of a cache that many callers request at once: each is built once, is complete or absent, and killed builders
leave nothing."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event

import pytest

from outrider.concurrency.build_once import build_once, locked, new_draft
from support.disk import Disk


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fill(draft: Path) -> None:
    (draft / "a").touch()


def test_of_many_threads_one_builds(tmp_path: Path) -> None:
    built: list[Path] = []
    waited: list[bool] = []

    def build(draft: Path) -> None:
        built.append(draft)
        fill(draft)

    place = tmp_path / "home" / "x"
    with ThreadPoolExecutor(32) as pool:
        jobs = [pool.submit(build_once, place, build, on_wait=lambda: waited.append(True)) for _ in range(32)]
    assert {job.result() for job in jobs} == {place}
    assert len(built) == 1
    assert names(place) == ["a"]
    assert names(place.parent) == [".locks", "x"]
    assert os.stat(place).st_mode & 0o777 == 0o755


def test_what_cannot_be_built_is_not_there(tmp_path: Path) -> None:
    def fail(draft: Path) -> None:
        fill(draft)
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        build_once(tmp_path / "x", fail)
    assert names(tmp_path) == [".locks"]


def test_one_file_of_a_draft_replaces_what_is_out_of_date(tmp_path: Path) -> None:
    place = tmp_path / "x-1.sif"
    for text in ("old", "new"):

        def build(draft: Path, text: str = text) -> None:
            (draft / "sif").write_text(text)

        build_once(place, build, part="sif", is_built=lambda _: False)
    assert place.read_text() == "new"
    assert names(tmp_path) == [".locks", "x-1.sif"]


def test_drafts_of_killed_builders_are_removed_and_those_of_live_ones_are_not(tmp_path: Path) -> None:
    (tmp_path / ".draft-x-dead").mkdir()
    (tmp_path / ".draft-other-1-dead/deep/er").mkdir(parents=True)
    with locked(tmp_path / "live-1"):
        live = new_draft(tmp_path / "live-1")
        build_once(tmp_path / "x", fill)
    assert names(tmp_path) == sorted([".locks", live.name, "x"])


def test_what_is_at_its_place_is_whole_after_a_loss_of_power(disk: Disk) -> None:
    place = disk.folder / "x"
    build_once(place, lambda draft: (draft / "a").write_bytes(b"a" * 100_000))
    disk.write_names()
    disk.lose_power()
    assert (place / "a").read_bytes() == b"a" * 100_000


def test_the_disk_loses_its_power_while_another_mount_namespace_holds_it(disk: Disk) -> None:
    """A test of the fixture `disk`. While other tests start sandboxes, each sandbox holds a copy of all mounts for a
    moment."""
    (disk.folder / "a").touch()
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo; sleep 0.5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        disk.lose_power()
    (disk.folder / "b").touch()
    assert "a" not in names(disk.folder)


def test_a_disk_is_not_filled_while_it_is_away(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the fixture `disk`: while the disk is not mounted, `full` must not fill the machine's own disk."""
    mount, away, back = disk.mount, Event(), Event()

    def late() -> str | None:
        away.set()
        back.wait(10)
        return mount()

    def filled() -> bool:
        with disk.full():
            return (disk.folder / "big").stat().st_dev != disk.folder.parent.stat().st_dev

    monkeypatch.setattr(disk, "mount", late)
    with ThreadPoolExecutor() as pool:
        losing = pool.submit(disk.lose_power)
        away.wait(10)
        filling = pool.submit(filled)
        assert not wait((filling,), timeout=0.2).done
        back.set()
        losing.result()
        assert filling.result()
