"""Live shells, which keep their state from one input to the next. Bash and sh run on a terminal. Python and IPython run
on pipes.

The code for bash and sh uses only features of POSIX, except PRELUDES. Python and IPython send each result as a frame
with a length (see python_program.py). Invariants:

- About two seconds after an input's time limit, the shell has either ended or accepts the next input.
- A Python shell is reported as open only after its first frame. It must send this frame within OPEN_SECONDS.
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
"""Seconds between two interrupts of an input that does not end."""
KILL_AFTER = 3
"""From this interrupt on (counted from 1), the programs that the input has started are also killed."""
RESTART_AFTER = 20
"""After this many interrupts (two seconds), the shell itself is killed and started again. This is needed, because the
sh of busybox can hang. If SIGINT arrives while this sh allocates memory, the sh waits for a lock that is never
released."""

SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "--noediting", "-i"],
    "sh": ["sh", "-i"],
}
PRELUDES = {
    "bash": b"PS1=; export -n PS1; PS2=; unset PROMPT_COMMAND HISTFILE; set +o history +H;",
    "sh": b"unset PS1 HISTFILE; PS1=; PS2=;",
}
"""Commands that turn off the prompt and the history. In bash, they also turn off the expansion of `!`."""
STATUS = b' __status=0; __set_status() { return "$1"; }; '
"""Shell code that lets each input start with the exit status of the previous input in `$?`. The first input starts with
0."""
GREETING_MAX = 1 << 16
"""Maximum bytes that a shell may print before its first marker (see `Bash`). This output is dropped. If the first
marker has not arrived after this many bytes, the shell is used without waiting for the marker any longer."""
STATUS_MAX = 8
r"""Maximum bytes of the exit status in a marker (see `Bash`), including the \x1e at its end."""
TERMIOS_SIZE = 64
"""Size of a buffer that can hold a `struct termios` of any architecture."""

FRAME_MAX = 10 << 20
"""Maximum bytes of a frame. Results are always smaller, unless an input itself writes to the program's descriptor for
results."""
OPEN_SECONDS = 25.0
"""A shell's program that is not ready after this many seconds is killed, and the next command is tried. The time is
long, because IPython loads slowly from a slow disk."""
WHY_MAX = 2000
"""Maximum bytes that are kept of the output of an interpreter that fails to start."""


class LiveShell:
    """A live shell. It runs one input at a time. Output that arrives between two inputs is returned with the output of
    the second input.

    program: starts the shell's process, sends inputs and reads output.
    commands: the commands that start the process. They are tried in order, and the first one that works is used.
    opening: the number of the host's call that opens the shell. 0 after the reply to this call.
    ticks: how often the running input has been interrupted.
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
        """Start the next command. If none is left, report that the shell cannot be opened. Raises OSError if the
        program cannot be started. In this case, all descriptors are closed."""
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
        self._try_next(b"[not ready after %d seconds]" % OPEN_SECONDS)

    def _try_next(self, reason: bytes) -> None:
        """Give the program up that is not ready yet, and try the next command."""
        self.drain()
        self.why = self.capture.take() + reason
        self._kill()
        del self.commands[0]
        self._open_again()

    def _open_again(self) -> str:
        """Call `_open`. Return the message of its error, or "" if there is none. If the host's call that opens the
        shell has no reply yet, the error is also sent as the reply. Raises no error, because the event loop does not
        handle exceptions."""
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
        """Report that the shell is open, because its program runs. A second call does nothing."""
        if self.opening:
            self._answer_opening({"shell": self.number})

    def _give_up(self) -> None:
        """Report that the shell cannot be opened, because no command is left or the host has cancelled the call."""
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
        """True if the shell's program does not run. When the program ends, its descriptors are closed and removed from
        `descriptors`."""
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
        """Read all output that has already arrived."""
        for _ in range(READS_AT_END):
            data = read_ready(self.output)
            if not data:
                break
            self.program.take(data)

    def finish(self, code: int | None) -> None:
        """Send the result of the running input to the host."""
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
        """Interrupt the running input now, and then every INTERRUPT_EVERY seconds until it ends.

        Each time, the input's process group gets SIGINT, and the input's programs in other process groups get SIGKILL.
        From interrupt KILL_AFTER on, all programs of the input get SIGKILL. After RESTART_AFTER interrupts, the shell
        is started again.
        """
        if not self.call:
            return
        self.ticks += 1
        self.calls.loop.at(self, INTERRUPT_EVERY, self.cancel)
        if self.ticks > RESTART_AFTER:
            self.restart(b"the shell did not react to an interrupt")
            return
        table = processes()
        group, members = self.program.victims(table)
        # Programs in other process groups do not get the SIGINT, so they are killed at once.
        strays = {pid for pid in descendants(table, members) if table[pid].group != group}
        for pid in members | strays if self.ticks >= KILL_AFTER else strays:
            send_signal(pid, SIGKILL)
        send_signal(-group, SIGINT)
        self.program.interrupted()

    def unreadable(self) -> None:
        """Handle a result that cannot be read. The shell is started again only for a running input: a program that
        sends such results at every start must not be started for ever."""
        if self.opening:
            self._try_next(b"[no readable result]")
        elif self.call:
            self.restart(b"the shell sent no readable result")
        else:
            self._kill()

    def restart(self, reason: bytes) -> None:
        """Kill the shell and start it again. If an input was running, its result says that the shell's state is lost,
        or why the shell could not be started."""
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
        """Kill the shell and its descendants. A running input gets a result."""
        if not self.dead:
            self._kill()
        if self.call:
            self.note = b"\n[the shell was closed]\n"
            self.finish(None)


