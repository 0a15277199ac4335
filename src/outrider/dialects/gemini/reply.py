"""Writes the replies of Google's API: whole replies, streams, errors, and the list of models.

Invariants: a streamed reply and a whole reply carry the same message; a reply has at least one part, and no part is an
empty object. Clients discard a reply without parts or with an empty part.

Source: Google AI API reference, "GenerateContentResponse", "Model", "Status"; google.rpc.Code for the names of errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from outrider.dialects.base import EVENT_STREAM, Completion, ModelRequest, Opening, WireCall, line
from outrider.dialects.gemini.contents import arguments_on_wire, signature
from outrider.dialects.gemini.request import GeminiContext, resource_of
from outrider.dialects.reading import quoted
from outrider.errors import ContextOverflow, NotFound, OutriderError, error_text, storable
from outrider.messages import Delta, ToolCall
from outrider.trajectory import FinishReason

DOMAIN = "outrider"
TYPES = "type.googleapis.com/google.rpc."

_STATUS = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    410: "FAILED_PRECONDITION",
    429: "RESOURCE_EXHAUSTED",
    501: "UNIMPLEMENTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
"""Google's names of errors by HTTP status. Any other status is `INVALID_ARGUMENT` below 500 and `INTERNAL` from 500
on."""


def whole_reply(request: ModelRequest, completion: Completion) -> bytes:
    context: GeminiContext = request.reply_context
    reply = completion.reply
    context.history.answered(reply)
    parts: list[dict[str, Any]] = []
    if context.thoughts and reply.reasoning:
        parts.append({"text": reply.reasoning, "thought": True})
    if reply.content:
        parts.append({"text": reply.content})
    parts += [call_part(call) for call in reply.tool_calls]
    return msgspec.json.encode(chunk_object(completion, parts))


def chunk_object(completion: Completion, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a whole reply, or the last chunk of a stream, with the parts, the finish reason, and the token counts."""
    return {
        "candidates": [
            {
                "content": {"parts": parts or [{"text": ""}], "role": "model"},
                "finishReason": finish_reason(completion),
                "index": 0,
            }
        ],
        "usageMetadata": usage(completion),
        "modelVersion": completion.model,
        "responseId": completion.id,
    }


def call_part(call: ToolCall) -> dict[str, Any]:
    """Return the part of the reply for a tool call. Its signature contains the call's id, because many clients send
    signatures back but drop ids."""
    function = {"id": call.id, "name": call.name, "args": msgspec.Raw(arguments_on_wire(call.arguments))}
    return {"functionCall": function, "thoughtSignature": signature(call.id)}


def finish_reason(completion: Completion) -> str:
    """Return `MAX_TOKENS` for a reply that a token limit or an abort cut off, and `STOP` for any other reply."""
    return "STOP" if completion.finish is FinishReason.STOP else "MAX_TOKENS"


def usage(completion: Completion) -> dict[str, int]:
    """Return the token counts. `candidatesTokenCount` includes the tokens of thoughts. They are not counted separately,
    so `thoughtsTokenCount` is 0 for a reply without thoughts, and absent for any other reply."""
    counts = {
        "promptTokenCount": completion.prompt_tokens,
        "candidatesTokenCount": completion.completion_tokens,
        "totalTokenCount": completion.prompt_tokens + completion.completion_tokens,
        "cachedContentTokenCount": completion.cached_tokens,
    }
    if not completion.reply.reasoning:
        counts["thoughtsTokenCount"] = 0
    return counts


def error_object(error: OutriderError) -> dict[str, Any]:
    """Return the object `{"error": {"code", "message", "status", "details"}}`."""
    status, message = error.http_status, error_text(error)
    if isinstance(error, ContextOverflow):
        # Clients recognise a context overflow by this text, not by the code.
        message = f"The input token count exceeds the maximum number of tokens allowed: {message}"
    details: list[dict[str, Any]] = [{"@type": f"{TYPES}ErrorInfo", "reason": error.code.upper(), "domain": DOMAIN}]
    if error.field:
        violation = {"field": storable(error.field), "description": storable(error.message)}
        details.append({"@type": f"{TYPES}BadRequest", "fieldViolations": [violation]})
    word = _STATUS.get(status, "INTERNAL" if status >= 500 else "INVALID_ARGUMENT")
    return {"error": {"code": status, "message": message, "status": word, "details": details}}


class GeminiStream:
    """Implements `StreamWriter` for streamGenerateContent. It writes server-sent events if the query has `alt=sse`.
    Otherwise it writes one JSON array, item by item."""

    # An empty line is white space in a JSON array, and clients of event streams skip it. An SSE comment, as in Chat's
    # streams, would not do: Google's Python client tries to parse the line as JSON and fails.
    ping = b"\n"

    _text_head: bytes
    _text_tail: bytes
    _thought_tail: bytes

    def __init__(self, request: ModelRequest) -> None:
        self._context: GeminiContext = request.reply_context
        self.content_type = EVENT_STREAM if self._context.events else "application/json; charset=utf-8"
        self._begun = False

    def open(self, opening: Opening) -> bytes:
        # The bytes before and after a delta's text are the same in all chunks, so they are made once.
        about = line({"modelVersion": opening.model, "responseId": opening.id})
        tail = b'}],"role":"model"},"index":0}],' + about[1:]
        self._text_head = b'{"candidates":[{"content":{"parts":[{"text":'
        self._text_tail = tail
        self._thought_tail = b',"thought":true' + tail
        return b""

    def delta(self, delta: Delta, pieces: tuple[bytes, ...] = ()) -> bytes:
        written = b""
        if delta.reasoning and self._context.thoughts:
            written = self._framed(self._text_head + line(delta.reasoning) + self._thought_tail)
        if delta.text:
            written += self._framed(self._text_head + line(delta.text) + self._text_tail)
        return written

    def close(self, completion: Completion) -> bytes:
        self._context.history.answered(completion.reply)
        parts = [call_part(call) for call in completion.reply.tool_calls]
        return self._last(chunk_object(completion, parts))

    def error(self, error: OutriderError) -> bytes:
        return self._last(error_object(error))

    def _last(self, chunk: dict[str, Any]) -> bytes:
        written = self._framed(line(chunk))
        return written if self._context.events else written + b"]"

    def _framed(self, chunk: bytes) -> bytes:
        """Frame a chunk, which is JSON on one line, as a server-sent event or as the next item of the array."""
        if self._context.events:
            return b"data: " + chunk + b"\n\n"
        before = b",\n" if self._begun else b"["
        self._begun = True
        return before + chunk + b"\n"


def models_reply(call: WireCall, contexts: Mapping[str, int | None]) -> bytes:
    """Write the list of models, or the one model that the path names. Raises NotFound for an unknown model."""
    if "/models/" not in call.path:
        return msgspec.json.encode({"models": [model_object(*named) for named in contexts.items()]})
    wanted = resource_of(call)
    if wanted not in contexts:
        raise NotFound(f"the model {quoted(wanted)} does not exist", field="name")
    return msgspec.json.encode(model_object(wanted, contexts[wanted]))


def model_object(name: str, context_tokens: int | None) -> dict[str, Any]:
    """Return the object of one model. It has no limits if the size of the context is unknown."""
    limits = {} if context_tokens is None else {"inputTokenLimit": context_tokens, "outputTokenLimit": context_tokens}
    return {
        "name": f"models/{name}",
        "baseModelId": name,
        "version": "1",  # the API requires a version, but models have no version here
        "displayName": name,
        "description": "",
        **limits,
        "supportedGenerationMethods": ["generateContent", "streamGenerateContent", "countTokens"],
    }
