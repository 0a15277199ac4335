"""A conversation on a scripted engine, with a list as its store, for the tests of model calls."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from outrider.dialects.base import Completion, ModelRequest
from outrider.dialects.chat import CHAT_DIALECT
from outrider.engines.base import EngineOptions
from outrider.engines.pool.pool import EnginePool
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.lifecycle import StopReason
from outrider.messages import Delta
from outrider.sessions.calls.call import ModelBackend, Step
from outrider.sessions.conversation import Conversation
from outrider.sessions.models import SessionModels
from outrider.spec import Limits, SamplingSpec
from outrider.tokens.rendering.renderer import History, make_renderer
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import Turn
from support.tokenizer import write_tokenizer
from support.wire import CALL

BASH = {
    "type": "function",
    "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
}


def call_markup(command: str) -> str:
    arguments = msgspec.json.encode({"name": "bash", "arguments": {"command": command}}).decode()
    return f"<tool_call>\n{arguments}\n</tool_call><|im_end|>"


class World:
    """A conversation, its engine, and the recorded turns."""

    def __init__(self, new: Callable[[], Conversation], engine: ScriptedEngine, turns: list[Turn]) -> None:
        self._new = new
        self.conversation = new()
        self.models = SessionModels(self.conversation)
        self.engine = engine
        self.turns = turns
        self.limits_told: list[StopReason | None] = []
        """`conversation.limit` at each call of `on_limit`."""
        self.store_failure: Exception | None = None
        self.storing = asyncio.Event()

    async def steps(self, *messages: dict[str, Any], **fields: Any) -> list[Step]:
        """All steps of one Chat call."""
        async with aclosing(self.conversation.call(chat_request(*messages, **fields), dialect="chat")) as batches:
            return [step async for steps in batches for step in steps]

    async def ask(self, *messages: dict[str, Any], **fields: Any) -> Completion:
        last = (await self.steps(*messages, **fields))[-1]
        assert isinstance(last, Completion)
        return last


def chat_request(*messages: dict[str, Any], **fields: Any) -> ModelRequest:
    return CHAT_DIALECT.parse(CALL, msgspec.json.encode({"model": "any", "messages": messages, **fields}), {})


def picture(data: bytes) -> dict[str, Any]:
    """A user message with one image."""
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


def echoed(completion: Completion) -> dict[str, Any]:
    """The assistant message as a client sends it back: re-serialised arguments, no reasoning."""
    reply = completion.reply
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or None}
    if reply.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": msgspec.json.encode(msgspec.json.decode(call.arguments)).decode(),
                },
            }
            for call in reply.tool_calls
        ]
    return message


def text_of(steps: Sequence[Step]) -> str:
    return "".join(step.text for step in steps if isinstance(step, Delta))


@asynccontextmanager
async def a_world(
    folder: Path,
    replies: Sequence[Any],
    *,
    limits: Limits | None = None,
    sampling: SamplingSpec | None = None,
    history: History = "recorded",
    patience: float = 5.0,
    sample_index: int = 0,
    kind: Callable[[EngineOptions], ScriptedEngine] = ScriptedEngine,
    **script: Any,
) -> AsyncIterator[World]:
    write_tokenizer(folder)
    engine = kind(EngineOptions(name="scripted", tokenizer=str(folder), options={"replies": list(replies), **script}))
    turns: list[Turn] = []

    world: World | None = None

    async def record(turn: Turn) -> None:
        if world is not None and world.store_failure is not None:
            world.storing.set()
            await asyncio.sleep(0.01)  # a disk takes some time
            raise world.store_failure
        turns.append(turn)

    tokenizer = Tokenizer.load(folder)
    async with EnginePool(patience=patience, vocabulary=tokenizer.vocabulary) as pool:
        await pool.add_engine(engine)
        backend = ModelBackend(renderer=make_renderer(tokenizer, "qwen3"), pool=pool, model="policy")

        def new() -> Conversation:
            return Conversation(
                backend,
                session_key="s-1-1",
                limits=limits or Limits(),
                sampling=sampling or SamplingSpec(),
                history=history,
                record=record,
                sample_index=sample_index,
                on_limit=lambda: world.limits_told.append(world.conversation.limit) if world else None,
            )

        world = World(new, engine, turns)
        try:
            yield world
        finally:
            await world.conversation.close()
