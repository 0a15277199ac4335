"""Encodings for the round trip of a Responses reply through a client: reasoning, custom calls and names.

Each function has its inverse beside it; the inverse of a flat name is the table of `tools.py`. Invariant: a reply in a
client's history is parsed as the model made it, to the character. Items that another service made are parsed as plain
text.

The wire has calls without JSON (`custom_tool_call`, one string) and names within namespaces; the model sees functions
only. A custom tool is a function with the single parameter `input`. The name of a tool in a namespace begins with the
namespace's name.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from typing import Any

import msgspec

from outrider.messages import ToolCall

INPUT = "input"
"""The only parameter of a custom tool as the model sees it."""

_SEAL = "outrider1:"
"""The prefix of our `encrypted_content`, which distinguishes it from content encrypted by another provider."""
_JOIN = "__"
_AS_JSON = "~json"
"""The ending of a custom call's id that marks the call's input as the JSON of all its arguments."""
_AS_TEXT = "~text"
"""The ending added to the id of an ordinary custom call if the id already has one of these two endings."""
_SURROGATE = re.compile("[\ud800-\udfff]")


def seal(reasoning: str) -> str:
    """Encode reasoning as `encrypted_content`, which is not secret. Clients return this field unchanged, even if they
    keep no other reasoning."""
    return _SEAL + base64.b64encode(reasoning.encode("utf-8", "replace")).decode()


def unseal(sealed: str) -> str | None:
    """The reasoning in our `encrypted_content`; None for any other content."""
    if not sealed.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(_SEAL), validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def flat_name(namespace: str | None, name: str) -> str:
    """The function name, for the model, of the tool `name` in `namespace`."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith(_JOIN) else namespace + _JOIN + name


class CustomCall(msgspec.Struct, frozen=True):
    """A call of a custom tool on the wire."""

    call_id: str
    input: str


def custom_call(call: ToolCall) -> CustomCall:
    """Convert the model's call of a custom tool to the wire.

    The model may send arguments other than `input`. The client then receives the JSON of the arguments as the input,
    under a call id with an ending for this case. The client's tool refuses such an input, and the refusal shows the
    model its mistake.
    """
    try:
        value: Any = json.loads(call.arguments)
    except (ValueError, RecursionError):
        value = None
    said = value.get(INPUT) if isinstance(value, dict) and len(value) == 1 else None
    # Python's parser reads unpaired surrogates, which a reply cannot encode, so such an input is sent as JSON.
    if not isinstance(said, str) or _SURROGATE.search(said):
        return CustomCall(call.id + _AS_JSON, call.arguments)
    return CustomCall(call.id + _AS_TEXT if call.id.endswith((_AS_JSON, _AS_TEXT)) else call.id, said)


def arguments_of_custom_call(sent: CustomCall) -> str:
    """The model's arguments of a call: the inverse of `custom_call`."""
    if sent.call_id.endswith(_AS_JSON):
        return sent.input
    return msgspec.json.encode({INPUT: sent.input}).decode()


def id_of_custom_call(sent: str) -> str:
    """The model's id of a call: the inverse of `custom_call`."""
    return sent.removesuffix(_AS_JSON) if sent.endswith(_AS_JSON) else sent.removesuffix(_AS_TEXT)
