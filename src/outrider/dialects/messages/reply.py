"""Writes the replies of Anthropic Messages: whole replies, streams of server-sent events, errors, and the list of
models.

Invariants:

- A streamed reply and a whole reply carry the same message.
- If a client sends a reply back, parsing gives the original reply, even if the model's tool arguments are no object.
- A stream has at most one open block, and the indexes of its blocks increase.

Source: Anthropic API reference, "Create a Message", "Streaming Messages", "List Models" and "Errors".
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec

from outrider.dialects.base import EVENT_STREAM, Completion, ModelRequest, Opening, WireCall, event, line
from outrider.dialects.reading import INVALID_JSON, is_invalid_json_object, quoted
from outrider.errors import ContextOverflow, NotFound, OutriderError, error_text
from outrider.messages import Delta, ToolCall
from outrider.trajectory import FinishReason

MODELS = "/v1/models"

UNKNOWN_TIME = "1970-01-01T00:00:00Z"
"""The value of `created_at` that the API documents for a model with an unknown release date."""
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Anthropic's error types by HTTP status. Any other status is `invalid_request_error` below 500 and `api_error` from
500 on."""

_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


class Signer:
    """Makes the signature of a thinking block from the block's text, which may be added in pieces. The signature proves
    nothing, and the request parser ignores it. It exists because clients expect a signature."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=24)

    def add(self, text: str) -> None:
        self._digest.update(text.encode("utf-8", "surrogatepass"))

    def signature(self) -> str:
        return base64.b64encode(self._digest.digest()).decode()


def whole_reply(request: ModelRequest, completion: Completion) -> bytes:
    answer = completion.reply
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        signer = Signer()
        signer.add(answer.reasoning)
        blocks.append(thinking_block_object(answer.reasoning, signer.signature()))
    if answer.content:
        blocks.append(text_block_object(answer.content))
    blocks += [tool_use_object(call, msgspec.Raw(input_json(call.arguments))) for call in answer.tool_calls]
    reply = {
        **message_head(completion.id, completion.model),
        "content": blocks or [text_block_object("")],  # clients expect at least one block
        **stopped(request, completion),
        "usage": usage(completion),
    }
    return msgspec.json.encode(reply)


def message_head(id: str, model: str) -> dict[str, Any]:
    # Anthropic's ids of replies begin with `msg_`.
    return {"id": f"msg_{id}", "type": "message", "role": "assistant", "model": model}


def stopped(request: ModelRequest, completion: Completion) -> dict[str, str | None]:
    """Return `stop_reason` and `stop_sequence`. An aborted reply has the reason `max_tokens`. Anthropic's API has no
    value for an abort, and `end_turn` would tell clients that the reply is complete. If the engine does not report
    which stop sequence ended the reply, the reason is `end_turn`."""
    reason, sequence = "end_turn", None
    if completion.finish is not FinishReason.STOP:
        reason = "max_tokens"
    elif completion.reply.tool_calls:
        reason = "tool_use"
    elif completion.stop_match in request.sampling.stop:
        reason, sequence = "stop_sequence", str(completion.stop_match)
    return {"stop_reason": reason, "stop_sequence": sequence}


def usage(completion: Completion) -> dict[str, int]:
    """Return the token counts. As in Anthropic's API, `input_tokens` excludes cached tokens: the three input counts add
    up to the length of the prompt."""
    return usage_object(completion.prompt_tokens, completion.completion_tokens, cached=completion.cached_tokens)


def usage_object(prompt: int, output: int, *, cached: int = 0) -> dict[str, int]:
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }


def text_block_object(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def thinking_block_object(thinking: str, signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": thinking, "signature": signature}


def tool_use_object(call: ToolCall, input: msgspec.Raw) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": input}


def input_json(arguments: str) -> str:
    """Return a call's arguments as a JSON object, which Anthropic's API requires. An object is returned unchanged, and
    empty text becomes `{}`. Any other text is put into an object with the key INVALID_JSON. The request parser takes
    the text out again."""
    if not arguments.strip():
        return "{}"
    try:
        value = _ANY.decode(arguments)
    except (msgspec.DecodeError, ValueError, RecursionError):
        value = None
    # If the model itself wrote an object with only the key INVALID_JSON, this object is wrapped, too. Otherwise the
    # request parser would unwrap the model's own object.
    if isinstance(value, dict) and not is_invalid_json_object(value):
        return arguments
    return msgspec.json.encode({INVALID_JSON: arguments}).decode()


def error_object(error: OutriderError) -> dict[str, Any]:
    """Return `{"type": "error", "error": {"type", "message"}, "request_id"}`. The id is null, because requests have no
    ids here."""
    status, message = error.http_status, error_text(error)
    if isinstance(error, ContextOverflow):
        # Clients recognise a context overflow by this text, and read the two numbers from it.
        if error.overflow is not None:
            message = f"{error.overflow.prompt_tokens} tokens > {error.overflow.context_tokens} maximum"
        message = f"prompt is too long: {message}"
    kind = ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}


class _BlockKind(Enum):
    """The kinds of blocks in a stream. A block's deltas have the type VALUE_delta, such as `text_delta`."""

    THINKING = "thinking"
    TEXT = "text"
    TOOL = "input_json"


