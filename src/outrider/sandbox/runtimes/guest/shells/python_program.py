"""The program of a live Python shell. It runs one input after another and keeps their variables. After each input, it
echoes the value of the input's last expression.

It needs only the standard library, and Python 3.8 or newer. The tool server starts it as `python3 -c SOURCE`. Text that
an input prints goes to standard output. The program and the tool server also exchange these messages:

- Input, on descriptor 3: u32 length, u32 number, source code.
- Result, on descriptor 4, after each input: u32 length, u32 number, u32 status, u32 length of the echo, the echo, and
  the displays (see `packed`). The echo is the text of the last expression's value.
- A first result with the number 0 says that the program is ready.

The program has no time limits. SIGINT raises KeyboardInterrupt only in the code of an input.
"""

import ast
import builtins
import contextlib
import linecache
import os
import signal
import sys
import traceback
import types
from typing import Any

INPUTS = 3
RESULTS = 4
ECHO_MAX = 1 << 15
"""Maximum characters of the echo in a result. A longer echo is printed, because the tool server can shorten printed
output."""


class InputResults:
    """The results of the running input so far, apart from printed text."""

    def __init__(self) -> None:
        self.echo = ""
        self.displays: list[dict[str, Any]] = []
        self.interruptible = False

    def show(self, text: str) -> None:
        """Add the value of a last expression to the echo. If the echo would become longer than ECHO_MAX, print the echo
        and the value instead."""
        if len(text) + len(self.echo) > ECHO_MAX:
            sys.stdout.write(self.echo + text)
            self.echo = ""
        else:
            self.echo += text

    def interrupt(self, number: int, frame: object) -> None:
        if self.interruptible:
            raise KeyboardInterrupt

    def watch_interrupts(self) -> None:
        """Install the handler for SIGINT again, because an input may have replaced it. Between inputs, the handler does
        nothing. SIG_IGN is not used for this, because child processes inherit SIG_IGN, and a thread of an earlier input
        may start a program between inputs."""
        if signal.getsignal(signal.SIGINT) != self.interrupt:
            signal.signal(signal.SIGINT, self.interrupt)


class PlainEngine:
    """Runs inputs as Python's interactive prompt does."""

    def __init__(self, session: InputResults) -> None:
        self.session = session
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        self.scope = module.__dict__
        self.scope["__builtins__"] = builtins
        sys.displayhook = self.display

    def display(self, value: object) -> None:
        if value is not None:
            builtins._ = value  # type: ignore[attr-defined]  # the interactive shell sets `_`, too
            self.session.show(repr(value) + "\n")

    def run(self, source: str, number: int) -> int:
        """Run one input. Returns 0 on success, and 1 after an exception. If the input calls `exit`, returns its exit
        status."""
        name = f"<input {number}>"
        # Tracebacks take the source lines from this cache.
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        try:
            self.execute(source, name)
            return 0
        except SystemExit as stop:
            return left_with(stop)
        except BaseException as error:  # raised by the input, and printed
            self.session.interruptible = False
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename != name:
                trace = trace.tb_next
            traceback.print_exception(type(error), error, trace)
            return 1

    def execute(self, source: str, name: str) -> None:
        tree = ast.parse(source, name)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]  # it is an Expr, as checked above
        self.session.interruptible = True
        if tree.body:
            exec(compile(tree, name, "exec"), self.scope)
        if last is not None:
            sys.displayhook(eval(compile(last, name, "eval"), self.scope))


def left_with(stop: SystemExit) -> int:
    """Return the exit status of an input that has called `exit`."""
    if stop.code is None or isinstance(stop.code, int):
        return (stop.code or 0) & 0xFF
    sys.stderr.write(f"{stop.code}\n")
    return 1


class Inputs:
    """Reads inputs from a descriptor, mostly with one system call each. Raises EOFError when the descriptor is
    closed."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.buffer = b""

    def take(self, count: int) -> bytes:
        while len(self.buffer) < count:
            piece = os.read(self.fd, 1 << 16)
            if not piece:
                raise EOFError
            self.buffer += piece
        data, self.buffer = self.buffer[:count], self.buffer[count:]
        return data

    def next(self) -> tuple[int, str]:
        """Return the number and the source code of the next input."""
        head = self.take(8)
        text = self.take(int.from_bytes(head[:4], "big"))
        return int.from_bytes(head[4:], "big"), text.decode("utf-8", "replace")


def packed(displays: list[dict[str, Any]]) -> bytes:
    """Encode displays as msgpack. Each display is a dictionary whose values are str or bytes. Returns b"" for no
    displays."""
    if not displays:
        return b""
    out = b"\xdd" + len(displays).to_bytes(4, "big")
    for display in displays:
        out += b"\xdf" + len(display).to_bytes(4, "big")
        for key, value in display.items():
            for item in (key, value):
                tag, data = (b"\xc6", item) if isinstance(item, bytes) else (b"\xdb", item.encode("utf-8", "replace"))
                out += tag + len(data).to_bytes(4, "big") + data
    return out


def answer(number: int, status: int, session: InputResults) -> None:
    echo = session.echo.encode("utf-8", "backslashreplace")
    shown = packed(session.displays)
    session.echo, session.displays = "", []
    frame = b"".join((number.to_bytes(4, "big"), status.to_bytes(4, "big"), len(echo).to_bytes(4, "big"), echo, shown))
    view = memoryview(len(frame).to_bytes(4, "big") + frame)
    while view:
        view = view[os.write(RESULTS, view) :]


def flush() -> None:
    """Flush standard output and standard error, even if an input has closed or replaced them."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def serve(engine: type) -> None:
    sys.argv = [""]
    for fd in (INPUTS, RESULTS):
        os.set_inheritable(fd, False)  # an input's programs must not read inputs or write results
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]  # text streams
    session = InputResults()
    session.watch_interrupts()
    runner = engine(session)
    inputs = Inputs(INPUTS)
    answer(0, 0, session)
    while True:
        try:
            number, source = inputs.next()
        except EOFError:
            return
        session.watch_interrupts()
        try:
            status = runner.run(source, number)
        except KeyboardInterrupt:  # SIGINT arrived while another exception was handled
            status = 1
        session.interruptible = False
        flush()
        answer(number, status, session)
