"""Runs one command, from its start to the reply. At its time limit, or if the host cancels the call, the command and
its descendants are killed.

Invariant: an output stream takes at most 1.5 times its maximum size (`cap`) plus one read (256 KiB) of memory, however
much is written to it.
"""

from __future__ import annotations

import posix
import time
from typing import TYPE_CHECKING

from outrider.sandbox.runtimes.guest.connection import Calls
from outrider.sandbox.runtimes.guest.poll_loop import POLL_READ, Loop, PipeWriter, read_ready
from outrider.sandbox.runtimes.guest.processes import kill_tree, pipes, spawn

if TYPE_CHECKING:
    from typing import Any

READS_AT_END = 16
"""Maximum number of reads that collect the rest of the output after a program has ended. A pipe holds at most 1 MiB,
and each read takes 256 KiB, so this is enough. Without a maximum, a child that keeps writing would occupy the server
forever."""


class Capture:
    """Keeps the first and the last `cap` / 2 bytes of a stream. After `take`, further data is dropped. The host sends
    `cap`, which is `MAX_OUTPUT` in `sandbox/runtimes/base.py`."""

    def __init__(self, cap: int) -> None:
        self.half = max(1, cap // 2)
        self.head = bytearray()
        self.tail = bytearray()
        self.cut = 0

    def add(self, data: bytes) -> None:
        room = self.half - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        if data and self.half:
            self.tail += data
            if len(self.tail) > 2 * self.half:  # only at twice the size, because each trim copies the tail
                self._trim()

    def _trim(self) -> None:
        extra = len(self.tail) - self.half
        if extra > 0:
            del self.tail[:extra]
            self.cut += extra

    def take(self) -> bytes:
        self._trim()
        note = b"\n[... %d bytes cut ...]\n" % self.cut if self.cut else b""
        whole = bytes(self.head + note + self.tail)
        self.half = 0
        self.head = self.tail = bytearray()
        return whole


class Drain:
    """Reads a file descriptor until its end, and passes the data to a capture."""

    def __init__(self, loop: Loop, fd: int, capture: Capture) -> None:
        self.loop = loop
        self.fd = fd
        self.capture = capture
        self.open = True
        posix.set_blocking(fd, False)
        loop.watch(fd, POLL_READ, self.ready)

    def ready(self, events: int) -> bool:
        """Read one piece of data. Returns whether there was any."""
        data = read_ready(self.fd) if self.open else b""
        if data is None:
            self.open = False
            self.loop.unwatch(self.fd)
            posix.close(self.fd)
        elif data:
            self.capture.add(data)
        return bool(data)

    def finish(self) -> bytes:
        """Return the output so far. If it is longer than the capture allows, its middle is missing."""
        for _ in range(READS_AT_END):
            if not self.ready(0):
                break
        return self.capture.take()


class Command:
    """One command, from its start to the reply. The reply does not wait for children that outlive the command.

    Such children keep the command's pipes open. Their later output is read and dropped, because a full pipe would block
    them, and a closed pipe would kill them with SIGPIPE."""

    def __init__(self, calls: Calls, call: int, args: dict[str, Any]) -> None:
        self.calls = calls
        self.call = call
        self.cap = args["cap"]
        self.limit_hit = False
        self.started = time.monotonic()
        self.mark = calls.mark(call)
        self.pid, self.drains = self._start(args)
        calls.loop.exits[self.pid] = self.exited
        calls.loop.at(self, args["ms"] / 1000, self.expire)
        calls.running[call] = self.cancel

    def _start(self, args: dict[str, Any]) -> tuple[int, list[Drain]]:
        env = self.calls.environment(args["env"], self.call)
        argv = args["argv"] or [self.calls.shell(), "-c", args["script"]]
        out, *more = pipes(1 + (not args["merged"]) + bool(args["stdin"]))
        err = out if args["merged"] else more[0]
        source, sink = more[-1] if args["stdin"] else (-1, -1)
        try:
            if source < 0:
                source = posix.open("/dev/null", posix.O_RDONLY)
            pid = spawn(argv, env, args["cwd"], {0: source, 1: out[1], 2: err[1]})
        except OSError:
            for fd in {out[0], err[0], sink} - {-1}:
                posix.close(fd)
            raise
        finally:
            for fd in {source, out[1], err[1]} - {-1}:
                posix.close(fd)
        if sink >= 0:
            posix.set_blocking(sink, False)
            PipeWriter(self.calls.loop, sink, lambda gone: posix.close(sink)).write(args["stdin"])
        readers = [out[0]] if args["merged"] else [out[0], err[0]]
        return pid, [Drain(self.calls.loop, fd, Capture(self.cap)) for fd in readers]

    def expire(self) -> None:
        self.limit_hit = True
        self.cancel()

    def cancel(self) -> None:
        """Kill the command and all its descendants. The reply follows when the server collects the command's exit
        code."""
        kill_tree({self.pid}, self.mark)

    def exited(self, code: int) -> None:
        self.calls.loop.timers.pop(self, None)
        self.calls.running.pop(self.call, None)
        done = {
            "code": None if self.limit_hit else code,
            "out": self.drains[0].finish(),
            "err": self.drains[1].finish() if len(self.drains) > 1 else b"",
            "timed_out": self.limit_hit,
            "us": int((time.monotonic() - self.started) * 1e6),
        }
        self.calls.reply(self.call, done)
