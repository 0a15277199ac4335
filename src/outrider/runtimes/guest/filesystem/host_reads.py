"""What the host may read of a sandbox: its files, wherever links lead, but not the kernel's and nothing special.

An agent makes links as it likes, and the tool server is not in the agent's place: its `/proc/self` is another one, and
what it holds open the agent has no path to. Invariant: nothing is opened for reading before it is known what it is, so
that no pipe is waited for and no device touched.
"""

from __future__ import annotations

import errno
import posix

KERNELS = ("/proc/", "/sys/")


def open_own(path: str, follow: bool) -> int:
    """A file's descriptor, for reading. Raises OSError, and ValueError for what is no file."""
    held = hold_own(path, 0 if follow else posix.O_NOFOLLOW)
    try:
        kind = posix.fstat(held).st_mode & 0o170000
        if kind == 0o040000:
            raise IsADirectoryError(errno.EISDIR, posix.strerror(errno.EISDIR), path)
        if kind == 0o120000:
            raise OSError(errno.ELOOP, posix.strerror(errno.ELOOP), path)
        if kind != 0o100000:
            raise ValueError("not a regular file: " + path)
        return posix.open(f"/proc/self/fd/{held}", posix.O_RDONLY | posix.O_CLOEXEC)
    finally:
        posix.close(held)


def hold_own(path: str, flags: int) -> int:
    """A descriptor of what is there, opened for nothing yet. Raises PermissionError where that is not below the
    sandbox's root, or the kernel's."""
    held = posix.open(path, posix.O_PATH | posix.O_CLOEXEC | flags)
    try:
        where = posix.readlink(f"/proc/self/fd/{held}")
        if not (where + "/").startswith(KERNELS) and (where == path or same_place(where, held)):
            return held
        raise PermissionError(errno.EPERM, "leads out of the sandbox's own files", path)
    except BaseException:
        posix.close(held)
        raise


def same_place(where: str, held: int) -> bool:
    """Whether a path leads to what is held: what has none here, such as a file in memory, has a path that only seems
    one."""
    try:
        there, here = posix.lstat(where), posix.fstat(held)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
