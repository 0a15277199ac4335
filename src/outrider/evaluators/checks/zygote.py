"""The zygote: the process from which the checks of one library are forked.

It has imported and warmed up the library, so that a fork takes only milliseconds. It has also confined itself
(`confinement.py`). Each check runs in its own fork, sees no data of other checks, and can be killed without affecting
other checks. The zygote is started by `python -I -S -c`, with one end of a control socket as standard input.

A request is one message in the format LIMITS on the control socket, with one file descriptor: the connection of the new
check. The check reads a JSON object from its connection until the end of input, and writes its result as a JSON object.
Then the zygote adds a last line with the result of `os.wait4`: `{"status", "seconds"}`.

Invariants:

- The zygote has one thread. Only the forks read answers.
- A check is killed when its caller closes the check's connection.
- The last line follows every exit of a check, unless the caller has left earlier output unread or the zygote is ending.
- Every check is killed when the control socket closes or the zygote exits.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import resource
import select
import signal
import socket
import struct
import sys
from typing import TYPE_CHECKING

from outrider.evaluators.checks.confinement import confine_check, confine_zygote
from outrider.sandbox.runtimes.guest.isolation import syscalls
from outrider.sandbox.runtimes.guest.server import close_others

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LIMITS = struct.Struct("dQi")
"""Format of a request: seconds of processor time, bytes of memory in addition to the loaded library's, and niceness to
add to the check."""
PIECE = 1 << 16


class CheckForker:
    """Forks checks, kills checks whose caller has closed the connection, and reports how each check ended."""

    def __init__(self, control: socket.socket, check: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._control = control
        self._check = check
        self._null = os.open(os.devnull, os.O_RDWR)
        with open("/proc/self/statm", "rb") as file:
            self._loaded = int(file.read().split()[0]) * resource.getpagesize()
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._pids: dict[int, int] = {}
        """Process ids of checks, by the descriptor of the connection."""
        self._ends: dict[int, socket.socket] = {}
        """Connections, by the pidfd of the check."""

    def serve(self) -> None:
        """Serve requests until the control socket closes."""
        while True:
            ready = dict(self._poll.poll())
            # Handle the control socket last. Otherwise a new check could get the number of a descriptor that was just
            # closed. An event that is left over for the closed descriptor would then count as an event of the new
            # check.
            asked = ready.pop(self._control.fileno(), 0)
            for fd in ready:
                if fd in self._ends:
                    self._ended(fd)
                elif fd in self._pids:  # the caller has closed the connection
                    os.kill(self._pids[fd], signal.SIGKILL)
                    self._poll.unregister(fd)
            if asked and not self._take():
                for pid in self._pids.values():
                    os.kill(pid, signal.SIGKILL)
                for pid in self._pids.values():
                    os.waitpid(pid, 0)  # the zygote must not exit before its checks
                return

    def _take(self) -> bool:
        """Read a request from the control socket, and fork a check for it. Returns False if the socket is closed."""
        message, fds, _, _ = socket.recv_fds(self._control, LIMITS.size, 1)
        if not message:
            return False
        if fds:  # if no file descriptor is free, the kernel drops the connection, and the caller finds it closed
            end = socket.socket(fileno=fds[0])
            pid = os.fork()
            if pid == 0:
                self._become(end, *LIMITS.unpack(message))
            pidfd = os.pidfd_open(pid)
            self._pids[end.fileno()], self._ends[pidfd] = pid, end
            self._poll.register(pidfd, select.POLLIN)
            self._poll.register(end, 0)  # the poll reports only that the connection was closed
        return True

    def _ended(self, pidfd: int) -> None:
        end = self._ends.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        pid = self._pids.pop(end.fileno())
        _, status, used = os.wait4(pid, 0)
        with contextlib.suppress(KeyError):  # the connection was unregistered when the caller closed it
            self._poll.unregister(end)
        usage = {"status": status, "seconds": used.ru_utime + used.ru_stime}
        # If the caller no longer reads, or has left earlier output unread, the connection closes without this line.
        with contextlib.suppress(OSError):
            end.send(b"\n" + json.dumps(usage).encode(), socket.MSG_DONTWAIT)
        # A check that was killed early has left a part of the request unread. Refuse what still comes, and read this
        # part: if the connection closed with unread data, it would be reset, and the line just sent could be lost.
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RD)
            while end.recv(PIECE, socket.MSG_DONTWAIT):
                pass
        end.close()

    def _become(self, end: socket.socket, seconds: float, memory: int, nicer: int) -> None:
        """Run the check in the forked process, then exit. Never returns."""
        code = 1
        try:
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
            os.dup2(self._null, 2)
            connection = end.detach()
            close_others({2, connection})  # the fork has inherited the connections of other checks
            os.nice(nicer)
            confine_check(seconds, self._loaded + memory)
            request = b""
            while piece := os.read(connection, PIECE):
                request += piece
            answer = json.dumps(self._check(json.loads(request))).encode()
            while answer:
                answer = answer[os.write(connection, answer) :]
            code = 0
        finally:  # after an exception, the fork must not continue as a second zygote
            os._exit(code)


def main(module: str) -> None:
    """Serve the control socket on file descriptor 0 until it closes. `module` names the module with the check."""
    sys.dont_write_bytecode = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Silence the libraries, which log each text that they cannot parse. The verdict's reason reports such a text
    # instead.
    logging.disable(logging.CRITICAL)
    checks = importlib.import_module(module)
    checks.warm_up()
    control = socket.socket(fileno=os.dup(0))
    control.setblocking(True)
    zygote = CheckForker(control, checks.check)
    confine_zygote()
    gc.collect()
    gc.freeze()  # a garbage collection in a fork would write to every shared page, and so copy it
    zygote.serve()
    os._exit(0)  # a normal exit could wait for threads or exit handlers of libraries
