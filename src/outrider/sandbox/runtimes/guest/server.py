"""The tool server: Outrider's program inside each sandbox. It needs only the standard library, and Python 3.8 or newer.

The server carries out calls that the host sends over one connection. The calls run commands and live shells, and
transfer files and archives. In a sandbox with its own network, the server also forwards connections from 127.0.0.1 to
the model gateway. They go through the gateway's socket or, if the sandbox is on another machine, through the connection
to the host. Invariant: the server collects the exit codes of all its children, including adopted orphans. Before it
exits, it kills all its descendants.

`runtimes/tool_server/bundle.py` joins the modules of this folder into one program. Modules that take more than a
millisecond to load are imported only in the functions that need them.
"""

from __future__ import annotations

import errno
import posix
from typing import TYPE_CHECKING

from outrider.sandbox.runtimes.guest.bridge import Bridge
from outrider.sandbox.runtimes.guest.child_reply import ChildReply
from outrider.sandbox.runtimes.guest.command import Command
from outrider.sandbox.runtimes.guest.connection import Calls, HostConnection
from outrider.sandbox.runtimes.guest.filesystem.files import open_file, write_all, write_file, write_tar
from outrider.sandbox.runtimes.guest.filesystem.glob import found_paths
from outrider.sandbox.runtimes.guest.filesystem.paths import folder_of, is_link, make_folders
from outrider.sandbox.runtimes.guest.filesystem.restore import Restore
from outrider.sandbox.runtimes.guest.memory_watch import MemoryWatch
from outrider.sandbox.runtimes.guest.msgpack import Unpacker
from outrider.sandbox.runtimes.guest.netlink_watch import NetlinkWatch
from outrider.sandbox.runtimes.guest.poll_loop import Loop
from outrider.sandbox.runtimes.guest.process_watch import ProcessWatch
from outrider.sandbox.runtimes.guest.processes import SPARE, kill_tree, read_or_empty
from outrider.sandbox.runtimes.guest.shells.shell import LiveShell
from outrider.sandbox.runtimes.guest.tunnel import Tunnel

if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable
    from typing import Any
else:
    import _signal  # importing `signal` would make the start longer by half

PR_SET_CHILD_SUBREAPER = 36
SEARCH_SECONDS = 60
SEARCH_BYTES = 64 << 20
"""Limits of a child that searches files, in seconds and in bytes of its result. Limits are needed, because an agent can
make a tree whose search would never end."""
SEARCH_FAILED = f"it failed, or took longer than {SEARCH_SECONDS} s"


class Server:
    """Carries out the host's calls. The method `do_NAME(call, arguments)` handles the call NAME."""

    def __init__(
        self, loop: Loop, fd: int, save_layers: Callable[[int], None] | None, gateway: int, out: int = -1
    ) -> None:
        self.loop = loop
        self.save_layers = save_layers
        self.gateway = gateway
        self.calls = Calls(loop, HostConnection(loop, fd, self.dispatch, out))
        self.shells: dict[int, LiveShell] = {}
        self.restores: dict[int, Restore] = {}
        self.watch: ProcessWatch | None = None
        self.tunnel: Tunnel | None = None

    def dispatch(self, frame: bytes) -> None:
        call, method, args = Unpacker(frame).value()
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
        self.calls.sandbox_mark = args["mark"]
        self.calls.python = args["python"]
        if args["own_processes"]:
            self.watch = ProcessWatch(self.loop)
            self.loop.watchers.append(self.watch.note_exit)
        if args["subreaper"]:
            import ctypes

            # Make the server adopt orphans among its descendants, so that it can still find and kill the orphans. The
            # first process of a pid namespace adopts orphans without this setting.
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
            MemoryWatch(self.loop, args["memory"])
        if args["bridge_port"]:
            socket = f"/proc/self/fd/{self.gateway}" if self.gateway >= 0 else args["bridge_socket"]
            Bridge(self.loop, args["bridge_port"], socket)
            # NetlinkWatch runs only in a sandbox with a bridge, because such a sandbox has its own network. In the
            # host's network, NetlinkWatch would also count the sockets of other programs.
            NetlinkWatch(self.loop)
        self.calls.reply(call, {})

    def expire(self) -> None:
        """End the sandbox, because its lifetime is over. Without a lifetime, the sandbox of a killed node would run
        forever."""
        kill_tree({posix.getpid()})
        for call in self.calls.running:
            self.calls.fail(call, "ended", "the sandbox has come to the end of its lifetime")
        self.loop.stop()

    def do_exec(self, call: int, args: dict[str, Any]) -> None:
        if self.watch is not None:
            self.watch.hurry()
        Command(self.calls, call, args)

    def do_processes(self, call: int, args: dict[str, Any]) -> None:
        self.calls.reply(call, {"processes": []} if self.watch is None else self.watch.report())

    def do_cancel(self, call: int, args: dict[str, Any]) -> None:
        cancel = self.calls.running.get(args["call"])
        if cancel is not None:
            cancel()

    def do_shell_open(self, call: int, args: dict[str, Any]) -> None:
        # The call's number is unique on this connection, so it also becomes the shell's number. `LiveShell` replies to
        # the call.
        self.shells[call] = LiveShell(self.calls, call, args)

    def do_shell_run(self, call: int, args: dict[str, Any]) -> None:
        shell = self.shells.get(args["shell"])
        if self.watch is not None:
            self.watch.hurry()
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
        try:
            fd = open_file(args["path"], args["follow"])
        except NotADirectoryError as error:  # a parent of the path is a file
            raise FileNotFoundError(str(error)) from error
        try:
            self.calls.reply(call, {"data": posix.pread(fd, args["size"], args["offset"])})
        finally:
            posix.close(fd)

    def do_environ(self, call: int, args: dict[str, Any]) -> None:
        """Reply with the environment that this process got at its start. In a container, this environment includes the
        image's variables."""
        self.calls.reply(call, {"data": read_or_empty("/proc/self/environ")})

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
            kill_all_below()
        ChildReply(
            self.calls,
            call,
            lambda fd: write_tar(fd, args["paths"], args["limit"]),
            limit=args["limit"],
            failed="snapshot failed",
        )

    def do_save_layer(self, call: int, args: dict[str, Any]) -> None:
        """Send an archive of the writable layers. First kill all other processes, so that no file changes meanwhile."""
        if self.save_layers is None:
            raise ValueError("this sandbox has no writable layer")
        kill_all_below()
        ChildReply(self.calls, call, self.save_layers, limit=args["limit"], failed="snapshot failed")

    def do_glob(self, call: int, args: dict[str, Any]) -> None:
        ChildReply(
            self.calls,
            call,
            lambda fd: write_all(fd, found_paths(args["root"], args["pattern"], args["limit"])),
            limit=SEARCH_BYTES,
            failed=SEARCH_FAILED,
            seconds=SEARCH_SECONDS,
        )

    def do_restore(self, call: int, args: dict[str, Any]) -> None:
        restore = self.restores.get(args["key"]) or Restore(self.calls, args["roots"], args["limit"])
        if args["last"]:
            self.restores.pop(args["key"], None)
        else:
            self.restores[args["key"]] = restore
        restore.feed(call, args["data"], args["last"])

    def do_drop_restore(self, call: int, args: dict[str, Any]) -> None:
        """End a restore that the host has abandoned. Sends no reply."""
        restore = self.restores.pop(args["key"], None)
        if restore is not None:
            restore.cancel()

    def do_tunnel(self, call: int, args: dict[str, Any]) -> None:
        """Forward connections to the model gateway through the connection to the host, until the call is cancelled."""
        self.tunnel = Tunnel(self.loop, args["port"], self.calls, call)

    def do_tunnel_data(self, call: int, args: dict[str, Any]) -> None:
        """Pass bytes from the gateway to a client. Sends no reply."""
        if self.tunnel is not None:
            self.tunnel.take(args["client"], args["data"])

    def do_tunnel_drop(self, call: int, args: dict[str, Any]) -> None:
        """Close a client's connection. Sends no reply."""
        if self.tunnel is not None:
            self.tunnel.drop(args["client"])

    def do_stop(self, call: int, args: dict[str, Any]) -> None:
        self.calls.reply(call, {"left": len(kill_tree({posix.getpid()}))})


