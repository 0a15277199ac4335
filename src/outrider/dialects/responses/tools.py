"""The tools of a Responses request as a model is told of them, and the way back from a name to a tool.

It knows no items and no reply. Invariant: every tool in the table is one that the client runs; each has one name.

- A function is told in the nested form of Chat Completions, its keys in the client's order.
- A custom tool is told as a function with the one string `input`; a grammar is described, not enforced.
- The tools of a namespace are told with its name before theirs, and what it says of itself with the first of them.
- All others are hosted: OpenAI's servers would run them, or only its models know their form (a shell, a computer,
  patches without a schema). The model is not told of them, the request notes them, and the reply's `tools`, which are
  those in force, show that they are gone. To choose one is a 400.

Source: OpenAI API reference, "Create a model response", tools.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from outrider.dialects.base import Memory
from outrider.dialects.json import decode, depth_exceeds, refuse, shown
from outrider.dialects.responses.echo import INPUT, flat_name
from outrider.messages import ToolSpec

MAX_TOOL_DEPTH = 64
"""How deep a tool's schema may nest: chat templates print it recursively."""
_READ = frozenset({"function", "custom", "namespace"})
_CHOICES = frozenset({"none", "auto", "required"})
_NOT_TOLD = frozenset({"type", "defer_loading", "strict"})
"""For servers, not for models. (`strict` promises that arguments follow their schema: nothing here enforces that.)"""
_KEY = "tools"

_TOOLS: msgspec.json.Decoder[list[dict[str, Any]] | None] = msgspec.json.Decoder(list[dict[str, Any]] | None)


class Tool(msgspec.Struct, frozen=True):
    """One tool: what the model is told, and what the client calls it."""

    spec: ToolSpec
    name: str
    namespace: str | None
    custom: bool


class Tools(msgspec.Struct, frozen=True):
    """A request's tools by the name that the model knows. `raw` is the bytes that determine them, `in_force` the
    client's own JSON of those that are, for the reply; `hosted` are the kinds of those that are not."""

    table: dict[str, Tool] = {}
    raw: bytes = b""
    in_force: msgspec.Raw = msgspec.Raw(b"[]")
    hosted: tuple[str, ...] = ()

    def specs(self) -> tuple[ToolSpec, ...]:
        return tuple([tool.spec for tool in self.table.values()])


class ToolList(msgspec.Struct, frozen=True):
    """One list of tools on the wire and its place; `top` says whether it is the request's own."""

    raw: msgspec.Raw
    where: str
    top: bool


def read_tools(lists: list[ToolList], memory: Memory) -> Tools:
    """All tools of a request. Raises RequestError. `memory` keeps the last ones, so that a session's unchanged tools
    are read once."""
    raw = b"\n".join([bytes(part.raw) for part in lists])
    tools = memory.get(_KEY)
    if not isinstance(tools, Tools) or tools.raw != raw:
        tools = memory[_KEY] = _read(lists, raw)
    return tools


def check_choice(choice: str | dict[str, Any] | None, tools: Tools) -> None:
    """Raise RequestError for a choice that does not exist. Like `required`, a choice by name is a wish: what the
    model samples is not constrained."""
    if choice is None:
        return
    if isinstance(choice, str):
        if choice not in _CHOICES:
            refuse("tool_choice", f"unknown choice {shown(choice)}; known: {', '.join(sorted(_CHOICES))}")
        return
    kind = choice.get("type")
    if kind == "allowed_tools":
        return
    if kind not in ("function", "custom"):
        refuse("tool_choice.type", f"{shown(str(kind))} cannot be chosen: only function, custom and allowed_tools can")
    if not any(choice.get("name") in (tool.name, flat) for flat, tool in tools.table.items()):
        refuse("tool_choice.name", "must be the name of one of the tools")


