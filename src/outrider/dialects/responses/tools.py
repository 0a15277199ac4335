"""Converts the tools of a Responses request to the model's form, and maps the names that the model sees to the client's
tools.

Invariant: the client runs every tool in the table (`Tools.table`), and no two of them have the same name for the model.

- A function is passed to the model in the nested form of Chat Completions, with its keys in the client's order.
- A custom tool, whose call takes one string and not JSON, is passed as a function with the single parameter `input`. If
  the tool has a grammar, the parameter's description contains it; nothing enforces the grammar.
- A tool in a namespace is passed under the namespace's name followed by the tool's name. The description of the
  namespace's first tool begins with the description of the namespace.
- A computer (`computer_use_preview`, `computer`) is passed as a function. Its parameters are those that OpenAI
  documents for an action of a `computer_call`.
- All other tools are hosted: OpenAI's servers would run them, or only OpenAI's models were trained to use them (a
  shell, patches without a schema). They are not passed to the model, and their types are added to the request's notes.
  The field `tools` of the reply does not list them. A request that chooses a hosted tool is refused with status 400.

Source: OpenAI API reference, "Create a model response", tools.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from outrider.computer_tools import OPENAI_NAME, openai_tool
from outrider.constraint import ToolChoice
from outrider.dialects.base import Memory
from outrider.dialects.reading import cached_tools, check_depth, check_function, decode, quoted, refuse, tool_choice
from outrider.dialects.responses.round_trip import INPUT, flat_name
from outrider.messages import ToolSpec

_COMPUTERS = {"computer_use_preview": "action", "computer": "actions"}
"""For each type of computer tool, the field of a `computer_call` that has the action or the list of actions."""
_COMPUTER_TYPES = tuple(_COMPUTERS)  # a tuple: `in` of a dict raises an error for an unhashable value of a client
_SUPPORTED = frozenset({"function", "custom", "namespace", *_COMPUTERS})
_CHOICES = frozenset({"none", "auto", "required"})
_NOT_TOLD = frozenset({"type", "defer_loading", "strict"})
"""Keys of a function declaration that are not part of the function shown to the model. Only OpenAI's servers use
`defer_loading` and `strict`. On these servers, `strict` guarantees that arguments follow the schema; nothing here
enforces the schema."""

_TOOLS: msgspec.json.Decoder[list[dict[str, Any]] | None] = msgspec.json.Decoder(list[dict[str, Any]] | None)


class ResponsesTool(msgspec.Struct, frozen=True):
    """One tool: its specification for the model, and the client's name and namespace. `custom` is True for a custom
    tool. `action_field` is set only for a computer: it names the field of a `computer_call` that has the action."""

    spec: ToolSpec
    name: str
    namespace: str | None
    custom: bool
    action_field: str | None = None

    def identity(self) -> tuple[str, str | None, str | None]:
        """Return the values that together identify one of the client's tools."""
        return self.name, self.namespace, self.action_field


class Tools(msgspec.Struct, frozen=True):
    """A request's tools.

    - `table`: the tools by the names that the model sees.
    - `raw`: the bytes from which the tools were parsed.
    - `in_force`: the JSON of the request's field `tools` without hosted tools. The reply repeats it.
    - `hosted`: the types of the hosted tools.
    """

    table: dict[str, ResponsesTool] = {}
    raw: bytes = b""
    in_force: msgspec.Raw = msgspec.Raw(b"[]")
    hosted: tuple[str, ...] = ()

    def specs(self) -> tuple[ToolSpec, ...]:
        return tuple([tool.spec for tool in self.table.values()])


class ToolList(msgspec.Struct, frozen=True):
    """One list of tools in a request. `where` is its path in the body. `top` is True for the request's field `tools`,
    and False for a list in an input item."""

    raw: msgspec.Raw
    where: str
    top: bool


def read_tools(lists: list[ToolList], memory: Memory) -> Tools:
    """Parse all tools of a request. Raises RequestError."""
    raw = b"\n".join([bytes(part.raw) for part in lists])
    return cached_tools(memory, raw, lambda: _read(lists, raw))


def read_tool_choice(choice: str | dict[str, Any] | None, tools: Tools, *, single: bool) -> ToolChoice | None:
    """Return the choice of tools that restricts the reply; None for `auto` and `none`. `single` means that the client
    allows at most one call. Raises RequestError for an unknown choice."""
    if choice in (None, "none", "auto"):
        return None
    if isinstance(choice, str):
        if choice not in _CHOICES:
            refuse("tool_choice", f"unknown choice {quoted(choice)}; known: {', '.join(sorted(_CHOICES))}")
        return tool_choice(None, tools.specs(), required=True, single=single, field="tool_choice")
    kind = (choice or {}).get("type")
    if kind == "allowed_tools":
        return _read_allowed_tools(choice or {}, tools, single=single)
    if kind in _COMPUTER_TYPES and OPENAI_NAME in tools.table:
        return tool_choice([OPENAI_NAME], tools.specs(), required=True, single=True, field="tool_choice")
    if kind not in ("function", "custom"):
        refuse("tool_choice.type", f"{quoted(str(kind))} cannot be chosen: only function, custom and allowed_tools can")
    named = _names_by_client_name(tools).get(_text((choice or {}).get("name")))
    if not named:
        refuse("tool_choice.name", "must be the name of one of the tools")
    return tool_choice(named, tools.specs(), required=True, single=True, field="tool_choice")


