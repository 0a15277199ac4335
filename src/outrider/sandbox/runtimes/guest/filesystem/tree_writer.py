"""Writes, empties and removes trees of folders. Trees may have any depth, because the functions work with descriptors.

Invariant: entries are changed only in and below the folder of the given descriptor, and no link is followed.
"""

from __future__ import annotations

import errno
import posix
from typing import TYPE_CHECKING

from outrider.sandbox.runtimes.guest.filesystem.paths import KIND, REGULAR
from outrider.sandbox.runtimes.guest.filesystem.trees import FOLDER, Descent, try_chmod
from outrider.sandbox.runtimes.guest.poll_loop import CHUNK

if TYPE_CHECKING:
    import tarfile

MOUNTED = (errno.EROFS, errno.EBUSY)
"""Errors that removing a mount raises. Mounts can stay in place: they are read-only, and the same in every sandbox of
the task."""


class FolderCursor:
    """Finds folders at any depth below the folder `top`. It stays at the last folder that it found, because successive
    members of an archive are mostly in the same folder."""

    def __init__(self, top: int) -> None:
        self.top = top
        self.descent = Descent(posix.dup(top))
        self.parts: list[str] = []

    def to(self, parts: list[str]) -> int:
        """Return a descriptor of the folder with the path `parts`. The descriptor is valid until the next call. Missing
        folders are made. Returns -1 if a file or link is in the way."""
        shared = len(self.parts) if self.parts == parts[: len(self.parts)] else 0
        while shared < min(len(self.parts), len(parts)) and self.parts[shared] == parts[shared]:
            shared += 1
        while len(self.parts) > shared:
            self.parts.pop()
            if not self.descent.up():
                posix.close(self.descent.fd)
                self.descent, self.parts = Descent(posix.dup(self.top)), []
        for part in parts[len(self.parts) :]:
            if not self.descent.down(part) and not (new_folder(self.descent.fd, part) and self.descent.down(part)):
                return -1
            self.parts.append(part)
        return self.descent.fd


def new_folder(above: int, name: str) -> bool:
    """Make a folder. Returns False if the name already exists."""
    try:
        posix.mkdir(name, 0o755, dir_fd=above)
    except FileExistsError:
        return False
    return True


def make_folder(above: int, name: str, mode: int) -> int:
    """Return a descriptor of a folder. A missing folder is made. A file or link of the same name is replaced."""
    try:
        folder = posix.open(name, FOLDER, dir_fd=above)
    except OSError:
        remove_entry(above, name)
        posix.mkdir(name, 0o755, dir_fd=above)
        folder = posix.open(name, FOLDER, dir_fd=above)
    try_chmod(folder, mode)
    return folder


def put_file(archive: tarfile.TarFile, member: tarfile.TarInfo, above: int, name: str, mode: int) -> None:
    remove_entry(above, name)
    flags = posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | posix.O_NOFOLLOW | posix.O_CLOEXEC
    source = archive.extractfile(member)
    with open(posix.open(name, flags, 0o600, dir_fd=above), "wb") as file:
        while source is not None:
            data = source.read(CHUNK)
            if not data:
                break
            file.write(data)
        file.flush()
        posix.fchmod(file.fileno(), mode)
        set_date(file.fileno(), member)


def set_date(fd: int, member: tarfile.TarInfo) -> None:
    """Set the modification time, because build tools compare it. A time that the file system cannot store is
    ignored."""
    try:
        posix.utime(fd, (member.mtime, member.mtime))
    except (OSError, OverflowError, ValueError):
        return


def put_link(source: int, base: str, above: int, name: str) -> None:
    """Hard-link a regular file. Does nothing if the file is missing or not regular."""
    try:
        if posix.lstat(base, dir_fd=source).st_mode & KIND != REGULAR:
            return
    except FileNotFoundError:
        return
    remove_entry(above, name)
    posix.link(base, name, src_dir_fd=source, dst_dir_fd=above, follow_symlinks=False)


def remove_entry(above: int, name: str) -> None:
    """Remove a file, a link or an empty folder, if it exists."""
    try:
        posix.unlink(name, dir_fd=above)
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        posix.rmdir(name, dir_fd=above)


class Level:
    """A folder that is being emptied: its name, the names still in it, and whether everything could be removed so
    far."""

    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        self.names = posix.listdir(fd)
        self.whole = True


def empty_folder(folder: int) -> bool:
    """Remove everything in a folder, and close its descriptor. Returns False if a mount stays in the folder. Raises
    OSError."""
    try_chmod(folder, 0o755)
    descent = Descent(folder)
    try:
        level = Level("", descent.fd)
        levels = [level]
        while levels:
            level = levels[-1]
            if level.names:
                name = level.names.pop()
                if descent.down(name, 0o755):
                    levels.append(Level(name, descent.fd))
                elif not removed(descent.fd, name):
                    level.whole = False
                continue
            levels.pop()
            if levels:
                if not descent.up():
                    raise OSError(errno.ESTALE, posix.strerror(errno.ESTALE), level.name)
                if not (level.whole and removed(descent.fd, level.name)):
                    levels[-1].whole = False
        return level.whole
    finally:
        posix.close(descent.fd)


def remove_below(above: int, name: str) -> bool:
    """Remove a file, or a folder with everything in it. Returns False if it is or contains a mount."""
    try:
        inner = posix.open(name, FOLDER, dir_fd=above)
    except OSError:
        inner = -1
    return (inner < 0 or empty_folder(inner)) and removed(above, name)


def removed(above: int, name: str) -> bool:
    """Remove an entry like `remove_entry`, but return False for a mount, which stays."""
    try:
        remove_entry(above, name)
    except OSError as error:
        if error.errno not in MOUNTED:
            raise
        return False
    return True
