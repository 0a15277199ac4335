"""Files for the host: written with their folders, archived by a forked child, sent in parts."""

from __future__ import annotations

import errno
import posix
from typing import TYPE_CHECKING

from outrider.runtimes.guest.calls import Calls
from outrider.runtimes.guest.filesystem.host_reads import hold_own
from outrider.runtimes.guest.filesystem.paths import folder_of, make_folders
from outrider.runtimes.guest.filesystem.trees import FOLDER, Packer, must_be_absent
from outrider.runtimes.guest.poll_loop import POLL_READ, read_ready
from outrider.runtimes.guest.processes import send_signal

if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable
else:
    import _signal  # `signal` would add half again to the start-up time

OUT_HIGH = 4 << 20
TOO_LARGE = 2
"""The exit code of a child whose archive would be."""


def write_file(path: str, data: bytes, mode: int, append: bool) -> None:
    flags = posix.O_WRONLY | posix.O_CREAT | posix.O_NONBLOCK | (posix.O_APPEND if append else posix.O_TRUNC)
    try:
        fd = posix.open(path, flags, 0o666)
    except FileNotFoundError:
        make_folders(folder_of(path) or ".")
        fd = posix.open(path, flags, 0o666)
    try:
        view = memoryview(data)
        while view:
            view = view[posix.write(fd, view) :]
        posix.fchmod(fd, mode)
    finally:
        posix.close(fd)


class Snapshot:
    """A tar stream made by a forked child, so that a large one holds up nothing else; sent in parts."""

    failed = "snapshot failed"

    def __init__(self, calls: Calls, call: int, limit: int, write: Callable[[int], object]) -> None:
        """`write`, in the child, writes the archive to a descriptor."""
        self.calls = calls
        self.call = call
        self.limit = self.left = limit
        self.code: int | None = None
        self.fd, writer = posix.pipe()
        self.pid = posix.fork()
        if self.pid == 0:
            write_and_leave(write, writer)
        posix.close(writer)
        posix.set_blocking(self.fd, False)
        calls.running[call] = self.cancel
        calls.loop.exits[self.pid] = self._exited
        calls.loop.watch(self.fd, POLL_READ, self._ready)

    def _ready(self, events: int) -> None:
        if len(self.calls.connection.outgoing) > OUT_HIGH:
            self.calls.loop.forget(self.fd)
            self.calls.loop.at(self, 0.005, self._resume)
            return
        data = read_ready(self.fd)
        if data is None:
            self.calls.loop.forget(self.fd)
            posix.close(self.fd)
            self.fd = -1
            self._finish()
        elif data:
            self.left -= len(data)
            if self.left < 0:
                self.cancel()
                return
            self.calls.part(self.call, data)

    def _resume(self) -> None:
        self.calls.loop.watch(self.fd, POLL_READ, self._ready)

    def cancel(self) -> None:
        send_signal(self.pid, _signal.SIGKILL)

    def _exited(self, code: int) -> None:
        self.code = code
        self._finish()

    def _finish(self) -> None:
        if self.code is None or self.fd >= 0:
            return
        self.calls.running.pop(self.call, None)
        if self.code == 0:
            self.calls.reply(self.call, {})
        else:
            larger = f"there are more than {self.limit} bytes of it, which is as much as is taken out of a sandbox"
            self.calls.fail(self.call, "failed", larger if self.left < 0 or self.code == TOO_LARGE else self.failed)


def write_and_leave(write: Callable[[int], object], fd: int) -> None:
    code = 1
    try:
        write(fd)
        code = 0
    except OSError as error:
        code = TOO_LARGE if error.errno == errno.EFBIG else 1
    finally:
        posix._exit(code)


def write_tar(fd: int, paths: list[list[str]], limit: int) -> None:
    """Archive `[path, name]` pairs, leaving out what is missing or vanishes. Raises OSError when that
    cannot be known, and when there are more than `limit` bytes."""
    import tarfile

    with open(fd, "wb") as sink, tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        packer = Packer(archive, lambda member, folder, name: None, limit)
        for path, name in paths:
            base = path[path.rfind("/") + 1 :]
            above = folder_of(path) or "."
            if base in ("", ".", ".."):
                base, above = ".", path
            try:
                held = hold_own(above, posix.O_DIRECTORY)
            except OSError as error:
                must_be_absent(error)
                continue
            try:
                folder = posix.open(".", FOLDER, dir_fd=held)
            except OSError as error:
                must_be_absent(error)
                continue
            finally:
                posix.close(held)
            packer.add_tree(folder, base, name)
