"""OpenAI Chat Completions, streamed and not: its routes, and the `Dialect` built from request, reply and stream.

Invariant: a streamed reply and a whole reply carry the same message.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from outrider.dialects.base import Action, Completion, Memory, ModelRequest, WireCall
from outrider.dialects.chat.reply import model_object, reply_object
from outrider.dialects.chat.request import parse_request
from outrider.dialects.chat.stream import ChatStream
from outrider.dialects.json import named_model, quoted
from outrider.dialects.openai_errors import openai_error
from outrider.errors import NotFound, OutriderError

MODEL = "/v1/models/"
ROUTES = {("POST", "/v1/chat/completions"): Action.GENERATE, ("GET", "/v1/models"): Action.MODELS}


class ChatDialect:
    """`Dialect` of `POST /v1/chat/completions`, `GET /v1/models` and `GET /v1/models/{model}`. A session's memory
    holds its parsed tools."""

    name = "chat"

    def action(self, call: WireCall) -> Action | None:
        if call.method == "GET" and call.path.startswith(MODEL):
            return Action.MODEL
        return ROUTES.get((call.method, call.path))

    def model(self, call: WireCall, body: bytes) -> str | None:
        return named_model(body)

    def parse(self, call: WireCall, body: bytes, memory: Memory) -> ModelRequest:
        return parse_request(call, body, memory)

    def reply(self, request: ModelRequest, completion: Completion) -> bytes:
        return msgspec.json.encode(reply_object(request, completion))

    def stream(self, request: ModelRequest) -> ChatStream:
        return ChatStream(request)

    def count(self, request: ModelRequest, tokens: int) -> bytes:
        raise NotFound("Chat Completions has no route that counts tokens")

    def error(self, error: OutriderError) -> tuple[int, bytes]:
        return error.http_status, msgspec.json.encode(openai_error(error))

    def models(self, call: WireCall, contexts: Mapping[str, int | None]) -> bytes:
        if not call.path.startswith(MODEL):
            listed = [model_object(*named) for named in contexts.items()]
            return msgspec.json.encode({"object": "list", "data": listed})
        wanted = call.path.removeprefix(MODEL)
        if wanted not in contexts:
            raise NotFound(f"the model {quoted(wanted)} does not exist", field="model")
        return msgspec.json.encode(model_object(wanted, contexts[wanted]))
