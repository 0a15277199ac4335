"""Finds a harness's tools for running a command, writing or reading a file, looking at an image, and waiting for a
sub-agent. Also sorts the tools by how likely they start a sub-agent.

The decisions use only the tools' declarations and the hint of a preset. Invariant: a call has every argument that the
tool's schema requires.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from outrider.harnesses.presets import Certify, McpCall
from outrider.lab.certify.note_server import TOOL
from outrider.lab.certify.rows import SERVER
from outrider.messages import ToolSpec

FILLER = "a step of the task"
"""The value of a required text argument that has no influence on the test."""

PATHS = ("path", "file_path", "filepath", "filename", "file_name", "file", "target_file", "absolute_path")
CONTENTS = ("content", "contents", "text", "file_text", "file_content", "data", "body", "code")
FOLDERS = frozenset({"cwd", "dir", "directory", "folder", "workdir", "path"})
"""Words in the name of a parameter that takes a path."""
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter that a tool with a role (`ToolRole`) is expected to have. `names` are its possible names, the
    likeliest first. `described_by` are words of its description. `may_be_list` is True if it may be a list of
    strings."""

    names: tuple[str, ...]
    described_by: frozenset[str] = frozenset()
    may_be_list: bool = False


class ToolRole(msgspec.Struct, frozen=True, kw_only=True):
    """A role of a tool (what a scripted action uses the tool for, such as running a command), and the words by which a
    tool with this role is recognised. `what` describes the role.

    - `certain`: words that decide the role, the likeliest first. They are in the tool's name or in a parameter's
      choices.
    - `read_description`: if True, the words of `certain` are also looked for in the tool's description, but give a
      lower score there.
    - `possible`: words in the tool's name that give a low score.
    - `excluding`: words in the tool's name that exclude the role.
    """

    what: str
    certain: tuple[str, ...]
    possible: frozenset[str] = frozenset()
    excluding: frozenset[str] = frozenset()
    read_description: bool = True
    parameters: tuple[Parameter, ...]


COMMAND = ToolRole(
    what="one that runs a shell command: a parameter such as `command`, a text or a list of words",
    certain=("bash", "shell", "terminal", "console", "zsh", "sh", "command", "commands", "cmd"),
    possible=frozenset({"run", "exec", "execute", "executes", "execution", "process", "subprocess"}),
    excluding=frozenset(
        {"python", "ipython", "jupyter", "notebook", "sql", "browser", "javascript", "kill", "stop", "output", "status"}
        | {"stdin", "read", "get", "list", "search", "wait", "agent", "task"}
    ),
    parameters=(
        Parameter(
            names=(
                *("command", "cmd", "commands", "command_line", "cmdline", "shell_command", "bash_command", "argv"),
                *("script", "args", "code", "input"),
            ),
            described_by=frozenset({"command", "commands", "shell", "bash", "script"}),
            may_be_list=True,
        ),
    ),
)
WRITE = ToolRole(
    what="one that writes a file: parameters such as `path` and `content`",
    certain=("write", "writes", "create", "creates", "save", "saves", "overwrite"),
    excluding=frozenset(
        {"append", "read", "edit", "replace", "patch", "insert", "delete", "folder", "directory", "memory", "todo"}
        | {"task", "agent"}
    ),
    parameters=(Parameter(names=PATHS), Parameter(names=CONTENTS)),
)
READ = ToolRole(
    what="one that reads a file: a parameter such as `path`",
    certain=("read", "reads", "view", "views", "cat", "open", "show"),
    excluding=frozenset(
        {"write", "edit", "list", "search", "folder", "directory", "image", "url", "web", "memory", "todo", "output"}
    ),
    parameters=(Parameter(names=PATHS),),
)
IMAGE = ToolRole(
    what="one that looks at an image file: a parameter such as `path`",
    certain=("image", *READ.certain),
    excluding=(READ.excluding - {"image"}) | {"create", "generate"},
    parameters=(Parameter(names=PATHS),),
)
SUBAGENT = ToolRole(
    what="one that starts a sub-agent",
    certain=("task", "agent", "subagent", "delegate"),
    read_description=False,
    parameters=(Parameter(names=("prompt", "message", "task", "instruction", "objective")),),
)
WAITER = ToolRole(
    what="one that waits for a sub-agent",
    certain=(),
    read_description=False,
    parameters=(Parameter(names=("targets", "ids", "id", "agent_id"), may_be_list=True),),
)

