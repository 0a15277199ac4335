"""What a Responses reply says so that its echo is recognised: sealed reasoning, custom calls, names in namespaces.

Each function has its inverse beside it. It knows no request and no event. Invariant: what a client gives back of
what was said here is read as what the model made, to the character; what others made is read as plain text.

The wire has a form of call without JSON (`custom_tool_call`, one string) and names within namespaces; a model is told
of functions only. A custom tool is a function with the one parameter `input`, and a name in a namespace is written
before it. A model may call a custom tool with other arguments than that: the client is then given their JSON as the
input, under a call id that says so, because a call that its tool refuses is one the model can learn from.
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
"""The one parameter of a custom tool as the model is told of it."""

_SEAL = "outrider1:"
_AS_JSON = "~json"  # ends the call id of a custom call whose input is the JSON of its arguments
_AS_TEXT = "~text"  # ends a call id that would else seem to have an ending of ours
_SURROGATE = re.compile("[\ud800-\udfff]")
_JOIN = "__"


class CustomCall(msgspec.Struct, frozen=True):
    """A call of a custom tool as the wire has it."""

    call_id: str
    input: str


def seal(reasoning: str) -> str:
    """Reasoning as `encrypted_content`: unreadable to nobody, but passed back untouched by every client."""
    return _SEAL + base64.b64encode(reasoning.encode("utf-8", "replace")).decode()


def unseal(sealed: str) -> str | None:
    """The reasoning in an `encrypted_content` of ours; None for anybody else's."""
    if not sealed.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(_SEAL), validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def custom_call(call: ToolCall) -> CustomCall:
    """What a client is told of a call that the model made of a custom tool."""
    said = _only_input(call.arguments)
    if said is None:
        return CustomCall(call.id + _AS_JSON, call.arguments)
    return CustomCall(call.id + _AS_TEXT if call.id.endswith((_AS_JSON, _AS_TEXT)) else call.id, said)


def custom_arguments(sent: CustomCall) -> str:
    """The arguments of such a call as the model made them."""
    if sent.call_id.endswith(_AS_JSON):
        return sent.input
    return msgspec.json.encode({INPUT: sent.input}).decode()


def custom_call_id(sent: str) -> str:
    """The id of such a call as the model's."""
    return sent.removesuffix(_AS_JSON) if sent.endswith(_AS_JSON) else sent.removesuffix(_AS_TEXT)


def flat_name(namespace: str | None, name: str) -> str:
    """The function name that the model is told for `name` in `namespace`."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith(_JOIN) else namespace + _JOIN + name


def _only_input(arguments: str) -> str | None:
    """The string of `{"input": "..."}`, None for other arguments."""
    try:
        value: Any = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or len(value) != 1 or not isinstance(said := value.get(INPUT), str):
        return None
    return None if _SURROGATE.search(said) else said
