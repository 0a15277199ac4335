"""The OpenAI Responses dialect, with and without streaming. A session's `Memory` has the stored responses and the
parsed tools.

A client can continue a stored response (`previous_response_id`), but cannot fetch or delete it.
"""

from __future__ import annotations

from collections.abc import Mapping

from outrider.dialects.base import Action, Dialect, Route, WireCall
from outrider.dialects.openai_errors import openai_error
from outrider.dialects.reading import named_model
from outrider.dialects.responses.reply import ResponsesStream, whole_reply
from outrider.dialects.responses.request import COUNT, parse_request
from outrider.errors import NotFound


def _no_models(call: WireCall, contexts: Mapping[str, int | None]) -> bytes:
    raise NotFound("models are listed in the Chat dialect")


RESPONSES_DIALECT = Dialect(
    name="responses",
    routes=(
        Route("POST /v1/responses", Action.GENERATE),
        Route(f"POST {COUNT}", Action.COUNT_TOKENS),
        Route(r"\S+ /v1/responses(/.*)?", hint=": responses can be created and continued, not fetched"),
    ),
    model=named_model,
    parse=parse_request,
    reply=whole_reply,
    stream=ResponsesStream,
    models=_no_models,
    error=openai_error,
    count=lambda tokens: {"object": "response.input_tokens", "input_tokens": tokens},
)
