"""Live shells, which keep their state between inputs: bash or sh on a terminal, Python and IPython on pipes.

Apart from PRELUDES, the code for bash and sh uses only POSIX features. Python and IPython report each result in a frame
(see python_program.py). Rich results in a frame are not decoded here. Invariants: whatever an input does, about two
seconds after its time limit the shell takes the next input or has ended; a Python shell is reported as open only after
its first frame, and each program has OPEN_SECONDS to send this frame.
"""

from __future__ import annotations

import posix
import sys
from typing import TYPE_CHECKING

from outrider.sandbox.runtimes.guest.command import READS_AT_END, Capture
from outrider.sandbox.runtimes.guest.connection import Calls
from outrider.sandbox.runtimes.guest.filesystem.paths import DEFAULT_PATH, find_program
from outrider.sandbox.runtimes.guest.poll_loop import POLL_READ, PipeWriter, read_ready
from outrider.sandbox.runtimes.guest.processes import (
    SIGINT,
    SIGKILL,
    Process,
    descendants,
    kill_tree,
    pipes,
    processes,
    send_signal,
    spawn,
)

if TYPE_CHECKING:
    from typing import Any

INTERRUPT_EVERY = 0.1
"""Seconds between two interrupts of an input that keeps running."""
KILL_AFTER = 3
"""The first interrupt that also kills the programs started by the input, counted from 1. Later interrupts kill them
too."""
RESTART_AFTER = 20
"""After this many interrupts (two seconds) the shell itself is killed and restarted. The sh of busybox hangs if SIGINT
arrives during a memory allocation, because it then waits for a lock that is never released."""

SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "--noediting", "-i"],
    "sh": ["sh", "-i"],
}
PRELUDES = {
    "bash": b"PS1=; export -n PS1; PS2=; unset PROMPT_COMMAND HISTFILE; set +o history +H;",
    "sh": b"unset PS1 HISTFILE; PS1=; PS2=;",
}
"""Commands that turn off prompts and the history, and in bash also the expansion of `!`."""
STATUS = b' __status=0; __set_status() { return "$1"; }; '
"""Definitions for setting `$?` before each input. It is 0 for the first input, and then the previous input's status."""
GREETING_MAX = 1 << 16
"""Maximum bytes that a shell may print before its first marker. Output before the marker is dropped. If this much
output arrives without a marker, it is dropped and the marker is no longer awaited."""
STATUS_MAX = 8
r"""Maximum bytes of the status in a marker, including the final \x1e."""
TERMIOS_SIZE = 64
"""Bytes of a buffer that can hold a `struct termios` on any architecture."""

FRAME_MAX = 10 << 20
"""Maximum bytes of a frame, more than any result needs. Only an input that itself writes to the descriptor sends
more."""
OPEN_SECONDS = 25.0
"""If a program is not ready after this many seconds, it is killed and the next command is tried. IPython loads
slowly from a slow disk."""
WHY_MAX = 2000
"""Maximum bytes kept of the output of an interpreter that did not start."""


