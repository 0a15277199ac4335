"""A finished model call, an error and a model in the JSON shapes of Google's API.

Invariant: a reply has at least one part, and no part is an empty object, because clients discard a turn without parts
or with an empty part.

Source: Google AI API reference, "GenerateContentResponse", "Model", "Status"; google.rpc.Code for the error words.
"""

from __future__ import annotations

from typing import Any

import msgspec

from outrider.dialects.base import Completion, error_text
from outrider.dialects.gemini.contents import arguments_on_wire, signature
from outrider.errors import ContextOverflow, OutriderError, storable
from outrider.messages import ToolCall
from outrider.trajectory import FinishReason

DOMAIN = "outrider"
RESOURCE = "models/"
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
"""Status words by HTTP status. Any other status below 500 is `INVALID_ARGUMENT`, from 500 on `INTERNAL`."""


def reply_object(completion: Completion, *, thoughts: bool) -> dict[str, Any]:
    """The whole reply, ready to encode."""
    reply = completion.reply
    parts: list[dict[str, Any]] = []
    if thoughts and reply.reasoning:
        parts.append({"text": reply.reasoning, "thought": True})
    if reply.content:
        parts.append({"text": reply.content})
    parts += [call_part(call) for call in reply.tool_calls]
    return chunk_object(completion, parts)


def chunk_object(completion: Completion, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The last chunk of a reply: its last parts, the finish reason, and the token counts."""
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
    """A call with its id, and a signature that repeats the id: many clients drop ids and keep signatures."""
    function = {"id": call.id, "name": call.name, "args": msgspec.Raw(arguments_on_wire(call.arguments))}
    return {"functionCall": function, "thoughtSignature": signature(call.id)}


def finish_reason(completion: Completion) -> str:
    """`STOP`, with calls and without, or `MAX_TOKENS` for a reply cut off by its limit or an abort."""
    return "STOP" if completion.finish is FinishReason.STOP else "MAX_TOKENS"


def usage(completion: Completion) -> dict[str, int]:
    """Token counts. Thoughts count as tokens of the candidate: their own number is known only if it is 0."""
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
    """`{"error": {"code", "message", "status", "details"}}`."""
    status, message = error.http_status, error_text(error)
    if isinstance(error, ContextOverflow):
        # Clients recognise an overflow by these words, not by the code.
        message = f"The input token count exceeds the maximum number of tokens allowed: {message}"
    details: list[dict[str, Any]] = [{"@type": f"{TYPES}ErrorInfo", "reason": error.code.upper(), "domain": DOMAIN}]
    if error.field:
        violation = {"field": storable(error.field), "description": storable(error.message)}
        details.append({"@type": f"{TYPES}BadRequest", "fieldViolations": [violation]})
    word = _STATUS.get(status, "INTERNAL" if status >= 500 else "INVALID_ARGUMENT")
    return {"error": {"code": status, "message": message, "status": word, "details": details}}


def model_object(name: str, context_tokens: int | None) -> dict[str, Any]:
    """One model. Its limits are absent if the size of the context is unknown."""
    limits = {} if context_tokens is None else {"inputTokenLimit": context_tokens, "outputTokenLimit": context_tokens}
    return {
        "name": RESOURCE + name,
        "baseModelId": name,
        "version": "1",  # the API requires a version; models have none here
        "displayName": name,
        "description": "",
        **limits,
        "supportedGenerationMethods": ["generateContent", "streamGenerateContent", "countTokens"],
    }
