"""The wire formats that the gateway speaks."""

from __future__ import annotations

from outrider.dialects.base import Dialect
from outrider.dialects.chat.dialect import ChatDialect
from outrider.dialects.gemini.dialect import GeminiDialect
from outrider.dialects.messages.dialect import MessagesDialect
from outrider.dialects.responses.dialect import ResponsesDialect


def dialects() -> list[Dialect]:
    """One of each, in the order in which they are asked for a route; the last one refuses what none of them knows."""
    return [MessagesDialect(), ResponsesDialect(), GeminiDialect(), ChatDialect()]
