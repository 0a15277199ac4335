"""One `Content` of the Google dialect read: its parts, and the text, images, calls and answers in them.

It knows one content at a time and makes up nothing: which call an answer belongs to is the history's business.
Invariant: a part that the model could not be shown raises RequestError; none is dropped silently. What tools of
Google's own servers did (`WirePart.hosted`) is not shown either, and noted by whoever reads the request.

A tool's answer is shown to the model as text. `response` is an object on the wire; clients that have only text put
it under one key, so an object that holds nothing but `output`, `result` or `content` (and perhaps the tool's own
`name` beside it) is shown as that value: a string as it is, anything else as JSON. Every other object, `{"error":
...}` among them, is shown whole, as JSON: the model should see that it is an error.

Source: Google AI API reference, "Content", "Part", "FunctionCall", "FunctionResponse".
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

from outrider.dialects.gemini.fields import ANY, absent, fields, has_escaped_letters, is_text, items
from outrider.dialects.json import decode, refuse, shown
from outrider.messages import Image, Message, Part, Role, Text, ToolCall, image_from_bytes, image_from_url

INVALID_JSON = "INVALID_JSON"
"""The one key of the `args` that stand for arguments that are no JSON object; their text is its value."""
SIGNED = b"outrider:"
"""Begins our thought signatures; the id of the call that carries one follows."""

_ROLES = {None: Role.USER, "": Role.USER, "user": Role.USER, "function": Role.USER, "model": Role.ASSISTANT}
_TEXT_KEYS = frozenset({"output", "result", "content"})
_SNAKE_CASE = re.compile(rb'_(?:signature|call|response|data|type|uri|code|result)"')
_INVALID_KEY = b'{"' + INVALID_JSON.encode()
_LONGEST_KEY = len(_INVALID_KEY) * len("\\u0041")  # every letter an escape
_URLSAFE = bytes.maketrans(b"-_", b"+/")


class FunctionCall(msgspec.Struct, frozen=True, gc=False):
    """A call as the client sends it back; `args` is raw JSON."""

    name: str
    args: Raw = Raw()
    id: str | None = None


class FunctionResponse(msgspec.Struct, frozen=True, gc=False):
    """A tool's answer; `response` is raw JSON."""

    name: str | None = None
    response: Raw = Raw()
    id: str | None = None
    parts: Raw = Raw()


class Blob(msgspec.Struct, frozen=True, rename="camel", gc=False):
    mime_type: str | None = None
    data: str | None = None


class FileData(msgspec.Struct, frozen=True, rename="camel", gc=False):
    file_uri: str
    mime_type: str | None = None


class WirePart(msgspec.Struct, frozen=True, rename="camel", gc=False):
    text: str | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None
    inline_data: Blob | None = None
    file_data: FileData | None = None
    executable_code: Any = None
    code_execution_result: Any = None
    tool_call: Any = None
    tool_response: Any = None

    @property
    def hosted(self) -> tuple[str, ...]:
        """What a tool of Google's servers did, by the names of the fields."""
        if not (self.executable_code or self.code_execution_result or self.tool_call or self.tool_response):
            return ()
        sent = {
            "executableCode": self.executable_code,
            "codeExecutionResult": self.code_execution_result,
            "toolCall": self.tool_call,
            "toolResponse": self.tool_response,
        }
        return tuple([name for name, value in sent.items() if value])

    @property
    def kinds(self) -> int:
        """How many kinds of data it holds: one, or none in a part that has, perhaps, a signature."""
        others = (self.function_call, self.function_response, self.inline_data, self.file_data)
        return (1 if self.text else 0) + len(others) - others.count(None)


class _Content(msgspec.Struct, gc=False):
    parts: list[WirePart] | WirePart | None = None


class _LooseContent(msgspec.Struct, gc=False):
    parts: Raw = Raw()


class _Head(msgspec.Struct, gc=False):
    role: str | None = None


_HEAD = msgspec.json.Decoder(_Head)
_CONTENT = msgspec.json.Decoder(_Content)
_LOOSE_CONTENT = msgspec.json.Decoder(_LooseContent)
_PART = msgspec.json.Decoder(WirePart)
_OBJECT: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


def role_of(raw: Raw, where: str) -> Role:
    """Who speaks in a content, its parts unread."""
    head = decode(_HEAD, raw, where)
    role = _ROLES.get(head.role)
    if role is None:
        refuse(f"{where}.role", f"unknown role {shown(str(head.role))}; known: user, model, function")
    return role


