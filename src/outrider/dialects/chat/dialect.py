"""OpenAI Chat Completions, streamed and not: `Dialect` put together from its request, reply and stream.

It knows no token and no transport. Invariant: what a stream says and what the one-piece reply says are the
same message.
"""

from __future__ import annotations

import msgspec

from outrider.dialects.base import Action, Completion, Memory, ModelRequest, WireCall
from outrider.dialects.chat.reply import error_object, models_object, reply_object
from outrider.dialects.chat.request import parse_request
from outrider.dialects.chat.stream import ChatStream
from outrider.dialects.json import shown
from outrider.errors import NotFound, OutriderError

MODEL = "/v1/models/"
ROUTES = {("POST", "/v1/chat/completions"): Action.GENERATE, ("GET", "/v1/models"): Action.MODELS}


class ChatDialect:
    """`Dialect` of `POST /v1/chat/completions` and `GET /v1/models`. Without state: one serves a process."""

    name = "chat"

    def action(self, call: WireCall) -> Action | None:
        if call.method == "GET" and call.path.startswith(MODEL):
            return Action.MODEL
        return ROUTES.get((call.method, call.path))

    def parse(self, call: WireCall, body: bytes, memory: Memory) -> ModelRequest:
        return parse_request(body)

    def reply(self, request: ModelRequest, completion: Completion) -> bytes:
        return msgspec.json.encode(reply_object(request, completion))

    def stream(self, request: ModelRequest) -> ChatStream:
        return ChatStream(request)

    def count(self, request: ModelRequest, tokens: int) -> bytes:
        raise NotFound("Chat Completions has no route that counts tokens")

    def error(self, error: OutriderError) -> tuple[int, bytes]:
        return error.http_status, msgspec.json.encode(error_object(error))

    def models(self, call: WireCall, names: list[str], context_tokens: int | None) -> bytes:
        listed = models_object(names, context_tokens)
        if not call.path.startswith(MODEL):
            return msgspec.json.encode(listed)
        wanted = call.path.removeprefix(MODEL)
        if wanted not in names:
            raise NotFound(f"the model {shown(wanted)} does not exist", field="model")
        return msgspec.json.encode(listed["data"][names.index(wanted)])
