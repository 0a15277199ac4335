"""Reads SIF files, Apptainer's images: finds the root file system in a file and unpacks it.

The layout is from the SIF specification: a header of 128 bytes, then descriptors of 585 bytes. Only the system
partition is used, and it must be squashfs, because Apptainer builds no other kind. Invariant: offsets and sizes in the
file are used only within the file's bounds.
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
"""The numbers of the header: times of creation and change, numbers of free and of all descriptors, offset and length of
the descriptors, offset and length of the data."""
DESCRIPTOR = struct.Struct("<i?IIIqqqqqqq128s384s")
PARTITION = 0x4004
SQUASHFS = 1
SYSTEM_PARTITION = 2
MAX_DESCRIPTORS = 4096
UNSQUASHFS_SECONDS = 3600.0
"""Time limit in seconds for each run of unsquashfs. It runs twice: to list an image, and then to unpack it."""
MAX_LINE = 64 << 10
"""Maximum bytes read as one line of a listing. A path has at most 4096 bytes."""


class Partition(NamedTuple):
    """Position of the root file system in the file, in bytes."""

    offset: int
    size: int


def is_sif(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(MAGIC_AT)
        return file.read(len(MAGIC)) == MAGIC


def root_partition(path: Path) -> Partition:
    """Return the partition of the root file system. Raises BadImage if it is missing, or is not squashfs."""
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
    """Unpack the root file system into an empty folder. `seconds` limits each run of unsquashfs. Raises BadImage, and
    RuntimeUnavailable without unsquashfs."""
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
    # Exit status 2: some files were left out, such as devices, which an ordinary user cannot make.
    if done.returncode not in (0, 2):
        raise BadImage(f"{path} cannot be unpacked: {done.stderr.decode(errors='replace').strip()[-500:]}")
    make_own(target)
    return contents_of(target)


def _check_size(tool: str, path: Path, offset: int, target: Path, seconds: float) -> None:
    """Check the total of the listed sizes before any file is written. Many files of a squashfs can share the same few
    bytes, so a small image may unpack to a huge tree. Raises BadImage."""
    room, total = Room(target, path.stat().st_size), 0
    command = [tool, "-lln", "-offset", str(offset), str(path)]
    until = time.monotonic() + seconds
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as said:
        assert said.stdout is not None
        limit = Timer(seconds, said.kill)
        limit.start()
        try:
            # A name with a newline adds a line and removes none, so no size is missed.
            while line := said.stdout.readline(MAX_LINE):
                room.take_entry()
                if line.startswith(b"-") and len(parts := line.split(maxsplit=3)) > 2 and parts[2].isdigit():
                    total += int(parts[2])
                    check_expansion(total, room.archived)
        finally:
            limit.cancel()
            said.kill()
    if time.monotonic() >= until:  # the listing may be incomplete, because unsquashfs was killed
        raise _too_slow(path, seconds)
    room.take(total)


def _too_slow(path: Path, seconds: float) -> BadImage:
    return BadImage(
        f"unsquashfs took over {seconds:g} s for {path}", hint="copy the file to a faster disk, or use a smaller image"
    )


def make_own(root: Path) -> None:
    """Give a tree to this process's user, with readable and writable files and folders. When run as root, unsquashfs
    keeps the owners, but a sandbox over the tree has only one user."""
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
