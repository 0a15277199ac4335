"""The file systems mounted on this machine, as seen by this process.

Some file systems are mounted below a host folder that is shown in a sandbox. A container engine that mounts the folder
read-only mounts these inner file systems too, but writable. An overlay over the folder leaves the inner file systems
out. Each inner file system must therefore be mounted again, over its path. This module mounts nothing: it lists mounts,
and checks whether their paths exist. Invariant: the returned mount points keep their positions relative to their
folder.
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
"""Escape sequence of mountinfo for blanks and similar characters in a path."""


class MountPoint(msgspec.Struct, frozen=True):
    """A mount point and the kind of its file system (such as `tmpfs`)."""

    path: str
    kind: str


class MountTable:
    """The mounts of this machine, read again only after the kernel has reported a change. Call `close` at the end."""

    def __init__(self, mountinfo: Path = MOUNTINFO) -> None:
        self._file = os.open(mountinfo, os.O_RDONLY | os.O_CLOEXEC)
        self._changes = select.poll()
        self._changes.register(self._file, select.POLLERR | select.POLLPRI)
        self._mounts: tuple[MountPoint, ...] | None = None

    def mounts(self) -> tuple[MountPoint, ...]:
        """Return all mounts, outer mounts before inner ones. At each path only the last mount counts, because it hides
        the others."""
        if self._mounts is None or self._changes.poll(0):
            os.lseek(self._file, 0, os.SEEK_SET)
            with open(self._file, "rb", closefd=False) as lines:
                self._mounts = parse(lines.read())
        return self._mounts

    def close(self) -> None:
        os.close(self._file)


def parse(mountinfo: bytes) -> tuple[MountPoint, ...]:
    """Parse mountinfo, see proc_pid_mountinfo(5): the fifth field is the mount point, and the kind follows a lone dash.
    In a path, blanks, tabs, newlines and backslashes are escaped, but no other characters."""
    kinds = {}
    for line in filter(None, mountinfo.split(b"\n")):
        fields = line.split(b" ")
        kinds[_text(fields[4])] = _text(fields[fields.index(b"-", 6) + 1])
    return tuple(MountPoint(path, kind) for path, kind in sorted(kinds.items()))


def inner_mounts(shown: Iterable[tuple[Path, str]], *, mountinfo: Path = MOUNTINFO) -> list[tuple[Path, str]]:
    """Return the mounts below the paths of `shown`, outer mounts first. `shown` and the result are pairs (path on the
    host, path inside).

    Blocks for checks of a few paths."""
    mounts = parse(mountinfo.read_bytes())
    found = []
    for source, target in shown:
        top = os.path.realpath(source)
        found += [
            (Path(path), os.path.join(target, os.path.relpath(path, top))) for path in mounts_below(source, mounts)
        ]
    return found


def mounts_below(folder: Path, mounts: Iterable[MountPoint]) -> list[str]:
    """Return the paths of those mounts that are below a folder, in the same order.

    Blocks for checks of a few paths."""
    top = os.path.realpath(folder)
    below = [mount.path for mount in mounts if mount.path != top and mount.path.startswith(f"{top.rstrip('/')}/")]
    # A mount that is hidden by a later mount is still listed. Its path may lead nowhere, and is then left out.
    return [path for path in below if os.path.lexists(path)]


def _text(field: bytes) -> str:
    return os.fsdecode(ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), field))
