"""Opens, writes and archives files of a sandbox for the host.

An agent may make any link. A link through `/proc/self` would lead the tool server to its own descriptors, which the
agent cannot reach otherwise. So links are followed only to the sandbox's own files. Invariant: the type of a file is
checked before the file is opened, so that no pipe blocks and no device is touched.
"""

from __future__ import annotations

import errno
import posix

from outrider.sandbox.runtimes.guest.filesystem.paths import DIRECTORY, KIND, LINK, REGULAR, folder_of, make_folders
from outrider.sandbox.runtimes.guest.filesystem.trees import FOLDER, Packer, identity, must_be_absent

KERNEL_FOLDERS = ("/proc/", "/sys/")


def open_file(path: str, follow: bool = True, flags: int = posix.O_RDONLY) -> int:
    """Open an existing regular file, and return its descriptor. Raises OSError, and ValueError for a file that is not
    regular."""
    held = hold(path, 0 if follow else posix.O_NOFOLLOW)
    try:
        kind = posix.fstat(held).st_mode & KIND
        if kind == DIRECTORY:
            raise IsADirectoryError(errno.EISDIR, posix.strerror(errno.EISDIR), path)
        if kind == LINK:
            raise OSError(errno.ELOOP, posix.strerror(errno.ELOOP), path)
        if kind != REGULAR:
            raise ValueError("not a regular file: " + path)
        # Opened through the descriptor, because the path may lead to another file by now.
        return posix.open(f"/proc/self/fd/{held}", flags | posix.O_CLOEXEC)
    finally:
        posix.close(held)


def hold(path: str, flags: int) -> int:
    """Return an O_PATH descriptor of the file at a path. It identifies the file, but cannot be read from. Raises
    PermissionError if the file is outside the sandbox's root, or is a kernel file in /proc or /sys."""
    held = posix.open(path, posix.O_PATH | posix.O_CLOEXEC | flags)
    try:
        where = posix.readlink(f"/proc/self/fd/{held}")
        if not (where + "/").startswith(KERNEL_FOLDERS) and (where == path or is_at(where, held)):
            return held
        raise PermissionError(errno.EPERM, "leads out of the sandbox's own files", path)
    except BaseException:
        posix.close(held)
        raise


def is_at(where: str, held: int) -> bool:
    """Return whether the descriptor's file is at the path `where`. `where` is the text of the descriptor's link in
    /proc/self/fd. For some files, such as a file in memory, this text only looks like a path."""
    try:
        return identity(posix.lstat(where)) == identity(posix.fstat(held))
    except OSError:
        return False


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[posix.write(fd, view) :]


def write_file(path: str, data: bytes, mode: int, append: bool) -> None:
    """Create, replace or extend a regular file. Missing parent folders are made."""
    flags = posix.O_WRONLY | (posix.O_APPEND if append else posix.O_TRUNC)
    try:
        fd = open_file(path, flags=flags)
    except FileNotFoundError:
        make_folders(folder_of(path) or ".")
        # Another program may just have made a pipe at this path. With O_NONBLOCK, opening a pipe does not block.
        posix.close(posix.open(path, posix.O_WRONLY | posix.O_CREAT | posix.O_NONBLOCK | posix.O_CLOEXEC, 0o666))
        fd = open_file(path, flags=flags)
    try:
        write_all(fd, data)
        posix.fchmod(fd, mode)
    finally:
        posix.close(fd)


def write_tar(fd: int, paths: list[list[str]], limit: int) -> None:
    """Write files to an archive. Each item of `paths` is a pair `[path, name in the archive]`. A path is left out if it
    is missing, unreadable or outside the sandbox's own files. Raises OSError for errors that do not depend on the path
    (see ABSENT in trees.py), and with EFBIG for more than `limit` bytes."""
    import tarfile  # slow to load, and only a fork needs it

    with open(fd, "wb") as sink, tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        packer = Packer(archive, lambda member, folder, name: None, limit)
        for path, name in paths:
            base = path[path.rfind("/") + 1 :]
            above = folder_of(path) or "."
            if base in ("", ".", ".."):
                base, above = ".", path
            try:
                held = hold(above, posix.O_DIRECTORY)
                try:
                    folder = posix.open(".", FOLDER, dir_fd=held)
                finally:
                    posix.close(held)
            except OSError as error:
                must_be_absent(error)
                continue
            packer.add_tree(folder, base, name)
