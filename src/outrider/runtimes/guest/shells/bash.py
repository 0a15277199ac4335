"""A live bash, or the sh that a sandbox without bash has, on a raw terminal.

It knows no more of the language than POSIX has. Inputs come on a pipe: on a terminal the sh of busybox edits lines, and
each would take a detour through the kernel's. Invariant: the end of an input is told by a marker behind its output,
``\\x1e TOKEN.SEQUENCE : STATUS \\x1e``, so that all output has come when it comes; what a shell says of itself before
the marker of 0 is no output.
"""

from __future__ import annotations

import posix

from outrider.runtimes.guest.processes import Process, spawn
from outrider.runtimes.guest.shells.shell import Shell

MODE_SIZE = 64
"""More than a `struct termios` of any architecture."""


GREETING_MAX = 1 << 16


STATUS_MAX = 8


SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "--noediting", "-i"],
    "sh": ["sh", "-i"],
}


PRELUDES = {
    "bash": b"PS1=; export -n PS1; PS2=; unset PROMPT_COMMAND HISTFILE; set +o history +H;",
    "sh": b"unset PS1 HISTFILE; PS1=; PS2=;",
}


STATUS = b' __status=0; __set_status() { return "$1"; }; '
"""The first input's `$?` is 0, and each other's the status of the one before."""


class Terminal(Shell):
    """`command` keeps a plain sh from giving up its line when `eval` finds bad syntax."""

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
                return  # not all of it has come
            self._print(start + 1)
            start = self.pending.find(marker)
        last = self.pending.rfind(b"\x1e", -len(marker))
        self._print(len(self.pending) if last < 0 else last)

    def _print(self, size: int) -> None:
        """So much of what has come is output."""
        self.capture.add(bytes(self.pending[:size]))
        del self.pending[:size]

    def _clean(self, out: bytes) -> bytes:
        """Without the markers that an interrupted line printed after all."""
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
        """The line that was interrupted will not report."""
        self.sequence += self.ticks == 1
        self._send(b"\n" + self._report(self.sequence) + b"\n")

    def _foreground(self) -> int:
        try:
            return posix.tcgetpgrp(self.output)
        except OSError:
            return self.pid


def raw_terminal(fd: int) -> bytes:
    """Makes it so, and tells its mode as the kernel does."""
    import fcntl
    import termios

    mode = termios.tcgetattr(fd)
    mode[0] = mode[1] = 0
    mode[3] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
    termios.tcsetattr(fd, termios.TCSANOW, mode)
    return fcntl.ioctl(fd, termios.TCGETS, bytes(MODE_SIZE))


def keep_terminal(fd: int, mode: bytes) -> None:
    """As it was, whatever a program has made of it. Looking costs a tenth of setting."""
    import fcntl
    import termios

    if fcntl.ioctl(fd, termios.TCGETS, bytes(MODE_SIZE)) != mode:
        fcntl.ioctl(fd, termios.TCSETS, mode)
