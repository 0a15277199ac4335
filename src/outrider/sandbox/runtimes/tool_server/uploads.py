"""Lists and opens the files, folders and links of a host folder that is copied into a sandbox.

Somebody may change a path between its check and its opening. So each folder of a path is opened relative to its parent,
and never through a link. Invariant: no byte is read through a symbolic link, and no link that leads out of the folder
is copied.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from outrider.errors import RuntimeFailure

FLAGS = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class UploadEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file, folder or link to upload. `name` is its path relative to the target of the upload, and "" for the
    target itself. `id` is the device and inode of the file."""

    name: str
    path: Path
    id: tuple[int, int]
    folder: bool = False
    link: str | None = None


def entries(source: Path) -> Iterator[UploadEntry]:
    """Yield the entries of a host file or folder. A folder comes before its content.

    Raises RuntimeFailure for a symbolic link that leads out of the folder, for a link in the path `source` itself, and
    for an entry that is not a file, folder or link.
    """
    source = Path(os.path.abspath(source))
    waiting = [""]
    while waiting:
        name = waiting.pop()
        path = source / name if name else source
        with _held(path) as held:
            status = os.fstat(held)
            children = sorted(os.listdir(f"/proc/self/fd/{held}")) if stat.S_ISDIR(status.st_mode) else []
        mode, id = status.st_mode, (status.st_dev, status.st_ino)
        if stat.S_ISLNK(mode) and name:
            yield UploadEntry(name=name, path=path, id=id, link=_link(path, source))
        elif stat.S_ISREG(mode):
            yield UploadEntry(name=name, path=path, id=id)
        elif stat.S_ISDIR(mode):
            yield UploadEntry(name=name, path=path, id=id, folder=True)
            waiting += [posixpath.join(name, child) for child in reversed(children)]
        else:
            what = "it is a symbolic link" if stat.S_ISLNK(mode) else "neither a file nor a folder"
            raise RuntimeFailure(f"cannot upload {path}: {what}")


def open_plain(path: Path) -> tuple[int, int]:
    """Open a regular file. Returns a descriptor for reading, and the file's mode bits. No part of the path may be a
    link. Raises RuntimeFailure.

    The file may have been replaced since it was listed, so the type is checked before the file is opened. Opening a
    pipe would wait for a writer, and opening a device may have side effects."""
    with _held(path) as held:
        mode = os.fstat(held).st_mode
        if not stat.S_ISREG(mode):
            raise RuntimeFailure(f"cannot upload {path}: not a regular file")
        return os.open(f"/proc/self/fd/{held}", os.O_RDONLY | os.O_CLOEXEC), mode & 0o755 | 0o600


@contextlib.contextmanager
def _held(path: Path) -> Iterator[int]:
    """Yield a descriptor (O_PATH) that identifies a file, but cannot read it. Only the last part of the path may be a
    link. Raises RuntimeFailure. An OSError of the block is converted to RuntimeFailure."""
    *folders, name = path.parts[1:] or ["."]
    steps = [*((folder, FLAGS | os.O_DIRECTORY) for folder in folders), (name, FLAGS)]
    held = os.open("/", FLAGS)
    try:
        for part, flags in steps:
            inner = os.open(part, flags, dir_fd=held)
            os.close(held)
            held = inner
        yield held
    except NotADirectoryError as error:
        raise RuntimeFailure(f"cannot upload {path}: a part of its path is a symbolic link or no folder") from error
    except OSError as error:
        raise RuntimeFailure(f"cannot upload {path}: {error.strerror}") from error
    finally:
        os.close(held)


def _link(path: Path, root: Path) -> str:
    """Return the target of a link, relative to the link's folder. Raises RuntimeFailure if the target is outside
    `root`."""
    try:
        goal = path.resolve()
    except (OSError, RuntimeError) as error:
        raise RuntimeFailure(f"cannot upload {path}: a loop of symbolic links") from error
    if not goal.is_relative_to(root):
        raise RuntimeFailure(f"cannot upload {path}: a symbolic link that leaves the uploaded folder")
    return os.path.relpath(goal, path.parent)
