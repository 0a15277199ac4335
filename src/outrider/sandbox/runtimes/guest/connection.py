"""The tool server's connection to the host. It sends and receives frames without blocking, and replies to calls.

A frame holds one message (see msgpack.py). Invariants: frames are sent in the order in which `send` was called. The
server answers each call from the host with any number of parts, and then exactly one "ok" or "error", unless the
connection ends first.
"""

from __future__ import annotations

import posix
import select
from typing import TYPE_CHECKING

from outrider.sandbox.runtimes.guest.filesystem.paths import DEFAULT_PATH, find_program
from outrider.sandbox.runtimes.guest.msgpack import pack
from outrider.sandbox.runtimes.guest.poll_loop import CHUNK, POLL_READ, Loop, read_ready

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class HostConnection:
    """Sends and receives frames over the socket `fd`. If `out` is given, the connection consists of two pipes instead:
    it reads from `fd`, and writes to `out`. Each received frame is passed to `on_frame`. When the connection ends, the
    loop stops, and later messages are dropped."""

    def __init__(self, loop: Loop, fd: int, on_frame: Callable[[bytes], object], out: int = -1) -> None:
        self.loop = loop
        self.fd = fd
        self.out = fd if out < 0 else out
        self.received = bytearray()
        self.outgoing = bytearray()
        self.on_frame = on_frame
        self.open = True
        posix.set_blocking(fd, False)
        posix.set_blocking(self.out, False)
        self._watch()

    def send(self, message: object) -> None:
        if not self.open:
            return
        start = len(self.outgoing)
        self.outgoing += b"\0\0\0\0"  # replaced below by the length of the packed message
        pack(message, self.outgoing)
        self.outgoing[start : start + 4] = (len(self.outgoing) - start - 4).to_bytes(4, "big")
        if start == 0:  # if older bytes are still waiting, the loop sends all of them when `out` is writable
            self._flush()

    def _watch(self) -> None:
        writes = select.POLLOUT if self.outgoing else 0
        if self.out == self.fd:
            self.loop.watch(self.fd, POLL_READ | writes, self._ready)
            return
        self.loop.watch(self.fd, POLL_READ, self._ready)
        if writes:
            self.loop.watch(self.out, writes, self._writable)
        else:
            self.loop.unwatch(self.out)

    def _writable(self, events: int) -> None:
        """Handle poll events of the pipe for writing. The pipe has become writable, or its reader has closed it."""
        self._flush()
        if self.open:
            self._watch()

    def _flush(self) -> None:
        try:
            while self.outgoing:
                del self.outgoing[: posix.write(self.out, self.outgoing[:CHUNK])]
        except BlockingIOError:
            self._watch()
        except OSError:
            self._end()

    def _end(self) -> None:
        self.open = False
        self.outgoing.clear()
        for fd in {self.fd, self.out}:
            self.loop.unwatch(fd)
            posix.close(fd)
        self.loop.stop()

    def _ready(self, events: int) -> None:
        if events & select.POLLOUT:
            self._flush()
            if self.open:
                self._watch()
        if events & POLL_READ and self.open:
            data = read_ready(self.fd)
            if data is None:
                self._end()
                return
            self.received += data
            while len(self.received) >= 4:
                size = int.from_bytes(self.received[:4], "big")
                if len(self.received) < 4 + size:
                    return
                frame = bytes(self.received[4 : 4 + size])
                del self.received[: 4 + size]
                self.on_frame(frame)


class Calls:
    """State that all calls share, and functions that reply to calls. `running` maps the number of each cancellable call
    to the function that cancels it."""

    def __init__(self, loop: Loop, connection: HostConnection) -> None:
        self.loop = loop
        self.connection = connection
        self.running: dict[int, Callable[[], object]] = {}
        self.base_env: dict[str, str] = {}
        self.sandbox_mark = ""
        """The mark that distinguishes this sandbox's processes from all others on the host."""
        self.python: list[str] = []
        """The command that starts Python in a sandbox without a Python of its own."""
        self.known_shell = ""

    def environment(self, extra: dict[str, str], owner: int) -> dict[str, str]:
        """Return the environment for a program that `owner` starts. `owner` is the number of a call, or the negative
        number of a shell."""
        env = dict(self.base_env)
        env.update(extra)
        env["OUTRIDER_CALL"] = f"{self.sandbox_mark}:{owner}"
        return env

    def mark(self, owner: int) -> bytes:
        """Return the entry that marks the environment of each program of `owner`.

        A program that leaves its session and outlives its parent becomes a child of this server. Only this entry then
        shows which `owner` started the program. By the entry, the program is found and killed, for example at a time
        limit."""
        return f"OUTRIDER_CALL={self.sandbox_mark}:{owner}\0".encode()

    def shell(self) -> str:
        """Return the shell of this sandbox: bash if it is installed, otherwise sh. PATH is searched only at the first
        call."""
        if not self.known_shell:
            path = self.base_env.get("PATH", DEFAULT_PATH)
            self.known_shell = "bash" if find_program("bash", path) else "sh"
        return self.known_shell

    def reply(self, call: int, fields: dict[str, Any]) -> None:
        self.connection.send([call, "ok", fields])

    def part(self, call: int, data: bytes) -> None:
        self.connection.send([call, "part", {"data": data}])

    def fail(self, call: int, code: str, text: str) -> None:
        self.connection.send([call, "error", {"code": code, "text": text}])
