"""Encodes the reasoning, the custom calls, a computer's actions and the tool names of a Responses reply, and decodes
all of these when the client sends the reply back.

Each function is followed by its inverse, except `flat_name`, whose inverse is the table of `tools.py`. Invariant: a
reply in a client's history is parsed exactly as the model wrote it, character by character. Items that another service
made are parsed as plain text.

The wire format has calls whose input is one string and not JSON (`custom_tool_call`), and namespaces of tool names. The
model sees functions only: a custom tool as a function with the single parameter `input`, and a tool of a namespace
under a name that begins with the namespace's name.
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
"""The only parameter of a custom tool as the model sees it."""

_SEAL = "outrider1:"
"""The prefix of our `encrypted_content`, which distinguishes it from content encrypted by another provider."""
_JOIN = "__"
_AS_JSON = "~json"
"""The ending of a custom call's id if the call's input is the JSON of all arguments that the model wrote, and not one
string."""
_AS_TEXT = "~text"
"""Added to the id of a custom call with plain-text input if the model's own id ends with `_AS_JSON` or `_AS_TEXT`.
When the client sends the call back, this ending shows that the ending before it belongs to the model's id."""
_SURROGATE = re.compile("[\ud800-\udfff]")


def seal(reasoning: str) -> str:
    """Encode reasoning as `encrypted_content`. The encoding is not secret. This field is used because clients send it
    back unchanged, even if they drop all other reasoning."""
    return _SEAL + base64.b64encode(reasoning.encode("utf-8", "replace")).decode()


def unseal(sealed: str) -> str | None:
    """Return the reasoning in our `encrypted_content`; None for content of another provider."""
    if not sealed.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(_SEAL), validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def flat_name(namespace: str | None, name: str) -> str:
    """Return the model's name for the tool `name` in `namespace`."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith(_JOIN) else namespace + _JOIN + name


class CustomCall(msgspec.Struct, frozen=True):
    """A call of a custom tool on the wire."""

    call_id: str
    input: str


def custom_call(call: ToolCall) -> CustomCall:
    """Convert the model's call of a custom tool to the wire.

    The model may write arguments other than `input`. The client then receives the text of the arguments as the input,
    and the call's id has the ending `_AS_JSON`. The client's tool refuses such an input, and the refusal shows the
    model its mistake.
    """
    try:
        value: Any = json.loads(call.arguments)
    except (ValueError, RecursionError):
        value = None
    said = value.get(INPUT) if isinstance(value, dict) and len(value) == 1 else None
    # Python's JSON parser accepts unpaired surrogates, which a reply cannot encode. An input with such a surrogate is
    # sent as JSON.
    if not isinstance(said, str) or _SURROGATE.search(said):
        return CustomCall(call.id + _AS_JSON, call.arguments)
    return CustomCall(call.id + _AS_TEXT if call.id.endswith((_AS_JSON, _AS_TEXT)) else call.id, said)


def arguments_of_custom_call(sent: CustomCall) -> str:
    """Return the model's arguments of a call on the wire: the inverse of `custom_call`."""
    if sent.call_id.endswith(_AS_JSON):
        return sent.input
    return msgspec.json.encode({INPUT: sent.input}).decode()


def computer_action(call: ToolCall) -> dict[str, Any] | None:
    """Return the action of the model's call of the computer; None if the arguments are not an action. Clients add null
    for fields that an action lacks. If the model itself wrote null, the arguments do not count as an action, because
    nothing would distinguish this null from a client's."""
    try:
        OPENAI_ACTION.decode(call.arguments)
        action: dict[str, Any] = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return None
    return None if None in action.values() else action


def arguments_of_action(action: dict[str, Any]) -> str:
    """Return the model's arguments of a call of the computer: the inverse of `computer_action`."""
    return msgspec.json.encode({name: value for name, value in action.items() if value is not None}).decode()


def id_of_custom_call(sent: str) -> str:
    """Return the model's id of the call with the id `sent` on the wire: the inverse of `custom_call`."""
    return sent.removesuffix(_AS_JSON) if sent.endswith(_AS_JSON) else sent.removesuffix(_AS_TEXT)
