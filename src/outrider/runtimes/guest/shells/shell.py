"""A live shell or interpreter that keeps its state between inputs.

It does not know how a program is given its inputs (see terminal.py and interpreter.py). Invariant: whatever an input
does, the shell takes the next one within two seconds of its time limit, or is gone.
"""

from __future__ import annotations

import posix
import select
from typing import TYPE_CHECKING

from outrider.runtimes.guest.calls import Calls
from outrider.runtimes.guest.capture import Capture
from outrider.runtimes.guest.poll_loop import CHUNK, POLL_READ, read_ready
from outrider.runtimes.guest.processes import Process, descendants, kill_tree, processes, send_signal

if TYPE_CHECKING:
    import signal as _signal
    from typing import Any
else:
    import _signal  # `signal` would add half again to the start-up time

INTERRUPT_EVERY = 0.1


KILL_AFTER = 3


RESTART_AFTER = 20


class Shell:
    """One program, one input at a time. A kind of shell adds how it starts (`_start`), how it is given an input
    (`_give`), what its output means (`_take`), whom an interrupt is for (`_victims`), and may add to `_interrupted`.

    What it prints between two inputs is shown with the next.
    """

    def __init__(self, calls: Calls, number: int, args: dict[str, Any]) -> None:
        self.calls = calls
        self.args = args
        self.number = number
        self.sequence = 0
        self.call = 0
        self.cap = 0
        self.capture = Capture(1)
        self.unsent = bytearray()
        self.blocked = False
        self.ticks = 0
        self.note = b""
        self.shown = b""
        self.dead = False
        self.pid = self.output = self.input = -1
        self._open()

    def _open(self) -> None:
        env = self.calls.environment({}, -self.number)
        env.setdefault("TERM", "dumb")
        self._start(env)
        for fd in self._descriptors():
            posix.set_blocking(fd, False)
        self.calls.loop.watch(self.output, POLL_READ, self._ready)
        self.calls.loop.exits[self.pid] = self._exited

    def _start(self, env: dict[str, str]) -> None:
        """Sets `pid`, `output` and `input`."""
        raise NotImplementedError

    def _give(self, text: bytes) -> None:
        raise NotImplementedError

    def _take(self, data: bytes) -> None:
        raise NotImplementedError

    def _victims(self, table: dict[int, Process]) -> tuple[int, set[int]]:
        """The process group that is interrupted, and the processes that are killed if that does not help."""
        raise NotImplementedError

    def _interrupted(self) -> None:
        pass

    def _descriptors(self) -> set[int]:
        return {self.output, self.input}

    def run(self, call: int, text: bytes, milliseconds: int, cap: int) -> None:
        if self.dead or self.call:
            self.calls.fail(call, "failed", "the shell is gone" if self.dead else "the shell is busy")
            return
        if cap != self.cap:
            self.cap, self.capture = cap, Capture(cap)
        self.call, self.ticks, self.note, self.shown = call, 0, b"", b""
        self.sequence += 1
        self.calls.running[call] = self.cancel
        self.calls.loop.at(self, milliseconds / 1000, self.cancel)
        self._give(text)

    def _send(self, data: bytes) -> None:
        self.unsent += data
        self._flush()

    def _flush(self) -> None:
        try:
            while self.unsent:
                del self.unsent[: posix.write(self.input, self.unsent[:CHUNK])]
        except BlockingIOError:
            pass
        except OSError:
            self.unsent.clear()
        if self.blocked == bool(self.unsent):
            return
        self.blocked = not self.blocked
        if self.blocked:
            self.calls.loop.watch(self.input, select.POLLOUT, lambda events: self._flush())
        else:
            self.calls.loop.forget(self.input)

    def _ready(self, events: int) -> None:
        data = read_ready(self.output)
        if data is None:
            self.calls.loop.forget(self.output)
        elif data:
            self._take(data)

    def _drain(self) -> None:
        """All that was printed up to now. A pipe holds at most 1 MiB, so later writers cannot keep us here."""
        for _ in range(16):
            data = read_ready(self.output)
            if not data:
                break
            self._take(data)

    def _finish(self, code: int | None) -> None:
        call, self.call = self.call, 0
        self.calls.running.pop(call, None)
        self.calls.loop.timers.pop(self, None)
        late = self.ticks > 0
        fields = {"out": self._clean(self.capture.take()) + self.note, "code": None if late else code}
        if late:
            fields["timed_out"] = True
        if self.shown:
            fields["shown"] = self.shown
        self.capture = Capture(self.cap)
        self.calls.reply(call, fields)

    def _clean(self, out: bytes) -> bytes:
        return out

    def cancel(self) -> None:
        """Interrupt the running input: first politely, then by SIGKILL, at last by a fresh shell."""
        if not self.call:
            return
        self.ticks += 1
        self.calls.loop.at(self, INTERRUPT_EVERY, self.cancel)
        if self.ticks > RESTART_AFTER:
            self._restart(b"the shell did not answer to an interrupt")
            return
        table = processes()
        group, members = self._victims(table)
        strays = {pid for pid in descendants(table, members) if table[pid].group != group}
        for pid in members | strays if self.ticks >= KILL_AFTER else strays:
            send_signal(pid, _signal.SIGKILL)
        send_signal(-group, _signal.SIGINT)
        self._interrupted()

    def _restart(self, reason: bytes) -> None:
        self._kill()
        self.note = b"\n[" + reason + b" and was started anew: its state is lost]\n"
        self._open()
        if self.call:
            self._finish(None)

    def _exited(self, code: int) -> None:
        self._drain()
        self.dead = True
        self._release()
        if self.call:
            self._finish(code)

    def _kill(self) -> None:
        self.calls.loop.exits.pop(self.pid, None)
        kill_tree({self.pid}, self.calls.mark(-self.number))
        self._release()

    def _release(self) -> None:
        self.unsent.clear()
        self.blocked = False
        for fd in self._descriptors():
            self.calls.loop.forget(fd)
            posix.close(fd)

    def close(self) -> None:
        """Kill the shell and the children it still has."""
        if not self.dead:
            self._kill()
            self.dead = True
        if self.call:
            self.note = b"\n[the shell was closed]\n"
            self._finish(None)
