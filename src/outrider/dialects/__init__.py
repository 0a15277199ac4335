"""The wire formats of agent programs: one folder for each, and modules that several of them share.

A dialect's folder holds its routes and its `Dialect` class (`__init__.py`), the parser of requests (`request.py`) and
the writers of replies, whole (`reply.py`) and streamed (`stream.py`). Other files are named after the part of a
request they parse. Nothing in this room handles tokens, sessions or sockets.
"""

from __future__ import annotations

from outrider.dialects.base import Dialect
from outrider.dialects.chat import ChatDialect
from outrider.dialects.gemini import GeminiDialect
from outrider.dialects.messages import MessagesDialect
from outrider.dialects.responses import ResponsesDialect


def dialects() -> list[Dialect]:
    """Return one instance of each dialect, in the order in which the gateway offers them a route.

    The order matters for `GET /v1/models` alone: Messages and Gemini serve a client that sends their headers, Chat
    serves all other clients.
    """
    return [MessagesDialect(), ResponsesDialect(), GeminiDialect(), ChatDialect()]


def dialect_of_unknown_routes() -> Dialect:
    """The dialect of the error for a route that no dialect serves: most clients can read OpenAI's errors."""
    return ChatDialect()
