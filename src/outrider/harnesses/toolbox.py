"""The tools of the built-in agent. They turn each tool call into a result for the model.

Invariant: every call that a model generates, valid or not, gets a text, a screenshot, or both as its result. An
exception is raised only for a broken sandbox, a sandbox without a tool's interpreter, or an error in an agent's own
tool.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Literal, get_args

import msgspec

from outrider.errors import RuntimeFailure
from outrider.harnesses.base import HarnessContext
from outrider.harnesses.desktop import Desktop
from outrider.messages import Message, Role, ToolCall, ToolSpec, message_of_parts
from outrider.sandbox.runtimes.base import Runtime, Shell, ShellKind

PlainTool = Literal["bash", "python", "ipython", "edit", "think"]
ToolName = Literal[PlainTool, "desktop"]

MAX_RESULT = 16_384
"""Maximum characters of a tool's result. The middle of a longer result is cut out."""

SHELLS: tuple[ShellKind, ...] = get_args(ShellKind)
PROBE_SECONDS = 30.0
COMBINING = frozenset(("$ref", "allOf", "anyOf", "oneOf"))
"""Keywords of a schema whose arguments may be described elsewhere than in its `properties`."""
MAX_PATH = 4096
"""Maximum bytes of a path. Linux has the same limit."""


def tool_spec(name: str, description: str, *arguments: str) -> ToolSpec:
    """Return the description of a tool for the model. All arguments of the tool are required strings."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string"} for argument in arguments},
                "required": list(arguments),
            },
        },
    }


TOOLS: dict[PlainTool, ToolSpec] = {
    "bash": tool_spec("bash", "Run a command.", "command"),
    "python": tool_spec("python", "Run Python code.", "code"),
    "ipython": tool_spec("ipython", "Run code in IPython: Python, %magics and !commands.", "code"),
    "edit": tool_spec(
        "edit",
        "Replace the text `old`, which must be in the file once, with `new`. If `old` is empty, write a file of `new`.",
        *("path", "old", "new"),
    ),
    "think": tool_spec("think", "Note a thought. Nothing else happens.", "thought"),
}


class Tool(msgspec.Struct, frozen=True):
    """A tool that an agent defines. `run` gets the call's arguments: all required properties of `spec`, and no other
    arguments than its properties, unless `spec` has `additionalProperties` or a keyword of COMBINING.
    `run` returns the text for the model, and is cancelled after the toolbox's time limit. If `run` raises an exception,
    the agent ends."""

    spec: ToolSpec
    run: Callable[[HarnessContext, Mapping[str, Any]], Awaitable[str]]


class Toolbox:
    """The tools for one run of an agent. A shell opens when it is first called, and closes when the run ends. `seconds`
    is the time limit of each call."""

    def __init__(
        self,
        context: HarnessContext,
        tools: Sequence[PlainTool],
        own: Sequence[Tool],
        seconds: float,
        desktop: Desktop | None = None,
    ) -> None:
        self._context = context
        self._desktop = desktop
        self._own = {tool.spec["function"]["name"]: tool for tool in own}
        self._seconds = seconds
        self._shells: dict[ShellKind, Shell] = {}
        self._by_name = {name: TOOLS[name] for name in tools} | {name: tool.spec for name, tool in self._own.items()}

    @property
    def specs(self) -> list[ToolSpec]:
        return [*self._by_name.values(), *(self._desktop.tools() if self._desktop is not None else ())]

    async def __aenter__(self) -> Toolbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        async with AsyncExitStack() as stack:
            for shell in self._shells.values():
                stack.push_async_callback(shell.close)
            self._shells = {}

    async def result(self, call: ToolCall) -> Message:
        """Return the result of a call as a message. Raises RuntimeFailure if the sandbox is broken, or does not have
        the tool's interpreter."""
        if self._desktop is not None and call.name in self._desktop.names():
            parts = await self._desktop.call(call.name, call.arguments)
            return message_of_parts(Role.TOOL, parts, tool_call_id=call.id)
        return Message(role=Role.TOOL, content=await self.call(call), tool_call_id=call.id)

    async def call(self, call: ToolCall) -> str:
        """Return the result of a call as text. The call must not be for a tool of the desktop. Raises RuntimeFailure
        (see `result`)."""
        if call.name not in self._by_name:
            known = [spec["function"]["name"] for spec in self.specs]
            return f"unknown tool {call.name!r}; known: {', '.join(known) or 'none'}"
        parameters = self._by_name[call.name]["function"].get("parameters", {})
        arguments = _arguments(call.arguments, parameters)
        if arguments is None:
            return f"malformed arguments: give a JSON object with {_described(parameters)}"
        shell = next((kind for kind in SHELLS if kind == call.name), None)
        try:
            async with asyncio.timeout(None if shell else self._seconds) as limit:  # shells apply the limit themselves
                if shell is not None:
                    return await self._in_shell(shell, *arguments.values())
                return shortened(await self._run(call.name, arguments))
        except TimeoutError:
            if not limit.expired():
                raise
            return f"[timed out after {self._seconds:g} s]"

    async def _run(self, name: str, arguments: Mapping[str, Any]) -> str:
        if name in self._own:
            return await self._own[name].run(self._context, arguments)
        if name == "edit":
            return await edit_file(self._context.runtime, **arguments)
        return "[noted]"

    async def _in_shell(self, kind: ShellKind, text: str) -> str:
        if kind not in self._shells:
            self._shells[kind] = await self._context.runtime.open_shell(kind)
        shell = self._shells[kind]
        try:
            result = await shell.run(text, seconds=self._seconds)
        except RuntimeFailure:
            # Do not raise here, because the model may have ended its own shell with `exit`. If instead the sandbox is
            # broken, the next call raises, because it cannot open a shell.
            del self._shells[kind]
            await shell.close()
            return f"[the {kind} session ended; the next call starts a new one]"
        if result.timed_out:
            status = f"[timed out after {self._seconds:g} s]"
        else:
            status = f"[exit code {result.exit_code}]" if result.exit_code else ""
        return "\n".join(filter(None, (shortened(result.output.removesuffix("\n")), status)))


