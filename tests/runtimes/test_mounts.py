"""Folders of the host are shown read-only, with all file systems that are mounted in them."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.sandbox.runtimes.kernel.mounts import inner_mounts

from .world import ISOLATING, World

LINE = "36 35 98:0 / {} rw,noatime shared:1 - ext4 /dev/root rw\n"
DETACH = 2
PLACES = ("one", "one/deeper", "with blank")


def test_what_is_mounted_below_a_folder(tmp_path: Path) -> None:
    for name in ("set", "set/one/deeper", "set/with blank", "set-2/other"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    (tmp_path / "link").symlink_to("set")
    places = ("set/one/deeper", "set/with\\040blank", "set/one", "set", "set/one", "set/gone", "set-2/other")
    mounts = tmp_path / "mountinfo"
    mounts.write_text("".join(LINE.format(f"{tmp_path}/{place}") for place in places))
    below = [(tmp_path / "set" / name, f"/data/{name}") for name in PLACES]
    assert inner_mounts([(tmp_path / "set", "/data")], mountinfo=mounts) == below
    assert inner_mounts([(tmp_path / "link", "/data")], mountinfo=mounts) == below
    assert inner_mounts([(mounts, "/file")], mountinfo=mounts) == []
    (tmp_path / "set" / "line\rfeed").mkdir()
    mounts.write_bytes(LINE.format(f"{tmp_path}/set/line\rfeed").encode())
    found = [(tmp_path / "set" / "line\rfeed", "/data/line\rfeed")]
    assert inner_mounts([(tmp_path / "set", "/data")], mountinfo=mounts) == found
    mounts.write_text(LINE.format("/") + LINE.format("/proc"))
    assert inner_mounts([(Path("/"), "/host")], mountinfo=mounts) == [(Path("/proc"), "/host/proc")]


@pytest.fixture
def tree(folder: Path) -> Iterator[Path]:
    """A folder to which every user may write, with file systems mounted in it. They are unmounted after the test."""
    top = folder / "tree"
    libc = ctypes.CDLL(None, use_errno=True)
    mounted: list[bytes] = []
    try:
        for name in PLACES:  # also below the mounts that hide them: an engine may have started before the mounts
            (top / name).mkdir(parents=True)
        for name in ("", *PLACES):
            place = top / name
            place.mkdir(exist_ok=True)
            if name:
                if libc.mount(b"none", os.fsencode(place), b"tmpfs", 0, b"size=64k,mode=777"):
                    pytest.skip(f"a file system cannot be mounted: {os.strerror(ctypes.get_errno())}")
                mounted.append(os.fsencode(place))
            place.chmod(0o777)
            (place / "file").write_text(f"{name}\n")
        yield top
    finally:
        for path in reversed(mounted):
            libc.umount2(path, DETACH)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", ISOLATING)
async def test_what_is_mounted_in_what_is_shown_is_read_only(world: World, kind: str, tree: Path) -> None:
    named = [{"source": str(tree), "target": "/data"}]
    sandbox = await world.start(kind, mounts=(tree,), named=named)
    for top in (str(tree), "/data"):
        for name in ("", *PLACES):
            place = os.path.join(top, name)
            if kind != "podman-rootless":  # this engine may see only the mounts that existed when it was started
                assert await sandbox.read(f"{place}/file") == f"{name}\n".encode()
            written = await sandbox.exec(["touch", f"{place}/new"], seconds=30)
            assert b"Read-only file system" in written.stderr, place
    assert not await asyncio.to_thread(lambda: list(tree.rglob("new")))