NOTER = ToolRole(
    what="the tool of the MCP server",
    certain=(),
    read_description=False,
    parameters=(Parameter(names=("text",)),),
)
LOADER = ToolRole(
    what="one that loads a skill",
    certain=("skill",),
    read_description=False,
    parameters=(Parameter(names=("skill", "name", "skill_name", "command")),),
)

CERTAIN = 30
"""Minimum score of a tool whose role is certain."""
NAMED = 6
"""Minimum score of a parameter with a likely name."""
DESCRIBED = 1
"""Score of a parameter that is recognised only by its description."""
NOTE_TOOL = str(TOOL["name"])
SHELL_LINE = ("bash", "-c")
SHELLS = ("bash", "sh", "shell", "zsh", "terminal")
"""Values of a tool's language parameter that select the shell. Tools that run code in several languages have such a
parameter."""
MAX_DEPTH = 8
"""Maximum depth of nested values in a call. A limit is needed because a schema may contain itself."""
MAX_VALUES = 1000
"""Maximum number of values in a call."""
MAX_ITEMS = 8
"""Maximum number of items in a list of a call."""
ARGUMENT_LISTS = ("args", "arguments", "argv")
"""Names of a parameter for a program's arguments. If a tool has a parameter with such a name, the tool's parameter
`command` takes only the program."""


class FoundTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool and how to call it. Below, "the value" is the first of `values` in `call`, for example a shell command.

    - `arguments`: the names of the tool's parameters, in the order of the role's parameters.
    - `before`: if the first argument must be a list, its elements before the value. None if the first argument is a
      string.
    - `fixed`: the values of all other required arguments.
    - `absolute`: True if the tool takes absolute paths.
    - `around`: if not empty, a template for the first argument. It contains {value} in place of the value as JSON.
    """

    name: str
    arguments: tuple[str, ...]
    before: tuple[str, ...] | None = None
    fixed: dict[str, Any] = {}
    absolute: bool = False
    around: str = ""

    def call(self, *values: str) -> dict[str, Any]:
        """Return the arguments of a call. `values` has one value for each name in `arguments`."""
        value = self.around.replace("{value}", json.dumps(values[0])) if self.around else values[0]
        first: Any = value if self.before is None else [*self.before, value]
        return {**dict(zip(self.arguments, (first, *values[1:]), strict=True)), **self.fixed}


class TaskTools(msgspec.Struct, frozen=True, kw_only=True):
    """A harness's tools for the scripted actions. A field is None if the harness has no such tool."""

    shell: FoundTool | None
    writer: FoundTool | None
    reader: FoundTool | None
    viewer: FoundTool | None
    noter: FoundTool | None
    loader: FoundTool | None


class MarkedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of the tool `name`. `texts` are the values of its text arguments, all different."""

    name: str
    arguments: dict[str, Any]
    texts: tuple[str, ...]

    def with_prompt(self, text: str, prompt: str) -> dict[str, Any]:
        """Return the call's arguments, with `prompt` in place of `text`, and FILLER in place of all other texts."""
        arguments = json.dumps(self.arguments)
        for each in self.texts:
            arguments = arguments.replace(json.dumps(each), json.dumps(prompt if each == text else FILLER))
        replaced: dict[str, Any] = json.loads(arguments)
        return replaced


def find_tools(tools: Sequence[ToolSpec], hint: Certify) -> TaskTools:
    """Return the tools of a request that can do the scripted actions (`ModelAction`)."""
    return TaskTools(
        shell=_find(tools, COMMAND, hint.shell),
        writer=_find(tools, WRITE, None),
        reader=_find(tools, READ, None),
        viewer=_find(tools, IMAGE, None),
        noter=_noter(tools, hint.mcp_call),
        loader=_find(tools, LOADER, hint.skill),
    )


