"""The Anthropic Messages dialect, with and without streaming. Its `Memory` caches the session's parsed tools."""

from __future__ import annotations

from outrider.dialects.base import Action, Dialect, Route
from outrider.dialects.messages.reply import MessagesStream, error_object, models_reply, whole_reply
from outrider.dialects.messages.request import parse_request
from outrider.dialects.reading import named_model

_VERSION = b"anthropic-version"
"""The header that Anthropic's clients send with every call. A call of `/v1/models` without it comes from an OpenAI
client."""

MESSAGES_DIALECT = Dialect(
    name="messages",
    routes=(
        Route("POST /v1/messages", Action.GENERATE),
        Route("POST /v1/messages/count_tokens", Action.COUNT_TOKENS),
        Route(r"\S+ /v1/messages(/.*)?"),
        Route("GET /v1/models", Action.MODELS, header=_VERSION),
        Route("GET /v1/models/.*", Action.MODEL, header=_VERSION),
    ),
    model=named_model,
    parse=parse_request,
    reply=whole_reply,
    stream=MessagesStream,
    models=models_reply,
    error=error_object,
    count=lambda tokens: {"input_tokens": tokens},
)