class MessagesStream:
    """Implements `StreamWriter` for Anthropic Messages."""

    content_type = EVENT_STREAM
    ping = event({"type": "ping"}, b"ping")

    _delta_head: bytes
    _signer: Signer

    def __init__(self, request: ModelRequest) -> None:
        self._request = request
        self._open: _BlockKind | None = None
        self._index = -1

    def open(self, opening: Opening) -> bytes:
        message = {
            **message_head(opening.id, opening.model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_object(opening.prompt_tokens, 0),
        }
        return _event("message_start", message=message)

    def delta(self, delta: Delta, pieces: tuple[bytes, ...] = ()) -> bytes:
        written = self._more(_BlockKind.THINKING, delta.reasoning) if delta.reasoning else b""
        return written + self._more(_BlockKind.TEXT, delta.text) if delta.text else written

    def close(self, completion: Completion) -> bytes:
        events: list[bytes] = []
        for call in completion.reply.tool_calls:
            events.append(self._start(_BlockKind.TOOL, tool_use_object(call, msgspec.Raw(b"{}"))))
            events.append(self._piece(input_json(call.arguments)))
        if self._index < 0:  # clients expect at least one block
            events.append(self._start(_BlockKind.TEXT, text_block_object("")))
        events.append(self._stop())
        stop = stopped(self._request, completion)
        events.append(_event("message_delta", delta=stop, usage=usage(completion)))
        events.append(_event("message_stop"))
        return b"".join(events)

    def error(self, error: OutriderError) -> bytes:
        return event(error_object(error), b"error")

    def _more(self, kind: _BlockKind, text: str) -> bytes:
        """Add text to the open block if it has this kind, or else to a new block."""
        started = b""
        if self._open is not kind:
            thinking = kind is _BlockKind.THINKING
            started = self._start(kind, thinking_block_object("", "") if thinking else text_block_object(""))
        if kind is _BlockKind.THINKING:
            self._signer.add(text)
        return started + self._piece(text)

    def _start(self, kind: _BlockKind, block: dict[str, Any]) -> bytes:
        """End the open block and begin the next."""
        ended = self._stop()
        self._open = kind
        self._index += 1
        name = kind.value.encode()
        field = b"partial_json" if kind is _BlockKind.TOOL else name
        # The bytes before a delta's text are the same for all deltas of a block, so they are encoded once.
        self._delta_head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"%b_delta","%b":' % (self._index, name, field)
        )
        if kind is _BlockKind.THINKING:
            self._signer = Signer()
        return ended + _event("content_block_start", index=self._index, content_block=block)

    def _piece(self, text: str) -> bytes:
        return self._delta_head + line(text) + b"}}\n\n"

    def _stop(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open is _BlockKind.THINKING:
            signature = {"type": "signature_delta", "signature": self._signer.signature()}
            signed = _event("content_block_delta", index=self._index, delta=signature)
        self._open = None
        return signed + _event("content_block_stop", index=self._index)


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind.encode())


def models_reply(call: WireCall, contexts: Mapping[str, int | None]) -> bytes:
    """Write the one model that the path names, or the list of all models in one page. Raises NotFound for an unknown
    model."""
    if call.path == MODELS:
        page = {
            "data": [model_object(*named) for named in contexts.items()],
            "has_more": False,
            "first_id": next(iter(contexts), None),
            "last_id": next(reversed(tuple(contexts)), None),
        }
        return msgspec.json.encode(page)
    wanted = call.path.removeprefix(f"{MODELS}/")
    if wanted not in contexts:
        raise NotFound(f"model: {quoted(wanted)} does not exist", field="model")
    return msgspec.json.encode(model_object(wanted, contexts[wanted]))


def model_object(name: str, context_tokens: int | None) -> dict[str, Any]:
    """Return the object of one model. `max_input_tokens` is null if the size of the context is unknown."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": UNKNOWN_TIME,
        "lifecycle": "active",
        "max_input_tokens": context_tokens,
    }
