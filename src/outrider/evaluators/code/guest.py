"""The code that runs in sandboxes: `run_call` calls a candidate's function in one sandbox, and `Checker` runs a hidden
check in another. The candidate is the program to be graded.

The code needs only Python 3.8 or newer. It is one file, because the node sends its text to Python in a sandbox,
followed by the code that starts one of the two parts. Values leave a process only as JSON of built-in types (`encode`,
`decode`). So an object whose `__eq__` always returns True has no effect outside its own process. The candidate may have
forged the output of `run_call`, so the node only compares this output or passes it on. Invariant: the candidate affects
the check only through return values and exceptions.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import queue
import sys
import threading
import types
from typing import Any

MARK = "outrider-step:"
"""Prefix of the Checker's lines. It distinguishes these lines from the output of the check."""


def encode(value: Any) -> Any:
    """Encode a value as JSON. None, booleans, ints, floats, strings and lists keep their form. A tuple, a set, a dict,
    bytes or a complex number becomes an object whose only key is the name of its type. Raises TypeError for a value of
    another type, and RecursionError for deep nesting."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list):
        return [encode(one) for one in value]
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(one) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(one)] for key, one in value.items()]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    raise TypeError(f"a value of type {type(value).__name__} cannot be passed on")


def decode(coded: Any) -> Any:
    """Decode a value that `encode` returned. Forged input can raise any exception and take any time, so this function
    runs only in sandboxes, never on the node."""
    if isinstance(coded, list):
        return [decode(one) for one in coded]
    if not isinstance(coded, dict):
        return coded
    [(kind, inner)] = coded.items()
    if kind == "dict":
        return {decode(key): decode(one) for key, one in inner}
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind == "complex":
        return complex(*inner)
    makers: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}
    if kind not in makers:
        raise ValueError(f"{kind!r} is no type of a value")
    return makers[kind](decode(one) for one in inner)


def whole_program(prompt: str, candidate: str, name: str) -> str:
    """Join the prompt and the candidate's text. A candidate that defines the function `name` follows the prompt, and
    may use the prompt's imports and helpers. Any other candidate, such as the body of the function, continues the
    prompt's last line."""
    try:
        defined = {getattr(one, "name", "") for one in ast.parse(candidate).body}
    except (SyntaxError, ValueError):
        defined = set()
    return f"{prompt}\n{candidate}" if name in defined else prompt + candidate


def run_call() -> None:
    """Read a request from standard input, call the candidate's function, write the result as JSON, and exit.

    The request has the candidate's `file`, the `prompt` that precedes it, the `name` of the function, and the encoded
    `args` and `kwargs` of the call. The function may be a method of a class `Solution`. The result has `value`, the
    encoded return value, or `raised`. What the candidate prints goes to standard error.
    """
    request = json.load(sys.stdin)
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # The module is not named "__main__", so that Python skips the part of a program that runs only as a script.
    module = types.ModuleType("candidate")
    sys.modules["candidate"] = module
    sys.path.insert(0, os.path.dirname(os.path.abspath(request["file"])))
    name = request["name"]
    try:
        with open(request["file"], encoding="utf-8") as file:
            program = whole_program(request["prompt"], file.read(), name)
        exec(compile(program, request["file"], "exec"), module.__dict__)
        function = getattr(module, name, None) or getattr(module.Solution(), name)
        answer = {"value": encode(function(*decode(request["args"]), **decode(request["kwargs"])))}
    except BaseException as error:  # SystemExit also counts as the result of the call
        answer = {"raised": [type(error).__name__, str(error)[:1000]]}
    output.write(json.dumps(answer))
    output.flush()
    os._exit(0)  # this waits for no threads and runs no exit handlers


class Checker:
    """Runs `check(candidate)` of a test in a thread, and passes each call of the candidate to the node.

    `step` prints the next event as one line: MARK, then JSON. The event is a `call`, or the end of the check: `passed`,
    `failed`, or `broken` if the test itself is the cause. The node passes the result of the call, in the format of
    `run_call`, to the next `step`.
    """

    def __init__(self, prompt: str, name: str, test: str) -> None:
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._answered = 0
        threading.Thread(target=self._run, args=(prompt, name, test), daemon=True).start()

    def step(self, answer: str | None = None) -> None:
        if answer is not None:
            self._answers.put(json.loads(answer))
        sys.stdout.write(f"\n{MARK}{json.dumps(self._events.get())}\n")

    def _run(self, prompt: str, name: str, test: str) -> None:
        scope: dict[str, Any] = {"__name__": "check"}
        try:
            try:
                code = compile(prompt, "prompt", "exec")
            except SyntaxError:  # a prompt may end with a function that has no body
                code = compile(f"{prompt}\n    pass\n", "prompt", "exec")
            exec(code, scope)
            scope[name] = self._candidate  # some checks call the function by its name
            exec(compile(test, "test", "exec"), scope)
            scope["check"](self._candidate)
            self._events.put({"passed": self._answered})
        except BaseException as error:  # an AssertionError, or any exception that a wrong value causes
            what = f"{type(error).__name__}: {error}"[:1000]
            self._events.put({"failed" if self._answered else "broken": what})

    def _candidate(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self._events.put({"call": {"args": encode(list(args)), "kwargs": encode(kwargs)}})
        except TypeError as error:
            self._events.put({"broken": str(error)})
        answer = self._answers.get()
        self._answered += 1
        if "value" in answer:
            try:
                return decode(answer["value"])
            except Exception as error:  # the candidate has forged the output of `run_call`
                self._events.put({"failed": f"the program gave no value: {error}"[:1000]})
                self._answers.get()  # this blocks forever: otherwise the check could go on and hide the failure
        name, message = answer["raised"]
        kind = getattr(builtins, name, None)
        # Only subclasses of Exception that are built in keep their type. Others, such as SystemExit or a class of the
        # candidate, become a RuntimeError. StopIteration also becomes a RuntimeError, because it would end a loop of
        # the check.
        if not (isinstance(kind, type) and issubclass(kind, Exception)) or name in (
            "StopIteration",
            "StopAsyncIteration",
        ):
            kind = RuntimeError
        try:
            raised = kind(message)
        except TypeError:  # UnicodeDecodeError, for example, needs more arguments
            raised = RuntimeError(message)
        raise raised
