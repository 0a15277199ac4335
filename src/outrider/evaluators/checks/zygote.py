"""The process that the checks of one library are forked from: the library is imported, warm, and confined.

A fork costs milliseconds and has everything loaded; each check has one of its own, so that none sees what another left,
and one that hangs is killed without any other noticing. The process is started by `python -I -S -c` with one end of a
socket as its standard input. It reads no answer itself. Invariants: it has one thread; a check whose connection is
hung up is killed; the last line on a check's connection is always this process's, written after the check is dead; and
when its own socket ends, or it dies, every check dies with it.

A request is one message, `LIMITS`, with one descriptor: the check's connection. On that, the check reads a JSON object
to its end and writes one; then comes a line with how it ended, `{"status", "seconds"}`: what `os.wait4` says.
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
from outrider.runtimes.guest.isolation import syscalls
from outrider.runtimes.guest.server import close_others

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LIMITS = struct.Struct("dQi")
"""Seconds of processor time, bytes of memory beside what is loaded already, and by how much the check is nicer."""
PIECE = 1 << 16


class Zygote:
    """Forks checks, kills those that nobody waits for, and says how each ended."""

    def __init__(self, control: socket.socket, check: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._control = control
        self._check = check
        self._null = os.open(os.devnull, os.O_RDWR)
        with open("/proc/self/statm", "rb") as file:
            self._loaded = int(file.read().split()[0]) * resource.getpagesize()
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._pids: dict[int, int] = {}
        """By the descriptor of a check's connection."""
        self._ends: dict[int, socket.socket] = {}
        """Connections, by the pidfd of the check."""

    def serve(self) -> None:
        """Until the socket ends."""
        while True:
            ready = dict(self._poll.poll())
            # Last: what is opened for a new check may get the number of what was closed for an old one.
            asked = ready.pop(self._control.fileno(), 0)
            for fd in ready:
                if fd in self._ends:
                    self._ended(fd)
                elif fd in self._pids:  # nobody waits for it any more
                    os.kill(self._pids[fd], signal.SIGKILL)
                    self._poll.unregister(fd)
            if asked and not self._take():
                self._kill_all()
                return

    def _kill_all(self) -> None:
        """None of the checks outlives this process: whoever waits for its end may then look for what is left."""
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)
        for pid in self._pids.values():
            os.waitpid(pid, 0)

    def _take(self) -> bool:
        """Take a request and fork a check for it; whether there was one."""
        message, fds, _, _ = socket.recv_fds(self._control, LIMITS.size, 1)
        if not message:
            return False
        if fds:  # else there was no room for it, and its other end is told so
            end = socket.socket(fileno=fds[0])
            pid = os.fork()
            if pid == 0:
                self._become(end, *LIMITS.unpack(message))
            pidfd = os.pidfd_open(pid)
            self._pids[end.fileno()], self._ends[pidfd] = pid, end
            self._poll.register(pidfd, select.POLLIN)
            self._poll.register(end, 0)  # only that it is hung up
        return True

    def _ended(self, pidfd: int) -> None:
        end = self._ends.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        pid = self._pids.pop(end.fileno())
        _, status, used = os.wait4(pid, 0)
        with contextlib.suppress(KeyError):  # it was hung up
            self._poll.unregister(end)
        told = {"status": status, "seconds": used.ru_utime + used.ru_stime}
        # Where nobody reads it, or not what came before it, the connection ends without it.
        with contextlib.suppress(OSError):
            end.send(b"\n" + json.dumps(told).encode(), socket.MSG_DONTWAIT)
        # A check that was killed early has left some of its request unread. Closed as it is, the connection would be
        # reset, and what was just sent not be read.
        with contextlib.suppress(OSError):
            while end.recv(PIECE, socket.MSG_DONTWAIT):
                pass
        end.close()

    def _become(self, end: socket.socket, seconds: float, memory: int, nicer: int) -> None:
        """In the child: do the check, and end."""
        code = 1
        try:
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
            os.dup2(self._null, 2)
            connection = end.detach()
            close_others({2, connection})  # also those of other checks
            os.nice(nicer)
            confine_check(seconds, self._loaded + memory)
            request = b""
            while piece := os.read(connection, PIECE):
                request += piece
            answer = json.dumps(self._check(json.loads(request))).encode()
            while answer:
                answer = answer[os.write(connection, answer) :]
            code = 0
        finally:  # whatever it raises, this process must not go on as a second zygote
            os._exit(code)


def main(module: str) -> None:
    """Serve the socket on descriptor 0 until it ends, with the checks of the module."""
    sys.dont_write_bytecode = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)  # libraries log what they cannot parse: the verdict's reason says it
    checks = importlib.import_module(module)
    checks.warm_up()
    control = socket.socket(fileno=os.dup(0))
    control.setblocking(True)
    zygote = Zygote(control, checks.check)
    confine_zygote()
    gc.collect()
    gc.freeze()  # a collection in a fork would write to, and so copy, every page that it shares with us
    zygote.serve()
    os._exit(0)  # libraries may have left threads or handlers that take their time
