"""One streamed Chat Completions reply, written as server-sent events.

Invariant: everything is sent once. `delta` sends text and reasoning; `close` sends tool calls, the finish reason and
usage; after `close` or `error` nothing is written.

Source: OpenAI API reference, "The chat completion chunk object".
"""

from __future__ import annotations

from typing import Any

import msgspec

from outrider.dialects import sse
from outrider.dialects.base import Completion, ModelRequest, Opening
from outrider.dialects.chat.reply import (
    finish_reason,
    ids_json,
    logprob_entries,
    tool_call_object,
    usage,
)
from outrider.dialects.openai_errors import openai_error
from outrider.errors import OutriderError
from outrider.messages import Delta

_encode = msgspec.json.Encoder().encode


class ChatStream:
    """`StreamWriter` of Chat Completions. A call of `delta` before `open` raises AttributeError."""

    content_type = sse.CONTENT_TYPE

    # The bytes around a delta's text are the same within a stream. `open` makes them once, which saves encoding a
    # dictionary for every token.
    _head: bytes
    _choice_head: bytes
    _content_head: bytes
    _reasoning_head: bytes
    _content_tail: bytes
    _tail: bytes

    def __init__(self, request: ModelRequest) -> None:
        self._logprobs = request.logprobs
        self._token_ids = request.return_token_ids
        self._usage = request.include_usage
        self._ended = False

    def open(self, opening: Opening) -> bytes:
        head = {
            "id": opening.id,
            "object": "chat.completion.chunk",
            "created": opening.created,
            "model": opening.model,
        }
        self._head = b"data: " + sse.one_line(_encode(head))[:-1] + b',"choices":['
        self._tail = b',"usage":null}\n\n' if self._usage else b"}\n\n"
        self._choice_head = self._head + b'{"index":0,"delta":'
        self._content_head = self._choice_head + b'{"content":'
        self._reasoning_head = self._choice_head + b'{"reasoning_content":'
        self._content_tail = b'},"logprobs":null,"finish_reason":null}]' + self._tail
        prompt = b""
        if self._token_ids:
            prompt = b',"prompt_token_ids":' + _encode(ids_json(opening.prompt_ids))
        return self._chunk({"role": "assistant", "content": "", "refusal": None}, after=prompt)

    def delta(self, delta: Delta, pieces: tuple[bytes, ...] = ()) -> bytes:
        if self._ended:
            return b""
        if not (self._logprobs or self._token_ids):
            written = b""
            if delta.reasoning:
                written = self._reasoning_head + sse.one_line(_encode(delta.reasoning)) + self._content_tail
            if delta.text:
                written += self._content_head + sse.one_line(_encode(delta.text)) + self._content_tail
            return written
        # With log-probabilities or ids, one chunk has all tokens of the step, also if they add no text yet.
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
        if self._ended:
            return b""
        self._ended = True
        chunks = [
            self._chunk({"tool_calls": [{"index": index, **tool_call_object(call)}]})
            for index, call in enumerate(completion.reply.tool_calls)
        ]
        chunks.append(self._chunk({}, finish=finish_reason(completion)))
        if self._usage:  # a chunk of its own without choices, as the API documents `stream_options`
            chunks.append(self._head + b'],"usage":' + _encode(usage(completion)) + b"}\n\n")
        chunks.append(sse.DONE)
        return b"".join(chunks)

    def error(self, error: OutriderError) -> bytes:
        if self._ended:
            return b""
        self._ended = True
        return sse.event(_encode(openai_error(error))) + sse.DONE

    def ping(self) -> bytes:
        return b"" if self._ended else sse.PING

    def _chunk(
        self,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish: str | None = None,
        ids: list[int] | None = None,
        after: bytes = b"",
    ) -> bytes:
        """One chunk event; `after` is encoded JSON after its choices."""
        parts = [self._choice_head, sse.one_line(_encode(delta)), b',"logprobs":', sse.one_line(_encode(logprobs))]
        parts += [b',"finish_reason":', _encode(finish)]
        if ids is not None:
            parts += [b',"token_ids":', _encode(ids)]
        parts += [b"}]", after, self._tail]
        return b"".join(parts)
