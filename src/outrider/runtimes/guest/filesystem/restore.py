"""An archive of another sandbox's files put back in this one, by a forked child that reads it from a pipe.

Whoever made the archive is not trusted with anything but the places it is for, its roots. Ownership, set-user-id bits,
devices, sockets and pipes are left out, and so are symbolic links that lead out of the roots to anything but the
system's own folders: a grader could be made to read, at a place that the agent names, what the grader puts there.
Invariant: nothing is written, linked to or taken away but at and below the roots, and no link of the archive is ever
followed.
"""

from __future__ import annotations

import errno
import posix
import select
from typing import TYPE_CHECKING

from outrider.runtimes.guest.calls import Calls
from outrider.runtimes.guest.filesystem.paths import folder_of, make_folders
from outrider.runtimes.guest.filesystem.tree_writer import (
    KEPT,
    Way,
    empty_folder,
    make_folder,
    put_file,
    put_link,
    take_away,
    vacate,
)
from outrider.runtimes.guest.filesystem.trees import FOLDER
from outrider.runtimes.guest.poll_loop import CHUNK
from outrider.runtimes.guest.processes import send_signal

if TYPE_CHECKING:
    import signal as _signal
    import tarfile
else:
    import _signal  # `signal` would add half again to the start-up time

NO_ARCHIVE = 255
NO_NUMBER = 128
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "opt")
"""What programs in a carried folder may link to."""
LEFT_OUT = (
    *KEPT,
    *(errno.EEXIST, errno.EILSEQ, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.EMLINK, errno.ENAMETOOLONG),
    *(errno.ENOENT, errno.ENOTDIR, errno.ENOTEMPTY, errno.EXDEV),
)
"""What such errors say of a member is wrong with the member only."""


class Restore:
    """The archive comes in any number of calls, one at a time; each is answered when there is room for the next, the
    last when all is in its place."""

    def __init__(self, calls: Calls, roots: list[list[str]], limit: int) -> None:
        self.calls = calls
        self.call = 0
        self.code: int | None = None
        self.data = memoryview(b"")
        self.last = False
        reader, self.fd = posix.pipe()
        self.pid = posix.fork()
        if self.pid == 0:
            posix.close(self.fd)
            put_back(reader, roots, limit)
        posix.close(reader)
        posix.set_blocking(self.fd, False)
        calls.loop.exits[self.pid] = self._exited

    def feed(self, call: int, data: bytes, last: bool) -> None:
        self.call = call
        self.data = memoryview(data)
        self.last = last
        self.calls.running[call] = self.cancel
        self._push(0)

    def cancel(self) -> None:
        send_signal(self.pid, _signal.SIGKILL)

    def _push(self, events: int) -> None:
        try:
            while self.data:
                self.data = self.data[posix.write(self.fd, self.data[:CHUNK]) :]
        except BlockingIOError:
            self.calls.loop.watch(self.fd, select.POLLOUT, self._push)
            return
        except OSError:  # the child has given up; its exit code says why
            self.last = True
        self.calls.loop.forget(self.fd)
        if not self.last:
            self.calls.running.pop(self.call, None)
            self.calls.reply(self.call, {})
            return
        if self.fd >= 0:
            posix.close(self.fd)
            self.fd = -1
        self._finish()

    def _exited(self, code: int) -> None:
        self.code = code
        self._finish()

    def _finish(self) -> None:
        """The child ends by itself only when it has seen the end of the pipe, or something went wrong."""
        if self.code is None or self.call not in self.calls.running:
            return
        self.calls.running.pop(self.call)
        if self.code == 0:
            self.calls.reply(self.call, {})
        else:
            self.calls.fail(self.call, "failed", "the archive cannot be put back: " + why_not(self.code))


def why_not(code: int) -> str:
    if code == NO_ARCHIVE:
        return "it is broken"
    return posix.strerror(code) if code < NO_NUMBER else "its reader was killed"


