"""A finished model call and the model list in the JSON shapes of Chat Completions.

Invariant: `return_token_ids` and `logprobs` report the engine's own numbers, position by position.

Source: OpenAI API reference, "The chat completion object"; `prompt_token_ids`, `token_ids` and `max_model_len` as vLLM
serves them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import msgspec
import numpy as np
import orjson

from outrider.dialects.base import Completion, ModelRequest
from outrider.messages import ToolCall
from outrider.trajectory import FinishReason, Ids

OWNER = "outrider"
UNKNOWN_LOGPROB = -9999.0
"""Stands for a log-probability without a JSON form, such as minus infinity; vLLM sends the same number."""


def reply_object(request: ModelRequest, completion: Completion) -> dict[str, Any]:
    """The whole reply, ready to encode."""
    said = completion.reply
    message: dict[str, Any] = {
        "role": "assistant",
        "content": said.content or (None if said.tool_calls else ""),
        "refusal": None,
    }
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.tool_calls:
        message["tool_calls"] = [tool_call_object(call) for call in said.tool_calls]
    logprobs = None
    if request.logprobs and completion.logprobs is not None:
        ids = None if completion.output_ids is None else completion.output_ids.tolist()
        logprobs = {"content": logprob_entries(ids, completion.logprobs.tolist(), completion.pieces)}
    choice = {
        "index": 0,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish_reason(completion),
    }
    reply = {
        "id": completion.id,
        "object": "chat.completion",
        "created": completion.created,
        "model": completion.model,
        "choices": [choice],
        "usage": usage(completion),
    }
    if request.return_token_ids:
        choice["token_ids"] = ids_json(completion.output_ids)
        reply["prompt_token_ids"] = ids_json(completion.prompt_ids)
    return reply


def finish_reason(completion: Completion) -> str:
    """`tool_calls`, `stop` or `length`. A reply cut off by its limit or an abort is `length` even if it holds complete
    calls: the dialect has no word for an abort, and clients read `stop` as a complete reply."""
    if completion.finish is not FinishReason.STOP:
        return "length"
    return "tool_calls" if completion.reply.tool_calls else "stop"


def usage(completion: Completion) -> dict[str, Any]:
    """Token counts. The number of reasoning tokens is known only for a reply without reasoning: 0."""
    return {
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
        "total_tokens": completion.prompt_tokens + completion.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": completion.cached_tokens},
        "completion_tokens_details": None if completion.reply.reasoning else {"reasoning_tokens": 0},
    }


def tool_call_object(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def logprob_entries(
    ids: Iterable[int] | None, logprobs: Iterable[float], pieces: Sequence[bytes]
) -> list[dict[str, Any]]:
    """`logprobs.content`: one entry for each token. A token whose text is unknown is named by its id; if the id is
    unknown, too, the text is empty.

    `top_logprobs` is always empty: engines return the log-probability of the sampled token alone.
    """
    if not pieces and ids is not None:
        pieces = [b"token_id:%d" % number for number in ids]
    return [
        {
            "token": piece.decode("utf-8", "replace"),
            "logprob": float(logprob) if math.isfinite(logprob) else UNKNOWN_LOGPROB,
            "bytes": list(piece),
            "top_logprobs": [],
        }
        for piece, logprob in zip(pieces or repeat(b""), logprobs, strict=bool(pieces))
    ]


def ids_json(ids: Ids | None) -> msgspec.Raw | None:
    """Token ids as encoded JSON, or None if they are unknown."""
    if ids is None:
        return None
    # orjson writes the array itself: a prompt has too many ids for an intermediate list of Python integers.
    packed = np.ascontiguousarray(ids, dtype=np.int32)
    return msgspec.Raw(orjson.dumps(packed, option=orjson.OPT_SERIALIZE_NUMPY))


def model_object(name: str, context_tokens: int | None) -> dict[str, Any]:
    """One model. `max_model_len` is absent if the size of the context is unknown."""
    context = {} if context_tokens is None else {"max_model_len": context_tokens}
    return {"id": name, "object": "model", "created": 0, "owned_by": OWNER, **context}
