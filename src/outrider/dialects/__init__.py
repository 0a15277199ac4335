"""The wire formats of agent programs: one folder for each dialect, and modules that several dialects share.

A dialect's folder holds its `Dialect` with its routes (`__init__.py`), the parser of requests (`request.py`) and the
writers of replies, whole and streamed (`reply.py`). Other files are named after the part of a request they parse.
Nothing in this package handles tokens, sessions or sockets.
"""

from __future__ import annotations

from outrider.dialects.chat import CHAT_DIALECT
from outrider.dialects.gemini import GEMINI_DIALECT
from outrider.dialects.messages import MESSAGES_DIALECT
from outrider.dialects.responses import RESPONSES_DIALECT

DIALECTS = (MESSAGES_DIALECT, RESPONSES_DIALECT, GEMINI_DIALECT, CHAT_DIALECT)
"""A call belongs to the first dialect with a route for the call. The order matters only for `GET /v1/models` and
`GET /v1/models/NAME`: Messages and Gemini serve clients that send the dialect's own header, and Chat serves all other
clients."""

UNKNOWN_ROUTES = CHAT_DIALECT
"""The dialect of the error reply to a call that no dialect serves. Most clients can read OpenAI's errors."""
