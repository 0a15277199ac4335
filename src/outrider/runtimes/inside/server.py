"""The tool server: the one program of ours inside a sandbox. Standard library only, Python 3.8 or newer.

It answers calls from the host on one connection: commands, live shells, files, archives, and a bridge from 127.0.0.1
to the model gateway's socket. It knows nothing of sessions, of models, or of how it was isolated. Invariant: every
child it ever had, orphans included, is reaped here, and none outlives it.

The modules of this folder are joined into one program by `runtimes/bundle.py`, and start in bare interpreters: only
modules that load within a millisecond are imported at the top, rarer ones where they are used.
"""

from __future__ import annotations

import errno
import posix
from typing import TYPE_CHECKING

from outrider.runtimes.inside.bridge import Bridge
from outrider.runtimes.inside.calls import Calls
from outrider.runtimes.inside.connection import Connection
from outrider.runtimes.inside.files import Snapshot, write_file
from outrider.runtimes.inside.job import Job
from outrider.runtimes.inside.loop import Loop
from outrider.runtimes.inside.paths import folder_of, is_link, make_folders, same_file
from outrider.runtimes.inside.processes import kill_tree
from outrider.runtimes.inside.shell import Shell
from outrider.runtimes.inside.wire import Unpacker

if TYPE_CHECKING:
    import signal as _signal
    from typing import Any
else:
    import _signal  # `signal` would add half again to the start-up time

PR_SET_CHILD_SUBREAPER = 36


class Server:
    """The methods: `do_NAME(call, arguments)` for each NAME the host may call."""

    def __init__(self, loop: Loop, connection: Connection) -> None:
        self.loop = loop
        self.calls = Calls(loop, connection)
        self.shells: dict[int, Shell] = {}
        connection.on_frame = self.dispatch

    def dispatch(self, frame: bytes) -> None:
        call, method, args = Unpacker(frame).message()
        try:
            getattr(self, "do_" + method)(call, args)
        except FileNotFoundError as error:
            self.calls.fail(call, "missing", str(error))
        except IsADirectoryError as error:
            self.calls.fail(call, "directory", str(error))
        except (OSError, ValueError) as error:
            self.calls.fail(call, "failed", f"{type(error).__name__}: {error}")

    def do_configure(self, call: int, args: dict[str, Any]) -> None:
        self.calls.base_env = args["env"]
        self.calls.marking = args["mark"]
        if args["subreaper"]:
            import ctypes

            if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
                raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
        for path, data in args["files"].items():
            write_file(path, data, 0o644, False)
        for path in args["folders"]:
            make_folders(path)
        posix.chdir(args["workdir"])
        if args["bridge_port"]:
            self.bridge = Bridge(self.loop, args["bridge_port"], args["bridge_socket"])
        self.calls.reply(call, {})

    def do_exec(self, call: int, args: dict[str, Any]) -> None:
        Job(self.calls, call, args)

    def do_cancel(self, call: int, args: dict[str, Any]) -> None:
        cancel = self.calls.running.get(args["call"])
        if cancel is not None:
            cancel()

    def do_shell_open(self, call: int, args: dict[str, Any]) -> None:
        number = call  # unique already
        self.shells[number] = Shell(self.calls, number, args)
        self.calls.reply(call, {"shell": number})

    def do_shell_run(self, call: int, args: dict[str, Any]) -> None:
        shell = self.shells.get(args["shell"])
        if shell is None:
            self.calls.fail(call, "failed", "the shell is gone")
        else:
            shell.run(call, args["text"], args["ms"], args["cap"])

    def do_shell_close(self, call: int, args: dict[str, Any]) -> None:
        shell = self.shells.pop(args["shell"], None)
        if shell is not None:
            shell.close()
        self.calls.reply(call, {})

    def do_read(self, call: int, args: dict[str, Any]) -> None:
        fd = posix.open(args["path"], posix.O_RDONLY | posix.O_NONBLOCK | posix.O_CLOEXEC)
        try:
            kind = posix.fstat(fd).st_mode & 0o170000
            if kind == 0o040000:
                raise IsADirectoryError(errno.EISDIR, posix.strerror(errno.EISDIR), args["path"])
            if kind != 0o100000:
                raise ValueError("not a regular file: " + args["path"])
            self.calls.reply(call, {"data": posix.pread(fd, args["size"], args["offset"])})
        finally:
            posix.close(fd)

    def do_write(self, call: int, args: dict[str, Any]) -> None:
        write_file(args["path"], args["data"], args["mode"], args["append"])
        self.calls.reply(call, {})

    def do_link(self, call: int, args: dict[str, Any]) -> None:
        make_folders(folder_of(args["path"]) or ".")
        if is_link(args["path"]):
            posix.unlink(args["path"])
        posix.symlink(args["target"], args["path"])
        self.calls.reply(call, {})

    def do_folder(self, call: int, args: dict[str, Any]) -> None:
        make_folders(args["path"])
        self.calls.reply(call, {})

    def do_snapshot(self, call: int, args: dict[str, Any]) -> None:
        Snapshot(self.calls, call, args["paths"], args["limit"])

    def do_stop(self, call: int, args: dict[str, Any]) -> None:
        kill_tree({posix.getpid()})
        self.calls.reply(call, {})


def main() -> None:
    """Serve the connection on descriptors 0 and 1 until it ends, then kill and reap all that is left."""
    one = same_file(0, 1)
    fd_in = posix.dup(0)
    fd_out = fd_in if one else posix.dup(1)
    null = posix.open("/dev/null", posix.O_RDWR)
    for fd in (0, 1):
        posix.dup2(null, fd)
    close_others({0, 1, 2, fd_in, fd_out})
    posix.umask(0o022)
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    loop = Loop()
    Server(loop, Connection(loop, fd_in, fd_out))
    loop.run()
    kill_tree({posix.getpid()})


def close_others(kept: set[int]) -> None:
    """Nothing that the host's process happened to have open may reach a program in here."""
    start = 0
    for fd in sorted(kept):
        if start < fd:  # closerange(0, 0) closes everything on kernels with close_range
            posix.closerange(start, fd)
        start = fd + 1
    posix.closerange(start, posix.sysconf("SC_OPEN_MAX"))
