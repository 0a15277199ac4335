"""Tools as several dialects read them: the list of a session, a function's declaration, the arguments of a call.

It knows no wire format of a list of tools; each dialect reads its own. Invariant: arguments are JSON text exactly as
the model sampled them, and survive the way to a client and back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Raw

from outrider.dialects.json import decode, is_absent, refuse
from outrider.messages import ToolSpec

INVALID_JSON = "INVALID_JSON"
"""The only key of the object that stands for arguments that are no JSON object, where a dialect asks for an object; its
value is their text. No tool takes such an object for valid, so that the model learns of its mistake. The key is the
one that Anthropic's documentation of fine-grained tool streaming suggests."""

_MEMORY_KEY = "tools"
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


class DeclaredTools(msgspec.Struct, frozen=True):
    """The tools that the model is shown in OpenAI's form, the bytes they were read from, and the kinds of the hosted
    tools, which a vendor's servers would run and which the model is not shown."""

    specs: tuple[ToolSpec, ...] = ()
    raw: bytes = b""
    hosted: tuple[str, ...] = ()


class _FromBytes(Protocol):
    @property
    def raw(self) -> bytes: ...


ToolsT = TypeVar("ToolsT", bound=_FromBytes)


def remembered_tools(memory: dict[str, Any], raw: bytes, read: Callable[[], ToolsT]) -> ToolsT:
    """The tools that `raw` declares. Agents send the same tools with every call, some tens of kilobytes: they are read
    when they differ from those of the session's last call."""
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
    """Arguments in OpenAI's dialects, a string of JSON. Some clients send an object instead: it is taken as it is
    written, without white space. Raises RequestError."""
    if is_absent(raw):
        return "{}"
    value = decode(_ANY, raw, where)
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        refuse(where, "must be a string of JSON")
    return msgspec.json.format(bytes(raw), indent=-1).decode()


def is_invalid_json_object(value: dict[str, Any]) -> bool:
    """Whether an object stands for arguments that are no JSON object."""
    return len(value) == 1 and isinstance(value.get(INVALID_JSON), str)