class LiveShell:
    """A live shell: one program that takes one input at a time. Output that arrives between two inputs is returned with
    the second input's output.

    `program` starts the process, sends inputs and reads output. Its commands are tried in order, and the first that
    works opens the shell. `opening` is the number of the call that opens the shell, or 0 after the reply to that call.
    `ticks` counts the interrupts of the running input.
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
        self.ticks = 0
        self.note = b""
        self.shown = b""
        self.why = b""
        self.pid = self.output = -1
        self.descriptors: set[int] = set()
        self.writer = PipeWriter(calls.loop, -1)
        self.program: Bash | Interpreter = Bash(self) if args["kind"] == "bash" else Interpreter(self)
        self.commands = self.program.commands()
        calls.running[number] = self._give_up
        try:
            self._open()
        except OSError:
            calls.running.pop(number, None)
            raise

    def _open(self) -> None:
        """Start the next command. If there is none, report that the shell cannot be opened. Raises OSError when the
        program cannot be started. Then the shell is dead, and all its descriptors are closed."""
        if not self.commands:
            self._give_up()
            return
        env = self.calls.environment({}, -self.number)
        env.setdefault("TERM", "dumb")
        try:
            self.program.start(self.commands[0], env)
        except OSError:
            self._release()
            raise
        for fd in (self.writer.fd, *self.descriptors):
            posix.set_blocking(fd, False)
        self.calls.loop.watch(self.output, POLL_READ, self._ready)
        self.calls.loop.exits[self.pid] = self._exited
        if self.opening:
            self.calls.loop.at(self, OPEN_SECONDS, self._not_ready)

    def _not_ready(self) -> None:
        self.drain()
        self.why = self.capture.take() + b"[not ready after %d seconds]" % OPEN_SECONDS
        self._kill()
        del self.commands[0]
        self._open_again()

    def _open_again(self) -> str:
        """Call `_open`. Return its error message, or "". If the shell was not yet open, the error is also the reply to
        the call that opens it. Raises nothing, because the loop does not handle exceptions."""
        try:
            self._open()
        except OSError as error:
            why = f"{type(error).__name__}: {error}"
            if self.opening:
                call, self.opening = self.opening, 0
                self.calls.running.pop(call, None)
                self.calls.fail(call, "failed", why)
            return why
        return ""

    def opened(self) -> None:
        """Report that the shell is open, because its program runs. Does nothing the second time."""
        if self.opening:
            self._answer_opening({"shell": self.number})

    def _give_up(self) -> None:
        """Report that the shell could not be opened, because no command is left or the host has cancelled the call."""
        if self.commands:
            self.close()
        self._answer_opening({"shell": None, "why": self.why})

    def _answer_opening(self, fields: dict[str, Any]) -> None:
        call, self.opening = self.opening, 0
        self.calls.loop.timers.pop(self, None)
        self.calls.running.pop(call, None)
        self.calls.reply(call, fields)

    @property
    def dead(self) -> bool:
        """True if no program runs. Its descriptors are closed as soon as it has ended."""
        return not self.descriptors

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

    def _ready(self, events: int) -> None:
        data = read_ready(self.output)
        if data is None:
            self.calls.loop.unwatch(self.output)
        elif data:
            self.program.take(data)

    def drain(self) -> None:
        """Read the output that has arrived so far."""
        for _ in range(READS_AT_END):
            data = read_ready(self.output)
            if not data:
                break
            self.program.take(data)

    def finish(self, code: int | None) -> None:
        """Reply to the call of the running input."""
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
        """Interrupt the running input, now and every INTERRUPT_EVERY seconds. SIGINT interrupts its process group, and
        SIGKILL ends its programs in other groups. From interrupt number KILL_AFTER on, all its programs are killed.
        After interrupt number RESTART_AFTER, the shell is restarted."""
        if not self.call:
            return
        self.ticks += 1
        self.calls.loop.at(self, INTERRUPT_EVERY, self.cancel)
        if self.ticks > RESTART_AFTER:
            self.restart(b"the shell did not react to an interrupt")
            return
        table = processes()
        group, members = self.program.victims(table)
        # The group's interrupt does not reach programs in other process groups, so these are killed at once.
        strays = {pid for pid in descendants(table, members) if table[pid].group != group}
        for pid in members | strays if self.ticks >= KILL_AFTER else strays:
            send_signal(pid, SIGKILL)
        send_signal(-group, SIGINT)
        self.program.interrupted()

    def restart(self, reason: bytes) -> None:
        """Kill the shell and start it again. If an input was running, its result reports that the state is lost, or why
        the shell could not be started."""
        self._kill()
        error = self._open_again()
        outcome = f"could not be started anew: {error}" if error else "was started anew: its state is lost"
        self.note = b"\n[" + reason + b" and " + outcome.encode() + b"]\n"
        if self.call:
            self.finish(None)

    def _exited(self, code: int) -> None:
        self.drain()
        self.program.ended()
        if self.opening:
            self.why = self.capture.take()
            self._release()
            del self.commands[0]
            self._open_again()
            return
        self._release()
        if self.call:
            self.finish(code)

    def _kill(self) -> None:
        self.calls.loop.exits.pop(self.pid, None)
        kill_tree({self.pid}, self.calls.mark(-self.number))
        self._release()

    def _release(self) -> None:
        self.calls.loop.timers.pop(self, None)
        self.writer.close()
        for fd in self.descriptors:
            self.calls.loop.unwatch(fd)
            posix.close(fd)
        self.descriptors = set()

    def close(self) -> None:
        """Kill the shell and its descendants. If an input is running, its call gets a reply."""
        if not self.dead:
            self._kill()
        if self.call:
            self.note = b"\n[the shell was closed]\n"
            self.finish(None)


class Bash:
    r"""A live bash, or sh in a sandbox without bash, on a raw terminal.

    Inputs come on a pipe, because on the terminal the sh of busybox would edit lines, and each input would have to pass
    through the kernel's terminal. A marker, ``\x1e TOKEN.SEQUENCE : STATUS \x1e``, ends the output of each input. It is
    printed on the same terminal, so all output precedes it. Text before the first marker, which has the number 0, is
    not output.
    """

    def __init__(self, shell: LiveShell) -> None:
        self.shell = shell
        self.token = b""
        self.pending = bytearray()
        self.begun = False
        self.mode = b""

    def commands(self) -> list[list[str]]:
        return [SHELLS[self.shell.calls.shell()]]

    def start(self, command: list[str], env: dict[str, str]) -> None:
        """Start the program. The shell is reported as open at once, because its first input shows any problem."""
        self.token = posix.urandom(8).hex().encode()
        self.pending = bytearray()
        self.begun = False
        env["PS1"] = ""
        env.pop("ENV", None)
        shell = self.shell
        reader, writer = posix.pipe()
        shell.writer = PipeWriter(shell.calls.loop, writer)
        slave = -1
        try:
            shell.output, slave = posix.openpty()
            shell.descriptors = {shell.output}
            self.mode = raw_terminal(slave)
            shell.pid = spawn(command, env, shell.args["cwd"], {0: reader, 1: slave, 2: slave}, tty=True)
        finally:
            for fd in {slave, reader} - {-1}:
                posix.close(fd)
        shell.writer.write(PRELUDES[command[0]] + STATUS + self._report(0) + b"\n")
        shell.opened()

    def give(self, text: bytes) -> None:
        """Send an input to the program."""
        keep_terminal(self.shell.output, self.mode)
        quoted = text.replace(b"\0", b"").replace(b"'", b"'\\''")
        # Without `command`, a plain sh would drop the whole line on a syntax error in `eval`. Standard input is
        # /dev/null, because the input's programs would otherwise read the next input.
        line = b"__set_status $__status; command eval '" + quoted + b"\n' </dev/null; __status=$?; "
        self.shell.writer.write(line + self._report(self.shell.sequence) + b"\n")

    def _report(self, sequence: int) -> bytes:
        return b"printf '\\036%s:%d\\036' " + self.token + b".%d $__status" % sequence

    def take(self, data: bytes) -> None:
        """Process a piece of output."""
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
                return  # the rest of the marker has not arrived yet
            self._print(start + 1)
            start = self.pending.find(marker)
        last = self.pending.rfind(b"\x1e", -len(marker))
        self._print(len(self.pending) if last < 0 else last)

    def _print(self, size: int) -> None:
        """Add the first `size` pending bytes to the output."""
        self.shell.capture.add(bytes(self.pending[:size]))
        del self.pending[:size]

    def ended(self) -> None:
        """Add the pending bytes to the output, because no marker can be completed after the program's exit."""
        self._print(len(self.pending))

    def clean(self, out: bytes) -> bytes:
        """Remove the markers of interrupted lines. The shell usually drops the marker with the rest of an interrupted
        line, but sometimes prints it."""
        marker = b"\x1e" + self.token
        while marker in out:
            start = out.index(marker)
            end = out.find(b"\x1e", start + 1)
            out = out[:start] + (out[end + 1 :] if end >= 0 else b"")
        return out

    def victims(self, table: dict[int, Process]) -> tuple[int, set[int]]:
        """Return the process group to interrupt (the terminal's foreground group), and the processes to kill if that
        fails."""
        try:
            group = posix.tcgetpgrp(self.shell.output)
        except OSError:
            group = self.shell.pid
        return group, {p.pid for p in table.values() if p.group == group and not p.zombie} - {self.shell.pid}

    def interrupted(self) -> None:
        """Print another marker, because an interrupt makes the shell drop the rest of its line, including the input's
        marker."""
        self.shell.sequence += self.shell.ticks == 1
        self.shell.writer.write(b"\n" + self._report(self.shell.sequence) + b"\n")


