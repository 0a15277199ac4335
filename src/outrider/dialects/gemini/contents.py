"""Parses one `Content` (a message) of a Google request: the text, images, calls and tool results in its parts.

Each content is parsed on its own. `history.py` assigns tool results to calls. Invariant: a part that cannot be shown to
the model raises RequestError. The only exceptions are parts written by tools on Google's own servers
(`WirePart.hosted`). These parts are left out, and the names of their fields are added to the request's notes.

The model sees a tool's result as text, but in a request the result is an object, `response`. Clients put a result that
is text under a single key. So if the object has only the key `output`, `result` or `content` (and perhaps the key
`name` with the tool's name), the model sees the value of this key: a string unchanged, any other value as JSON. Every
other object, such as `{"error": ...}`, is shown whole, as JSON.

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

from outrider.dialects.gemini.proto_json import fields, has_escaped_letters, is_text, items
from outrider.dialects.reading import (
    INVALID_JSON,
    decode,
    file_from_base64,
    image_from_base64,
    is_absent,
    is_invalid_json_object,
    quoted,
    refuse,
)
from outrider.media import attachment
from outrider.messages import Attachment, Image, Message, Part, Role, Text, ToolCall, image_from_url, message_of_parts

SIGNED = b"outrider:"
"""The prefix of a thought signature that Outrider made. The id of the signed call follows it."""

# A content without a role comes from the user. Older clients give tool results the role `function`.
_ROLES = {None: Role.USER, "": Role.USER, "user": Role.USER, "function": Role.USER, "model": Role.ASSISTANT}
_TEXT_KEYS = frozenset({"output", "result", "content"})
_SNAKE_CASE_KEY = re.compile(rb'_(?:signature|call|response|data|type|uri|code|result)"')
"""Matches the end of a snake_case key of a part. Most contents have only camelCase keys and are decoded in one pass."""
_INVALID_KEY = b'{"' + INVALID_JSON.encode()
_LONGEST_KEY = len(_INVALID_KEY) * len("\\u0041")  # long enough for a key with all letters as escapes
_URLSAFE = bytes.maketrans(b"-_", b"+/")


class FunctionCall(msgspec.Struct, frozen=True, gc=False):
    """A call in a client's history. `args` is raw JSON."""

    name: str
    args: Raw = Raw()
    id: str | None = None


class FunctionResponse(msgspec.Struct, frozen=True, gc=False):
    """A tool's result. `response` is raw JSON."""

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
        """The names of this part's fields that tools on Google's servers wrote."""
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
        """How many kinds of data the part has: text, call, tool result, inline data and file. A part with more than one
        kind is refused. A part with only a signature or fields in `hosted` has 0 kinds."""
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
_STRING = msgspec.json.Decoder(str)


def role_of(raw: Raw, where: str) -> Role:
    """Return the role of a content, without parsing the content's parts. Raises RequestError."""
    head = decode(_HEAD, raw, where)
    role = _ROLES.get(head.role)
    if role is None:
        refuse(f"{where}.role", f"unknown role {quoted(str(head.role))}; known: user, model, function")
    return role


def parts_of(raw: Raw, where: str) -> list[WirePart]:
    """Return the parts of a content. Raises RequestError with the path of the wrong part."""
    data = bytes(raw)
    if (b"_" in data and _SNAKE_CASE_KEY.search(data)) or has_escaped_letters(data):
        wire = decode(_LOOSE_CONTENT, raw, where)
        return [
            _part(item, f"{where}.parts[{index}]") for index, item in enumerate(items(wire.parts, f"{where}.parts"))
        ]
    parts = decode(_CONTENT, raw, where).parts or []
    parts = [parts] if isinstance(parts, WirePart) else parts
    for index, part in enumerate(parts):
        if part.kinds > 1:
            _refuse_mixed_part(f"{where}.parts[{index}]")
    return parts


