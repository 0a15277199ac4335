"""Walks folder trees of any depth with one open descriptor, and archives them.

Other processes may change a tree during the walk. Invariants:

- No link is followed, and no file that could block is read.
- A missing or unreadable file is left out. A file that shrinks while it is read is padded with zeros. Neither affects
  the rest of the archive.
- All other errors are raised. Such an error says nothing about the file, so the file must not be left out silently (see
  ABSENT).
"""

from __future__ import annotations

import errno
import posix
from typing import TYPE_CHECKING

from outrider.sandbox.runtimes.guest.filesystem.paths import DEVICES, DIRECTORY, KIND, LINK, PIPE, REGULAR

if TYPE_CHECKING:
    import tarfile
    from collections.abc import Callable, Iterator

FOLDER = posix.O_RDONLY | posix.O_DIRECTORY | posix.O_NOFOLLOW | posix.O_CLOEXEC
PLAIN_FILE = posix.O_RDONLY | posix.O_NOFOLLOW | posix.O_NONBLOCK | posix.O_CLOEXEC
"""Flags for opening a file that was a regular file a moment ago. O_NONBLOCK is needed, because a pipe may have replaced
the file."""
KINDS = {REGULAR: b"0", LINK: b"2", DEVICES[0]: b"3", DEVICES[1]: b"4", DIRECTORY: b"5", PIPE: b"6"}
"""The types of archive members, by the type bits of a file's mode. Sockets are missing, because a tar archive has no
type for them."""

ABSENT = (
    *(errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ESTALE, errno.EACCES, errno.EPERM),
    *(errno.EINVAL, errno.ESRCH),
)
"""Errors which mean that one file has disappeared or is unreadable. EINVAL: the file was a link a moment ago. ESRCH:
the file's process has ended.

Other errors, such as too many open descriptors or no memory, do not depend on the file. Ignoring them would silently
lose the file."""


def must_be_absent(error: OSError) -> None:
    """Raise the error again unless its number is in ABSENT."""
    if error.errno not in ABSENT:
        raise error


def identity(status: posix.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


class Descent:
    """The current folder of a walk through a tree. `fd` is a descriptor of this folder.

    The way up is `..`, so one descriptor is enough at any depth. Other processes may move folders meanwhile. So the
    object stores the inodes of the folders above, and `up` succeeds only if `..` still leads to the right folder.
    """

    def __init__(self, fd: int) -> None:
        """Start in the folder `fd`, the top of the tree. The object closes this descriptor when it leaves the folder.
        After the walk, the caller must close the attribute `fd`."""
        self.fd = fd
        self.here = identity(posix.fstat(fd))
        self.above: list[tuple[int, int]] = []

    def down(self, name: str, mode: int = 0) -> bool:
        """Enter the folder `name`. If `mode` is not 0, the folder first gets this mode. Returns False if there is no
        such folder, or if its `..` is not the current folder. Raises OSError for an error that does not depend on the
        folder."""
        try:
            fd = posix.open(name, FOLDER, dir_fd=self.fd)
        except OSError as error:
            must_be_absent(error)
            return False
        try:
            if mode:
                try_chmod(fd, mode)
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
        """Return to the folder above. Returns False if `..` now leads to another folder or cannot be opened. The walk
        must then end. Raises OSError for an error that does not depend on the folder."""
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


def try_chmod(fd: int, mode: int) -> None:
    """Set a mode, and ignore a failure. If the folder cannot be used without the mode, its next use fails anyway."""
    try:
        posix.fchmod(fd, mode)
    except OSError:
        return


def names_in(fd: int) -> list[str]:
    """Return the names in a folder, in reverse order for `list.pop`. Returns no names if the folder cannot be read."""
    try:
        return sorted(posix.listdir(fd), reverse=True)
    except OSError as error:
        must_be_absent(error)
        return []


def walk(descent: Descent, above: str) -> Iterator[tuple[str, str]]:
    """Yield every file and folder below the current folder of `descent`, as a name and a path. A folder comes before
    its content. When a name is yielded, the current folder of `descent` is the one that contains it. The path begins
    with `above`. If another process moves a folder so that `..` leads elsewhere, the walk ends."""
    # There is no recursion, because a tree may be deeper than Python's stack.
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
    """Adds trees of files to an archive.

    `adjust(member, folder, name)` may change a member before it is added. `limit` is the maximum size of all files
    together, in bytes. A file that exceeds the rest of the limit raises EFBIG before it is read. A sparse file counts
    with its full size: it takes little room on the disk, but would be stored in full size.
    """

    def __init__(
        self, archive: tarfile.TarFile, adjust: Callable[[tarfile.TarInfo, int, str], object], limit: int = 1 << 62
    ) -> None:
        self.archive = archive
        self.left = limit
        self.adjust = adjust
        self.linked: dict[tuple[int, int], str] = {}
        """For each file that has several names: its first name in the archive, by device and inode. Further names are
        added as hard links to the first one."""

    def add_tree(self, folder: int, name: str, path: str) -> None:
        """Add a file or a folder with everything in it to the archive. The file or folder is the entry `name` of
        `folder`, and gets the name `path` in the archive. The name "." stands for `folder` itself. Closes the folder's
        descriptor."""
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
            fd = posix.open(name, PLAIN_FILE, dir_fd=folder) if member.isreg() else -1
        except ValueError:
            return
        except OSError as error:
            must_be_absent(error)
            return
        if fd < 0:
            self.archive.addfile(member)
        else:
            self.add_file(member, fd)
        self.archive.members = []  # type: ignore[attr-defined]  # tarfile keeps every member it ever added

    def describe(self, member: tarfile.TarInfo, status: posix.stat_result, folder: int, name: str) -> bool:
        """Fill in the fields of an archive member. Returns False if an archive cannot hold this type of file. tarfile's
        own `gettarinfo` is not used: it reads the names of users from files of the sandbox, which an agent may have
        made slow or endless."""
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
        self.adjust(member, folder, name)
        return True

    def add_file(self, member: tarfile.TarInfo, fd: int) -> None:
        """Add a regular file with its current size. Closes the descriptor."""
        try:
            status = posix.fstat(fd)
            if status.st_mode & KIND != REGULAR:
                return
            member.size = status.st_size
            self.left -= member.size
            if self.left < 0:
                raise OSError(errno.EFBIG, posix.strerror(errno.EFBIG))
            self.archive.addfile(member, PaddedFile(fd))  # type: ignore[arg-type]  # tarfile only calls `read`
            if status.st_nlink > 1:
                self.linked[identity(status)] = member.name
        finally:
            posix.close(fd)


class PaddedFile:
    """A file that returns as many bytes as requested, with zeros after its end. The header of an archive member already
    states the file's size, but the file may shrink while it is read."""

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