def raw_terminal(fd: int) -> bytes:
    """Make a terminal raw, so that it passes output through unchanged and echoes nothing. Returns the terminal's mode,
    a `struct termios`."""
    import fcntl  # only `Bash` needs these modules
    import termios

    mode = termios.tcgetattr(fd)
    mode[0] = mode[1] = 0
    mode[3] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
    termios.tcsetattr(fd, termios.TCSANOW, mode)
    return fcntl.ioctl(fd, termios.TCGETS, bytes(TERMIOS_SIZE))


def keep_terminal(fd: int, mode: bytes) -> None:
    """Restore a terminal's mode if a program has changed it. The mode is read first, because reading takes a tenth of
    the time of setting."""
    import fcntl
    import termios

    if fcntl.ioctl(fd, termios.TCGETS, bytes(TERMIOS_SIZE)) != mode:
        fcntl.ioctl(fd, termios.TCSETS, mode)


class Interpreter:
    """A live Python or IPython. Output arrives on one pipe. At the end of each input, a frame arrives on another
    pipe."""

    def __init__(self, shell: LiveShell) -> None:
        self.shell = shell
        self.results = -1
        self.frames = bytearray()

    def commands(self) -> list[list[str]]:
        """Return the commands to try: the sandbox's `python3`, then an interpreter provided by the host. Commands that
        do not exist are left out."""
        calls, args = self.shell.calls, self.shell.args
        commands = [["python3"]] if find_program("python3", calls.base_env.get("PATH", DEFAULT_PATH)) else []
        own = calls.python or [sys.executable]
        spare = args["fallback"] if args["kind"] == "ipython" else own
        return commands + ([spare] if spare and find_program(spare[0], "") else [])

    def start(self, command: list[str], env: dict[str, str]) -> None:
        """Start the program, which sends a frame with the number 0 when it is ready."""
        shell = self.shell
        self.frames = bytearray()
        shell.capture = Capture(WHY_MAX)
        (inputs, writer), (shell.output, output), (self.results, results) = pipes(3)
        shell.writer = PipeWriter(shell.calls.loop, writer)
        shell.descriptors = {shell.output, self.results}
        null = -1
        argv = [*command, "-c", shell.args["program"]]
        try:
            null = posix.open("/dev/null", posix.O_RDONLY)
            shell.pid = spawn(argv, env, shell.args["cwd"], {0: null, 1: output, 2: output, 3: inputs, 4: results})
        finally:
            for fd in {null, inputs, output, results} - {-1}:
                posix.close(fd)
        shell.calls.loop.watch(self.results, POLL_READ, self._answered)

    def give(self, text: bytes) -> None:
        """Send an input to the program."""
        self.shell.writer.write(len(text).to_bytes(4, "big") + self.shell.sequence.to_bytes(4, "big") + text)

    def take(self, data: bytes) -> None:
        """Process a piece of output."""
        self.shell.capture.add(data)

    def _answered(self, events: int) -> None:
        shell = self.shell
        data = read_ready(self.results)
        if data is None:
            shell.calls.loop.unwatch(self.results)
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
            # The fields of a frame (see python_program.py): number, status, length of the echo, the echo, rich results.
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
        """Do nothing, because an interpreter has no pending output."""

    def clean(self, out: bytes) -> bytes:
        return out

    def victims(self, table: dict[int, Process]) -> tuple[int, set[int]]:
        """Return the process group to interrupt (the program's own), and the processes to kill if that fails."""
        return self.shell.pid, descendants(table, {self.shell.pid}) - {self.shell.pid}

    def interrupted(self) -> None:
        """Do nothing, because the program sends the input's frame even after an interrupt."""
