"""The tool server: the one program of ours inside a sandbox. Standard library only, Python 3.8 or newer.

It answers calls from the host on one connection: commands, live shells, files, archives, and a bridge from 127.0.0.1
to the model gateway's socket. It knows nothing of sessions, of models, or of how it was isolated. Invariant: every
child it ever had, orphans included, is reaped here, and none outlives it.

`runtimes/tool_server/bundle.py` joins the modules of this folder into one program, which starts in bare interpreters:
only modules that load within a millisecond are imported at the top, rarer ones where they are used.
"""

from __future__ import annotations

import errno
import posix
from typing import TYPE_CHECKING

from outrider.runtimes.guest.bridge import Bridge
from outrider.runtimes.guest.calls import Calls
from outrider.runtimes.guest.connection import Connection
from outrider.runtimes.guest.filesystem.files import Snapshot, write_file, write_tar
from outrider.runtimes.guest.filesystem.glob import Helper, found_paths, patched_files
from outrider.runtimes.guest.filesystem.host_reads import open_own
from outrider.runtimes.guest.filesystem.paths import folder_of, is_link, make_folders, same_file
from outrider.runtimes.guest.filesystem.restore import Restore
from outrider.runtimes.guest.job import Job
from outrider.runtimes.guest.memory_watch import Watch
from outrider.runtimes.guest.msgpack import Unpacker
from outrider.runtimes.guest.poll_loop import Loop
from outrider.runtimes.guest.processes import kill_tree, slurp
from outrider.runtimes.guest.shells.bash import Terminal
from outrider.runtimes.guest.shells.interpreter import Interpreter
from outrider.runtimes.guest.shells.shell import Shell

if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable
    from typing import Any
else:
    import _signal  # `signal` would add half again to the start-up time

PR_SET_CHILD_SUBREAPER = 36


class Server:
    """The methods: `do_NAME(call, arguments)` for each NAME the host may call."""

    def __init__(
        self, loop: Loop, connection: Connection, save_layers: Callable[[int], None] | None, gateway: int
    ) -> None:
        self.loop = loop
        self.save_layers = save_layers
        self.gateway = gateway
        self.calls = Calls(loop, connection)
        self.shells: dict[int, Shell] = {}
        self.restores: dict[int, Restore] = {}
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
        self.calls.python = args["python"]
        if args["subreaper"]:
            import ctypes

            if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
                raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
        for path, data in args["files"].items():
            write_file(path, data, 0o644, False)
        for path in args["folders"]:
            make_folders(path)
        posix.chdir(args["workdir"])
        if args["lifetime"]:
            self.loop.at(self, args["lifetime"] / 1000, self.expire)
        if args["memory"]:
            Watch(self.loop, args["memory"])
        if args["bridge_port"]:
            held = f"/proc/self/fd/{self.gateway}" if self.gateway >= 0 else ""
            self.bridge = Bridge(self.loop, args["bridge_port"], held or args["bridge_socket"])
        self.calls.reply(call, {})

    def expire(self) -> None:
        """The sandbox has lived as long as it may."""
        kill_tree({posix.getpid()})
        for call in self.calls.running:
            self.calls.fail(call, "ended", "the sandbox has come to the end of its lifetime")
        self.loop.stopped = True

    def do_exec(self, call: int, args: dict[str, Any]) -> None:
        Job(self.calls, call, args)

    def do_cancel(self, call: int, args: dict[str, Any]) -> None:
        cancel = self.calls.running.get(args["call"])
        if cancel is not None:
            cancel()

    def do_shell_open(self, call: int, args: dict[str, Any]) -> None:
        number = call  # unique already
        if args["kind"] == "bash":
            self.shells[number] = Terminal(self.calls, number, args)
            self.calls.reply(call, {"shell": number})
        else:
            self.shells[number] = Interpreter(self.calls, number, args)

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
        fd = open_own(args["path"], args["follow"])
        try:
            self.calls.reply(call, {"data": posix.pread(fd, args["size"], args["offset"])})
        finally:
            posix.close(fd)

    def do_environ(self, call: int, args: dict[str, Any]) -> None:
        """What this process was started with."""
        self.calls.reply(call, {"data": slurp("/proc/self/environ")})

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
        if args["alone"]:
            end_all()
        Snapshot(self.calls, call, args["limit"], lambda fd: write_tar(fd, args["paths"], args["limit"]))

    def do_save_layer(self, call: int, args: dict[str, Any]) -> None:
        """All else that runs is ended first: what is saved is what it left."""
        if self.save_layers is None:
            raise ValueError("this sandbox has no layer of its own")
        end_all()
        Snapshot(self.calls, call, args["limit"], self.save_layers)

    def do_glob(self, call: int, args: dict[str, Any]) -> None:
        Helper(self.calls, call, lambda: found_paths(args["root"], args["pattern"], args["limit"]))

    def do_patch(self, call: int, args: dict[str, Any]) -> None:
        Helper(self.calls, call, lambda: patched_files(args["cwd"], args["text"], args["size"]))

    def do_restore(self, call: int, args: dict[str, Any]) -> None:
        restore = self.restores.get(args["key"]) or Restore(self.calls, args["roots"], args["limit"])
        if args["last"]:
            self.restores.pop(args["key"], None)
        else:
            self.restores[args["key"]] = restore
        restore.feed(call, args["data"], args["last"])

    def do_stop(self, call: int, args: dict[str, Any]) -> None:
        self.calls.reply(call, {"left": len(kill_tree({posix.getpid()}))})


def end_all() -> None:
    """Raises OSError when something stays alive."""
    left = kill_tree({posix.getpid()})
    if left:
        raise OSError(errno.EBUSY, f"{len(left)} processes in the sandbox cannot be killed")


def preload() -> None:
    """Import now what is otherwise imported where it is used: for a process that is about to change its root."""
    import _socket
    import ctypes
    import fcntl
    import fnmatch
    import tarfile
    import termios

    assert all((_socket, ctypes, fcntl, fnmatch, tarfile, termios))


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
    serve(fd_in, fd_out)


def serve(fd_in: int, fd_out: int, *, save_layers: Callable[[int], None] | None = None, gateway: int = -1) -> None:
    """Serve one connection. `save_layers` writes an archive of the sandbox's writable layers, where it has any;
    `gateway` is a descriptor of the gateway's socket, where no path inside leads to it."""
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    loop = Loop()
    Server(loop, Connection(loop, fd_in, fd_out), save_layers, gateway)
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
