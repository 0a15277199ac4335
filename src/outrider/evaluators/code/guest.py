"""What runs in sandboxes: one call of a candidate's function in one, and a task's hidden check in another.

Standard library only, Python 3.8 or newer, in one file: its text is sent along, with a last line that starts a part of
it. Values cross as JSON (`encode`, `decode`), and only those of built-in types: an object that claims to be equal to
everything stays where it was made. Nothing that `run_call` says is believed, it is only compared. Invariant: the check
is told of a value that a candidate returned, or that it raised, and never of what else it did.
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
"""In front of each line by which a Checker speaks; it shares its output with what the check prints."""


def encode(value: Any) -> Any:
    """The value as JSON has it. A list is a list, and any other collection an object that names its type. Raises
    TypeError for what is no value of a built-in type, and RecursionError."""
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
    """The value that `encode` made this of, whose subclasses are gone. Of anything else it raises what it likes, and
    takes as long as it likes: only the sandbox of a check does this."""
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
    """A candidate that defines `name` comes below the prompt, whose imports and helpers it may use; any other goes on
    where the prompt ends."""
    try:
        defined = {getattr(one, "name", "") for one in ast.parse(candidate).body}
    except (SyntaxError, ValueError):
        defined = set()
    return f"{prompt}\n{candidate}" if name in defined else prompt + candidate


def run_call() -> None:
    """Read a request from standard input: the candidate's `file`, the `prompt` in front of it, the `name` of the
    function, its `args` and `kwargs`. Write what came of it: `value`, or `raised`. The process ends here.

    A method of a class `Solution` is found, too. What the candidate prints goes to the standard error.
    """
    request = json.load(sys.stdin)
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # Not "__main__": what a program does only when it is run as one is not wanted here.
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
    except BaseException as error:  # SystemExit, too: it is what came of the call
        answer = {"raised": [type(error).__name__, str(error)[:1000]]}
    told.write(json.dumps(answer))
    told.flush()
    os._exit(0)  # without waiting for threads, and without what is registered for the exit


class Checker:
    """Runs `check(candidate)` of a test in a thread, and hands each call of the candidate out.

    `step` says in one line of JSON, behind MARK, what comes next: `call`, to which `step(answer)` is the answer as
    `run_call` gives it; or the end: `passed`, `failed`, or `broken` where no candidate can be blamed.
    """

    def __init__(self, prompt: str, name: str, test: str) -> None:
        self._said: queue.Queue[dict[str, Any]] = queue.Queue()
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._answered = 0
        threading.Thread(target=self._run, args=(prompt, name, test), daemon=True).start()

    def step(self, answer: str | None = None) -> None:
        if answer is not None:
            self._answers.put(json.loads(answer))
        sys.stdout.write(f"\n{MARK}{json.dumps(self._said.get())}\n")

    def _run(self, prompt: str, name: str, test: str) -> None:
        scope: dict[str, Any] = {"__name__": "check"}
        try:
            try:
                code = compile(prompt, "prompt", "exec")
            except SyntaxError:  # a function without a docstring is not one yet
                code = compile(f"{prompt}\n    pass\n", "prompt", "exec")
            exec(code, scope)
            scope[name] = self._candidate  # some checks name the function itself
            exec(compile(test, "test", "exec"), scope)
            scope["check"](self._candidate)
            self._said.put({"passed": self._answered})
        except BaseException as error:  # an AssertionError, or what a wrong value leads to
            what = f"{type(error).__name__}: {error}"[:1000]
            self._said.put({"failed" if self._answered else "broken": what})

    def _candidate(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self._said.put({"call": {"args": encode(list(args)), "kwargs": encode(kwargs)}})
        except TypeError as error:
            self._said.put({"broken": str(error)})
        answer = self._answers.get()
        self._answered += 1
        if "value" in answer:
            try:
                return decode(answer["value"])
            except Exception as error:  # `run_call` has not written this: the candidate has
                self._said.put({"failed": f"the program gave no value: {error}"[:1000]})
                self._answers.get()  # for ever: nothing of the check may hide it
        name, message = answer["raised"]
        kind = getattr(builtins, name, None)
        # Such as SystemExit, or a class of the candidate's own. StopIteration would end a loop of the check.
        if not (isinstance(kind, type) and issubclass(kind, Exception)) or name in (
            "StopIteration",
            "StopAsyncIteration",
        ):
            kind = RuntimeError
        try:
            raised = kind(message)
        except TypeError:  # UnicodeDecodeError and its like take more
            raised = RuntimeError(message)
        raise raised
