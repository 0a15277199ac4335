"""Live shells, which keep their state between inputs: bash or sh on a terminal, Python and IPython on pipes.

It knows no more of the shell's language than POSIX has, and of Python the frames of python_program.py, not what is in
their rich results. Invariants: whatever an input does, a shell takes the next one within two seconds of its time limit,
or is gone; a shell of Python is reported as open only when it has shown that it runs.
"""

from __future__ import annotations

import posix
import select
import sys
from typing import TYPE_CHECKING

from outrider.runtimes.guest.command import READS_AT_END, Capture
from outrider.runtimes.guest.connection import Calls
from outrider.runtimes.guest.filesystem.paths import DEFAULT_PATH, find_program
from outrider.runtimes.guest.poll_loop import CHUNK, POLL_READ, read_ready
from outrider.runtimes.guest.processes import Process, descendants, kill_tree, processes, send_signal, spawn

if TYPE_CHECKING:
    import signal as _signal
    from typing import Any
else:
    import _signal  # `signal` would add half again to the start-up time

INTERRUPT_EVERY = 0.1
"""Seconds between two interrupts of an input that goes on."""
KILL_AFTER = 3
"""Interrupts before what the input started is killed."""
RESTART_AFTER = 20
"""Interrupts before the shell itself is killed and started anew: two seconds."""

SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "--noediting", "-i"],
    "sh": ["sh", "-i"],
}
PRELUDES = {
    "bash": b"PS1=; export -n PS1; PS2=; unset PROMPT_COMMAND HISTFILE; set +o history +H;",
    "sh": b"unset PS1 HISTFILE; PS1=; PS2=;",
}
"""Commands that make a shell print nothing of its own: no prompts, no history, no `!` expansion."""
STATUS = b' __status=0; __set_status() { return "$1"; }; '
"""Sets `$?` before each input: the first input sees 0, each other the status of the one before."""
GREETING_MAX = 1 << 16
"""Bytes that a shell may print before its first marker. Past that, the marker is not waited for any longer."""
STATUS_MAX = 8
"""Bytes of a marker's status with what ends it."""
TERMIOS_SIZE = 64
"""More than a `struct termios` of any architecture."""

FRAME_MAX = 10 << 20
"""More than any result's frame has. A longer one is what an input wrote to the descriptor itself."""
WHY_MAX = 2000
"""Bytes kept of what an interpreter printed when it did not start."""


class Shell:
    """One program that takes one input at a time. What it prints between two inputs is shown with the next.

    The two kinds below differ in how they start (`_start`), are given an input (`_give`), read output (`_take`) and are
    interrupted (`_victims`, `_interrupted`). They share this class's state, against the rule of the house: each of its
    fields changes in steps of both, and apart they would only call each other.
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
        """Start the program; set `pid`, `output` and `input`."""
        raise NotImplementedError

    def _give(self, text: bytes) -> None:
        """Send the program an input."""
        raise NotImplementedError

    def _take(self, data: bytes) -> None:
        """Use a piece of output."""
        raise NotImplementedError

    def _victims(self, table: dict[int, Process]) -> tuple[int, set[int]]:
        """The process group to interrupt, and the processes to kill if that does not help."""
        raise NotImplementedError

    def _interrupted(self) -> None:
        """Called after each interrupt."""

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
        """Read all that was printed up to now."""
        for _ in range(READS_AT_END):
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
        """Interrupt the running input: first by SIGINT, then also by SIGKILL, and at last by a new shell."""
        if not self.call:
            return
        self.ticks += 1
        self.calls.loop.at(self, INTERRUPT_EVERY, self.cancel)
        if self.ticks > RESTART_AFTER:
            self._restart(b"the shell did not answer to an interrupt")
            return
        table = processes()
        group, members = self._victims(table)
        # Programs in a process group of their own do not get the terminal's interrupt.
        strays = {pid for pid in descendants(table, members) if table[pid].group != group}
        for pid in members | strays if self.ticks >= KILL_AFTER else strays:
            send_signal(pid, _signal.SIGKILL)
        send_signal(-group, _signal.SIGINT)
        self._interrupted()

    def _restart(self, reason: bytes) -> None:
        """Kill the shell and start a new one. The input's result says that the state is lost."""
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


