"""The files, folders and links of a host folder that is copied into a sandbox.

A path may be changed between its check and its opening. The folders of a path are therefore opened one inside another,
and never through a link. Invariant: no byte is read through a symbolic link, and no link out of the folder is passed
on.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from outrider.errors import RuntimeFailure

FOLDER_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class UploadEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file, folder or link to upload. `name` is relative to the target, "" for the target itself. `id` is the
    device and inode of the file."""

    name: str
    path: Path
    id: tuple[int, int]
    folder: bool = False
    link: str | None = None


def entries(source: Path) -> Iterator[UploadEntry]:
    """Yield the entries of a host file or folder, parents before children. No part of `source` may be a link.

    Raises RuntimeFailure for a symbolic link that leaves the folder, for a `source` with a link in its path, and for an
    entry that is neither file, folder nor link.
    """
    source = Path(os.path.abspath(source))
    waiting = [""]
    while waiting:
        name = waiting.pop()
        path = source / name if name else source
        status, children = _look_at(path)
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
    """Return a read descriptor of a regular file, and its mode bits. No part of the path may be a link. The file may
    have been replaced since it was listed, so its type is checked before it is opened for reading: opening a pipe would
    wait for a writer, and opening a device may have effects. Raises RuntimeFailure."""
    folder = _open(path.parent, path)
    try:
        held = os.open(path.name or ".", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        raise RuntimeFailure(f"cannot upload {path}: {error.strerror}") from error
    finally:
        os.close(folder)
    try:
        mode = os.fstat(held).st_mode
        if not stat.S_ISREG(mode):
            raise RuntimeFailure(f"cannot upload {path}: not a regular file")
        fd = os.open(f"/proc/self/fd/{held}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise RuntimeFailure(f"cannot upload {path}: {error.strerror}") from error
    finally:
        os.close(held)
    return fd, mode & 0o755 | 0o600


def _open(folder: Path, source: Path) -> int:
    """Return a descriptor of a folder whose path contains no link. Raises RuntimeFailure."""
    held = os.open("/", FOLDER_FLAGS)
    for part in folder.parts[1:]:
        try:
            inner = os.open(part, FOLDER_FLAGS, dir_fd=held)
        except OSError as error:
            raise RuntimeFailure(
                f"cannot upload {source}: {part} in its path is a symbolic link or no folder ({error.strerror})"
            ) from error
        finally:
            os.close(held)
        held = inner
    return held


def _look_at(path: Path) -> tuple[os.stat_result, list[str]]:
    """Return the status of a path, and the sorted names in a folder, [] for anything else. Only the last part of the
    path may be a link. Raises RuntimeFailure."""
    folder, name = _open(path.parent, path), path.name or "."
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            return status, []
        held = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            return status, sorted(os.listdir(held))
        finally:
            os.close(held)
    except OSError as error:
        raise RuntimeFailure(f"cannot upload {path}: {error.strerror}") from error
    finally:
        os.close(folder)


def _link(path: Path, root: Path) -> str:
    """Return the link's target, made relative. Raises RuntimeFailure for a target outside of `root`."""
    try:
        goal = path.resolve()
    except (OSError, RuntimeError) as error:
        raise RuntimeFailure(f"cannot upload {path}: a loop of symbolic links") from error
    if not goal.is_relative_to(root):
        raise RuntimeFailure(f"cannot upload {path}: a symbolic link that leaves the uploaded folder")
    return os.path.relpath(goal, path.parent)