def _read_allowed_tools(choice: dict[str, Any], tools: Tools, *, single: bool) -> ToolChoice | None:
    """Read a list of allowed tools. Hosted tools in the list are skipped, because the model does not see them. Raises
    RequestError."""
    mode, listed = choice.get("mode", "auto"), choice.get("tools")
    if mode not in ("auto", "required"):
        refuse("tool_choice.mode", "must be 'auto' or 'required'")
    if not isinstance(listed, list):
        refuse("tool_choice.tools", "must be a list of tools")
    by_name, hosted = _names_by_client_name(tools), set(tools.hosted)
    names: list[str] = []
    for index, entry in enumerate(listed):
        at = f"tool_choice.tools[{index}]"
        if not isinstance(entry, dict):
            refuse(at, "must be an object")
        if entry.get("type") in ("function", "custom"):
            name = _text(entry.get("name"))
            named = by_name.get(name)
            if named is None:
                refuse(f"{at}.name", "must be the name of one of the tools")
            names += named
            by_name[name] = []  # a repeated entry adds nothing
        elif entry.get("type") in _COMPUTER_TYPES and OPENAI_NAME in tools.table:
            names.append(OPENAI_NAME)
        elif _text(entry.get("type")) not in hosted:
            refuse(f"{at}.type", "must be the type of one of the tools")
    return tool_choice(names, tools.specs(), required=mode == "required", single=single, field="tool_choice")


def _names_by_client_name(tools: Tools) -> dict[str, list[str]]:
    """Return the keys in `tools.table` of all tools that a name may mean, by this name. A client names a tool by its
    key or by the client's own name. The client may give the same name to tools in different namespaces."""
    found: dict[str, list[str]] = {}
    for flat, tool in tools.table.items():
        for name in {tool.name, flat}:
            found.setdefault(name, []).append(flat)
    return found


def _text(value: Any) -> str:
    """Return a value if it is text, else "", which no tool and no type of tool is called."""
    return value if isinstance(value, str) else ""


def _read(lists: list[ToolList], raw: bytes) -> Tools:
    table: dict[str, ResponsesTool] = {}
    in_force: list[Any] = []
    hosted: list[str] = []
    for part in lists:
        sent = decode(_TOOLS, part.raw, part.where)
        for index, spec in enumerate(sent or []):
            where = f"{part.where}[{index}]"
            check_depth(spec, where)
            kind = spec.get("type")
            if not isinstance(kind, str) or not kind:
                refuse(f"{where}.type", "must be a non-empty string")
            if kind not in _SUPPORTED:
                hosted.append(kind)
                continue
            if part.top:
                in_force.append(spec)
            # A list in an input item may declare a tool again. The last declaration is used.
            for tool in _tools_of(spec, where):
                flat = tool.spec["function"]["name"]
                known = table.get(flat)
                if known is not None and known.identity() != tool.identity():
                    refuse(where, f"two tools would have the same name for the model: {quoted(flat)}")
                table[flat] = tool
    if not table:
        return Tools(raw=raw, hosted=tuple(hosted))
    return Tools(table, raw, msgspec.Raw(msgspec.json.encode(in_force)), tuple(hosted))


def _tools_of(spec: dict[str, Any], where: str) -> Iterator[ResponsesTool]:
    """Yield the tools that one entry of a list declares: a single tool, or all tools of a namespace. Raises
    RequestError."""
    if (kind := spec.get("type")) in _COMPUTERS:
        for key in ("display_width", "display_height"):
            if not isinstance(spec.get(key), int | None):
                refuse(f"{where}.{key}", "must be an integer")
        function = openai_tool(spec.get("display_width"), spec.get("display_height"))
        yield ResponsesTool(function, OPENAI_NAME, None, custom=False, action_field=_COMPUTERS[kind])
        return
    if spec.get("type") != "namespace":
        yield _tool(spec, None, where)
        return
    check_function(spec, where)
    about, inner = spec.get("description"), spec.get("tools")
    if not isinstance(inner, list):
        refuse(f"{where}.tools", "must be a list of tools")
    for index, nested in enumerate(inner):
        at = f"{where}.tools[{index}]"
        if not isinstance(nested, dict):
            refuse(at, "must be an object")
        tool = _tool(nested, spec["name"], at)
        if about:
            function = tool.spec["function"]
            own = function.get("description")
            function["description"] = f"{about}\n\n{own}" if own else about
            about = None
        yield tool


def _tool(spec: dict[str, Any], namespace: str | None, where: str) -> ResponsesTool:
    kind = spec.get("type")
    if kind not in ("function", "custom"):
        refuse(f"{where}.type", f"a tool of type {quoted(str(kind))} is not supported: send a function or custom tool")
    check_function(spec, where)
    flat = flat_name(namespace, spec["name"])
    if kind == "function":
        function = {key: flat if key == "name" else value for key, value in spec.items() if key not in _NOT_TOLD}
        return ResponsesTool({"type": "function", "function": function}, spec["name"], namespace, custom=False)
    text = {"type": "string"}
    form, at = spec.get("format"), f"{where}.format"
    if form is not None and form != {"type": "text"}:  # free text needs no description of its format
        if not isinstance(form, dict) or form.get("type") != "grammar":
            refuse(f"{at}.type", "must be 'text' or 'grammar'")
        for key in ("syntax", "definition"):
            if not isinstance(form.get(key), str | None):
                refuse(f"{at}.{key}", "must be a string")
        syntax, definition = form.get("syntax") or "", form.get("definition") or ""
        text["description"] = f"Text that this {syntax} grammar accepts:\n{definition}"
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    function = {"name": flat, "description": spec.get("description") or "", "parameters": parameters}
    return ResponsesTool({"type": "function", "function": function}, spec["name"], namespace, custom=True)
