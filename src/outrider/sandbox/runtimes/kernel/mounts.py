"""Lists the file systems that are mounted on this machine, as this process sees them. The module mounts nothing.

A host folder that a sandbox can see may contain mounts, called inner mounts here. A container engine that mounts the
folder read-only also mounts the inner mounts, but leaves them writable. An overlay over the folder does not contain the
inner mounts. So each inner mount must be mounted again at its own path. Invariant: an inner mount keeps its position
relative to its folder.
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
"""An escape sequence in a path of /proc/self/mountinfo. It stands for a character such as a blank."""


class MountPoint(msgspec.Struct, frozen=True):
    """A mount point and the kind of its file system (such as `tmpfs`). `device` identifies the file system. The mount
    shows the path `root` of this file system."""

    path: str
    kind: str
    device: str = ""
    root: str = "/"


class MountTable:
    """The mounts of this machine. They are read again only after the kernel has reported a change. Call `close` after
    use."""

    def __init__(self, mountinfo: Path = MOUNTINFO) -> None:
        self._file = os.open(mountinfo, os.O_RDONLY | os.O_CLOEXEC)
        self._changes = select.poll()
        self._changes.register(self._file, select.POLLERR | select.POLLPRI)
        self._mounts: tuple[MountPoint, ...] | None = None

    def mounts(self) -> tuple[MountPoint, ...]:
        """Return all mounts, with outer mounts before inner ones. If several are mounted at the same path, only the
        last one is returned, because it hides the others."""
        if self._mounts is None or self._changes.poll(0):
            os.lseek(self._file, 0, os.SEEK_SET)
            with open(self._file, "rb", closefd=False) as lines:
                self._mounts = parse(lines.read())
        return self._mounts

    def close(self) -> None:
        os.close(self._file)


def parse(mountinfo: bytes) -> tuple[MountPoint, ...]:
    """Parse the text of mountinfo (see proc_pid_mountinfo(5)). The third to fifth fields are the device, the root and
    the mount point. The kind of the file system follows a field `-`. In a path, only blanks, tabs, newlines and
    backslashes are escaped."""
    found = {}
    for line in filter(None, mountinfo.split(b"\n")):
        fields = line.split(b" ")
        device, root, path = map(_text, fields[2:5])
        found[path] = MountPoint(path, _text(fields[fields.index(b"-", 6) + 1]), device, root)
    return tuple(found[path] for path in sorted(found))


def inner_mounts(shown: Iterable[tuple[Path, str]], *, mountinfo: Path = MOUNTINFO) -> list[tuple[Path, str]]:
    """Return the mounts below the folders in `shown`, with outer mounts first. Both `shown` and the result have pairs
    (path on the host, path inside). The call blocks to check a few paths."""
    mounts = parse(mountinfo.read_bytes())
    found = []
    for source, target in shown:
        top = os.path.realpath(source)
        found += [
            (Path(path), os.path.join(target, os.path.relpath(path, top))) for path in mounts_below(source, mounts)
        ]
    return found


def mounts_below(folder: Path, mounts: Iterable[MountPoint]) -> list[str]:
    """Return the paths of the mounts that are below a folder, in the order of `mounts`. The call blocks to check a few
    paths."""
    top = os.path.realpath(folder)
    below = [mount.path for mount in mounts if mount.path != top and mount.path.startswith(f"{top.rstrip('/')}/")]
    # Leave out a mount whose path no longer exists, because a later mount hides it.
    return [path for path in below if os.path.lexists(path)]


def place_of(path: str, mounts: Iterable[MountPoint]) -> tuple[str, str] | None:
    """Return the place to which an absolute path without links leads: a device, and the path within the device's file
    system. A file has the same place in all mounts of its file system. `mounts` has outer mounts before inner ones.

    Returns None if no mount contains the path. Also returns None for NFS, where the place is unknown: all mounts of a
    server's file system have the same device and the root `/`, even a mount that shows only one folder of the file
    system.
    """
    above = [mount for mount in mounts if f"{path}/".startswith(f"{mount.path.rstrip('/')}/")]
    if not above or above[-1].kind in ("nfs", "nfs4"):
        return None
    inside = os.path.join(above[-1].root, os.path.relpath(path, above[-1].path))
    return above[-1].device, os.path.normpath(inside)


def _text(field: bytes) -> str:
    return os.fsdecode(ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), field))
