"""Writes the replies of Chat Completions: whole replies, streams of server-sent events, and the list of models.

Invariants: a streamed reply and a whole reply carry the same message. If the client requests token ids and
log-probabilities, the reply has the engine's values, one for each token.

Source: OpenAI API reference, "The chat completion object" and "The chat completion chunk object"; vLLM's server for
`prompt_token_ids`, `token_ids` and `max_model_len`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

import msgspec
import numpy as np
import orjson

from outrider.dialects.base import COMMENT, EVENT_STREAM, Completion, ModelRequest, Opening, WireCall, event, line
from outrider.dialects.openai_errors import openai_error
from outrider.dialects.reading import quoted
from outrider.errors import NotFound, OutriderError
from outrider.messages import Delta, Message, ToolCall
from outrider.trajectory import FinishReason, Ids

DONE = b"data: [DONE]\n\n"
"""The event that ends a stream."""
MODEL = "/v1/models/"

OWNER = "outrider"
UNKNOWN_LOGPROB = -9999.0
"""Written in place of a log-probability that JSON cannot express, such as minus infinity. vLLM sends the same
number."""


def whole_reply(request: ModelRequest, completion: Completion) -> bytes:
    answer = completion.reply
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.content or (None if answer.tool_calls else ""),
        "refusal": None,
    }
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [tool_call_object(call) for call in answer.tool_calls]
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
        "id": f"chatcmpl-{completion.id}",
        "object": "chat.completion",
        "created": completion.created,
        "model": completion.model,
        "choices": [choice],
        "usage": usage(completion),
    }
    if request.return_token_ids:
        choice["token_ids"] = ids_json(completion.output_ids)
        reply["prompt_token_ids"] = ids_json(completion.prompt_ids)
    return msgspec.json.encode(reply)


def finish_reason(completion: Completion) -> str:
    """Return `tool_calls`, `stop` or `length`. A reply that a token limit or an abort cut off has the reason `length`,
    even if it contains complete calls. OpenAI's API has no value for an abort, and `stop` would tell clients that the
    reply is complete."""
    if completion.finish is not FinishReason.STOP:
        return "length"
    return "tool_calls" if completion.reply.tool_calls else "stop"


def usage(completion: Completion) -> dict[str, Any]:
    """Return the token counts. `reasoning_tokens` is 0 for a reply without reasoning. For any other reply it is absent,
    because reasoning tokens are not counted separately."""
    return {
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
        "total_tokens": completion.prompt_tokens + completion.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": completion.cached_tokens},
        "completion_tokens_details": None if completion.reply.reasoning else {"reasoning_tokens": 0},
    }


def message_object(message: Message) -> dict[str, Any]:
    """Return a message in OpenAI's form, without its images and its reasoning."""
    found: dict[str, Any] = {"role": message.role.value, "content": message.content}
    if message.tool_calls:
        found["tool_calls"] = [*map(tool_call_object, message.tool_calls)]
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        found["name"] = message.name
    return found


