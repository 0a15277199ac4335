"""The fake's live Python: a namespace in this process, with few builtins and a watched clock.

It is no sandbox: it is meant for tests and for scripted agents. Invariant: an input ends at its time limit, because
every line it executes looks at the clock.
"""

from __future__ import annotations

import ast
import builtins
import io
import json
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from outrider.errors import RuntimeFailure
from outrider.runtimes.base import Display, ShellResult

ALLOWED_MODULES = frozenset({"collections", "functools", "itertools", "json", "math", "re", "string"})
FORBIDDEN = frozenset({"open", "input", "breakpoint", "eval", "exec", "compile", "help"})
SOURCE = "<input>"


class Expired(BaseException):
    """The time limit of an input, raised inside it."""


FORMS = {
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
    "_repr_svg_": "image/svg+xml",
    "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg",
    "_repr_json_": "application/json",
}
"""The methods by which IPython asks a value for its other forms."""


class MemoryPython:
    """`check` raises RuntimeFailure when the sandbox is gone. When `rich` it stands in for IPython, of which it knows
    `display` and the forms that values give themselves."""

    def __init__(self, check: Callable[[str], None], *, rich: bool = False) -> None:
        self._check = check
        self._closed = False
        self._rich = rich
        self._displays: list[Display] = []
        self._out = io.StringIO()
        allowed = {name: value for name, value in vars(builtins).items() if name not in FORBIDDEN}
        self._scope: dict[str, Any] = {
            "__name__": "__main__",
            "__builtins__": {**allowed, "__import__": restricted_import, "print": self._print},
        }
        if rich:
            self._scope["display"] = self._display

    async def run(self, text: str, *, seconds: float) -> ShellResult:
        self._check("shell")
        if self._closed:
            raise RuntimeFailure("the shell is gone")
        self._out = io.StringIO()
        self._displays = []
        code: int | None = 0
        previous = sys.gettrace()
        sys.settrace(clock(time.monotonic() + seconds))
        try:
            self._execute(text)
        except Expired:
            code = None
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except Exception as error:  # the code is its user's, and so is what it raises
            code = 1
            self._out.write(report(error))
        finally:
            sys.settrace(previous)
        return ShellResult(
            output=self._out.getvalue(), exit_code=code, timed_out=code is None, displays=tuple(self._displays)
        )

    async def close(self) -> None:
        self._closed = True

    def _print(self, *values: object, **options: Any) -> None:
        self._out.write(str(options.get("sep", " ")).join(map(str, values)) + str(options.get("end", "\n")))

    def _execute(self, text: str) -> None:
        tree = ast.parse(text, SOURCE)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, SOURCE, "exec"), self._scope)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), SOURCE, "eval"), self._scope)
            if value is not None:
                self._display(value)

    def _display(self, value: object) -> None:
        text = repr(value)
        self._out.write(f"{text}\n")
        data = {mime: getattr(value, name)() for name, mime in FORMS.items() if self._rich and hasattr(value, name)}
        if data:
            kept = {mime: one if isinstance(one, str | bytes) else json.dumps(one) for mime, one in data.items()}
            self._displays.append(Display({"text/plain": text, **kept}))


def clock(deadline: float) -> Callable[[FrameType, str, Any], Any]:
    """A trace function that raises Expired in the frames of an input once `deadline` has passed."""

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != SOURCE:
            return None
        if time.monotonic() > deadline:
            raise Expired
        frame.f_trace_opcodes = True  # a loop on one line has no line events
        return look

    return look


def restricted_import(name: str, *args: Any) -> Any:
    if name.partition(".")[0] not in ALLOWED_MODULES:
        raise ImportError(f"the memory runtime does not import {name}")
    return __import__(name, *args)


def report(error: Exception) -> str:
    """The traceback from the input's own frames on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != SOURCE:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))
