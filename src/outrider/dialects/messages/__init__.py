"""Anthropic Messages, streamed and not: its routes, and the `Dialect` built from request, reply and stream.

Invariant: a streamed reply and a whole reply carry the same message.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from outrider.dialects.base import Action, Completion, Memory, ModelRequest, WireCall
from outrider.dialects.json import named_model, quoted
from outrider.dialects.messages.reply import error_object, model_object, models_object, reply_object
from outrider.dialects.messages.request import parse_request
from outrider.dialects.messages.stream import MessagesStream
from outrider.errors import NotFound, OutriderError

MESSAGES = "/v1/messages"
COUNT_TOKENS = f"{MESSAGES}/count_tokens"
MODELS = "/v1/models"
POSTS = {MESSAGES: Action.GENERATE, COUNT_TOKENS: Action.COUNT_TOKENS}


class MessagesDialect:
    """`Dialect` of `POST /v1/messages` and `/v1/messages/count_tokens`, and of `GET /v1/models` for a client that
    names its `anthropic-version`. A session's memory holds its parsed tools."""

    name = "messages"

    def action(self, call: WireCall) -> Action | None:
        if call.path == MESSAGES or call.path.startswith(f"{MESSAGES}/"):
            action = POSTS.get(call.path) if call.method == "POST" else None
            if action is None:
                raise NotFound(f"{call.method} {call.path} is not served here")
            return action
        # OpenAI's API has the same route. Anthropic's clients are recognised by their version, which they send with
        # every call.
        if call.method == "GET" and call.header(b"anthropic-version") is not None:
            if call.path == MODELS:
                return Action.MODELS
            if call.path.startswith(f"{MODELS}/"):
                return Action.MODEL
        return None

    def model(self, call: WireCall, body: bytes) -> str | None:
        return named_model(body)

    def parse(self, call: WireCall, body: bytes, memory: Memory) -> ModelRequest:
        return parse_request(call, body, memory, generate=call.path != COUNT_TOKENS)

    def reply(self, request: ModelRequest, completion: Completion) -> bytes:
        return msgspec.json.encode(reply_object(request, completion))

    def stream(self, request: ModelRequest) -> MessagesStream:
        return MessagesStream(request)

    def count(self, request: ModelRequest, tokens: int) -> bytes:
        return msgspec.json.encode({"input_tokens": tokens})

    def error(self, error: OutriderError) -> tuple[int, bytes]:
        return error.http_status, msgspec.json.encode(error_object(error))

    def models(self, call: WireCall, contexts: Mapping[str, int | None]) -> bytes:
        if call.path == MODELS:
            return msgspec.json.encode(models_object(contexts))
        wanted = call.path.removeprefix(f"{MODELS}/")
        if wanted not in contexts:
            raise NotFound(f"model: {quoted(wanted)} does not exist", field="model")
        return msgspec.json.encode(model_object(wanted, contexts[wanted]))
