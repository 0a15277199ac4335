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
"""Interrupts before the shell itself is killed and started anew: two seconds. The sh of busybox needs it now and then:
SIGINT may catch it in its memory allocator, whose lock it then waits for in vain."""

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
    """A live shell's life: one program that takes one input at a time. What it prints between two inputs is shown with
    the next.

    `program` knows how the program is started, given an input and read. The shell is opened by the first of its
    commands that works; `opening` is the call that asked for it, 0 once that is answered. `ticks` counts the interrupts
    of the running input.
    """

    def __init__(self, calls: Calls, number: int, args: dict[str, Any]) -> None:
        self.calls = calls
        self.args = args
        self.number = number
        self.opening = number
        self.sequence = 0
        self.call = 0
        self.cap = 0
        self.capture = Capture(1)
        self.unsent = bytearray()
        self.blocked = False
        self.ticks = 0
        self.note = b""
        self.shown = b""
        self.why = b""
        self.dead = False
        self.pid = self.output = self.input = -1
        self.descriptors: set[int] = set()
        self.program: Bash | Interpreter = Bash(self) if args["kind"] == "bash" else Interpreter(self)
        self.commands = self.program.commands()
        calls.running[number] = self._give_up
        try:
            self._open()
        except OSError:
            calls.running.pop(number, None)
            raise

    def _open(self) -> None:
        if not self.commands:
            self._give_up()
            return
        env = self.calls.environment({}, -self.number)
        env.setdefault("TERM", "dumb")
        self.program.start(self.commands[0], env)
        for fd in self.descriptors:
            posix.set_blocking(fd, False)
        self.calls.loop.watch(self.output, POLL_READ, self._ready)
        self.calls.loop.exits[self.pid] = self._exited

    def opened(self) -> None:
        """The program has shown that it runs."""
        if self.opening:
            self._answer_opening({"shell": self.number})

    def _give_up(self) -> None:
        """Report that there is no such shell: no command is left to try, or the host has cancelled the call."""
        if self.commands:
            self.close()
        self.dead = True
        self._answer_opening({"shell": None, "why": self.why})

    def _answer_opening(self, fields: dict[str, Any]) -> None:
        call, self.opening = self.opening, 0
        self.calls.running.pop(call, None)
        self.calls.reply(call, fields)

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
        self.program.give(text)

    def send(self, data: bytes) -> None:
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
            self.program.take(data)

    def drain(self) -> None:
        """Read all that was printed up to now."""
        for _ in range(READS_AT_END):
            data = read_ready(self.output)
            if not data:
                break
            self.program.take(data)

    def finish(self, code: int | None) -> None:
        """Answer the running input's call."""
        call, self.call = self.call, 0
        self.calls.running.pop(call, None)
        self.calls.loop.timers.pop(self, None)
        late = self.ticks > 0
        fields = {"out": self.program.clean(self.capture.take()) + self.note, "code": None if late else code}
        if late:
            fields["timed_out"] = True
        if self.shown:
            fields["shown"] = self.shown
        self.capture = Capture(self.cap)
        self.calls.reply(call, fields)

    def cancel(self) -> None:
        """Interrupt the running input: first by SIGINT, then also by SIGKILL, and at last by a new shell."""
        if not self.call:
            return
        self.ticks += 1
        self.calls.loop.at(self, INTERRUPT_EVERY, self.cancel)
        if self.ticks > RESTART_AFTER:
            self.restart(b"the shell did not answer to an interrupt")
            return
        table = processes()
        group, members = self.program.victims(table)
        # Programs in a process group of their own do not get the group's interrupt.
        strays = {pid for pid in descendants(table, members) if table[pid].group != group}
        for pid in members | strays if self.ticks >= KILL_AFTER else strays:
            send_signal(pid, _signal.SIGKILL)
        send_signal(-group, _signal.SIGINT)
        self.program.interrupted()

    def restart(self, reason: bytes) -> None:
        """Kill the shell and start a new one. The input's result says that the state is lost."""
        self._kill()
        self.note = b"\n[" + reason + b" and was started anew: its state is lost]\n"
        self._open()
        if self.call:
            self.finish(None)

    def _exited(self, code: int) -> None:
        self.drain()
        self.program.ended()
        if self.opening:
            self.why = self.capture.take()
            self._release()
            del self.commands[0]
            self._open()
            return
        self.dead = True
        self._release()
        if self.call:
            self.finish(code)

    def _kill(self) -> None:
        self.calls.loop.exits.pop(self.pid, None)
        kill_tree({self.pid}, self.calls.mark(-self.number))
        self._release()

    def _release(self) -> None:
        self.unsent.clear()
        self.blocked = False
        for fd in self.descriptors:
            self.calls.loop.forget(fd)
            posix.close(fd)

    def close(self) -> None:
        """Kill the shell and the children it still has."""
        if not self.dead:
            self._kill()
            self.dead = True
        if self.call:
            self.note = b"\n[the shell was closed]\n"
            self.finish(None)


