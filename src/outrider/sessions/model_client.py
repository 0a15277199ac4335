"""The session's model for agents that run in this process: calls of its conversation, without HTTP.

It knows no token. Invariant: such a call is admitted, recorded and limited like one that comes through the gateway.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

import msgspec

from outrider.dialects.base import AskedSampling, Completion, ModelRequest
from outrider.errors import EngineUnavailable
from outrider.messages import Message, ParsedMessages, ToolSpec
from outrider.sessions.conversation import Conversation

DIALECT = "inprocess"


class ConversationClient:
    """`harnesses.base.ModelClient` over a conversation."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Message:
        request = ModelRequest(
            model=self._conversation.backend.model,
            messages=ParsedMessages(tuple(messages)),
            tools=tuple(tools),
            tools_raw=msgspec.json.encode(list(tools)) if tools else b"",
            sampling=AskedSampling(max_tokens=max_tokens, stop=tuple(stop)),
        )
        async with aclosing(self._conversation.call(request, dialect=DIALECT)) as batches:
            async for steps in batches:
                if isinstance(steps[-1], Completion):
                    return steps[-1].reply
        raise EngineUnavailable("the model call ended without a reply")