def put_back(reader: int, roots: list[list[str]], limit: int) -> None:
    """In the child: empty the roots, `[path, name in the archive]`, then fill them, then exit."""
    code = NO_ARCHIVE
    try:
        import tarfile

        with open(reader, "rb") as source:
            refill = Refill(roots, limit)
            with tarfile.open(fileobj=source, mode="r|") as archive:
                while True:
                    member = archive.next()
                    if member is None:
                        break
                    refill.put(archive, member)
                    archive.members = []  # type: ignore[attr-defined]  # it would keep every one
            while source.read(CHUNK):
                """What follows the archive's end is padding."""
            refill.finish()
        code = 0
    except OSError as error:
        code = error.errno or NO_ARCHIVE
    finally:
        posix._exit(code)


class Root:
    """A root: a descriptor of the folder above it, opened before anything of the archive is there, and its name."""

    def __init__(self, path: str) -> None:
        above = folder_of(path) or "."
        make_folders(above)
        self.above = posix.open(above, posix.O_RDONLY | posix.O_DIRECTORY | posix.O_CLOEXEC)
        self.name = path[path.rfind("/") + 1 :]
        self.way = Way(self.above)
        self.filled = False

    def empty(self) -> None:
        """Raises OSError for a link: what it leads to would be graded as it is, and not as the agent left it."""
        try:
            folder = posix.open(self.name, FOLDER, dir_fd=self.above)
        except FileNotFoundError:
            return
        except NotADirectoryError:
            if posix.stat(self.name, dir_fd=self.above, follow_symlinks=False).st_mode & 0o170000 == 0o120000:
                raise OSError(errno.ELOOP, posix.strerror(errno.ELOOP), self.name) from None
            take_away(self.above, self.name)
            return
        empty_folder(folder)


class Refill:
    """The roots, and what is put below them."""

    def __init__(self, roots: list[list[str]], limit: int) -> None:
        self.roots = {name: Root(path) for path, name in roots}
        for place in self.roots.values():
            place.empty()
        self.left = limit

    def put(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        above = self.above(member.name)
        if above < 0:
            return
        name = member.name[member.name.rfind("/") + 1 :]
        try:
            if member.isdir():
                posix.close(make_folder(above, name, member.mode & 0o777 | 0o700))
            elif member.issym() and self.stays(member.name, member.linkname):
                vacate(above, name)
                posix.symlink(member.linkname, name, dir_fd=above)
            elif member.islnk():
                self.link(above, name, member)
            elif member.isreg():
                self.left -= member.size
                if self.left < 0:
                    raise OSError(errno.EFBIG, posix.strerror(errno.EFBIG))
                put_file(archive, member, above, name, member.mode & 0o777 | 0o600)
        except OSError as error:
            if error.errno not in LEFT_OUT:
                raise

    def finish(self) -> None:
        """A root that the archive knows nothing of is not there."""
        for place in self.roots.values():
            if not place.filled:
                take_away(place.above, place.name)

    def above(self, name: str) -> int:
        """A descriptor of the folder that a member is to be put in, which is made if it is missing; -1 for a member
        that is below no root, or whose way there leads through something else than folders."""
        parts = name.split("/")
        if not {"", ".", ".."}.isdisjoint(parts):
            return -1
        root = next((root for root in self.roots if name == root or name.startswith(root + "/")), None)
        if root is None:
            return -1
        place = self.roots[root]
        place.filled = True
        return place.way.to([place.name, *parts[root.count("/") + 1 :]][:-1])

    def stays(self, name: str, target: str) -> bool:
        """Whether a link leads to a place below a root, or to a system folder. Up it may lead only at its beginning:
        what comes later would be up from wherever another link leads."""
        goal = [] if target.startswith("/") else name.split("/")[:-1]
        parts = [part for part in target.split("/") if part not in ("", ".")]
        while parts[:1] == [".."]:
            goal, parts = goal[:-1], parts[1:]
        if ".." in parts:
            return False
        whole = "/".join(goal + parts)
        inside = any(whole == root or whole.startswith(root + "/") for root in self.roots)
        return inside or whole.split("/")[0] in SYSTEM

    def link(self, above: int, name: str, member: tarfile.TarInfo) -> None:
        """To a file that came out of this archive: nothing else is below the roots."""
        kept = posix.dup(above)  # `above` is of the last folder, and may be left to find the other
        try:
            source = self.above(member.linkname)
            if source >= 0 and member.linkname != member.name:
                put_link(source, member.linkname[member.linkname.rfind("/") + 1 :], kept, name)
        finally:
            posix.close(kept)
