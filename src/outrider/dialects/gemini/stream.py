"""One streamed Google reply: server-sent events for `alt=sse`, else one JSON array that grows.

Invariant: everything is sent once. `delta` sends thoughts (if the request shows them) and text; `close` sends tool
calls, the finish reason and usage; after `close` or `error` nothing is written, and an array is closed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from outrider.dialects import sse
from outrider.dialects.base import Completion, Opening
from outrider.dialects.gemini.reply import call_part, chunk_object, error_object
from outrider.errors import OutriderError
from outrider.messages import Delta, Message

ARRAY_TYPE = "application/json; charset=utf-8"
PING = b"\n"
"""An empty line, which is white space in an array. The other dialects' ping, a comment of the event stream, does not
work here: Google's Python client parses it as JSON and fails."""

_encode = msgspec.json.Encoder().encode


class GeminiStream:
    """`StreamWriter` of streamGenerateContent. A call of `delta` before `open` raises AttributeError."""

    _text_head: bytes
    _text_tail: bytes
    _thought_tail: bytes

    def __init__(self, answered: Callable[[Message], None], *, thoughts: bool, events: bool) -> None:
        """`answered` is called with the reply before the end of the stream is sent."""
        self._answered = answered
        self.content_type = sse.CONTENT_TYPE if events else ARRAY_TYPE
        self._thoughts = thoughts
        self._events = events
        self._begun = False
        self._ended = False

    def open(self, opening: Opening) -> bytes:
        # The bytes around a delta's text are the same within a stream, and are made once.
        rest = b',"modelVersion":' + _encode(opening.model) + b',"responseId":' + _encode(opening.id) + b"}"
        head = b'{"candidates":[{"content":{"parts":[{'
        tail = b'}],"role":"model"},"index":0}]' + sse.one_line(rest)
        self._text_head = head + b'"text":'
        self._text_tail = tail
        self._thought_tail = b',"thought":true' + tail
        return b""

    def delta(self, delta: Delta, pieces: tuple[bytes, ...] = ()) -> bytes:
        if self._ended:
            return b""
        written = b""
        if delta.reasoning and self._thoughts:
            written = self._framed(self._text_head + sse.one_line(_encode(delta.reasoning)) + self._thought_tail)
        if delta.text:
            written += self._framed(self._text_head + sse.one_line(_encode(delta.text)) + self._text_tail)
        return written

    def close(self, completion: Completion) -> bytes:
        if not self._ended:
            self._answered(completion.reply)
        parts = [call_part(call) for call in completion.reply.tool_calls]
        return self._last(chunk_object(completion, parts))

    def error(self, error: OutriderError) -> bytes:
        return self._last(error_object(error))

    def ping(self) -> bytes:
        return b"" if self._ended else PING

    def _last(self, chunk: dict[str, Any]) -> bytes:
        if self._ended:
            return b""
        written = self._framed(sse.one_line(_encode(chunk)))
        self._ended = True
        return written if self._events else written + b"]"

    def _framed(self, chunk: bytes) -> bytes:
        """A chunk, already one line, as an event or as the array's next item."""
        if self._events:
            return b"data: " + chunk + b"\n\n"
        before = b",\n" if self._begun else b"["
        self._begun = True
        return before + chunk + b"\n"
