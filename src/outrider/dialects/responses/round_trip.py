"""Encodes the reasoning, the calls of custom tools, the actions of a computer and the names of tools in a Responses
reply, and decodes them when the client sends the reply back.

Each function is followed by its inverse. Only `flat_name` has no inverse here, because `Tools.table` (in `tools.py`)
maps flat names back. Invariant: a reply in a client's history is parsed exactly as the model wrote it, character by
character. Items that another service wrote have none of the marks defined here, and their text is taken as it is.

The model sees functions only, but the Responses API has two more forms of tools. A custom tool's call
(`custom_tool_call`) has a string as input, not JSON; the model sees a function with the single parameter `input`. A
tool can be in a namespace; the model sees a function whose name begins with the namespace's name.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from typing import Any

import msgspec

from outrider.computer_tools import OPENAI_ACTION
from outrider.messages import ToolCall

INPUT = "input"
"""The single parameter of the function that represents a custom tool."""

_SEAL = "outrider1:"
"""The prefix that marks `encrypted_content` as written by Outrider and not by another provider."""
_JOIN = "__"
_AS_JSON = "~json"
"""Appended to the id of a custom call if the model's arguments do not have the form `{"input": "..."}`. The client then
gets the whole text of the arguments as the input."""
_AS_TEXT = "~text"
"""Appended to the id of a custom call whose input is text, but only if the call's id already ends with `_AS_JSON` or
`_AS_TEXT`. Without this addition, the original ending would be taken for ours, and removed, when the client sends the
call back."""
_SURROGATE = re.compile("[\ud800-\udfff]")


def seal(reasoning: str) -> str:
    """Encode reasoning as `encrypted_content`. The encoding is not secret. This field is used because clients send it
    back unchanged, even if they drop other reasoning."""
    return _SEAL + base64.b64encode(reasoning.encode("utf-8", "replace")).decode()


def unseal(sealed: str) -> str | None:
    """Return the reasoning in `encrypted_content` that Outrider wrote; None for content of another provider."""
    if not sealed.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(_SEAL), validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name under which the model sees the tool `name` of `namespace`."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith(_JOIN) else namespace + _JOIN + name


class CustomCall(msgspec.Struct, frozen=True):
    """The call of a custom tool as the client receives it."""

    call_id: str
    input: str


def custom_call(call: ToolCall) -> CustomCall:
    """Convert the model's call of a custom tool to the form that the client receives.

    If the model's arguments are not an object with only a string `input`, the client receives the whole text of the
    arguments as the input, and the id ends with `_AS_JSON`. The client's tool then refuses the input, and this shows
    the model its mistake.
    """
    try:
        value: Any = json.loads(call.arguments)
    except (ValueError, RecursionError):
        value = None
    text = value.get(INPUT) if isinstance(value, dict) and len(value) == 1 else None
    # Python's JSON parser accepts unpaired surrogates, but a reply cannot encode them. If the input contains one, the
    # client gets the whole text of the arguments.
    if not isinstance(text, str) or _SURROGATE.search(text):
        return CustomCall(call.id + _AS_JSON, call.arguments)
    return CustomCall(call.id + _AS_TEXT if call.id.endswith((_AS_JSON, _AS_TEXT)) else call.id, text)


def arguments_of_custom_call(sent: CustomCall) -> str:
    """Return the arguments as the model wrote them: the inverse of `custom_call`."""
    if sent.call_id.endswith(_AS_JSON):
        return sent.input
    return msgspec.json.encode({INPUT: sent.input}).decode()


def computer_action(call: ToolCall) -> dict[str, Any] | None:
    """Return the action in the model's call of the computer; None if the arguments are not an action. Arguments with a
    null value do not count as an action: clients add nulls for missing fields, so the inverse function removes all
    nulls. The inverse function would also remove a null that the model wrote."""
    try:
        OPENAI_ACTION.decode(call.arguments)
        action: dict[str, Any] = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return None
    return None if None in action.values() else action


def arguments_of_action(action: dict[str, Any]) -> str:
    """Return the arguments of a computer call as the model wrote them: the inverse of `computer_action`."""
    return msgspec.json.encode({name: value for name, value in action.items() if value is not None}).decode()


def id_of_custom_call(sent: str) -> str:
    """Return the model's id of a custom call, from the id that the client sends: the inverse of `custom_call`."""
    return sent.removesuffix(_AS_JSON) if sent.endswith(_AS_JSON) else sent.removesuffix(_AS_TEXT)
