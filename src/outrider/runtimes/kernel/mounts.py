"""The file systems that are mounted on this machine, as this process sees them.

Some are below the host folders that a sandbox is shown. Container engines that mount a folder read-only mount these
with it and leave them writable; an overlay does not show them at all. Each has to be mounted again by itself, over what
is there. This module mounts nothing, and asks no file system anything but whether a path exists. Invariant: the places
that it names keep their positions relative to the folder they are in.
"""

from __future__ import annotations

import os
import re
import select
from collections.abc import Iterable
from pathlib import Path

import msgspec

MOUNTINFO = Path("/proc/self/mountinfo")
ESCAPED = re.compile(rb"\\([0-7]{3})")
"""How mountinfo writes blanks and the like in a path."""


class Mount(msgspec.Struct, frozen=True):
    """Where something is mounted, and the kind of file system (`tmpfs`)."""

    path: str
    kind: str


class MountTable:
    """The mounts of this machine, read anew only after the kernel has reported a change. Call `close` at the end."""

    def __init__(self, mountinfo: Path = MOUNTINFO) -> None:
        self._file = os.open(mountinfo, os.O_RDONLY | os.O_CLOEXEC)
        self._changes = select.poll()
        self._changes.register(self._file, select.POLLERR | select.POLLPRI)
        self._mounts: tuple[Mount, ...] | None = None

    def mounts(self) -> tuple[Mount, ...]:
        """All of them, outer ones before those in them; of several at one place the last, which hides the others."""
        if self._mounts is None or self._changes.poll(0):
            os.lseek(self._file, 0, os.SEEK_SET)
            with open(self._file, "rb", closefd=False) as lines:
                self._mounts = parse(lines.read())
        return self._mounts

    def close(self) -> None:
        os.close(self._file)


def parse(mountinfo: bytes) -> tuple[Mount, ...]:
    """See proc_pid_mountinfo(5): the fifth field is the place; behind a lone dash there is the kind."""
    kinds = {}
    for line in mountinfo.splitlines():
        fields = line.split(b" ")
        kinds[_text(fields[4])] = _text(fields[fields.index(b"-", 6) + 1])
    return tuple(Mount(path, kind) for path, kind in sorted(kinds.items()))


def inner_mounts(shown: Iterable[tuple[Path, str]], *, mountinfo: Path = MOUNTINFO) -> list[tuple[Path, str]]:
    """What is mounted below the paths of `shown`, as `shown` itself: (path of the host, path inside), outer ones first.

    Blocks for as long as a look at some paths."""
    points = [mount.path for mount in parse(mountinfo.read_bytes())]
    found = []
    for source, target in shown:
        top = os.path.realpath(source)
        below = [path for path in points if path != top and path.startswith(f"{top.rstrip('/')}/")]
        # A mount that a later one hides is still listed, though its path leads nowhere.
        found += [
            (Path(path), os.path.join(target, os.path.relpath(path, top))) for path in below if os.path.lexists(path)
        ]
    return found


def _text(field: bytes) -> str:
    return os.fsdecode(ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), field))
