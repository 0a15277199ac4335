"""Reads SIF files, the image files of Apptainer: finds and unpacks their root file system.

A file starts with a header of 128 bytes, and descriptors of 585 bytes follow (SIF specification). Only the system
partition is used. It must be squashfs, because Apptainer builds nothing else. Invariant: an offset or size in a file is
used only if it does not lead beyond the file's end.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import time
from pathlib import Path
from threading import Timer
from typing import NamedTuple

from outrider.errors import RuntimeUnavailable
from outrider.sandbox.rootfs.unpack import BadImage, Contents, Room, check_expansion, contents_of

MAGIC = b"SIF_MAGIC\0"
MAGIC_AT = 32
HEADER = struct.Struct("<64x8q")
"""The numbers in the header: creation time, modification time, number of free descriptors, number of all descriptors,
offset and length of the descriptors, offset and length of the data."""
DESCRIPTOR = struct.Struct("<i?IIIqqqqqqq128s384s")
PARTITION = 0x4004
SQUASHFS = 1
SYSTEM_PARTITION = 2
MAX_DESCRIPTORS = 4096
UNSQUASHFS_SECONDS = 3600.0
"""Time limit in seconds for each run of unsquashfs. It runs twice: to list the files, and then to unpack them."""
MAX_LINE = 64 << 10
"""Maximum bytes of a line in the list of files. A path has at most 4096 bytes."""


class Partition(NamedTuple):
    """The position and the size of the root file system in a SIF file, both in bytes."""

    offset: int
    size: int


def is_sif(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(MAGIC_AT)
        return file.read(len(MAGIC)) == MAGIC


def root_partition(path: Path) -> Partition:
    """Find the root file system in a SIF file. Raises BadImage if there is none or if it is not squashfs."""
    length = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(HEADER.size)
        if len(header) < HEADER.size:
            raise BadImage(f"{path} ends within its header")
        _, _, _, total, at, _, _, _ = HEADER.unpack(header)
        if not (0 < total <= MAX_DESCRIPTORS and HEADER.size <= at <= length):
            raise BadImage(f"{path} has {total} descriptors at byte {at}, which is impossible")
        file.seek(at)
        for _ in range(total):
            packed = file.read(DESCRIPTOR.size)
            if len(packed) < DESCRIPTOR.size:
                break
            kind, used, _, _, _, offset, size, *_, extra = DESCRIPTOR.unpack(packed)
            format_, part = struct.unpack_from("<ii", extra)
            if kind == PARTITION and used and part == SYSTEM_PARTITION:
                if format_ != SQUASHFS or not (0 < offset <= length - size and size > 0):
                    raise BadImage(f"the root file system of {path} is not squashfs")
                return Partition(offset, size)
    raise BadImage(f"{path} has no root file system")


def unpack_sif(path: Path, target: Path, *, seconds: float = UNSQUASHFS_SECONDS) -> Contents:
    """Unpack the root file system of a SIF file into an empty folder. `seconds` limits each run of unsquashfs. Raises
    BadImage, and RuntimeUnavailable if unsquashfs is not installed."""
    tool = shutil.which("unsquashfs")
    if tool is None:
        raise RuntimeUnavailable("unsquashfs is not installed", hint="it is in the package squashfs-tools")
    offset = root_partition(path).offset
    _check_size(tool, path, offset, target, seconds)
    command = [tool, "-quiet", "-no-progress", "-no-xattrs", "-ignore-errors", "-force"]
    try:
        done = subprocess.run(
            [*command, "-offset", str(offset), "-dest", str(target), str(path)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise _too_slow(path, seconds) from error
    # Status 2: some files are missing, such as devices, which only root can create.
    if done.returncode not in (0, 2):
        raise BadImage(f"{path} cannot be unpacked: {done.stderr.decode(errors='replace').strip()[-500:]}")
    make_own(target)
    return contents_of(target)


def _check_size(tool: str, path: Path, offset: int, target: Path, seconds: float) -> None:
    """Raise BadImage if the files would be too large in total. The sizes are checked before any file is written,
    because many files in squashfs can share the same bytes, so a small image may unpack to a huge folder."""
    room, total = Room(target, path.stat().st_size), 0
    command = [tool, "-lln", "-offset", str(offset), str(path)]
    until = time.monotonic() + seconds
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        limit = Timer(seconds, process.kill)
        limit.start()
        try:
            # A newline in a file name only adds a line to the list, so every size is still counted.
            while line := process.stdout.readline(MAX_LINE):
                room.take_entry()
                if line.startswith(b"-") and len(parts := line.split(maxsplit=3)) > 2 and parts[2].isdigit():
                    total += int(parts[2])
                    check_expansion(total, room.archived)
        finally:
            limit.cancel()
            process.kill()
    if time.monotonic() >= until:  # unsquashfs was killed, so the list may be incomplete
        raise _too_slow(path, seconds)
    room.take(total)


def _too_slow(path: Path, seconds: float) -> BadImage:
    return BadImage(
        f"unsquashfs took over {seconds:g} s for {path}", hint="copy the file to a faster disk, or use a smaller image"
    )


def make_own(root: Path) -> None:
    """Make all files below a folder readable and writable for this process's user, and give them to this user. If root
    runs unsquashfs, the files keep their original owners. The owners are changed, because a sandbox of a SIF image has
    one user by default."""
    user, group = os.getuid(), os.getgid()
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            place = os.path.join(folder, name)
            status = os.lstat(place)
            if (status.st_uid, status.st_gid) != (user, group):
                os.lchown(place, user, group)
            if not os.path.islink(place):
                needed = 0o700 if os.path.isdir(place) else 0o600
                os.chmod(place, status.st_mode & 0o777 | needed)