class Bash:
    """A live bash, or the sh that a sandbox without bash has, on a raw terminal.

    Inputs come on a pipe and not on the terminal: there the sh of busybox edits lines, and each would take a detour
    through the kernel's terminal. A marker behind its output ends an input,
    ``\\x1e TOKEN.SEQUENCE : STATUS \\x1e``: on the same terminal, so that all output has come before it. What a shell
    prints before its first marker, number 0, is no output.
    """

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.token = b""
        self.pending = bytearray()
        self.begun = False
        self.mode = b""

    def commands(self) -> list[list[str]]:
        return [SHELLS[self.shell.calls.shell()]]

    def start(self, command: list[str], env: dict[str, str]) -> None:
        """Start the program. It counts as open at once: what is wrong with it, its first input shows."""
        self.token = posix.urandom(8).hex().encode()
        self.pending = bytearray()
        self.begun = False
        env["PS1"] = ""
        env.pop("ENV", None)
        shell = self.shell
        shell.output, slave = posix.openpty()
        reader, shell.input = posix.pipe()
        shell.descriptors = {shell.output, shell.input}
        self.mode = raw_terminal(slave)
        try:
            shell.pid = spawn(command, env, shell.args["cwd"], {0: reader, 1: slave, 2: slave}, tty=True)
        finally:
            for fd in {slave, reader}:
                posix.close(fd)
        shell.send(PRELUDES[command[0]] + STATUS + self._report(0) + b"\n")
        shell.opened()

    def give(self, text: bytes) -> None:
        """Send the program an input."""
        keep_terminal(self.shell.output, self.mode)
        quoted = text.replace(b"\0", b"").replace(b"'", b"'\\''")
        # `command` keeps a plain sh from giving up the whole line when `eval` finds bad syntax. /dev/null, because the
        # input's programs would read the next input.
        line = b"__set_status $__status; command eval '" + quoted + b"\n' </dev/null; __status=$?; "
        self.shell.send(line + self._report(self.shell.sequence) + b"\n")

    def _report(self, sequence: int) -> bytes:
        return b"printf '\\036%s:%d\\036' " + self.token + b".%d $__status" % sequence

    def take(self, data: bytes) -> None:
        """Use a piece of output."""
        self.pending += data
        if not self.begun:
            _, begun, rest = self.pending.partition(b"\x1e%s.0:0\x1e" % self.token)
            if not begun and len(self.pending) < GREETING_MAX:
                return
            self.begun = True
            self.pending = rest
        marker = b"\x1e%s.%d:" % (self.token, self.shell.sequence)
        start = self.pending.find(marker)
        while start >= 0:
            at = start + len(marker)
            status, end, _ = self.pending[at : at + STATUS_MAX].partition(b"\x1e")
            if end and status.isdigit():
                self._print(start)
                del self.pending[: len(marker) + len(status) + 1]
                if self.shell.call:
                    self.shell.finish(int(status))
                return
            if not end and len(status) < STATUS_MAX and (status + b"0").isdigit():
                return  # the rest of the marker has not come yet
            self._print(start + 1)
            start = self.pending.find(marker)
        last = self.pending.rfind(b"\x1e", -len(marker))
        self._print(len(self.pending) if last < 0 else last)

    def _print(self, size: int) -> None:
        """The first `size` bytes of what has come are output."""
        self.shell.capture.add(bytes(self.pending[:size]))
        del self.pending[:size]

    def ended(self) -> None:
        """The program has exited: what looked like the beginning of a marker was output."""
        self._print(len(self.pending))

    def clean(self, out: bytes) -> bytes:
        """Remove the markers that interrupted lines printed after all."""
        marker = b"\x1e" + self.token
        while marker in out:
            start = out.index(marker)
            end = out.find(b"\x1e", start + 1)
            out = out[:start] + (out[end + 1 :] if end >= 0 else b"")
        return out

    def victims(self, table: dict[int, Process]) -> tuple[int, set[int]]:
        """The process group to interrupt, the terminal's foreground, and what to kill if that does not help."""
        try:
            group = posix.tcgetpgrp(self.shell.output)
        except OSError:
            group = self.shell.pid
        return group, {p.pid for p in table.values() if p.group == group and not p.zombie} - {self.shell.pid}

    def interrupted(self) -> None:
        """Ask for another marker: an interrupt makes the shell drop the rest of the line, and with it the marker."""
        self.shell.sequence += self.shell.ticks == 1
        self.shell.send(b"\n" + self._report(self.shell.sequence) + b"\n")


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