def parts_of(raw: Raw, where: str) -> list[WirePart]:
    """The parts of a content. Raises RequestError naming the part."""
    data = bytes(raw)
    if (b"_" in data and _SNAKE_CASE.search(data)) or has_escaped_letters(data):
        wire = decode(_LOOSE_CONTENT, raw, where)
        return [
            _part(item, f"{where}.parts[{index}]") for index, item in enumerate(items(wire.parts, f"{where}.parts"))
        ]
    parts = decode(_CONTENT, raw, where).parts or []
    parts = [parts] if isinstance(parts, WirePart) else parts
    for index, part in enumerate(parts):
        _check(part, where, index)
    return parts


def system_message(raw: Raw, where: str) -> Message:
    """The system instruction: a text, a Content (whatever its role), or parts."""
    if is_text(raw):
        return Message(role=Role.SYSTEM, content=decode(ANY, raw, where))
    pieces: list[str] = []
    for index, item in enumerate(items(raw, where)):
        at = f"{where}[{index}]"
        inner = Raw() if is_text(item) else fields(item, at).get("parts", Raw())
        parts = [item] if absent(inner) else items(inner, at)
        pieces += [_system_text(part, at) for part in parts]
    return Message(role=Role.SYSTEM, content="".join(pieces))


def user_message(parts: Sequence[WirePart], where: str, start: int = 0) -> Message:
    """What a user says in `parts`, of which the first is part `start` of the content `where`."""
    shown_parts: list[Part] = []
    for index, part in enumerate(parts, start):
        at = f"{where}.parts[{index}]"
        if part.function_call is not None:
            refuse(f"{at}.functionCall", "only a content of role 'model' has function calls")
        if part.function_response is not None:
            refuse(f"{at}.functionResponse", "is spelled with escapes: spell it plainly")
        if part.hosted:
            refuse(f"{at}.{part.hosted[0]}", "only a content of role 'model' has what Google's tools did")
        if (image := _image_of(part, at)) is not None:
            shown_parts.append(image)
        elif part.text:
            shown_parts.append(Text(part.text))
    return _mixed(Role.USER, shown_parts)


def tool_message(part: WirePart, where: str, call_id: str | None) -> Message:
    """What a tool answered to the call `call_id`; `where` names its part."""
    answer = part.function_response
    assert answer is not None
    at = f"{where}.functionResponse"
    shown_parts: list[Part] = []
    if text := _answer_text(answer, at):
        shown_parts.append(Text(text))
    for index, item in enumerate(items(answer.parts, f"{at}.parts")):
        inner = f"{at}.parts[{index}]"
        image = _image_of(_part(item, inner), inner)
        if image is None:
            refuse(inner, "has neither inlineData nor fileData")
        shown_parts.append(image)
    return _mixed(Role.TOOL, shown_parts, tool_call_id=call_id, name=answer.name)


def model_message(parts: Sequence[WirePart], ids: Sequence[str]) -> Message:
    """What the model said, its calls named by `ids`."""
    calls = [part.function_call for part in parts if part.function_call is not None]
    return Message(
        role=Role.ASSISTANT,
        content=said(parts),
        reasoning="".join([part.text for part in parts if part.thought and part.text]) or None,
        tool_calls=tuple(
            ToolCall(id, call.name, arguments_from_wire(call.args)) for id, call in zip(ids, calls, strict=True)
        ),
    )


def said(parts: Sequence[WirePart]) -> str:
    """The text of a model's parts, without its thoughts."""
    return "".join([part.text for part in parts if part.text and not part.thought])


def check_model_parts(parts: Sequence[WirePart], where: str) -> None:
    """Raises RequestError for what a model does not say."""
    for index, part in enumerate(parts):
        at = f"{where}.parts[{index}]"
        if part.function_response is not None:
            refuse(f"{at}.functionResponse", "a content of role 'model' has no function responses")
        if part.inline_data is not None or part.file_data is not None:
            refuse(at, "a content of role 'model' can hold text, thoughts and function calls only")


def arguments_on_wire(arguments: str) -> bytes:
    """A call's arguments as the JSON object that the dialect asks for. Text that is none is wrapped in one, which
    `arguments_from_wire` takes off again; so is an object that looks like such a wrapper."""
    try:
        if not _is_wrapper(_OBJECT.decode(arguments)):
            return msgspec.json.format(arguments, indent=-1).encode()
    except (msgspec.DecodeError, ValueError, RecursionError):
        pass  # no object
    return msgspec.json.encode({INVALID_JSON: arguments.encode("utf-8", "replace").decode()})