def _noter(tools: Sequence[ToolSpec], within: McpCall | None) -> FoundTool | None:
    """Return the tool that the model must call to use the MCP server's tool. Usually this is the server's tool itself.
    In some programs, the model must instead call a tool that runs code, and the code uses the server's tool. `within`
    then describes this other tool and the code."""
    names = _names(tools)
    if within is None:
        # Programs put the server's name before the tool's name, so only the end of a name is compared.
        return _find(tools, NOTER, next((name for name in names if name.endswith(NOTE_TOOL)), ""))
    if within.tool not in names:
        return None
    words = {"{server}": SERVER, "{tool}": NOTE_TOOL, "{arguments}": '{"text": {value}}'}
    text = re.sub("|".join(map(re.escape, words)), lambda found: words[found[0]], within.text)
    return FoundTool(name=within.tool, arguments=(within.argument,), around=text)


def _names(tools: Iterable[ToolSpec]) -> list[str]:
    return [str(tool["function"].get("name", "")) for tool in tools]


def marked_calls(tools: Iterable[ToolSpec], hint: Certify, text: Callable[[], str]) -> list[MarkedCall]:
    """Return a call of each tool that takes a text. `text` makes a new text for each argument. Tools that probably
    start a sub-agent come first."""
    calls: list[tuple[int, MarkedCall]] = []
    for tool in tools:
        function = tool["function"]
        properties = _properties(function)
        declared = function.get("parameters")
        filling = _Arguments(declared if isinstance(declared, Mapping) else {}, text)
        schema = {"type": "object", "properties": properties, "required": _required(function)}
        arguments, texts = filling.filled("", schema), filling.texts
        arguments |= {name: value for name, value in hint.subagent_arguments.items() if name in properties}
        if texts:
            fits = [_fit(name, each, SUBAGENT.parameters[0]) for name, each in properties.items()]
            call = MarkedCall(name=str(function.get("name", "")), arguments=arguments, texts=tuple(texts))
            calls.append((_certainty(function, SUBAGENT, hinted=False) + max(fits, default=0), call))
    return [call for _, call in sorted(calls, key=lambda pair: -pair[0])]


def may_start(tool: ToolSpec) -> bool:
    """Return True if the tool's name or a choice of a parameter is typical of tools that start a sub-agent."""
    return _certainty(tool["function"], SUBAGENT, hinted=False) > 0


def find_waiter(tools: Iterable[ToolSpec], hint: Certify) -> FoundTool | None:
    """Return the tool that waits for the sub-agent with a given id, or None. Only the preset's hint can name it."""
    return _find(tools, WAITER, hint.wait)


def describe(tools: Iterable[ToolSpec]) -> str:
    """Return a readable list of a request's tools with their parameters."""
    offered = {str(tool["function"].get("name")): _properties(tool["function"]) for tool in tools}
    shown = [
        f"{name}({', '.join(f'{parameter}: {_kind(schema)}' for parameter, schema in properties.items())})"
        for name, properties in sorted(offered.items())
    ]
    return "; ".join(shown) or "none"


