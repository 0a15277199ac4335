"""Trees of files, however deep and long their paths: walked by one descriptor, and archived.

It does not know what an archive is for. Whoever made a tree may still be changing it. Invariants: no link is followed,
nothing that could block is read; what is not there, not to be had, or changes is left out, or filled up with zeros, and
spoils nothing else; and where something cannot be read for another reason, that is an error: nothing is left out
silently.
"""

from __future__ import annotations

import errno
import posix
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tarfile
    from collections.abc import Callable, Iterator

FOLDER = posix.O_RDONLY | posix.O_DIRECTORY | posix.O_NOFOLLOW | posix.O_CLOEXEC
PLAIN = posix.O_RDONLY | posix.O_NOFOLLOW | posix.O_NONBLOCK | posix.O_CLOEXEC
KIND = 0o170000
REGULAR, LINK, DEVICES = 0o100000, 0o120000, (0o020000, 0o060000)
KINDS = {REGULAR: b"0", LINK: b"2", 0o020000: b"3", 0o060000: b"4", 0o040000: b"5", 0o010000: b"6"}
"""What an archive calls what a file's mode says. It has no word for sockets."""

ABSENT = (
    *(errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ESTALE, errno.EACCES, errno.EPERM),
    *(errno.EINVAL, errno.ESRCH),
)
"""What such errors say is wrong with one file, and with that only: EINVAL that it was a link, ESRCH that it was of a
process. Of others, such as that there are no more descriptors, or no memory, a file may be as good as any."""


def must_be_absent(error: OSError) -> None:
    """Raises it unless it says that a file is not there, or not to be had."""
    if error.errno not in ABSENT:
        raise error


def identity(status: posix.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


class Descent:
    """Where a walk is: a descriptor of a folder, `fd`, and through which it came there. It leaves a folder by `..`, so
    that it holds but one, and only if that still leads to where it came from."""

    def __init__(self, fd: int) -> None:
        """Of the top; it is taken over."""
        self.fd = fd
        self.here = identity(posix.fstat(fd))
        self.above: list[tuple[int, int]] = []

    def down(self, name: str, mode: int = 0) -> bool:
        """Into a folder, which is given that mode first; whether there is one that can be left again. Raises OSError
        when that cannot be known."""
        try:
            fd = posix.open(name, FOLDER, dir_fd=self.fd)
        except OSError as error:
            must_be_absent(error)
            return False
        try:
            if mode:
                allow(fd, mode)
            returns = identity(posix.stat("..", dir_fd=fd)) == self.here
        except OSError as error:
            must_be_absent(error)
            returns = False
        if not returns:
            posix.close(fd)
            return False
        self.above.append(self.here)
        self._enter(fd)
        return True

    def up(self) -> bool:
        """Back to where it came from; False when that is somewhere else now: the walk is at its end. Raises OSError
        when that cannot be known."""
        try:
            fd = posix.open("..", FOLDER, dir_fd=self.fd)
        except OSError as error:
            must_be_absent(error)
            return False
        if identity(posix.fstat(fd)) != self.above.pop():
            posix.close(fd)
            return False
        self._enter(fd)
        return True

    def _enter(self, fd: int) -> None:
        posix.close(self.fd)
        self.fd = fd
        self.here = identity(posix.fstat(fd))


def allow(fd: int, mode: int) -> None:
    """What cannot be had tells by itself when it is used."""
    try:
        posix.fchmod(fd, mode)
    except OSError:
        return


def names_in(fd: int) -> list[str]:
    """The last first, to be taken from the end; none if they are not to be had."""
    try:
        return sorted(posix.listdir(fd), reverse=True)
    except OSError as error:
        must_be_absent(error)
        return []


def walk(descent: Descent, above: str) -> Iterator[tuple[str, str]]:
    """All below the folder where `descent` is, parents first: a name in the folder where it is then, and the same with
    `above` and the way there in front."""
    levels = [(names_in(descent.fd), len(above))]
    while levels:
        names, length = levels[-1]
        if not names:
            levels.pop()
            if levels and not descent.up():
                return
            continue
        name = names.pop()
        above = above[:length] + name
        yield name, above
        if descent.down(name):
            above += "/"
            levels.append((names_in(descent.fd), len(above)))


class Packer:
    """Adds to an archive. `mend` may change what is said of a member, which is of that name in that folder. A file with
    more than what is left of `limit` bytes is an error at once: it may have holes, and take no room but in an archive.
    """

    def __init__(
        self, archive: tarfile.TarFile, mend: Callable[[tarfile.TarInfo, int, str], object], limit: int = 1 << 62
    ) -> None:
        self.archive = archive
        self.left = limit
        self.mend = mend
        self.linked: dict[tuple[int, int], str] = {}
        """Files of several names that are in the archive, and the name that they have there."""

    def add_tree(self, folder: int, name: str, path: str) -> None:
        """What is called `name` in a folder, whose descriptor is taken over, as `path`, and all below it. "." is the
        folder itself."""
        descent = Descent(folder)
        self.add(descent.fd, name, path)
        if name == "." or descent.down(name):
            for inner, below in walk(descent, path + "/"):
                self.add(descent.fd, inner, below)
        posix.close(descent.fd)

    def add(self, folder: int, name: str, path: str) -> None:
        try:
            status = posix.lstat(name, dir_fd=folder)
            member = self.archive.tarinfo(path)
            if not self.describe(member, status, folder, name):
                return
            fd = posix.open(name, PLAIN, dir_fd=folder) if member.isreg() else -1
        except ValueError:
            return
        except OSError as error:
            must_be_absent(error)
            return
        if fd < 0:
            self.archive.addfile(member)
        else:
            self.add_file(member, fd)
        self.archive.members = []  # type: ignore[attr-defined]  # it would keep every one

    def describe(self, member: tarfile.TarInfo, status: posix.stat_result, folder: int, name: str) -> bool:
        """Not by tarfile's own way, which asks the sandbox's files for the names of users."""
        kind = status.st_mode & KIND
        if kind not in KINDS:
            return False
        member.type = KINDS[kind]
        member.mode = status.st_mode & 0o7777
        member.uid, member.gid, member.mtime = status.st_uid, status.st_gid, status.st_mtime
        if kind == LINK:
            member.linkname = posix.readlink(name, dir_fd=folder)
        elif kind in DEVICES:
            member.devmajor, member.devminor = posix.major(status.st_rdev), posix.minor(status.st_rdev)
        elif kind == REGULAR and identity(status) in self.linked:
            member.type, member.linkname = b"1", self.linked[identity(status)]
        self.mend(member, folder, name)
        return True

    def add_file(self, member: tarfile.TarInfo, fd: int) -> None:
        """With as many bytes as it has now."""
        try:
            status = posix.fstat(fd)
            if status.st_mode & KIND != REGULAR:
                return
            member.size = status.st_size
            self.left -= member.size
            if self.left < 0:
                raise OSError(errno.EFBIG, posix.strerror(errno.EFBIG))
            self.archive.addfile(member, Steady(fd))  # type: ignore[arg-type]  # all that it needs is `read`
            if status.st_nlink > 1:
                self.linked[identity(status)] = member.name
        finally:
            posix.close(fd)


class Steady:
    """A file that gives as many bytes as it is asked for: behind its end, zeros."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def read(self, size: int) -> bytes:
        data = b""
        try:
            while len(data) < size:
                piece = posix.read(self.fd, size - len(data))
                if not piece:
                    break
                data += piece
        except OSError as error:
            must_be_absent(error)
        return data + bytes(size - len(data))