def kill_all_below() -> None:
    """Kill all descendants of this process. Raises OSError if any stays alive."""
    left = kill_tree({posix.getpid()})
    if left:
        raise OSError(errno.EBUSY, f"{len(left)} processes in the sandbox cannot be killed")


def preload() -> None:
    """Import all modules that functions would otherwise import only when they are called. After this process has
    changed its root, it can no longer import from the standard library."""
    import _socket
    import ctypes
    import fcntl
    import fnmatch
    import tarfile
    import termios

    assert all((_socket, ctypes, fcntl, fnmatch, tarfile, termios))


def main() -> None:
    """Serve the host's connection on descriptors 0 and 1 (see `serve`)."""
    # Move the connection to another descriptor, because every program would inherit 0 and 1.
    connection = posix.dup(0)
    _without_programs({connection})
    serve(connection)


def main_on_pipes() -> None:
    """Serve like `main`, but on two pipes: descriptor 0 for reading, and descriptor 1 for writing."""
    connection, out = posix.dup(0), posix.dup(1)
    _without_programs({connection, out})
    serve(connection, out=out)


def _without_programs(kept: set[int]) -> None:
    """Prepare this process for starting programs. Descriptors 0 and 1 lead to /dev/null. All other descriptors are
    closed, except 2 and those in `kept`. The umask becomes 022."""
    null = posix.open("/dev/null", posix.O_RDWR)
    for fd in (0, 1):
        posix.dup2(null, fd)
    close_others({0, 1, 2, *kept})
    posix.umask(0o022)


def serve(fd: int, *, save_layers: Callable[[int], None] | None = None, gateway: int = -1, out: int = -1) -> None:
    """Serve a connection until it ends, or until the sandbox's lifetime is over. Then kill all descendants of this
    process.

    out: the pipe for writing, if the connection consists of two pipes (see `HostConnection`).
    save_layers: a function that writes an archive of the sandbox's writable layers to a descriptor. None without
        layers.
    gateway: a descriptor of the gateway's socket, for a sandbox in which no path leads to the socket."""
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    SPARE.hold()
    loop = Loop()
    Server(loop, fd, save_layers, gateway, out)
    loop.run()
    kill_tree({posix.getpid()})


def close_others(kept: set[int]) -> None:
    """Close all descriptors except `kept`, so that programs in the sandbox inherit none from the host."""
    start = 0
    for fd in sorted(kept):
        if start < fd:  # with a C library that has close_range, closerange(0, 0) would close everything
            posix.closerange(start, fd)
        start = fd + 1
    posix.closerange(start, posix.sysconf("SC_OPEN_MAX"))