def _find(tools: Iterable[ToolSpec], role: ToolRole, hint: str | None) -> FoundTool | None:
    found: list[tuple[int, FoundTool]] = []
    for tool in tools:
        function = tool["function"]
        hinted = hint is not None and function.get("name") == hint
        certainty = _certainty(function, role, hinted)
        if not certainty or not (made := _usable(function, role)):
            continue
        fit, usable = made
        texts = [function, *_properties(function).values()]
        # Words such as `execute` may also describe a tool that runs Python. So a tool that mentions Python is accepted
        # only if its role is certain.
        python = any(
            "python" in str(each.get("description", "")).lower() for each in texts if isinstance(each, Mapping)
        )
        if certainty >= CERTAIN or ((fit >= NAMED or fit == DESCRIBED) and not python):
            found.append((certainty + fit, usable))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _certainty(function: Mapping[str, Any], role: ToolRole, hinted: bool) -> int:
    """Return a score for how likely the tool has the role, judged by its choices, name and description. The score is 0
    if nothing suggests the role. It is also 0 if the tool's name excludes the role, unless a choice of a parameter is
    one of the `certain` words."""
    if hinted:
        return 1000
    name = str(function.get("name", ""))
    words, described = _words(name), _words(str(function.get("description") or ""))
    choices = {choice for schema in _properties(function).values() for choice in _choices(schema)}
    if choices & {*role.certain}:
        return CERTAIN
    if words & role.excluding:
        return 0
    matches = [word in words or (len(word) > 3 and word in name.lower()) for word in role.certain]
    if any(matches):
        return CERTAIN + 20 - matches.index(True)
    if role.read_description and described & {*role.certain}:
        return 20 if words & role.possible else 15
    return 10 if words & role.possible else 0


def _usable(function: Mapping[str, Any], role: ToolRole) -> tuple[int, FoundTool] | None:
    """Return a pair: a score for how well the tool's parameters fit the role, and the tool itself. Returns None if the
    tool has no fitting parameter for one of the role's parameters."""
    properties = _properties(function)
    arguments: list[str] = []
    fit = 0
    for parameter in role.parameters:
        free = {name: schema for name, schema in properties.items() if name not in arguments}
        best = max(((_fit(name, schema, parameter), name) for name, schema in free.items()), default=(0, ""))
        if not best[0]:
            return None
        fit += best[0]
        arguments.append(best[1])
    before: tuple[str, ...] | None = None
    # the argument is a list, either of a program and its arguments, or of commands
    if _kind(properties[arguments[0]]) == "array":
        program = arguments[0].lower() in ("command", "cmd", "argv", *ARGUMENT_LISTS)
        before = SHELL_LINE if program else ()
    fixed = {name: _filler(name, properties.get(name), role) for name in _required(function)}
    if role is COMMAND and arguments[0] in ARGUMENT_LISTS and "command" in properties:
        before, fixed["command"] = SHELL_LINE[1:], SHELL_LINE[0]
    return fit, FoundTool(
        name=str(function.get("name", "")),
        arguments=tuple(arguments),
        before=before,
        fixed={name: value for name, value in fixed.items() if name not in arguments},
        absolute="absolute" in arguments[0] or "absolute" in str(properties[arguments[0]].get("description", "")),
    )


def _fit(name: str, schema: Any, parameter: Parameter) -> int:
    """Return a score for how well a tool's parameter fits a role's parameter. The score is 0 if the tool's parameter
    has a wrong type or fixed choices, or if neither its name nor its description fits."""
    kind = _kind(schema)
    if (kind != "string" and not (parameter.may_be_list and kind == "array")) or _choices(schema):
        return 0
    lower = name.lower()
    if kind == "array" and lower in ARGUMENT_LISTS:
        # A list of arguments must have a higher score than the same tool's parameter `command`, because `command` takes
        # only the program.
        return 3 + len(parameter.names)
    if lower in parameter.names:
        return 2 + len(parameter.names) - parameter.names.index(lower)
    if _words(name) & set(parameter.names):
        return 2
    return DESCRIBED if parameter.described_by & _words(str(schema.get("description") or "")) else 0


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _required(function: Mapping[str, Any]) -> list[str]:
    parameters = function.get("parameters")
    required = parameters.get("required") if isinstance(parameters, Mapping) else None
    return list(map(str, required)) if isinstance(required, list) else []


def _words(text: str) -> set[str]:
    return {word.lower() for word in WORD.findall(text)}


def _choices(schema: Any) -> tuple[str, ...]:
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    return tuple(map(str, choices)) if isinstance(choices, list) else ()


