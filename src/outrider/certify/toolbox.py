"""Which of a harness's tools runs a command, starts a sub-agent or waits for one, and how it is called.

Pure: it knows tools by what requests declare of them, and by a preset's hint. Invariant: a call that it makes has
every argument that the tool's schema requires.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from outrider.harnesses.presets import Certify
from outrider.messages import ToolSpec

COMMANDS = ("command", "cmd", "script", "code", "input")
"""What the argument that holds a shell command is called, the likelier first."""

SHELLS = ("bash", "shell", "terminal", "exec", "run", "command")
"""What is in the name of a tool that runs commands, the likelier first."""

PROMPTS = ("prompt", "message", "task", "instruction", "objective")
HELPERS = ("task", "agent", "delegate")
TARGETS = ("targets", "ids", "id", "agent_id")

_SHELL_LIST = ("bash", "-c")


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool and the one argument that matters. `before` is what stands before its value in a list, None where it
    takes no list; `fixed` are the other arguments that it cannot be called without."""

    name: str
    argument: str
    before: tuple[str, ...] | None = None
    fixed: dict[str, Any] = {}

    def call(self, value: str) -> dict[str, Any]:
        """The arguments of a call."""
        return {self.argument: value if self.before is None else [*self.before, value], **self.fixed}


def find_shell(tools: Iterable[ToolSpec], hint: Certify) -> Tool | None:
    """The tool that runs a command; None when there is none. The hint's goes first, then the likeliest name."""
    found = _find(tools, hint.shell, SHELLS, COMMANDS, {})
    return msgspec.structs.replace(found, before=_SHELL_LIST) if found and found.before is not None else found


def find_subagent(tools: Iterable[ToolSpec], hint: Certify) -> Tool | None:
    """The tool that starts a sub-agent, called with a prompt; None when there is none."""
    return _find(tools, hint.subagent, HELPERS, PROMPTS, hint.subagent_arguments)


def find_waiter(tools: Iterable[ToolSpec], hint: Certify) -> Tool | None:
    """The tool that waits for a sub-agent, called with its id; None unless the hint names one."""
    return _find(tools, hint.wait, (), TARGETS, {})


def _find(
    tools: Iterable[ToolSpec],
    hint: str | None,
    names: tuple[str, ...],
    arguments: tuple[str, ...],
    given: Mapping[str, Any],
) -> Tool | None:
    found: list[tuple[int, Tool]] = []
    for tool in tools:
        function = tool["function"]
        name = str(function.get("name", ""))
        rank = 0 if name == hint else _rank(name, names)
        if rank is not None and (made := _made(name, function.get("parameters") or {}, arguments, given)):
            found.append((rank, made))
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _rank(name: str, names: tuple[str, ...]) -> int | None:
    """How likely a tool of that name is the one; less is likelier."""
    lower = name.lower()
    exact = next((index for index, part in enumerate(names) if part == lower), None)
    inside = next((index for index, part in enumerate(names) if part in lower), None)
    if exact is not None:
        return 1 + exact
    return None if inside is None else 1 + len(names) + inside


def _made(name: str, schema: Mapping[str, Any], arguments: tuple[str, ...], given: Mapping[str, Any]) -> Tool | None:
    properties = schema.get("properties") or {}
    for argument in arguments:
        kind = _kind(properties.get(argument))
        if kind in ("string", "array"):
            wanted = [*schema.get("required", ()), *(known for known in given if known in properties)]
            fixed = {other: given.get(other, _filler(properties.get(other))) for other in wanted if other != argument}
            return Tool(name=name, argument=argument, before=() if kind == "array" else None, fixed=fixed)
    return None


def _kind(schema: Any) -> str | None:
    """The JSON type of a property; of several the first that is not null."""
    if not isinstance(schema, Mapping):
        return None
    kind = schema.get("type")
    if isinstance(kind, list):
        return next((one for one in kind if one != "null"), None)
    if kind is None and (choices := schema.get("anyOf") or schema.get("oneOf")):
        return next((found for one in choices if (found := _kind(one)) not in (None, "null")), None)
    return kind if isinstance(kind, str) else None


def _filler(schema: Any) -> Any:
    """A value that a required property will take."""
    if isinstance(schema, Mapping) and (choices := schema.get("enum")):
        return choices[0]
    fillers: dict[str | None, Any] = {"boolean": False, "integer": 60, "number": 60, "array": [], "object": {}}
    return fillers.get(_kind(schema), "a step of the task")
