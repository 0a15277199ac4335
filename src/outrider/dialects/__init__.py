"""The wire formats that agent programs speak: one folder for each, and beside them what several of them share.

A dialect's folder holds its routes and its `Dialect` class (`__init__.py`), the reading of requests (`request.py`) and
the writing of replies, whole (`reply.py`) and streamed (`stream.py`); other files are named after what they read.
Nothing here knows tokens, sessions or sockets.
"""

from __future__ import annotations

from outrider.dialects.base import Dialect
from outrider.dialects.chat import ChatDialect
from outrider.dialects.gemini import GeminiDialect
from outrider.dialects.messages import MessagesDialect
from outrider.dialects.responses import ResponsesDialect


def dialects() -> list[Dialect]:
    """One of each, in the order in which they are asked whether a route is theirs.

    The order matters for `GET /v1/models` alone: Messages and Gemini answer it for a client that sends their headers,
    Chat for everybody else.
    """
    return [MessagesDialect(), ResponsesDialect(), GeminiDialect(), ChatDialect()]


def dialect_of_unknown_routes() -> Dialect:
    """The dialect in which a client is told that nobody serves its route: most clients know OpenAI's errors."""
    return ChatDialect()