def arguments_from_wire(args: Raw) -> str:
    """A call's arguments as JSON text, compact and otherwise as sent."""
    if absent(args):
        return "{}"
    compact = msgspec.json.format(bytes(args), indent=-1)
    key = compact[:_LONGEST_KEY].partition(b'":"')[0]
    if key == _INVALID_KEY or has_escaped_letters(key):
        value = _OBJECT.decode(compact)
        if _is_wrapper(value):
            return str(value[INVALID_JSON])
    return compact.decode()


def _is_wrapper(value: dict[str, Any]) -> bool:
    """Whether an object stands for arguments that are no JSON object."""
    return len(value) == 1 and isinstance(value.get(INVALID_JSON), str)


def signature(call_id: str) -> str:
    """A thought signature (base64) that names its call, for clients that keep signatures and drop ids."""
    return base64.b64encode(SIGNED + call_id.encode("utf-8", "replace")).decode()


def signed_id(told: str | None) -> str | None:
    """The id in a signature of ours, in either alphabet of base64; None for any other."""
    if not told:
        return None
    try:
        data = base64.b64decode(told.encode().translate(_URLSAFE), validate=True)
        return data.removeprefix(SIGNED).decode() if data.startswith(SIGNED) else None
    except (binascii.Error, ValueError):
        return None


def _part(raw: Raw, where: str) -> WirePart:
    """One part, in either spelling."""
    named = fields(raw, where)
    for name in ("inlineData", "fileData"):
        if name in named:
            named[name] = Raw(msgspec.json.encode(fields(named[name], f"{where}.{name}")))
    part = decode(_PART, msgspec.json.encode(named), where)
    _check(part, where)
    return part


def _check(part: WirePart, where: str, index: int | None = None) -> None:
    """Raises RequestError for a part that cannot be shown, or is two at once."""
    if part.kinds > 1:
        refuse(where if index is None else f"{where}.parts[{index}]", "holds more than one kind of data")


def _system_text(raw: Raw, where: str) -> str:
    if is_text(raw):
        text = decode(ANY, raw, where)
        assert isinstance(text, str)
        return text
    part = _part(raw, where)
    if (part.kinds and part.text is None) or part.hosted:
        refuse(where, "a system instruction holds text only")
    return part.text or ""


def _mixed(role: Role, parts: list[Part], *, tool_call_id: str | None = None, name: str | None = None) -> Message:
    pictured = any(isinstance(part, Image) for part in parts)
    return Message(
        role=role,
        content="".join([part.text for part in parts if isinstance(part, Text)]),
        tool_call_id=tool_call_id,
        name=name,
        parts=tuple(parts) if pictured else (),
    )


def _answer_text(answer: FunctionResponse, where: str) -> str:
    """What the model reads of a tool's answer (module heading)."""
    if absent(answer.response):
        return ""
    whole = decode(_OBJECT, answer.response, f"{where}.response")
    told = [key for key, value in whole.items() if value is not None and not (key == "name" and value == answer.name)]
    if len(told) != 1 or told[0] not in _TEXT_KEYS:
        return _json_text(whole)
    value = whole[told[0]]
    return value if isinstance(value, str) else _json_text(value)


def _json_text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _image_of(part: WirePart, where: str) -> Image | None:
    if part.inline_data is not None:
        return _inline(part.inline_data, f"{where}.inlineData")
    if part.file_data is not None:
        return _linked(part.file_data, f"{where}.fileData")
    return None


def _inline(blob: Blob, where: str) -> Image:
    if blob.mime_type is None or not blob.mime_type.startswith("image/"):
        refuse(f"{where}.mimeType", f"only images are taken, not {shown(str(blob.mime_type))}")
    encoded = (blob.data or "").encode().translate(_URLSAFE).rstrip(b"=")
    try:
        data = base64.b64decode(encoded + b"=" * (-len(encoded) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        refuse(f"{where}.data", "is not valid base64", error)
    if not data:
        refuse(f"{where}.data", "is missing")
    return image_from_bytes(blob.mime_type, data)


def _linked(file: FileData, where: str) -> Image:
    if file.mime_type is not None and not file.mime_type.startswith("image/"):
        refuse(f"{where}.mimeType", f"only images are taken, not {shown(file.mime_type)}")
    if not file.file_uri.startswith(("http://", "https://")):
        refuse(f"{where}.fileUri", "must be an http or https address: files are not kept here")
    return image_from_url(file.file_uri)
