"""What a Responses reply says so that it is recognised when a client sends it back: reasoning, custom calls and names.

Each function has its inverse beside it; the inverse of a flat name is the table of `tools.py`. It knows no request and
no event. Invariant: what a client sends back of a reply is read as what the model made, to the character; what others
made is read as plain text.

The wire has a form of call without JSON (`custom_tool_call`, one string) and names within namespaces; a model is told
of functions only. A custom tool is a function with the one parameter `input`; the name of a tool in a namespace begins
with the namespace's name.
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
"""Begins an `encrypted_content` of ours, so that it is told from what another provider encrypted."""
_JOIN = "__"
_AS_JSON = "~json"
"""Ends the call id of a custom call whose input is the JSON of its arguments."""
_AS_TEXT = "~text"
"""Ends a call id that would otherwise seem to have an ending of ours."""
_SURROGATE = re.compile("[\ud800-\udfff]")


def seal(reasoning: str) -> str:
    """Reasoning as `encrypted_content`. Anybody can read it; clients pass it back untouched, also those that keep no
    other reasoning."""
    return _SEAL + base64.b64encode(reasoning.encode("utf-8", "replace")).decode()


def unseal(sealed: str) -> str | None:
    """The reasoning in an `encrypted_content` of ours; None for anybody else's."""
    if not sealed.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(_SEAL), validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def flat_name(namespace: str | None, name: str) -> str:
    """The function name that the model is told for `name` in `namespace`."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith(_JOIN) else namespace + _JOIN + name


class CustomCall(msgspec.Struct, frozen=True):
    """A call of a custom tool as the wire has it."""

    call_id: str
    input: str


def custom_call(call: ToolCall) -> CustomCall:
    """A call that the model made of a custom tool, as the wire has it.

    The model may send other arguments than the one `input`. The client is then given their JSON as the input, under a
    call id that says so: its tool refuses them, and the model can learn from that.
    """
    try:
        value: Any = json.loads(call.arguments)
    except (ValueError, RecursionError):
        value = None
    said = value.get(INPUT) if isinstance(value, dict) and len(value) == 1 else None
    # Python's parser reads unpaired surrogates, which a reply cannot encode.
    if not isinstance(said, str) or _SURROGATE.search(said):
        return CustomCall(call.id + _AS_JSON, call.arguments)
    return CustomCall(call.id + _AS_TEXT if call.id.endswith((_AS_JSON, _AS_TEXT)) else call.id, said)


def arguments_of_custom_call(sent: CustomCall) -> str:
    """The arguments of a call as the model made them: the inverse of `custom_call`."""
    if sent.call_id.endswith(_AS_JSON):
        return sent.input
    return msgspec.json.encode({INPUT: sent.input}).decode()


def id_of_custom_call(sent: str) -> str:
    """The id of a call as the model made it: the inverse of `custom_call`."""
    return sent.removesuffix(_AS_JSON) if sent.endswith(_AS_JSON) else sent.removesuffix(_AS_TEXT)
