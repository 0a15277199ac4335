"""Restores files from an archive of another sandbox. A forked child reads the archive from a pipe.

An agent may have manipulated the archive. So only the given root paths are written. Ownership, set-user-id bits,
devices, sockets and pipes are left out. A symbolic link that leads out of the roots is kept only if it leads to a
system folder. Through any other link out of the roots, an agent could make the grader read the grader's own files
instead of the agent's.

Invariant: files are written, linked to and removed only at and below the roots, and no link of the archive is ever
followed.
"""

from __future__ import annotations

import errno
import posix
from typing import TYPE_CHECKING

from outrider.sandbox.runtimes.guest.connection import Calls
from outrider.sandbox.runtimes.guest.filesystem.paths import KIND, LINK, folder_of, make_folders
from outrider.sandbox.runtimes.guest.filesystem.tree_writer import (
    MOUNTED,
    FolderCursor,
    empty_folder,
    make_folder,
    put_file,
    put_link,
    remove_below,
    remove_entry,
)
from outrider.sandbox.runtimes.guest.filesystem.trees import FOLDER
from outrider.sandbox.runtimes.guest.poll_loop import CHUNK, PipeWriter
from outrider.sandbox.runtimes.guest.processes import OTHER_ERROR, SIGKILL, fork_with_pipe, send_signal

if TYPE_CHECKING:
    import tarfile

FIRST_SIGNAL = 128
"""Exit codes from this number on mean that a signal has ended the child."""
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "opt")
"""System folders to which links in a restored folder may lead. Virtual environments have such links."""
LEFT_OUT = (
    *MOUNTED,
    *(errno.EEXIST, errno.EILSEQ, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.EMLINK, errno.ENAMETOOLONG),
    *(errno.ENOENT, errno.ENOTDIR, errno.ENOTEMPTY, errno.EXDEV),
)
"""Errors that concern a single member, which is then left out. Any other error ends the restore."""


class Restore:
    """One restore. The host sends the archive in any number of calls, one after the other. The server replies to a call
    when the pipe to the child has taken the call's data. Only the reply to the last call is later: it is sent when the
    child has restored all files and exited. The pipe is closed after the last data, or when the child exits early."""

    def __init__(self, calls: Calls, roots: list[list[str]], limit: int) -> None:
        self.calls = calls
        self.call = 0
        self.code: int | None = None
        self.last = False
        self.pid, fd = fork_with_pipe(lambda reader: restore_archive(reader, roots, limit), reads=True)
        self.writer = PipeWriter(calls.loop, fd, self._written)
        calls.loop.exits[self.pid] = self._exited

    def feed(self, call: int, data: bytes, last: bool) -> None:
        self.call = call
        self.last = last
        self.calls.running[call] = self.cancel
        self.writer.write(data)

    def cancel(self) -> None:
        if self.code is None:
            send_signal(self.pid, SIGKILL)

    def _written(self, gone: bool) -> None:
        if self.last or gone:  # `gone` means that the child no longer reads; its exit code tells why
            self.writer.close()
            self._finish()
        else:
            self.calls.running.pop(self.call, None)
            self.calls.reply(self.call, {})

    def _exited(self, code: int) -> None:
        self.code = code
        self.writer.close()
        self._finish()

    def _finish(self) -> None:
        """Reply to the waiting call if the child has exited. The child exits at the end of the archive, or at an error.
        If no call waits, the next call gets the error."""
        if self.code is None or self.call not in self.calls.running:
            return
        self.calls.running.pop(self.call)
        if self.code == 0:
            self.calls.reply(self.call, {})
        else:
            why = posix.strerror(self.code) if self.code < FIRST_SIGNAL else "the process that reads it was killed"
            if self.code == OTHER_ERROR:
                why = "it is damaged"
            self.calls.fail(self.call, "failed", "the archive cannot be put back: " + why)


