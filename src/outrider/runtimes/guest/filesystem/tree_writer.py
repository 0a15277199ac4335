"""Folders emptied and filled by descriptors, however deep they are.

It knows no archive but by its members. Invariant: nothing is written, made or taken away but in the folder whose
descriptor is given and below it, and no link is followed.
"""

from __future__ import annotations

import errno
import posix
from typing import TYPE_CHECKING

from outrider.runtimes.guest.filesystem.trees import FOLDER, Descent, allow
from outrider.runtimes.guest.poll_loop import CHUNK

if TYPE_CHECKING:
    import tarfile

KEPT = (errno.EROFS, errno.EBUSY)
"""What is mounted here, read-only, is the same in every sandbox of the task."""


class Way:
    """To a folder at any depth below a top, of which the last that was asked for is held."""

    def __init__(self, top: int) -> None:
        self.top = top
        self.descent = Descent(posix.dup(top))
        self.parts: list[str] = []

    def to(self, parts: list[str]) -> int:
        """A descriptor of the folder, good until the next call; what is missing is made. -1 where something else than
        folders is in the way."""
        shared = 0
        if self.parts == parts[: len(self.parts)]:  # mostly
            shared = len(self.parts)
        while shared < min(len(self.parts), len(parts)) and self.parts[shared] == parts[shared]:
            shared += 1
        while len(self.parts) > shared:
            self.parts.pop()
            if not self.descent.up():
                posix.close(self.descent.fd)
                self.descent, self.parts = Descent(posix.dup(self.top)), []
        for part in parts[len(self.parts) :]:
            if not self.descent.down(part) and not (made(self.descent.fd, part) and self.descent.down(part)):
                return -1
            self.parts.append(part)
        return self.descent.fd


def made(above: int, name: str) -> bool:
    """Whether there was nothing, and is a folder now."""
    try:
        posix.mkdir(name, 0o755, dir_fd=above)
    except FileExistsError:
        return False
    return True


def make_folder(above: int, name: str, mode: int) -> int:
    """A folder's descriptor. It is made if there is something else, or nothing."""
    try:
        folder = posix.open(name, FOLDER, dir_fd=above)
    except OSError:
        vacate(above, name)
        posix.mkdir(name, 0o755, dir_fd=above)
        folder = posix.open(name, FOLDER, dir_fd=above)
    allow(folder, mode)
    return folder


def put_file(archive: tarfile.TarFile, member: tarfile.TarInfo, above: int, name: str, mode: int) -> None:
    vacate(above, name)
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
    """Builds compare times; one that no clock shows is not kept."""
    try:
        posix.utime(fd, (member.mtime, member.mtime))
    except (OSError, OverflowError, ValueError):
        return


def put_link(source: int, base: str, above: int, name: str) -> None:
    """Another name of a regular file; nothing where there is none."""
    try:
        if posix.lstat(base, dir_fd=source).st_mode & 0o170000 != 0o100000:
            return
    except FileNotFoundError:
        return
    vacate(above, name)
    posix.link(base, name, src_dir_fd=source, dst_dir_fd=above, follow_symlinks=False)


def vacate(above: int, name: str) -> None:
    """Take away a file, a link or an empty folder."""
    try:
        posix.unlink(name, dir_fd=above)
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        posix.rmdir(name, dir_fd=above)


class Level:
    """A folder that is being emptied: its name, what is still in it, and whether nothing had to be left."""

    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        self.names = posix.listdir(fd)
        self.whole = True


def empty_folder(folder: int) -> bool:
    """Take away all that is in a folder, whose descriptor is closed; whether nothing had to be left."""
    allow(folder, 0o755)
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
                elif not vacated(descent.fd, name):
                    level.whole = False
                continue
            levels.pop()
            if levels:
                if not descent.up():
                    raise OSError(errno.ESTALE, posix.strerror(errno.ESTALE), level.name)
                if not (level.whole and vacated(descent.fd, level.name)):
                    levels[-1].whole = False
        return level.whole
    finally:
        posix.close(descent.fd)


def take_away(above: int, name: str) -> bool:
    """With all below it; whether nothing had to be left."""
    try:
        inner = posix.open(name, FOLDER, dir_fd=above)
    except OSError:
        inner = -1
    return (inner < 0 or empty_folder(inner)) and vacated(above, name)


def vacated(above: int, name: str) -> bool:
    try:
        vacate(above, name)
    except OSError as error:
        if error.errno not in KEPT:
            raise
        return False
    return True
