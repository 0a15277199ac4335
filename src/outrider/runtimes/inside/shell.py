"""A live bash or Python that keeps its state between inputs.

Invariant: whatever an input does, the shell takes the next one within two seconds of its time limit, or is gone.
"""

from __future__ import annotations

import posix
import select
import sys
from typing import TYPE_CHECKING

from outrider.runtimes.inside.calls import Calls
from outrider.runtimes.inside.capture import Capture
from outrider.runtimes.inside.loop import CHUNK, POLL_READ, read_ready
from outrider.runtimes.inside.paths import DEFAULT_PATH
from outrider.runtimes.inside.processes import descendants, kill_tree, processes, send_signal, spawn

if TYPE_CHECKING:
    import signal as _signal
    from typing import Any
else:
    import _signal  # `signal` would add half again to the start-up time

INTERRUPT_EVERY = 0.1


KILL_AFTER = 3


RESTART_AFTER = 20


BASH_PRELUDE = (
    b"PS1=; export -n PS1; PS2=; unset PROMPT_COMMAND HISTFILE; set +o history +H;"
    b' __status=0; __set_status() { return "$1"; }\n'
)


class Shell:
    """A live bash on a raw pty, or a live Python on a pipe: one input at a time, its end told by a marker.

    The marker is ``\\x1e TOKEN SEQ : STATUS \\x1e`` in the output stream, so that all output is known to have come.
    """

    def __init__(self, calls: Calls, number: int, args: dict[str, Any]) -> None:
        self.calls = calls
        self.args = args
        self.number = number
        self.token = posix.urandom(8).hex().encode()
        self.sequence = 0
        self.call = 0
        self.cap = 0
        self.capture = Capture(1)
        self.pending = bytearray()
        self.unsent = bytearray()
        self.ticks = 0
        self.note = b""
        self.dead = False
        self._open()

    def _open(self) -> None:
        self.bash = self.args["kind"] == "bash"
        env = self.calls.environment({}, -self.number)
        self.pid, self.output, self.input = (self._bash if self.bash else self._python)(env)
        for fd in {self.output, self.input}:
            posix.set_blocking(fd, False)
        loop = self.calls.loop
        loop.watch(self.output, POLL_READ, self._ready)
        loop.exits[self.pid] = self._exited
        if self.bash:
            self._send(BASH_PRELUDE)

    def _bash(self, env: dict[str, str]) -> tuple[int, int, int]:
        master, slave = posix.openpty()
        raw_terminal(slave)
        argv = ["bash", "--norc", "--noprofile", "--noediting"]
        try:
            env.setdefault("TERM", "dumb")
            env["PS1"] = ""
            pid = spawn(argv, env, self.args["cwd"], {0: slave, 1: slave, 2: slave}, tty=True)
        finally:
            posix.close(slave)
        return pid, master, master

    def _python(self, env: dict[str, str]) -> tuple[int, int, int]:
        input_read, input_write = posix.pipe()
        output_read, output_write = posix.pipe()
        null = posix.open("/dev/null", posix.O_RDONLY)
        found = any(posix.access(d + "/python3", posix.X_OK) for d in env.get("PATH", DEFAULT_PATH).split(":"))
        argv = ["python3" if found else sys.executable, "-c", self.args["program"], self.token.decode()]
        try:
            pid = spawn(argv, env, self.args["cwd"], {0: null, 1: output_write, 2: output_write, 3: input_read})
        finally:
            for fd in (null, input_read, output_write):
                posix.close(fd)
        return pid, output_read, input_write

    def run(self, call: int, text: bytes, milliseconds: int, cap: int) -> None:
        if self.dead or self.call:
            self.calls.fail(call, "failed", "the shell is gone" if self.dead else "the shell is busy")
            return
        self.call, self.cap, self.capture, self.ticks = call, cap, Capture(cap), 0
        self.note = b""
        self.sequence += 1
        self.calls.running[call] = self.cancel
        self.calls.loop.at(self, milliseconds / 1000, self.cancel)
        if self.bash:
            raw_terminal(self.output)
            quoted = text.replace(b"\0", b"").replace(b"'", b"'\\''")
            line = b"__set_status $__status; eval '" + quoted + b"\n' </dev/null; __status=$?; "
            self._send(line + self._report() + b"\n")
        else:
            self._send(len(text).to_bytes(4, "big") + self.sequence.to_bytes(4, "big") + text)

    def _report(self) -> bytes:
        return b"printf '\\036%s:%d\\036' " + self.token + b".%d $__status" % self.sequence

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
        writes = select.POLLOUT if self.unsent else 0
        if self.input == self.output:
            self.calls.loop.watch(self.output, POLL_READ | writes, self._ready)
        elif writes:
            self.calls.loop.watch(self.input, writes, lambda events: self._flush())
        else:
            self.calls.loop.forget(self.input)

    def _ready(self, events: int) -> None:
        if events & select.POLLOUT:
            self._flush()
        if events & POLL_READ:
            data = read_ready(self.output)
            if data is None:
                self.calls.loop.forget(self.output)
            elif data:
                self._take(data)

    def _take(self, data: bytes) -> None:
        self.pending += data
        marker = b"\x1e%s.%d:" % (self.token, self.sequence)
        start = self.pending.find(marker)
        end = self.pending.find(b"\x1e", start + len(marker)) if start >= 0 else -1
        if end >= 0:
            status = int(self.pending[start + len(marker) : end])
            self.capture.add(bytes(self.pending[:start]))
            del self.pending[: end + 1]
            if self.call:
                self._finish(status)
        elif start < 0:
            keep = self.pending.rfind(b"\x1e", -len(marker))
            keep = len(self.pending) if keep < 0 else keep
            self.capture.add(bytes(self.pending[:keep]))
            del self.pending[:keep]

    def _finish(self, code: int | None) -> None:
        call, self.call = self.call, 0
        self.calls.running.pop(call, None)
        self.calls.loop.timers.pop(self, None)
        late = self.ticks > 0
        out = self._clean(self.capture.take()) + self.note
        self.capture = Capture(self.cap)  # what background jobs print before the next input is shown with it
        self.calls.reply(call, {"out": out, "code": None if late else code, "timed_out": late})

    def _clean(self, out: bytes) -> bytes:
        """Without the markers that an interrupted line printed after all."""
        marker = b"\x1e" + self.token
        while marker in out:
            start = out.index(marker)
            end = out.find(b"\x1e", start + 1)
            out = out[:start] + (out[end + 1 :] if end >= 0 else b"")
        return out

    def cancel(self) -> None:
        """Interrupt the running input: first politely, then by SIGKILL, at last by a fresh shell."""
        if not self.call:
            return
        self.ticks += 1
        self.calls.loop.at(self, INTERRUPT_EVERY, self.cancel)
        if self.ticks > RESTART_AFTER:
            self._restart()
            return
        table = processes()
        group = self._foreground()
        members = {p.pid for p in table.values() if p.group == group and not p.zombie} - {self.pid}
        if not self.bash:
            members = descendants(table, {self.pid}) - {self.pid}
        strays = {pid for pid in descendants(table, members) if table[pid].group != group}
        for pid in members | strays if self.ticks >= KILL_AFTER else strays:
            send_signal(pid, _signal.SIGKILL)
        send_signal(-group, _signal.SIGINT)
        if self.bash:
            self.sequence += self.ticks == 1
            self._send(b"\n" + self._report() + b"\n")

    def _foreground(self) -> int:
        if self.bash:
            try:
                return posix.tcgetpgrp(self.output)
            except OSError:
                pass
        return self.pid

    def _restart(self) -> None:
        self._kill()
        self.note = b"\n[the shell did not answer to an interrupt and was started anew: its state is lost]\n"
        self._open()
        self._finish(None)

    def _exited(self, code: int) -> None:
        for _ in range(16):
            data = read_ready(self.output)
            if not data:
                break
            self._take(data)
        self.dead = True
        self._release()
        if self.call:
            self.capture.add(bytes(self.pending))
            self._finish(code)

    def _kill(self) -> None:
        self.calls.loop.exits.pop(self.pid, None)
        kill_tree({self.pid}, self.calls.mark(-self.number))
        self._release()

    def _release(self) -> None:
        self.pending.clear()
        self.unsent.clear()
        for fd in {self.output, self.input}:
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


def raw_terminal(fd: int) -> None:
    import termios

    mode = termios.tcgetattr(fd)
    mode[0] = mode[1] = 0
    mode[3] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
    termios.tcsetattr(fd, termios.TCSANOW, mode)