def _read(lists: list[ToolList], raw: bytes) -> Tools:
    table: dict[str, Tool] = {}
    in_force: list[Any] = []
    hosted: list[str] = []
    for part in lists:
        sent = decode(_TOOLS, part.raw, part.where) or []
        for index, spec in enumerate(sent):
            where = f"{part.where}[{index}]"
            if depth_exceeds(spec, MAX_TOOL_DEPTH):
                refuse(where, f"nests more than {MAX_TOOL_DEPTH} levels deep")
            kind = spec.get("type")
            if not isinstance(kind, str) or not kind:
                refuse(f"{where}.type", "must be a non-empty string")
            if kind not in _READ:
                hosted.append(kind)
                continue
            if part.top:
                in_force.append(spec)
            for flat, tool in _tools_of(spec, where):
                known = table.get(flat)
                if known is not None and (known.name, known.namespace) != (tool.name, tool.namespace):
                    refuse(where, f"two tools would be told to the model as {shown(flat)}")
                table[flat] = tool
    if not table:
        return Tools(raw=raw, hosted=tuple(hosted))
    return Tools(table, raw, msgspec.Raw(msgspec.json.encode(in_force)), tuple(hosted))


def _tools_of(spec: dict[str, Any], where: str) -> Iterator[tuple[str, Tool]]:
    """The tools in one entry, each with the name that the model is told."""
    if spec.get("type") != "namespace":
        tool = _tool(spec, None, where)
        yield tool.name, tool
        return
    namespace, inner = _name(spec, where), spec.get("tools")
    about = _text(spec, "description", where)
    if not isinstance(inner, list):
        refuse(f"{where}.tools", "must be a list of tools")
    for index, nested in enumerate(inner):
        at = f"{where}.tools[{index}]"
        if not isinstance(nested, dict):
            refuse(at, "must be an object")
        tool = _tool(nested, namespace, at)
        if about:
            _introduce(tool.spec["function"], about)
            about = ""
        yield tool.spec["function"]["name"], tool


def _tool(spec: dict[str, Any], namespace: str | None, where: str) -> Tool:
    kind, name = spec.get("type"), ""
    if kind in ("function", "custom"):
        name = _name(spec, where)
    told = flat_name(namespace, name)
    match kind:
        case "function":
            _text(spec, "description", where)
            if not isinstance(spec.get("parameters"), dict | None):
                refuse(f"{where}.parameters", "must be an object")
            function = {key: told if key == "name" else value for key, value in spec.items() if key not in _NOT_TOLD}
        case "custom":
            function = _custom_function(spec, told, where)
        case _:
            refuse(
                f"{where}.type", f"a tool of type {shown(str(kind))} is not supported: send a function or custom tool"
            )
    return Tool({"type": "function", "function": function}, name, namespace, kind == "custom")


def _custom_function(spec: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """The function that stands for a custom tool."""
    text = {"type": "string", **_input_description(spec.get("format"), f"{where}.format")}
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    return {"name": name, "description": _text(spec, "description", where), "parameters": parameters}


def _input_description(form: Any, where: str) -> dict[str, str]:
    """What the model is told of the form of a custom tool's input: nothing for free text."""
    if form is None or form == {"type": "text"}:
        return {}
    if not isinstance(form, dict) or form.get("type") != "grammar":
        refuse(f"{where}.type", "must be 'text' or 'grammar'")
    syntax, definition = _text(form, "syntax", where), _text(form, "definition", where)
    return {"description": f"Text that this {syntax} grammar accepts:\n{definition}"}


def _introduce(function: dict[str, Any], about: str) -> None:
    """Put what a namespace says of itself before what its first function says."""
    own = function.get("description")
    function["description"] = f"{about}\n\n{own}" if own else about


def _name(spec: dict[str, Any], where: str) -> str:
    name = spec.get("name")
    if not isinstance(name, str) or not name:
        refuse(f"{where}.name", "must be a non-empty string")
    return name


def _text(spec: dict[str, Any], key: str, where: str) -> str:
    value = spec.get(key)
    if not isinstance(value, str | None):
        refuse(f"{where}.{key}", "must be a string")
    return value or ""
