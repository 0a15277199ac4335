"""The live Python of a sandbox: reads one input after another, keeps its variables, echoes a last expression.

Standard library only, Python 3.8 or newer, in one file; the tool server starts it as `python3 -c SOURCE TOKEN`.
Inputs come on descriptor 3 as u32 length, u32 number, source; each ends with the marker `\\x1e TOKEN.NUMBER:STATUS
\\x1e` on standard output. It knows nothing of time limits: SIGINT raises KeyboardInterrupt in the input that runs,
and only there.
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


def take(fd: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = os.read(fd, count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def run(source: str, number: int, scope: dict) -> int:  # type: ignore[type-arg]
    """Execute one input; 0 when it went well, 1 after an exception, else what it passed to `exit`."""
    name = f"<input {number}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    try:
        tree = ast.parse(source, name)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        exec(compile(tree, name, "exec"), scope)
        if last is not None:
            sys.displayhook(eval(compile(last, name, "eval"), scope))
        return 0
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF
        sys.stderr.write(f"{stop.code}\n")
        return 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != name:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        return 1
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def main() -> None:
    token = sys.argv[1]
    sys.argv = [""]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    module.__dict__["__builtins__"] = builtins
    os.set_inheritable(3, False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    while True:
        try:
            size = int.from_bytes(take(3, 4), "big")
            number = int.from_bytes(take(3, 4), "big")
            source = take(3, size).decode("utf-8", "replace")
        except EOFError:
            return
        try:
            status = run(source, number, module.__dict__)
        except KeyboardInterrupt:  # it came while another exception was being shown
            status = 1
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed or replaced by the input
                stream.flush()
        os.write(1, f"\x1e{token}.{number}:{status}\x1e".encode())


main()