def system_message(raw: Raw, where: str) -> Message:
    """Return the system message for a request's instruction: a string, a Content of any role, or a list of parts.
    Raises RequestError."""
    if is_text(raw):
        return Message(role=Role.SYSTEM, content=decode(_STRING, raw, where))
    texts: list[str] = []
    for index, item in enumerate(items(raw, where)):
        at = f"{where}[{index}]"
        inner = Raw() if is_text(item) else fields(item, at).get("parts", Raw())
        for one in [item] if is_absent(inner) else items(inner, at):
            if is_text(one):
                texts.append(decode(_STRING, one, at))
                continue
            part = _part(one, at)
            if (part.kinds and part.text is None) or part.hosted:
                refuse(at, "a system instruction holds text only")
            texts.append(part.text or "")
    return Message(role=Role.SYSTEM, content="".join(texts))


def user_message(parts: Sequence[WirePart], where: str, start: int = 0) -> Message:
    """Return the user message that consists of `parts`. `where` is the path of the content. `start` is the index of
    `parts[0]` in the content. Raises RequestError."""
    read: list[Part] = []
    for index, part in enumerate(parts, start):
        at = f"{where}.parts[{index}]"
        if part.function_call is not None:
            refuse(f"{at}.functionCall", "only a content of role 'model' has function calls")
        # `history.py` searches the content's bytes for tool results and makes each a separate message. This check is a
        # safeguard, in case the search misses a key that is written with escapes.
        if part.function_response is not None:
            refuse(f"{at}.functionResponse", "has a key that is written with escapes: write it in plain letters")
        if part.hosted:
            refuse(f"{at}.{part.hosted[0]}", "only a content of role 'model' may have the work of Google's tools")
        if (image := _image(part, at)) is not None:
            read.append(image)
        elif part.text:
            read.append(Text(part.text))
    return message_of_parts(Role.USER, read)


def tool_message(part: WirePart, where: str, call_id: str | None) -> Message:
    """Return the tool message for a part with the result of the call `call_id`. `where` is the part's path in the
    request. Raises RequestError."""
    answer = part.function_response
    assert answer is not None
    at = f"{where}.functionResponse"
    read: list[Part] = []
    if not is_absent(answer.response):
        value: Any = decode(_OBJECT, answer.response, f"{at}.response")
        name = answer.name
        keys = [key for key, inner in value.items() if inner is not None and not (key == "name" and inner == name)]
        if len(keys) == 1 and keys[0] in _TEXT_KEYS:
            value = value[keys[0]]
        read.append(Text(value if isinstance(value, str) else msgspec.json.encode(value).decode()))
    for index, item in enumerate(items(answer.parts, f"{at}.parts")):
        inner = f"{at}.parts[{index}]"
        image = _image(_part(item, inner), inner)
        if image is None:
            refuse(inner, "has neither inlineData nor fileData")
        read.append(image)
    return message_of_parts(Role.TOOL, read, tool_call_id=call_id, name=answer.name)


def check_model_parts(parts: Sequence[WirePart], where: str) -> None:
    """Raise RequestError for parts that a model's reply cannot have: tool results, images and files."""
    for index, part in enumerate(parts):
        at = f"{where}.parts[{index}]"
        if part.function_response is not None:
            refuse(f"{at}.functionResponse", "a content of role 'model' has no function responses")
        if part.inline_data is not None or part.file_data is not None:
            refuse(at, "a content of role 'model' can hold text, thoughts and function calls only")


def model_message(parts: Sequence[WirePart], ids: Sequence[str]) -> Message:
    """Return the assistant message made of the parts of an earlier reply. `ids` are the ids of the reply's calls, in
    order."""
    calls = [part.function_call for part in parts if part.function_call is not None]
    return Message(
        role=Role.ASSISTANT,
        content=reply_text(parts),
        reasoning="".join([part.text for part in parts if part.thought and part.text]) or None,
        tool_calls=tuple(
            ToolCall(id, call.name, arguments_from_wire(call.args)) for id, call in zip(ids, calls, strict=True)
        ),
    )


def reply_text(parts: Sequence[WirePart]) -> str:
    """Return the text of a model's parts, without the thoughts."""
    return "".join([part.text for part in parts if part.text and not part.thought])


