"""Which of a harness's tools runs a command, writes or reads a file, starts a sub-agent or waits for one.

Pure: it knows tools by what requests declare of them (names, types and descriptions of their parameters, what the tool
says of itself), and by a preset's hint. Invariant: a call that it makes has every argument that the tool's schema
requires.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from outrider.harnesses.presets import Certify
from outrider.messages import ToolSpec

FILLER = "a step of the task"
"""For a text that a tool requires and that does not matter."""

PATHS = ("path", "file_path", "filepath", "filename", "file_name", "file", "target_file", "absolute_path")
CONTENTS = ("content", "contents", "text", "file_text", "file_content", "data", "body", "code")
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter that a tool of some role has: what it may be called, the likelier first, what its description says,
    and whether it may be a list of texts, and not only a text."""

    names: tuple[str, ...]
    told: frozenset[str] = frozenset()
    listed: bool = False


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool is for. Words that say it for certain (`clear`, the likelier first), in its name, in a choice that it
    gives, or else in its description if that is looked at (`told`); words of its name that hint at it (`vague`), and
    that speak `against` it."""

    what: str
    clear: tuple[str, ...]
    vague: frozenset[str] = frozenset()
    against: frozenset[str] = frozenset()
    told: bool = True
    slots: tuple[Slot, ...]


COMMAND = Role(
    what="one that runs a shell command: a parameter such as `command`, a text or a list of words",
    clear=("bash", "shell", "terminal", "console", "zsh", "sh", "command", "commands", "cmd"),
    vague=frozenset({"run", "exec", "execute", "executes", "execution", "process", "subprocess"}),
    against=frozenset(
        {"python", "ipython", "jupyter", "notebook", "sql", "browser", "javascript", "kill", "stop", "output", "status"}
        | {"stdin", "read", "get", "list", "search", "wait", "agent", "task"}
    ),
    slots=(
        Slot(
            names=(
                *("command", "cmd", "commands", "command_line", "cmdline", "shell_command", "bash_command", "argv"),
                *("script", "args", "code", "input"),
            ),
            told=frozenset({"command", "commands", "shell", "bash", "script"}),
            listed=True,
        ),
    ),
)
WRITE = Role(
    what="one that writes a file: parameters such as `path` and `content`",
    clear=("write", "writes", "create", "creates", "save", "saves", "overwrite"),
    against=frozenset(
        {"append", "read", "edit", "replace", "patch", "insert", "delete", "folder", "directory", "memory", "todo"}
        | {"task", "agent"}
    ),
    slots=(Slot(names=PATHS), Slot(names=CONTENTS)),
)
READ = Role(
    what="one that reads a file: a parameter such as `path`",
    clear=("read", "reads", "view", "views", "cat", "open", "show"),
    against=frozenset(
        {"write", "edit", "list", "search", "folder", "directory", "image", "url", "web", "memory", "todo", "output"}
    ),
    slots=(Slot(names=PATHS),),
)
SUBAGENT = Role(
    what="one that starts a sub-agent",
    clear=("task", "agent", "subagent", "delegate"),
    told=False,
    slots=(Slot(names=("prompt", "message", "task", "instruction", "objective")),),
)
WAITER = Role(
    what="one that waits for a sub-agent",
    clear=(),
    told=False,
    slots=(Slot(names=("targets", "ids", "id", "agent_id"), listed=True),),
)

CERTAIN = 30
PLAIN = 6
"""How well a parameter fits that is called what such parameters are called."""
TOLD = 1
"""How well one fits of which only its description says what it is."""
SHELL_LINE = ("bash", "-c")
SHELLS = ("bash", "sh", "shell", "zsh", "terminal")
"""A choice of a tool that runs code in one of several languages."""
PROGRAM_BESIDE = ("args", "arguments", "argv")
"""What is called so beside a `command` has the words behind a program."""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool and the arguments that matter, in the order of its role's slots. `before` is what stands before the value
    of the first in a list, None where that takes no list; `fixed` are the other arguments that it cannot be called
    without. `absolute` where it says that it wants absolute paths."""

    name: str
    arguments: tuple[str, ...]
    before: tuple[str, ...] | None = None
    fixed: dict[str, Any] = {}
    absolute: bool = False

    def call(self, *values: str) -> dict[str, Any]:
        """The arguments of a call."""
        first: Any = values[0] if self.before is None else [*self.before, values[0]]
        return {**dict(zip(self.arguments, (first, *values[1:]), strict=True)), **self.fixed}


class Toolbox(msgspec.Struct, frozen=True, kw_only=True):
    """What of a harness's tools can do a task's steps."""

    shell: Tool | None
    writer: Tool | None
    reader: Tool | None


def find_tools(tools: Sequence[ToolSpec], hint: Certify) -> Toolbox:
    return Toolbox(
        shell=find_shell(tools, hint), writer=_find(tools, WRITE, None, {}), reader=_find(tools, READ, None, {})
    )


def find_shell(tools: Iterable[ToolSpec], hint: Certify) -> Tool | None:
    """The tool that runs a command; None when there is none. The hint's goes first."""
    return _find(tools, COMMAND, hint.shell, {})


def find_subagent(tools: Iterable[ToolSpec], hint: Certify) -> Tool | None:
    """The tool that starts a sub-agent, called with a prompt; None when there is none."""
    return _find(tools, SUBAGENT, hint.subagent, hint.subagent_arguments)


def find_waiter(tools: Iterable[ToolSpec], hint: Certify) -> Tool | None:
    """The tool that waits for a sub-agent, called with its id; None unless the hint names one."""
    return _find(tools, WAITER, hint.wait, {})


