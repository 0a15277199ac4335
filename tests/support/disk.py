"""A small disk that can be full and can lose power: ext4 in a file, mounted through a loop device. Needs the permission
to mount."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FS_IOC_SHUTDOWN = 0x8004587D
WITHOUT_FLUSH = 2
"""Argument of FS_IOC_SHUTDOWN: nothing more is written to the device, not even the file system's journal, so all data
that was not synced is lost."""
RELEASE_SECONDS = 10.0
"""Seconds within which the processes that had files open on the disk exit."""


class Disk:
    """A disk that is mounted at `folder`."""

    def __init__(self, folder: Path, image: Path) -> None:
        self.folder = folder
        self._image = image
        self._lock = threading.Lock()
        """Held while the disk is not mounted, and by writers, which must not write to the folder beneath the mount."""

    def lose_power(self) -> None:
        """Lose all data that was not synced, and mount the disk again, as a restart of the machine does. The processes
        that use the disk must have been killed."""
        with self._lock:
            root = os.open(self.folder, os.O_RDONLY)
            try:
                fcntl.ioctl(root, FS_IOC_SHUTDOWN, struct.pack("I", WITHOUT_FLUSH))
            finally:
                os.close(root)
            _until_none(lambda: _run("umount", str(self.folder)))
            # A copy, because mount namespaces of other programs may still hold the file system that was shut down,
            # and mounting the same image would bring that file system back.
            copy = self._image.with_name(f"{self._image.name}.copy")
            subprocess.run(["cp", "--sparse=always", self._image, copy], check=True)
            copy.replace(self._image)
            if (fault := self.mount()) is not None:
                raise RuntimeError(fault)

    def write_names(self) -> None:
        """Sync an empty file. This writes the names of all files to the disk, but not the contents of new files. A
        database's commit has the same effect."""
        with (self.folder / "other").open("w") as file:
            os.fsync(file.fileno())

    def mount(self) -> str | None:
        """Mount the disk. Returns the error, or None."""
        return _run("mount", "-o", "loop", str(self._image), str(self.folder))

    @contextmanager
    def full(self) -> Iterator[None]:
        """Fill the disk, and free the space at the end of the block."""
        big = self.folder / "big"
        with self._lock:
            assert self.folder.is_mount()  # otherwise the machine's own disk would be filled
            with suppress(OSError), big.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 20))
            # Fill the last bytes, too. So far, the file system has written whole pages only.
            with suppress(OSError), big.open("ab", buffering=0) as file:
                while True:
                    file.write(bytes(512))
        try:
            yield
        finally:
            with self._lock:
                big.unlink(missing_ok=True)


@contextmanager
def a_disk(folder: Path, mib: int) -> Iterator[Disk | None]:
    """Create `folder`, mount a disk of `mib` MiB there, and yield the disk. Yields None if this machine cannot mount a
    disk. `folder` is then an ordinary folder."""
    folder.mkdir()
    image = folder.with_name(f"{folder.name}.ext4")
    with image.open("wb") as file:
        file.truncate(mib << 20)
    disk = Disk(folder, image)
    if _run("mkfs.ext4", "-q", "-F", "-m", "0", str(image)) is not None or disk.mount() is not None:
        image.unlink()
        yield None
        return
    folder.chmod(0o700)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
        image.unlink()


def _until_none(look: Callable[[], str | None]) -> None:
    deadline = time.monotonic() + RELEASE_SECONDS
    while (left := look()) is not None:
        if time.monotonic() > deadline:
            raise RuntimeError(left)
        time.sleep(0.02)


def _run(*command: str) -> str | None:
    """Run a command. Returns its output if it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return None if done.returncode == 0 else f"{command[0]} failed with {done.returncode}: {done.stderr.strip()}"