def arguments_on_wire(arguments: str) -> bytes:
    """Return a call's arguments as a JSON object, which Google's API requires. Text that is not a JSON object is put
    into an object with the key INVALID_JSON; `arguments_from_wire` takes the text out again. If the model itself wrote
    such an object, the object is wrapped, too, so that unwrapping restores it."""
    try:
        if not is_invalid_json_object(_OBJECT.decode(arguments)):
            return msgspec.json.format(arguments, indent=-1).encode()
    except (msgspec.DecodeError, ValueError, RecursionError):
        pass  # not a JSON object: wrapped below
    return msgspec.json.encode({INVALID_JSON: arguments.encode("utf-8", "replace").decode()})


def arguments_from_wire(args: Raw) -> str:
    """Return a call's arguments as JSON text, without white space and otherwise unchanged. If `arguments_on_wire`
    wrapped a text, returns this text."""
    if is_absent(args):
        return "{}"
    compact = msgspec.json.format(bytes(args), indent=-1)
    # Arguments can be long and wrappers are rare, so arguments are decoded only if their first key may be INVALID_JSON.
    key = compact[:_LONGEST_KEY].partition(b'":"')[0]
    if key == _INVALID_KEY or has_escaped_letters(key):
        value = _OBJECT.decode(compact)
        if is_invalid_json_object(value):
            return str(value[INVALID_JSON])
    return compact.decode()


def signature(call_id: str) -> str:
    """Return a thought signature (base64) that contains the call's id. Some clients send signatures back but drop
    ids."""
    return base64.b64encode(SIGNED + call_id.encode("utf-8", "replace")).decode()


def signed_id(sent: str | None) -> str | None:
    """Return the call's id from a thought signature; None if Outrider did not make the signature. Accepts both
    alphabets of base64."""
    if not sent:
        return None
    try:
        data = base64.b64decode(sent.encode().translate(_URLSAFE), validate=True)
        return data.removeprefix(SIGNED).decode() if data.startswith(SIGNED) else None
    except (binascii.Error, ValueError):
        return None


def _part(raw: Raw, where: str) -> WirePart:
    """Parse one part, with keys in camelCase or snake_case. Raises RequestError."""
    named = fields(raw, where)
    for name in ("inlineData", "fileData"):
        if name in named:
            named[name] = Raw(msgspec.json.encode(fields(named[name], f"{where}.{name}")))
    part = decode(_PART, msgspec.json.encode(named), where)
    if part.kinds > 1:
        _refuse_mixed_part(where)
    return part


def _refuse_mixed_part(where: str) -> None:
    refuse(where, "holds more than one kind of data")


def _image(part: WirePart, where: str) -> Image | Attachment | None:
    """Return the image or other file of a part, or None. Raises RequestError for a file that the client uploaded to
    Google earlier."""
    if (blob := part.inline_data) is not None:
        at = f"{where}.inlineData"
        # ProtoJSON accepts both alphabets of base64, with and without padding.
        encoded = (blob.data or "").encode().translate(_URLSAFE).rstrip(b"=").decode()
        padded = encoded + "=" * (-len(encoded) % 4)
        if blob.mime_type is None or not blob.mime_type.startswith("image/"):
            reason = f"only images are accepted, not {quoted(str(blob.mime_type))}"
            return file_from_base64(blob.mime_type, padded, f"{at}.mimeType", reason)
        return image_from_base64(blob.mime_type, padded, f"{at}.data")
    if (file := part.file_data) is not None:
        at = f"{where}.fileData"
        if file.mime_type is not None and not file.mime_type.startswith("image/"):
            reason = f"only images are accepted, not {quoted(file.mime_type)}"
            return attachment(file.mime_type, f"{at}.mimeType", reason, address=file.file_uri)
        if not file.file_uri.startswith(("http://", "https://")):
            refuse(f"{at}.fileUri", "must be an http or https address: uploaded files are not supported")
        return image_from_url(file.file_uri)
    return None