def restore_archive(reader: int, roots: list[list[str]], limit: int) -> None:
    """Empty the roots, and fill them from the archive. Each root is a pair `[path, name in the archive]`. Runs in the
    forked child."""
    import tarfile  # slow to load, and only a fork needs it

    with open(reader, "rb") as source:
        restored = RestoredRoots(roots, limit)
        with tarfile.open(fileobj=source, mode="r|") as archive:
            while True:
                member = archive.next()
                if member is None:
                    break
                restored.put(archive, member)
                archive.members = []  # type: ignore[attr-defined]  # tarfile keeps every member it ever read
        while source.read(CHUNK):
            pass  # drop the padding that the host sends after the archive's end
        restored.finish()


class RestoredRoot:
    """One root of a restore: its name, and a descriptor of its parent folder. The parent is opened before any file is
    restored, so that no file of the archive can redirect the path."""

    def __init__(self, path: str) -> None:
        above = folder_of(path) or "."
        make_folders(above)
        self.above = posix.open(above, posix.O_RDONLY | posix.O_DIRECTORY | posix.O_CLOEXEC)
        self.name = path[path.rfind("/") + 1 :]
        self.cursor = FolderCursor(self.above)
        self.filled = False

    def empty(self) -> None:
        """Remove everything at the root. Raises OSError if the root is a symbolic link, because the grader would
        mistake the link's target, which belongs to this sandbox, for the agent's file."""
        try:
            folder = posix.open(self.name, FOLDER, dir_fd=self.above)
        except FileNotFoundError:
            return
        except NotADirectoryError:
            if posix.stat(self.name, dir_fd=self.above, follow_symlinks=False).st_mode & KIND == LINK:
                raise OSError(errno.ELOOP, posix.strerror(errno.ELOOP), self.name) from None
            remove_below(self.above, self.name)
            return
        empty_folder(folder)


class RestoredRoots:
    """The roots of one restore. They are first emptied, and then filled member by member."""

    def __init__(self, roots: list[list[str]], limit: int) -> None:
        self.roots = {name: RestoredRoot(path) for path, name in roots}
        for place in self.roots.values():
            place.empty()
        self.left = limit

    def put(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Write one member, unless members of its type are left out. Every file and folder is made readable and
        writable for its owner, so that the grader can use it."""
        above = self.above(member.name)
        if above < 0:
            return
        name = member.name[member.name.rfind("/") + 1 :]
        try:
            if member.isdir():
                posix.close(make_folder(above, name, member.mode & 0o777 | 0o700))
            elif member.issym() and self.stays(member.name, member.linkname):
                remove_entry(above, name)
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
        """Remove each root that the archive does not contain, because such a root did not exist in the other
        sandbox."""
        for place in self.roots.values():
            if not place.filled:
                remove_below(place.above, place.name)

    def above(self, name: str) -> int:
        """Return a descriptor of the folder that contains a member. Missing folders are made. Returns -1 if the member
        is outside the roots, or if its path leads through a file or a link."""
        parts = name.split("/")
        if not {"", ".", ".."}.isdisjoint(parts):
            return -1
        root = next((root for root in self.roots if name == root or name.startswith(root + "/")), None)
        if root is None:
            return -1
        place = self.roots[root]
        place.filled = True
        return place.cursor.to([place.name, *parts[root.count("/") + 1 :]][:-1])

    def stays(self, name: str, target: str) -> bool:
        """Return whether a link leads to a root, to a path below a root, or into a system folder. In the link's target,
        `..` is allowed only at the beginning. A later `..` could follow the name of another link, and would then be
        relative to that link's target."""
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
        """Make a hard link to a file below the roots. The roots were emptied first, so this restore wrote the file."""
        kept = posix.dup(above)  # the search for the linked file's folder may close `above`
        try:
            source = self.above(member.linkname)
            if source >= 0 and member.linkname != member.name:
                put_link(source, member.linkname[member.linkname.rfind("/") + 1 :], kept, name)
        finally:
            posix.close(kept)