async def edit_file(runtime: Runtime, path: str, old: str, new: str) -> str:
    """Replace `old`, which must occur exactly once, with `new` in a file. If `old` is empty, `new` becomes the whole
    file. A relative path is below the working directory. Returns the text for the model. Raises RuntimeFailure if the
    sandbox is broken."""
    if not 0 < len(path.encode()) <= MAX_PATH or "\0" in path:
        return "give the path of a file"
    # Writing sets the file's mode, so find out first whether the file is executable. In a broken sandbox, this command
    # raises RuntimeFailure.
    executable = (await runtime.exec(["test", "-x", path], seconds=PROBE_SECONDS)).exit_code == 0
    try:
        text = (await runtime.read(path)).decode() if old else ""
        if old and (count := text.count(old)) != 1:
            return f"nothing was changed: `old` is {count} times in {path}, not once"
        await runtime.write(path, (text.replace(old, new) if old else new).encode(), executable=executable)
    except FileNotFoundError:
        return f"there is no file {path}"
    except (IsADirectoryError, UnicodeDecodeError):
        return f"{path} is no text file"
    except RuntimeFailure as error:
        # Either this file cannot be read or written, or the sandbox is broken. In a broken sandbox, `true` does not run
        # either, and RuntimeFailure is raised.
        await runtime.exec(["true"], seconds=PROBE_SECONDS)
        return error.message
    return f"changed {path}" if old else f"wrote {path}"


def shortened(text: str) -> str:
    """Return the text. If it is longer than MAX_RESULT, a note replaces its middle."""
    if len(text) <= MAX_RESULT:
        return text
    half = MAX_RESULT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters cut ...]\n{text[-half:]}"


def _arguments(text: str, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of a call by name. Returns None if the text is not a JSON object, if a required argument is
    missing, or if an argument is not a string although it must be one. Also returns None if a text in an argument has a
    lone surrogate, which no program accepts."""
    required, properties = _properties(parameters)
    try:
        given = json.loads(text)
        if not isinstance(given, dict):
            return None
        arguments = {name: given[name] for name in properties if name in required or name in given}
        for name, value in arguments.items():
            if _type(properties[name]) == "string" and not isinstance(value, str):
                return None
        if parameters.get("additionalProperties") or not COMBINING.isdisjoint(parameters):
            arguments = given | arguments
        json.dumps(arguments, ensure_ascii=False).encode()  # raises an error for a lone surrogate at any depth
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return arguments


def _described(parameters: Mapping[str, Any]) -> str:
    """Return a description of the arguments that a tool requires."""
    required, properties = _properties(parameters)
    wanted = [f'a {_type(schema)} "{name}"' for name, schema in properties.items() if name in required]
    return ", ".join(wanted) or "the arguments of the tool"


def _properties(parameters: Mapping[str, Any]) -> tuple[Sequence[str], Mapping[str, Any]]:
    """Return the names of the arguments that a tool requires, and the schemas of its arguments by name."""
    return parameters.get("required") or (), parameters.get("properties") or {}


def _type(schema: Any) -> Any:
    """Return the type in a schema, or "value" if it names none. A schema can be a truth value instead of an object."""
    return schema.get("type", "value") if isinstance(schema, Mapping) else "value"
