"""OpenAI Responses, streamed and not: its routes, and the `Dialect` built from request, reply and stream.

Invariant: a streamed reply and a whole reply carry the same response. A stored response can be continued
(`previous_response_id`); it cannot be fetched or deleted.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from outrider.dialects.base import Action, Completion, Memory, ModelRequest, WireCall
from outrider.dialects.json import named_model
from outrider.dialects.openai_errors import openai_error
from outrider.dialects.responses.reply import (
    ResponsesContext,
    finished,
    output_items,
    response_id,
    response_object,
)
from outrider.dialects.responses.request import parse_request
from outrider.dialects.responses.stream import ResponsesStream
from outrider.errors import NotFound, OutriderError

RESPONSES = "/v1/responses"
COUNT = f"{RESPONSES}/input_tokens"
ROUTES = {("POST", RESPONSES): Action.GENERATE, ("POST", COUNT): Action.COUNT_TOKENS}


class ResponsesDialect:
    """`Dialect` of `POST /v1/responses` and `/v1/responses/input_tokens`. A session's memory holds its stored
    responses and its parsed tools."""

    name = "responses"

    def action(self, call: WireCall) -> Action | None:
        action = ROUTES.get((call.method, call.path))
        if action is None and (call.path == RESPONSES or call.path.startswith(f"{RESPONSES}/")):
            raise NotFound(
                f"{call.method} {call.path} is not served here: responses can be created and continued, not fetched"
            )
        return action

    def model(self, call: WireCall, body: bytes) -> str | None:
        return named_model(body)

    def parse(self, call: WireCall, body: bytes, memory: Memory) -> ModelRequest:
        return parse_request(call, body, memory, generate=call.path != COUNT)

    def reply(self, request: ModelRequest, completion: Completion) -> bytes:
        context: ResponsesContext = request.reply_context
        output = output_items(context, completion)
        if context.keep is not None:
            context.keep(response_id(completion.id), output)
        return msgspec.json.encode(response_object(context, completion, finished(completion, output)))

    def stream(self, request: ModelRequest) -> ResponsesStream:
        return ResponsesStream(request)

    def count(self, request: ModelRequest, tokens: int) -> bytes:
        return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": tokens})

    def error(self, error: OutriderError) -> tuple[int, bytes]:
        return error.http_status, msgspec.json.encode(openai_error(error))

    def models(self, call: WireCall, contexts: Mapping[str, int | None]) -> bytes:
        raise NotFound("models are listed in the Chat dialect")
