"""The dialect of Google's generateContent, with and without streaming. Its `Memory` for a session has the parsed tools
and a `history.HistoryMemory`.

The dialect serves all paths under `/v1beta/` and `/v1alpha/`, and the methods of models under `/v1/models/`. `GET
/v1/models` and `GET /v1/models/NAME` also exist in OpenAI's API. This dialect serves them only for a client that sends
its key in Google's header.
"""

from __future__ import annotations

from outrider.dialects.base import Action, Dialect, Route
from outrider.dialects.gemini.reply import GeminiStream, error_object, models_reply, whole_reply
from outrider.dialects.gemini.request import model_of, parse_request

_KEY = b"x-goog-api-key"
_METHOD = r"POST /v1(beta|alpha)?/models/(models/)?+.+:"

GEMINI_DIALECT = Dialect(
    name="gemini",
    routes=(
        Route(f"{_METHOD}(g|streamG)enerateContent", Action.GENERATE),
        Route(f"{_METHOD}countTokens", Action.COUNT_TOKENS),
        Route("GET /v1(beta|alpha)/models", Action.MODELS),
        Route("GET /v1(beta|alpha)/models/.*", Action.MODEL),
        Route("GET /v1/models", Action.MODELS, header=_KEY),
        Route("GET /v1/models/.*", Action.MODEL, header=_KEY),
        Route(r"\S+ /v1(beta|alpha)/.*"),
        Route(r"(?!GET )\S+ /v1/models/.*:.*"),
    ),
    model=lambda call, body: model_of(call),
    parse=parse_request,
    reply=whole_reply,
    stream=GeminiStream,
    models=models_reply,
    error=error_object,
    count=lambda tokens: {"totalTokens": tokens},
)
