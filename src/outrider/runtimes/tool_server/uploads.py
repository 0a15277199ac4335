"""The files, folders and links of a host folder that is copied into a sandbox.

It does not know where they go. Invariant: no byte is read through a symbolic link, and no link is passed on that leads
out of the folder.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from outrider.errors import RuntimeFailure


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to upload: `name` is relative to the target, "" for the target itself."""

    name: str
    path: Path
    folder: bool = False
    link: str | None = None


def entries(source: Path) -> Iterator[Entry]:
    """The entries of a host file or folder, parents before children. Raises RuntimeFailure for a symbolic link that
    leaves the folder, for a `source` that is a link, and for what is neither file, folder nor link."""
    if source.is_symlink() or not source.exists():
        raise RuntimeFailure(f"cannot upload {source}: it is a symbolic link or does not exist")
    yield from _entries(source, "", source.resolve())


def _entries(path: Path, name: str, root: Path) -> Iterator[Entry]:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        yield Entry(name=name, path=path, link=_link(path, root))
    elif stat.S_ISREG(mode):
        yield Entry(name=name, path=path)
    elif stat.S_ISDIR(mode):
        yield Entry(name=name, path=path, folder=True)
        for child in sorted(path.iterdir()):
            yield from _entries(child, posixpath.join(name, child.name), root)
    else:
        raise RuntimeFailure(f"cannot upload {path}: neither a file nor a folder")


def _link(path: Path, root: Path) -> str:
    """The link's target, made relative. Raises RuntimeFailure for one outside of `root`."""
    try:
        goal = path.resolve()
    except (OSError, RuntimeError) as error:
        raise RuntimeFailure(f"cannot upload {path}: a loop of symbolic links") from error
    if not goal.is_relative_to(root):
        raise RuntimeFailure(f"cannot upload {path}: a symbolic link that leaves the uploaded folder")
    return os.path.relpath(goal, path.parent.resolve())


def open_plain(path: Path) -> tuple[int, int]:
    """A read descriptor of a regular file, and its mode bits. Refuses a link or a pipe that was put there meanwhile:
    O_NONBLOCK, because to open a pipe would wait for a writer. Raises RuntimeFailure."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise RuntimeFailure(f"cannot upload {path}: {error.strerror}") from error
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise RuntimeFailure(f"cannot upload {path}: not a regular file")
    return fd, mode & 0o755 | 0o600