class Bash:
    r"""A live bash on a raw terminal. In a sandbox without bash, it is sh.

    Only output goes to the terminal. Inputs arrive on a pipe, because on a terminal, the sh of busybox would edit
    lines, and the kernel would process every input first. After the output of each input, the shell prints a marker on
    the terminal: ``\x1e TOKEN.SEQUENCE : STATUS \x1e``. So all output of an input comes before its marker. The first
    marker has the sequence number 0, and all text before it is dropped.
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
        """Start the program, and report at once that the shell is open. If the program could not be executed, the
        result of the first input shows the error."""
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
        """Send an input to the shell."""
        keep_terminal(self.shell.output, self.mode)
        quoted = text.replace(b"\0", b"").replace(b"'", b"'\\''")
        # `command` is needed: without it, sh would drop the rest of the line after a syntax error in `eval`. Standard
        # input is /dev/null, because programs would otherwise read the shell's next input.
        line = b"__set_status $__status; command eval '" + quoted + b"\n' </dev/null; __status=$?; "
        self.shell.writer.write(line + self._report(self.shell.sequence) + b"\n")

    def _report(self, sequence: int) -> bytes:
        return b"printf '\\036%s:%d\\036' " + self.token + b".%d $__status" % sequence

    def take(self, data: bytes) -> None:
        """Process output that has arrived."""
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
        """Move the first `size` pending bytes to the output."""
        self.shell.capture.add(bytes(self.pending[:size]))
        del self.pending[:size]

    def ended(self) -> None:
        """Move all pending bytes to the output. The shell has exited, so no marker can follow."""
        self._print(len(self.pending))

    def clean(self, out: bytes) -> bytes:
        """Remove markers from the output of an interrupted input. Usually the shell does not print the marker of such
        an input, but sometimes it does."""
        marker = b"\x1e" + self.token
        while marker in out:
            start = out.index(marker)
            end = out.find(b"\x1e", start + 1)
            out = out[:start] + (out[end + 1 :] if end >= 0 else b"")
        return out

    def victims(self, table: dict[int, Process]) -> tuple[int, set[int]]:
        """Return two things for an interrupt: the terminal's foreground process group, which gets the interrupt, and
        the processes to kill if they ignore the interrupt."""
        try:
            group = posix.tcgetpgrp(self.shell.output)
        except OSError:
            group = self.shell.pid
        return group, {p.pid for p in table.values() if p.group == group and not p.zombie} - {self.shell.pid}

    def interrupted(self) -> None:
        """Let the shell print a new marker. The line of each input ends with the command that prints the input's
        marker. An interrupt makes the shell drop the rest of the line, and this command with it."""
        self.shell.sequence += self.shell.ticks == 1
        self.shell.writer.write(b"\n" + self._report(self.shell.sequence) + b"\n")


def raw_terminal(fd: int) -> bytes:
    """Make a terminal raw: it passes output on unchanged and echoes nothing. Returns the terminal's mode, a `struct
    termios`."""
    import fcntl  # imported here, because only `Bash` needs them
    import termios

    mode = termios.tcgetattr(fd)
    mode[0] = mode[1] = 0
    mode[3] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
    termios.tcsetattr(fd, termios.TCSANOW, mode)
    return fcntl.ioctl(fd, termios.TCGETS, bytes(TERMIOS_SIZE))


def keep_terminal(fd: int, mode: bytes) -> None:
    """Restore the terminal's mode if a program has changed it. The mode is first read and compared, because reading is
    ten times as fast as setting."""
    import fcntl
    import termios

    if fcntl.ioctl(fd, termios.TCGETS, bytes(TERMIOS_SIZE)) != mode:
        fcntl.ioctl(fd, termios.TCSETS, mode)


class Interpreter:
    """A live Python or IPython shell. Its output arrives on one pipe. After each input, the result arrives as a frame
    on another pipe."""

    def __init__(self, shell: LiveShell) -> None:
        self.shell = shell
        self.results = -1
        self.frames = bytearray()

    def commands(self) -> list[list[str]]:
        """Return the commands to try: first the sandbox's `python3`, then an interpreter of the host. Programs that do
        not exist are left out."""
        calls, args = self.shell.calls, self.shell.args
        commands = [["python3"]] if find_program("python3", calls.base_env.get("PATH", DEFAULT_PATH)) else []
        own = calls.python or [sys.executable]
        spare = args["fallback"] if args["kind"] == "ipython" else own
        return commands + ([spare] if spare and find_program(spare[0], "") else [])

    def start(self, command: list[str], env: dict[str, str]) -> None:
        """Start the program. It sends a frame with the number 0 when it is ready."""
        shell = self.shell
        self.frames = bytearray()
        if shell.opening:  # if the program is started anew, the running input ends with its output so far
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
        """Process output that has arrived."""
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
                shell.unreadable()
                return
            if len(self.frames) < 4 + size:
                return
            frame = bytes(self.frames[4 : 4 + size])
            del self.frames[: 4 + size]
            # A frame has these parts: number, status, length of the echo, the echo, the displays (see
            # python_program.py).
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
        """Do nothing. Unlike `Bash`, this class holds back no output."""

    def clean(self, out: bytes) -> bytes:
        return out

    def victims(self, table: dict[int, Process]) -> tuple[int, set[int]]:
        """Return two things for an interrupt: the program's own process group, which gets the interrupt, and the
        processes to kill if they ignore the interrupt."""
        return self.shell.pid, descendants(table, {self.shell.pid}) - {self.shell.pid}

    def interrupted(self) -> None:
        """Do nothing, because the program sends its frame even after an interrupt."""