def _kind(schema: Any) -> str | None:
    """Return the JSON type of a property, or None. Of several types, returns the first that is not null."""
    if not isinstance(schema, Mapping):
        return None
    kind = schema.get("type")
    if isinstance(kind, list):
        return next((one for one in kind if one != "null"), None)
    if kind is None and (choices := schema.get("anyOf") or schema.get("oneOf")):
        return next((found for one in choices if (found := _kind(one)) not in (None, "null")), None)
    return kind if isinstance(kind, str) else None


def _filler(name: str, schema: Any, role: ToolRole) -> Any:
    """Return a value that a required property accepts. If the property has fixed choices, prefer one that fits the
    role."""
    if not isinstance(schema, Mapping):
        return FILLER
    if choices := schema.get("enum"):
        likely = SHELLS if role is COMMAND else role.certain
        return next((choice for choice in choices if choice in likely), choices[0])
    if "default" in schema or "const" in schema:
        return schema.get("const", schema.get("default"))
    kind = _kind(schema)
    if kind == "string" and _words(name) & FOLDERS:
        return "."
    fillers: dict[str | None, Any] = {"boolean": False, "integer": 60, "number": 60, "array": [], "object": {}}
    if kind in ("integer", "number"):
        return max(min(60, schema.get("maximum", 60)), schema.get("minimum", 0))
    return fillers.get(kind, FILLER)


class _Arguments:
    """Fills in the arguments of a call. `text` makes a new text for each text argument, and `texts` collects them.
    References in schemas are looked up in `whole`. A schema may contain itself, so filling stops at MAX_DEPTH and at
    MAX_VALUES."""

    def __init__(self, whole: Mapping[str, Any], text: Callable[[], str]) -> None:
        self.texts: list[str] = []
        self._whole = whole
        self._text = text
        self._left = MAX_VALUES

    def filled(self, name: str, schema: Any, depth: int = 0) -> Any:
        """Return a value that the schema accepts. If the required properties of an object contain no text, optional
        properties are added: the property with a likely name, or all optional properties if no name is likely."""
        schema = self._resolved(schema)
        self._left -= 1
        fixed = not isinstance(schema, Mapping) or {"enum", "const", "default", "format", "pattern"} & schema.keys()
        if fixed or depth > MAX_DEPTH or self._left < 0:
            return _filler(name, schema, SUBAGENT)
        match _kind(schema):
            case "string" | None if not _words(name) & FOLDERS:
                self.texts.append(self._text())
                return self.texts[-1]
            case "array" if self._kind(schema.get("items")) in ("string", "object", "array"):
                number = schema.get("minItems")
                count = max(1, min(number, MAX_ITEMS)) if isinstance(number, int) else 1
                return [self.filled(name, schema["items"], depth + 1) for _ in range(count)]
            case "object":
                properties, before = _properties({"parameters": schema}), len(self.texts)
                required = _required({"parameters": schema})
                values = {each: self.filled(each, properties.get(each, {}), depth + 1) for each in required}
                if len(self.texts) == before:
                    kinds = {each: self._kind(one) for each, one in properties.items() if each not in required}
                    free = sorted(each for each, kind in kinds.items() if kind in ("string", "array", "object"))
                    likely = [each for each in SUBAGENT.parameters[0].names if kinds.get(each) == "string"][:1]
                    values |= {each: self.filled(each, properties[each], depth + 1) for each in likely or free}
                return values
        return _filler(name, schema, SUBAGENT)

    def _kind(self, schema: Any) -> str | None:
        return _kind(self._resolved(schema))

    def _resolved(self, schema: Any) -> Any:
        """Resolve a schema without a `type`: return the target of its reference, or the first schema in `anyOf`,
        `oneOf` or `allOf` that is not null."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, Mapping) or "type" in schema:
                return schema
            choices = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
            if isinstance(reference := schema.get("$ref"), str):
                schema = self._whole
                for part in reference.removeprefix("#").split("/")[1:]:
                    schema = schema.get(part) if isinstance(schema, Mapping) else None
            elif isinstance(choices, list):
                schema = next((one for one in choices if _kind(one) != "null"), None)
            else:
                return schema
        return None
