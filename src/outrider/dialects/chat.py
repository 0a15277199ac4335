"""OpenAI Chat Completions, streamed and not: `Dialect` put together from its request, reply and stream.

It knows no token and no transport. Invariant: what a stream says and what the one-piece reply says are the
same message.
"""

from __future__ import annotations

import msgspec

from outrider.dialects import sse
from outrider.dialects.base import Completion, ModelRequest
from outrider.dialects.chat_reply import error_object, models_object, reply_object
from outrider.dialects.chat_request import parse_request
from outrider.dialects.chat_stream import ChatStream
from outrider.errors import OutriderError


class ChatDialect:
    """`Dialect` of `POST /v1/chat/completions` and `GET /v1/models`. Without state: one serves a process."""

    name = "chat"
    stream_content_type = sse.CONTENT_TYPE

    def parse(self, body: bytes) -> ModelRequest:
        return parse_request(body)

    def reply(self, request: ModelRequest, completion: Completion) -> bytes:
        return msgspec.json.encode(reply_object(request, completion))

    def stream(self, request: ModelRequest) -> ChatStream:
        return ChatStream(request)

    def error(self, error: OutriderError) -> tuple[int, bytes]:
        return error.http_status, msgspec.json.encode(error_object(error))

    def models(self, names: list[str], context_tokens: int | None) -> bytes:
        return msgspec.json.encode(models_object(names, context_tokens))