def tool_call_object(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def logprob_entries(
    ids: Iterable[int] | None, logprobs: Iterable[float], pieces: Sequence[bytes]
) -> list[dict[str, Any]]:
    """Return the value of `logprobs.content`, with one entry for each token. `pieces` are the tokens' texts. Without
    them, the text of an entry is `token_id:ID`, or empty if the ids are also unknown.

    `top_logprobs` is always empty, because engines return the log-probability of the sampled token only.
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
    """Encode token ids as a JSON array. Returns None if the ids are unknown."""
    if ids is None:
        return None
    # orjson encodes the numpy array directly, because converting the many ids of a prompt to Python integers would be
    # slow.
    packed = np.ascontiguousarray(ids, dtype=np.int32)
    return msgspec.Raw(orjson.dumps(packed, option=orjson.OPT_SERIALIZE_NUMPY))


class ChatStream:
    """Implements `StreamWriter` for Chat Completions."""

    content_type = EVENT_STREAM
    ping = COMMENT

    # The bytes before and after a delta's text are the same in all chunks. `open` makes them once, so that `delta` does
    # not encode a dictionary for every token.
    _head: bytes
    _content_head: bytes
    _reasoning_head: bytes
    _content_tail: bytes
    _tail: bytes

    def __init__(self, request: ModelRequest) -> None:
        self._logprobs = request.logprobs
        self._token_ids = request.return_token_ids
        self._usage = request.include_usage

    def open(self, opening: Opening) -> bytes:
        head = {
            "id": f"chatcmpl-{opening.id}",
            "object": "chat.completion.chunk",
            "created": opening.created,
            "model": opening.model,
        }
        self._head = b"data: " + line(head)[:-1] + b',"choices":['
        self._tail = b',"usage":null}\n\n' if self._usage else b"}\n\n"
        self._content_head = self._head + b'{"index":0,"delta":{"content":'
        self._reasoning_head = self._head + b'{"index":0,"delta":{"reasoning_content":'
        self._content_tail = b'},"logprobs":null,"finish_reason":null}]' + self._tail
        prompt = b""
        if self._token_ids:
            prompt = b',"prompt_token_ids":' + line(ids_json(opening.prompt_ids))
        return self._chunk({"role": "assistant", "content": "", "refusal": None}, after=prompt)

    def delta(self, delta: Delta, pieces: tuple[bytes, ...] = ()) -> bytes:
        if not (self._logprobs or self._token_ids):
            written = b""
            if delta.reasoning:
                written = self._reasoning_head + line(delta.reasoning) + self._content_tail
            if delta.text:
                written += self._content_head + line(delta.text) + self._content_tail
            return written
        # A client that requests log-probabilities or ids gets all tokens of the delta in the chunk, even if they add no
        # text yet.
        fields: dict[str, Any] = {}
        if delta.reasoning:
            fields["reasoning_content"] = delta.reasoning
        if delta.text:
            fields["content"] = delta.text
        if not fields and not delta.ids:
            return b""
        logprobs = None
        if self._logprobs and delta.logprobs:
            logprobs = {"content": logprob_entries(delta.ids, delta.logprobs, pieces)}
        return self._chunk(fields, logprobs=logprobs, ids=delta.ids if self._token_ids else None)

    def close(self, completion: Completion) -> bytes:
        chunks = [
            self._chunk({"tool_calls": [{"index": index, **tool_call_object(call)}]})
            for index, call in enumerate(completion.reply.tool_calls)
        ]
        chunks.append(self._chunk({}, finish=finish_reason(completion)))
        if self._usage:  # OpenAI documents the usage as a separate last chunk without choices
            chunks.append(self._head + b'],"usage":' + line(usage(completion)) + b"}\n\n")
        chunks.append(DONE)
        return b"".join(chunks)

    def error(self, error: OutriderError) -> bytes:
        return event(openai_error(error)) + DONE

    def _chunk(
        self,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish: str | None = None,
        ids: list[int] | None = None,
        after: bytes = b"",
    ) -> bytes:
        """Write one chunk as an event. `after` is JSON text that follows the choices in the chunk."""
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        if ids is not None:
            choice["token_ids"] = ids
        return b"".join((self._head, line(choice), b"]", after, self._tail))


def models_reply(call: WireCall, contexts: Mapping[str, int | None]) -> bytes:
    """Write the list of models, or the one model that the path names. Raises NotFound for an unknown model."""
    if not call.path.startswith(MODEL):
        listed = [model_object(*named) for named in contexts.items()]
        return msgspec.json.encode({"object": "list", "data": listed})
    wanted = call.path.removeprefix(MODEL)
    if wanted not in contexts:
        raise NotFound(f"the model {quoted(wanted)} does not exist", field="model")
    return msgspec.json.encode(model_object(wanted, contexts[wanted]))


def model_object(name: str, context_tokens: int | None) -> dict[str, Any]:
    """Return the object of one model. `max_model_len` is absent if the size of the context is unknown."""
    context = {} if context_tokens is None else {"max_model_len": context_tokens}
    return {"id": name, "object": "model", "created": 0, "owned_by": OWNER, **context}
