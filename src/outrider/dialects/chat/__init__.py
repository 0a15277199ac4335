"""The OpenAI Chat Completions dialect, with and without streaming. Its `Memory` caches the session's parsed tools."""

from __future__ import annotations

from outrider.dialects.base import Action, Dialect, Route
from outrider.dialects.chat.reply import ChatStream, models_reply, whole_reply
from outrider.dialects.chat.request import parse_request
from outrider.dialects.openai_errors import openai_error
from outrider.dialects.reading import named_model

CHAT_DIALECT = Dialect(
    name="chat",
    routes=(
        Route("POST /v1/chat/completions", Action.GENERATE),
        Route("GET /v1/models", Action.MODELS),
        Route("GET /v1/models/.*", Action.MODEL),
    ),
    model=named_model,
    parse=parse_request,
    reply=whole_reply,
    stream=ChatStream,
    error=openai_error,
    models=models_reply,
)