class Interpreter:
    """A live Python or IPython: what it prints comes on a pipe, and the end of an input as a frame on another."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.results = -1
        self.frames = bytearray()

    def commands(self) -> list[list[str]]:
        """The sandbox's own Python, then what the host has mounted in here."""
        calls, args = self.shell.calls, self.shell.args
        commands = [["python3"]] if find_program("python3", calls.base_env.get("PATH", DEFAULT_PATH)) else []
        own = calls.python or [sys.executable]
        spare = args["fallback"] if args["kind"] == "ipython" else own
        return commands + ([spare] if spare and find_program(spare[0], "") else [])

    def start(self, command: list[str], env: dict[str, str]) -> None:
        """Start the program, which says in a frame of number 0 that it runs."""
        shell = self.shell
        self.frames = bytearray()
        shell.capture = Capture(WHY_MAX)
        inputs, shell.input = posix.pipe()
        shell.output, output = posix.pipe()
        self.results, results = posix.pipe()
        shell.descriptors = {shell.output, shell.input, self.results}
        null = posix.open("/dev/null", posix.O_RDONLY)
        argv = [*command, "-c", shell.args["program"]]
        try:
            shell.pid = spawn(argv, env, shell.args["cwd"], {0: null, 1: output, 2: output, 3: inputs, 4: results})
        finally:
            for fd in (null, inputs, output, results):
                posix.close(fd)
        shell.calls.loop.watch(self.results, POLL_READ, self._answered)

    def give(self, text: bytes) -> None:
        """Send the program an input."""
        self.shell.send(len(text).to_bytes(4, "big") + self.shell.sequence.to_bytes(4, "big") + text)

    def take(self, data: bytes) -> None:
        """Use a piece of output."""
        self.shell.capture.add(data)

    def _answered(self, events: int) -> None:
        shell = self.shell
        data = read_ready(self.results)
        if data is None:
            shell.calls.loop.forget(self.results)
            return
        self.frames += data
        while len(self.frames) >= 4:
            size = int.from_bytes(self.frames[:4], "big")
            if not 12 <= size <= FRAME_MAX:
                shell.restart(b"the shell sent no readable result")
                return
            if len(self.frames) < 4 + size:
                return
            frame = bytes(self.frames[4 : 4 + size])
            del self.frames[: 4 + size]
            # A frame of python_program.py: number, status, length of the echo, the echo, rich results.
            number, status, length = (int.from_bytes(frame[at : at + 4], "big") for at in (0, 4, 8))
            shell.drain()
            if number == 0 and shell.opening:
                shell.capture = Capture(shell.cap)
                shell.opened()
            elif number == shell.sequence and shell.call:
                shell.capture.add(frame[12 : 12 + length])
                shell.shown = frame[12 + length :]
                shell.finish(status)

    def ended(self) -> None:
        """The program has exited."""

    def clean(self, out: bytes) -> bytes:
        return out

    def victims(self, table: dict[int, Process]) -> tuple[int, set[int]]:
        """The process group to interrupt, the program's own, and what to kill if that does not help."""
        return self.shell.pid, descendants(table, {self.shell.pid}) - {self.shell.pid}

    def interrupted(self) -> None:
        """The program answers by a frame, as always."""