class Bash(Shell):
    """A live bash, or the sh that a sandbox without bash has, on a raw terminal.

    Inputs come on a pipe and not on the terminal: there the sh of busybox edits lines, and each would take a detour
    through the kernel's terminal. The end of an input is told by a marker behind its output,
    ``\\x1e TOKEN.SEQUENCE : STATUS \\x1e``: on the same terminal, so that all output has come before it. What a shell
    prints before its first marker, number 0, is no output.
    """

    def _start(self, env: dict[str, str]) -> None:
        self.token = posix.urandom(8).hex().encode()
        self.pending = bytearray()
        self.begun = False
        env["PS1"] = ""
        env.pop("ENV", None)
        kind = self.calls.shell()
        self.output, slave = posix.openpty()
        reader, self.input = posix.pipe()
        self.mode = raw_terminal(slave)
        try:
            self.pid = spawn(SHELLS[kind], env, self.args["cwd"], {0: reader, 1: slave, 2: slave}, tty=True)
        finally:
            for fd in {slave, reader}:
                posix.close(fd)
        self._send(PRELUDES[kind] + STATUS + self._report(0) + b"\n")

    def _give(self, text: bytes) -> None:
        keep_terminal(self.output, self.mode)
        quoted = text.replace(b"\0", b"").replace(b"'", b"'\\''")
        # `command` keeps a plain sh from giving up the whole line when `eval` finds bad syntax. /dev/null, because the
        # input's programs would read the next input.
        line = b"__set_status $__status; command eval '" + quoted + b"\n' </dev/null; __status=$?; "
        self._send(line + self._report(self.sequence) + b"\n")

    def _report(self, sequence: int) -> bytes:
        return b"printf '\\036%s:%d\\036' " + self.token + b".%d $__status" % sequence

    def _take(self, data: bytes) -> None:
        self.pending += data
        if not self.begun:
            _, begun, rest = self.pending.partition(b"\x1e%s.0:0\x1e" % self.token)
            if not begun and len(self.pending) < GREETING_MAX:
                return
            self.begun = True
            self.pending = rest
        marker = b"\x1e%s.%d:" % (self.token, self.sequence)
        start = self.pending.find(marker)
        while start >= 0:
            at = start + len(marker)
            status, end, _ = self.pending[at : at + STATUS_MAX].partition(b"\x1e")
            if end and status.isdigit():
                self._print(start)
                del self.pending[: len(marker) + len(status) + 1]
                if self.call:
                    self._finish(int(status))
                return
            if not end and len(status) < STATUS_MAX and (status + b"0").isdigit():
                return  # the rest of the marker has not come yet
            self._print(start + 1)
            start = self.pending.find(marker)
        last = self.pending.rfind(b"\x1e", -len(marker))
        self._print(len(self.pending) if last < 0 else last)

    def _print(self, size: int) -> None:
        """The first `size` bytes of what has come are output."""
        self.capture.add(bytes(self.pending[:size]))
        del self.pending[:size]

    def _clean(self, out: bytes) -> bytes:
        """Remove the markers that interrupted lines printed after all."""
        marker = b"\x1e" + self.token
        while marker in out:
            start = out.index(marker)
            end = out.find(b"\x1e", start + 1)
            out = out[:start] + (out[end + 1 :] if end >= 0 else b"")
        return out

    def _exited(self, code: int) -> None:
        self._drain()
        self.capture.add(bytes(self.pending))
        self.pending.clear()
        super()._exited(code)

    def _victims(self, table: dict[int, Process]) -> tuple[int, set[int]]:
        group = self._foreground()
        return group, {p.pid for p in table.values() if p.group == group and not p.zombie} - {self.pid}

    def _interrupted(self) -> None:
        """Ask for another marker: an interrupt makes the shell drop the rest of the line, and with it the marker."""
        self.sequence += self.ticks == 1
        self._send(b"\n" + self._report(self.sequence) + b"\n")

    def _foreground(self) -> int:
        try:
            return posix.tcgetpgrp(self.output)
        except OSError:
            return self.pid


def raw_terminal(fd: int) -> bytes:
    """Make a terminal raw: output as programs write it, no echo. Returns its mode, a `struct termios`."""
    import fcntl  # only bash needs these
    import termios

    mode = termios.tcgetattr(fd)
    mode[0] = mode[1] = 0
    mode[3] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
    termios.tcsetattr(fd, termios.TCSANOW, mode)
    return fcntl.ioctl(fd, termios.TCGETS, bytes(TERMIOS_SIZE))


def keep_terminal(fd: int, mode: bytes) -> None:
    """Restore a terminal's mode if a program has changed it. Looking costs a tenth of setting."""
    import fcntl
    import termios

    if fcntl.ioctl(fd, termios.TCGETS, bytes(TERMIOS_SIZE)) != mode:
        fcntl.ioctl(fd, termios.TCSETS, mode)


class Interpreter(Shell):
    """A live Python or IPython: what it prints comes on a pipe, and the end of an input as a frame on another.

    It is started by the first of several commands that works. The call that opens it is answered then, or when none
    has worked.
    """

    def __init__(self, calls: Calls, number: int, args: dict[str, Any]) -> None:
        self.opening = number
        self.commands = self._commands(calls, args)
        self.why = b""
        calls.running[number] = self._give_up
        super().__init__(calls, number, args)

    def _commands(self, calls: Calls, args: dict[str, Any]) -> list[list[str]]:
        """The commands to try: the sandbox's own Python, then what the host has mounted in here."""
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
            if not 12 <= size <= FRAME_MAX:
                self._restart(b"the shell sent no readable result")
                return
            if len(self.frames) < 4 + size:
                return
            frame = bytes(self.frames[4 : 4 + size])
            del self.frames[: 4 + size]
            self._ended(frame)

    def _ended(self, frame: bytes) -> None:
        """Read a frame of python_program.py: number, status, length of the echo, the echo, rich results."""
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
        """Report that there is no such interpreter: no command is left to try, or the host has cancelled the call."""
        if self.commands:
            self.close()
        self.dead = True
        self._opened({"shell": None, "why": self.why})

    def _victims(self, table: dict[int, Process]) -> tuple[int, set[int]]:
        return self.pid, descendants(table, {self.pid}) - {self.pid}
