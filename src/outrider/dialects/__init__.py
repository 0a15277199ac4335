"""The wire formats that agents use to call models. Each dialect has a folder; several dialects share the modules here.

A dialect's folder defines its `Dialect` and routes (`__init__.py`), the parser of requests (`request.py`), and the
writers of whole and streamed replies (`reply.py`). Its other files parse the part of a request that they are named
after. Nothing in this package handles tokens, sessions or sockets.
"""

from __future__ import annotations

from outrider.dialects.chat import CHAT_DIALECT
from outrider.dialects.gemini import GEMINI_DIALECT
from outrider.dialects.messages import MESSAGES_DIALECT
from outrider.dialects.responses import RESPONSES_DIALECT

DIALECTS = (MESSAGES_DIALECT, RESPONSES_DIALECT, GEMINI_DIALECT, CHAT_DIALECT)
"""The first dialect with a matching route serves a call. The order matters only for `GET /v1/models` and `GET
/v1/models/NAME`, which three dialects have: Messages and Gemini serve such a call if it has a header that only their
clients send. Chat serves all other clients."""

UNKNOWN_ROUTES = CHAT_DIALECT
"""Writes the error reply to a call that matches no route. Most clients can read OpenAI's errors."""