def described(tools: Iterable[ToolSpec]) -> str:
    """The tools as they were offered, each with its parameters, for people."""
    offered = {str(tool["function"].get("name")): _properties(tool["function"]) for tool in tools}
    shown = [
        f"{name}({', '.join(f'{parameter}: {_kind(schema)}' for parameter, schema in properties.items())})"
        for name, properties in sorted(offered.items())
    ]
    return "; ".join(shown) or "none"


def _find(tools: Iterable[ToolSpec], role: Role, hint: str | None, given: Mapping[str, Any]) -> Tool | None:
    found: list[tuple[int, Tool]] = []
    for tool in tools:
        function = tool["function"]
        hinted = hint is not None and function.get("name") == hint
        certainty = _certainty(function, role, hinted)
        if not certainty or not (made := _made(function, role, given)):
            continue
        fit, usable = made
        if certainty >= CERTAIN or ((fit >= PLAIN or fit == TOLD) and not _is_python(function)):
            found.append((certainty + fit, usable))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _is_python(function: Mapping[str, Any]) -> bool:
    """Whether what it runs is Python, by what it says: it may say `execute` and `script` as well."""
    said = [function, *_properties(function).values()]
    return any("python" in str(one.get("description", "")).lower() for one in said if isinstance(one, Mapping))


def _certainty(function: Mapping[str, Any], role: Role, hinted: bool) -> int:
    """How likely the tool is of that role, by what it is called and says of itself; 0 if it is not."""
    if hinted:
        return 1000
    name = str(function.get("name", ""))
    words, told = _words(name), _words(str(function.get("description") or ""))
    choices = {choice for schema in _properties(function).values() for choice in _choices(schema)}
    if choices & {*role.clear}:
        return CERTAIN
    if words & role.against:
        return 0
    said = [word in words or (len(word) > 3 and word in name.lower()) for word in role.clear]
    if any(said):
        return CERTAIN + 20 - said.index(True)
    if role.told and told & {*role.clear}:
        return 20 if words & role.vague else 15
    return 10 if words & role.vague else 0


def _made(function: Mapping[str, Any], role: Role, given: Mapping[str, Any]) -> tuple[int, Tool] | None:
    """How to call it for that role, and how well its parameters fit; None when it lacks one."""
    properties = _properties(function)
    arguments: list[str] = []
    fit = 0
    for slot in role.slots:
        free = {name: schema for name, schema in properties.items() if name not in arguments}
        best = max(((_fit(name, schema, slot), name) for name, schema in free.items()), default=(0, ""))
        if not best[0]:
            return None
        fit += best[0]
        arguments.append(best[1])
    before = _before(properties, arguments[0])
    wanted = [*_required(function), *(known for known in given if known in properties)]
    fixed = {name: given.get(name, _filler(name, properties.get(name), role)) for name in wanted}
    if role is COMMAND and arguments[0] in PROGRAM_BESIDE and "command" in properties:
        before, fixed["command"] = SHELL_LINE[1:], SHELL_LINE[0]
    return fit, Tool(
        name=str(function.get("name", "")),
        arguments=tuple(arguments),
        before=before,
        fixed={name: value for name, value in fixed.items() if name not in arguments},
        absolute="absolute" in arguments[0] or "absolute" in str(properties[arguments[0]].get("description", "")),
    )


def _fit(name: str, schema: Any, slot: Slot) -> int:
    """How well a parameter fills a slot; 0 if not at all. One that has only some choices fills none."""
    kind = _kind(schema)
    if (kind != "string" and not (slot.listed and kind == "array")) or _choices(schema):
        return 0
    lower = name.lower()
    if kind == "array" and lower in PROGRAM_BESIDE:
        return 3 + len(slot.names)  # before the program that these are the arguments of
    if lower in slot.names:
        return 2 + len(slot.names) - slot.names.index(lower)
    if _words(name) & set(slot.names):
        return 2
    return TOLD if slot.told & _words(str(schema.get("description") or "")) else 0


def _before(properties: Mapping[str, Any], argument: str) -> tuple[str, ...] | None:
    """A list is a program and its arguments, unless it is one of commands."""
    if _kind(properties[argument]) != "array":
        return None
    return SHELL_LINE if argument.lower() in ("command", "cmd", "argv", *PROGRAM_BESIDE) else ()


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _required(function: Mapping[str, Any]) -> list[str]:
    parameters = function.get("parameters")
    required = parameters.get("required") if isinstance(parameters, Mapping) else None
    return [str(name) for name in required] if isinstance(required, list) else []


def _words(text: str) -> set[str]:
    return {word.lower() for word in WORD.findall(text)}


def _choices(schema: Any) -> tuple[str, ...]:
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    return tuple(map(str, choices)) if isinstance(choices, list) else ()


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


def _filler(name: str, schema: Any, role: Role) -> Any:
    """A value that a required property will take: of some choices the one for the role."""
    if not isinstance(schema, Mapping):
        return FILLER
    if choices := schema.get("enum"):
        likely = SHELLS if role is COMMAND else role.clear
        return next((choice for choice in choices if choice in likely), choices[0])
    if "default" in schema or "const" in schema:
        return schema.get("const", schema.get("default"))
    kind = _kind(schema)
    if kind == "string" and _words(name) & {"cwd", "dir", "directory", "folder", "workdir", "path"}:
        return "."
    fillers: dict[str | None, Any] = {"boolean": False, "integer": 60, "number": 60, "array": [], "object": {}}
    if kind in ("integer", "number"):
        return max(min(60, schema.get("maximum", 60)), schema.get("minimum", 0))
    return fillers.get(kind, FILLER)
