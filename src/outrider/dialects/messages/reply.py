"""A finished model call, an error and the model list in the JSON shapes of Anthropic Messages.

Invariant: a reply that a client sends back is parsed as the same reply, whatever text the model wrote as tool
arguments.

Source: Anthropic API reference, "Create a Message", "List Models" and "Errors".
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from outrider.dialects.base import Completion, ModelRequest, error_text
from outrider.dialects.tools import INVALID_JSON, is_invalid_json_object
from outrider.errors import ContextOverflow, OutriderError
from outrider.messages import ToolCall
from outrider.trajectory import FinishReason

UNKNOWN_TIME = "1970-01-01T00:00:00Z"
"""The `created_at` that the API documents for a model with an unknown release date."""
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
"""Error types by HTTP status. Any other status below 500 is `invalid_request_error`, from 500 on `api_error`."""

_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


class StopFields(msgspec.Struct, frozen=True):
    """The end of a reply in the API's words."""

    stop_reason: str
    stop_sequence: str | None = None


class Signer:
    """Makes the signature of a thinking block from the block's text, in pieces or whole. The signature proves nothing:
    clients expect a signature and send it back, and the request parser ignores it."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=24)

    def add(self, text: str) -> None:
        self._digest.update(text.encode("utf-8", "surrogatepass"))

    def signature(self) -> str:
        return base64.b64encode(self._digest.digest()).decode()


def reply_object(request: ModelRequest, completion: Completion) -> dict[str, Any]:
    """The whole reply, ready to encode."""
    reply = completion.reply
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        signer = Signer()
        signer.add(reply.reasoning)
        blocks.append(thinking_block_object(reply.reasoning, signer.signature()))
    if reply.content:
        blocks.append(text_block_object(reply.content))
    blocks += [tool_use_object(call, msgspec.Raw(input_json(call.arguments))) for call in reply.tool_calls]
    stop = stopped(request, completion)
    return {
        **message_head(completion.id, completion.model),
        "content": blocks or [text_block_object("")],  # clients expect at least one block
        "stop_reason": stop.stop_reason,
        "stop_sequence": stop.stop_sequence,
        "usage": usage(completion),
    }


def message_head(id: str, model: str) -> dict[str, Any]:
    # The API's ids begin with `msg_`.
    return {"id": f"msg_{id}", "type": "message", "role": "assistant", "model": model}


def stopped(request: ModelRequest, completion: Completion) -> StopFields:
    """The reason why the reply ended. An aborted reply is `max_tokens`: the dialect has no word for an abort, and
    clients read `end_turn` as a complete reply. If the engine does not report which stop sequence ended the reply, the
    reason is `end_turn`."""
    if completion.finish is not FinishReason.STOP:
        return StopFields("max_tokens")
    if completion.reply.tool_calls:
        return StopFields("tool_use")
    if completion.stop_match in request.sampling.stop:
        return StopFields("stop_sequence", str(completion.stop_match))
    return StopFields("end_turn")


def usage(completion: Completion) -> dict[str, int]:
    """Token counts. `input_tokens` excludes cached tokens, as in the API: the three input counts add up to the
    prompt."""
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
    """Arguments as the JSON object that the dialect requires: an object unchanged, `{}` for no text, and any other
    text as an object with the text under `INVALID_JSON`. The request parser turns such an object back into the text."""
    if not arguments.strip():
        return "{}"
    try:
        value = _ANY.decode(arguments)
    except (msgspec.DecodeError, ValueError, RecursionError):
        value = None
    # A model's object in the form of the wrapper is wrapped once more. Otherwise the request parser would unwrap it.
    if isinstance(value, dict) and not is_invalid_json_object(value):
        return arguments
    return msgspec.json.encode({INVALID_JSON: arguments}).decode()


def error_object(error: OutriderError) -> dict[str, Any]:
    """`{"type": "error", "error": {"type", "message"}, "request_id"}`. Requests have no ids here."""
    status, message = error.http_status, error_text(error)
    if isinstance(error, ContextOverflow):
        # Clients recognise an overflow by these words, and read the two numbers from them.
        if error.overflow is not None:
            message = f"{error.overflow.prompt_tokens} tokens > {error.overflow.context_tokens} maximum"
        message = f"prompt is too long: {message}"
    kind = ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}


def model_object(name: str, context_tokens: int | None) -> dict[str, Any]:
    """One model. `max_input_tokens` is null if the size of the context is unknown."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": UNKNOWN_TIME,
        "lifecycle": "active",
        "max_input_tokens": context_tokens,
    }


def models_object(contexts: Mapping[str, int | None]) -> dict[str, Any]:
    """The list of models, always in one page."""
    return {
        "data": [model_object(*named) for named in contexts.items()],
        "has_more": False,
        "first_id": next(iter(contexts), None),
        "last_id": next(reversed(tuple(contexts)), None),
    }
