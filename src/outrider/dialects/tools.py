"""Tools in several dialects: the tools of a session, a function's declaration, the arguments of a call.

Each dialect parses its own list of tools. Invariant: arguments that a client sends back unchanged are parsed as
arguments equal to the sampled ones (`tokens/tree/canonical.py`); only the spelling of the JSON may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Raw

from outrider.dialects.json import decode, is_absent, refuse
from outrider.messages import ToolSpec

INVALID_JSON = "INVALID_JSON"
"""The only key of the object that replaces arguments that are not a JSON object, in dialects that require an object.
Its value is the text of the arguments. No tool accepts such an object, so the model gets an error from the tool. The
key comes from Anthropic's documentation of fine-grained tool streaming."""

_MEMORY_KEY = "tools"
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


class DeclaredTools(msgspec.Struct, frozen=True):
    """The tools in OpenAI's form as the model sees them, the bytes they were parsed from, and the kinds of the hosted
    tools. A vendor's servers would run hosted tools; the model does not see them."""

    specs: tuple[ToolSpec, ...] = ()
    raw: bytes = b""
    hosted: tuple[str, ...] = ()


class _FromBytes(Protocol):
    @property
    def raw(self) -> bytes: ...


ToolsT = TypeVar("ToolsT", bound=_FromBytes)


def remembered_tools(memory: dict[str, Any], raw: bytes, read: Callable[[], ToolsT]) -> ToolsT:
    """Return the tools that `raw` declares. Agents send the same tools with every call, some tens of kilobytes, so
    `read` is called only if `raw` differs from the session's last call."""
    tools: ToolsT | None = memory.get(_MEMORY_KEY)
    if tools is None or tools.raw != raw:
        tools = memory[_MEMORY_KEY] = read()
    return tools


def check_function(function: Any, where: str) -> None:
    """Raise RequestError for a declaration whose name, description or parameters are of a wrong type."""
    if not isinstance(function, dict):
        refuse(where, "must be an object")
    if not isinstance(function.get("name"), str) or not function["name"]:
        refuse(f"{where}.name", "must be a non-empty string")
    if not isinstance(function.get("description"), str | None):
        refuse(f"{where}.description", "must be a string")
    if not isinstance(function.get("parameters"), dict | None):
        refuse(f"{where}.parameters", "must be an object")


def arguments_from_text(raw: Raw, where: str) -> str:
    """Return the arguments of a call in OpenAI's dialects: a string of JSON, "{}" if the field is absent. Some clients
    send an object, which is accepted as written, without white space. Raises RequestError."""
    if is_absent(raw):
        return "{}"
    value = decode(_ANY, raw, where)
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        refuse(where, "must be a string of JSON")
    return msgspec.json.format(bytes(raw), indent=-1).decode()


def is_invalid_json_object(value: dict[str, Any]) -> bool:
    """Return True for an object that replaces arguments that are not a JSON object (INVALID_JSON)."""
    return len(value) == 1 and isinstance(value.get(INVALID_JSON), str)
