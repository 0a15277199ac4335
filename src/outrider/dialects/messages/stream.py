"""One streamed Anthropic Messages reply, written as server-sent events.

Invariant: at most one block is open, and block indexes rise. `delta` sends text and reasoning; `close` sends tool
calls, the stop reason and usage; after `close` or `error` nothing is written.

Source: Anthropic API reference, "Streaming Messages".
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from outrider.dialects import sse
from outrider.dialects.base import Completion, ModelRequest, Opening
from outrider.dialects.messages.reply import (
    Signer,
    error_object,
    input_json,
    message_head,
    stopped,
    text_block_object,
    thinking_block_object,
    tool_use_object,
    usage,
    usage_object,
)
from outrider.errors import OutriderError
from outrider.messages import Delta

PING = sse.event(b'{"type":"ping"}', b"ping")

_encode = msgspec.json.Encoder().encode
_TAIL = b"}}\n\n"


class _BlockKind(Enum):
    """The kinds of blocks. A value is the type of the block's deltas without `_delta`."""

    THINKING = "thinking"
    TEXT = "text"
    TOOL = "input_json"


class MessagesStream:
    """`StreamWriter` of Anthropic Messages."""

    content_type = sse.CONTENT_TYPE

    _delta_head: bytes
    _signer: Signer

    def __init__(self, request: ModelRequest) -> None:
        self._request = request
        self._open: _BlockKind | None = None
        self._index = -1
        self._ended = False

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
        if self._ended:
            return b""
        written = self._more(_BlockKind.THINKING, delta.reasoning) if delta.reasoning else b""
        return written + self._more(_BlockKind.TEXT, delta.text) if delta.text else written

    def close(self, completion: Completion) -> bytes:
        if self._ended:
            return b""
        self._ended = True
        events: list[bytes] = []
        for call in completion.reply.tool_calls:
            events.append(self._start(_BlockKind.TOOL, tool_use_object(call, msgspec.Raw(b"{}"))))
            events.append(self._piece(input_json(call.arguments)))
        if self._index < 0:  # clients expect at least one block
            events.append(self._start(_BlockKind.TEXT, text_block_object("")))
        events.append(self._stop())
        stop = msgspec.structs.asdict(stopped(self._request, completion))
        events.append(_event("message_delta", delta=stop, usage=usage(completion)))
        events.append(_event("message_stop"))
        return b"".join(events)

    def error(self, error: OutriderError) -> bytes:
        if self._ended:
            return b""
        self._ended = True
        return sse.event(_encode(error_object(error)), b"error")

    def ping(self) -> bytes:
        return b"" if self._ended else PING

    def _more(self, kind: _BlockKind, text: str) -> bytes:
        """Add text to the open block if it is of the kind, else to a new block."""
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
        # The bytes before a delta's text are the same within a block, and are made once.
        self._delta_head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"%b_delta","%b":' % (self._index, name, field)
        )
        if kind is _BlockKind.THINKING:
            self._signer = Signer()
        return ended + _event("content_block_start", index=self._index, content_block=block)

    def _piece(self, text: str) -> bytes:
        return self._delta_head + sse.one_line(_encode(text)) + _TAIL

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
    return sse.event(_encode({"type": kind, **fields}), kind.encode())
