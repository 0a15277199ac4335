"""The live Python of a sandbox: reads one input after another, keeps its variables, echoes a last expression.

Standard library only, Python 3.8 or newer, in one file; the tool server starts it as `python3 -c SOURCE`. Inputs come
on descriptor 3 as u32 length, u32 number, source. What they print goes to standard output as it comes; each ends with
a frame on descriptor 4: u32 length, u32 number, u32 status, u32 length of the echo, the echo, and what else is shown
(see `packed`). A first frame, of number 0, says that it is ready. It knows nothing of time limits: SIGINT raises
KeyboardInterrupt in the input that runs, and only there.
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
"""Characters of a last expression that travel with the result, after all other output; a longer one is printed."""


class Session:
    """What the input that runs has shown so far, besides what it printed."""

    def __init__(self) -> None:
        self.echo = ""
        self.displays: list[dict[str, Any]] = []
        self.interruptible = False

    def show(self, text: str) -> None:
        """The text of a last expression."""
        if len(text) + len(self.echo) > ECHO_MAX:
            sys.stdout.write(self.echo + text)
            self.echo = ""
        else:
            self.echo += text

    def interrupt(self, number: int, frame: object) -> None:
        if self.interruptible:
            raise KeyboardInterrupt

    def watch_interrupts(self) -> None:
        """Also after an input that took the signal for itself. A handler is not inherited by programs."""
        if signal.getsignal(signal.SIGINT) != self.interrupt:
            signal.signal(signal.SIGINT, self.interrupt)


class PlainEngine:
    """Runs inputs as Python itself would at a prompt."""

    def __init__(self, session: Session) -> None:
        self.session = session
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        self.scope = module.__dict__
        self.scope["__builtins__"] = builtins
        sys.displayhook = self.display

    def display(self, value: object) -> None:
        if value is not None:
            builtins._ = value  # type: ignore[attr-defined]  # as the interactive shell does
            self.session.show(repr(value) + "\n")

    def run(self, source: str, number: int) -> int:
        """Execute one input; 0 when it went well, 1 after an exception, else what it passed to `exit`."""
        name = f"<input {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        try:
            self.execute(source, name)
            return 0
        except SystemExit as stop:
            return left_with(stop)
        except BaseException as error:  # of the code that was given: it is shown
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
            last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]  # an Expr, as was just seen
        self.session.interruptible = True
        if tree.body:
            exec(compile(tree, name, "exec"), self.scope)
        if last is not None:
            sys.displayhook(eval(compile(last, name, "eval"), self.scope))


def left_with(stop: SystemExit) -> int:
    """The status of an input that called `exit`."""
    if stop.code is None or isinstance(stop.code, int):
        return (stop.code or 0) & 0xFF
    sys.stderr.write(f"{stop.code}\n")
    return 1


class Inputs:
    """Inputs from a descriptor, mostly with one read each. Raises EOFError at the end."""

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
        """Its number and text."""
        head = self.take(8)
        text = self.take(int.from_bytes(head[:4], "big"))
        return int.from_bytes(head[4:], "big"), text.decode("utf-8", "replace")


def packed(displays: list[dict[str, Any]]) -> bytes:
    """Dictionaries of text and bytes as msgpack, for the host to read; nothing when there are none."""
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


def answer(number: int, status: int, session: Session) -> None:
    echo = session.echo.encode("utf-8", "backslashreplace")
    shown = packed(session.displays)
    session.echo, session.displays = "", []
    frame = b"".join((number.to_bytes(4, "big"), status.to_bytes(4, "big"), len(echo).to_bytes(4, "big"), echo, shown))
    view = memoryview(len(frame).to_bytes(4, "big") + frame)
    while view:
        view = view[os.write(RESULTS, view) :]


def flush() -> None:
    """The streams of this moment: an input may have closed or replaced them."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def serve(engine: type) -> None:
    sys.argv = [""]
    for fd in (INPUTS, RESULTS):
        os.set_inheritable(fd, False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]  # they are text streams here
    session = Session()
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
        except KeyboardInterrupt:  # it came while another exception was being shown
            status = 1
        session.interruptible = False
        flush()
        answer(number, status, session)
