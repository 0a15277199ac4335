"""A live Python or IPython: what it prints comes on a pipe, the end of an input as a frame on another.

It knows the frames of pythonshell.py, and not what is in their rich results. Invariant: a shell is said to be open
when it has shown that it can run.
"""

from __future__ import annotations

import posix
import sys
from typing import TYPE_CHECKING

from outrider.runtimes.guest.calls import Calls
from outrider.runtimes.guest.capture import Capture
from outrider.runtimes.guest.filesystem.paths import DEFAULT_PATH, find_program
from outrider.runtimes.guest.poll_loop import POLL_READ, read_ready
from outrider.runtimes.guest.processes import Process, descendants, spawn
from outrider.runtimes.guest.shells.shell import Shell

if TYPE_CHECKING:
    from typing import Any

FRAME_LIMIT = 10 << 20
"""More than any result's frame has: the input wrote to the descriptor itself."""
WHY_MAX = 2000


class Interpreter(Shell):
    """Started in the first of several ways that works; the call that opens it is answered then, or if none does."""

    def __init__(self, calls: Calls, number: int, args: dict[str, Any]) -> None:
        self.opening = number
        self.commands = self._commands(calls, args)
        self.why = b""
        calls.running[number] = self._give_up
        super().__init__(calls, number, args)

    def _commands(self, calls: Calls, args: dict[str, Any]) -> list[list[str]]:
        """The sandbox's own Python, then what the host says it has shown in here."""
        commands = [["python3"]] if find_program("python3", calls.base_env.get("PATH", DEFAULT_PATH)) else []
        own = calls.python or [sys.executable]
        spare = args["fallback"] if args["kind"] == "ipython" else own
        return commands + ([spare] if spare and find_program(spare[0], "") else [])

    def _open(self) -> None:
        if self.commands:
            super()._open()
            self.calls.loop.watch(self.results, POLL_READ, self._answered)
        else:
            self._give_up()

    def _start(self, env: dict[str, str]) -> None:
        self.frames = bytearray()
        self.capture = Capture(WHY_MAX)
        inputs, self.input = posix.pipe()
        self.output, output = posix.pipe()
        self.results, results = posix.pipe()
        null = posix.open("/dev/null", posix.O_RDONLY)
        argv = [*self.commands[0], "-c", self.args["program"]]
        try:
            self.pid = spawn(argv, env, self.args["cwd"], {0: null, 1: output, 2: output, 3: inputs, 4: results})
        finally:
            for fd in (null, inputs, output, results):
                posix.close(fd)

    def _descriptors(self) -> set[int]:
        return {self.output, self.input, self.results}

    def _give(self, text: bytes) -> None:
        self._send(len(text).to_bytes(4, "big") + self.sequence.to_bytes(4, "big") + text)

    def _take(self, data: bytes) -> None:
        self.capture.add(data)

    def _answered(self, events: int) -> None:
        data = read_ready(self.results)
        if data is None:
            self.calls.loop.forget(self.results)
            return
        self.frames += data
        while len(self.frames) >= 4:
            size = int.from_bytes(self.frames[:4], "big")
            if not 12 <= size <= FRAME_LIMIT:
                self._restart(b"the shell sent no readable result")
                return
            if len(self.frames) < 4 + size:
                return
            frame = bytes(self.frames[4 : 4 + size])
            del self.frames[: 4 + size]
            self._ended(frame)

    def _ended(self, frame: bytes) -> None:
        """A frame of pythonshell.py: number, status, length of the echo, the echo, rich results."""
        number, status, length = (int.from_bytes(frame[at : at + 4], "big") for at in (0, 4, 8))
        self._drain()
        if number == 0 and self.opening:
            self.capture = Capture(self.cap)
            self._opened({"shell": self.number})
        elif number == self.sequence and self.call:
            self.capture.add(frame[12 : 12 + length])
            self.shown = frame[12 + length :]
            self._finish(status)

    def _opened(self, fields: dict[str, Any]) -> None:
        call, self.opening = self.opening, 0
        self.calls.running.pop(call, None)
        self.calls.reply(call, fields)

    def _exited(self, code: int) -> None:
        if not self.opening:
            super()._exited(code)
            return
        self._drain()
        self.why = self.capture.take()
        self._release()
        del self.commands[0]
        self._open()

    def _give_up(self) -> None:
        """No way to start it is left, or the host wants it no more."""
        if self.commands:
            self.close()
        self.dead = True
        self._opened({"shell": None, "why": self.why})

    def _victims(self, table: dict[int, Process]) -> tuple[int, set[int]]:
        return self.pid, descendants(table, {self.pid}) - {self.pid}
