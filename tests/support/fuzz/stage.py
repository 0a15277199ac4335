"""One session of the real gateway on a scripted engine that records its own prompts and outputs.

Independent of the dialect.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from outrider.api.gateway import Gateway
from outrider.engines.base import EngineOptions
from outrider.engines.pool.pool import EnginePool
from outrider.errors import Unauthorized
from outrider.sessions.calls.call import ModelBackend
from outrider.sessions.conversation import Conversation
from outrider.sessions.models import SessionModels
from outrider.spec import Limits, SamplingSpec
from outrider.tokens.rendering.renderer import History, Renderer, make_renderer
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import Turn
from support.fuzz.script import replies
from support.recording_engine import RecordingEngine
from support.tokenizer import write_tokenizer

MODEL = "policy"
CONTEXT_TOKENS = 16_384
SCRIPT_LINES = 40


class Ground:
    """The folder of the tokenizer and the renderer, which all sessions of a run share."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(write_tokenizer(folder))
        self.renderer: Renderer = make_renderer(Tokenizer.load(folder), "qwen3")


class Stage:
    """One session: its gateway, its engine, and the stored turns."""

    def __init__(
        self, key: str, conversation: Conversation, engine: RecordingEngine, turns: list[Turn], history: History
    ) -> None:
        self.key = key
        self.history = history
        self.engine = engine
        self.turns = turns
        self.application = Gateway(self)
        self._conversation = conversation
        self._models = SessionModels(conversation)

    async def refusal(self, key: str) -> Unauthorized:
        return Unauthorized("this session key is unknown, or its run is over")

    def models(self, key: str) -> SessionModels | None:
        return self._models if key == self.key else None

    async def close(self) -> None:
        await self._conversation.close()

    @property
    def open(self) -> bool:
        return self._conversation.open

    @property
    def failure(self) -> Any:
        return self._conversation.failure


@asynccontextmanager
async def a_stage(ground: Ground, dice: random.Random) -> AsyncIterator[Stage]:
    """Yield a new session. Its limits and the script of its engine are drawn with `dice`."""
    options = {
        "replies": [msgspec.to_builtins(reply) for reply in replies(dice, SCRIPT_LINES)],
        "chunk_tokens": dice.choice((1, 2, 3, 7, 50)),
        "context_tokens": CONTEXT_TOKENS,
        "version": dice.randrange(5),
    }
    engine = RecordingEngine(EngineOptions(name="scripted", model=MODEL, tokenizer=ground.folder, options=options))
    turns: list[Turn] = []

    async def record(turn: Turn) -> None:
        turns.append(turn)

    history: History = dice.choice(("recorded", "recorded", "recorded", "template"))
    small = dice.random() < 0.05
    async with EnginePool(patience=1.0, vocabulary=ground.renderer.tokenizer.vocabulary) as pool:
        await pool.add_engine(engine)
        conversation = Conversation(
            ModelBackend(renderer=ground.renderer, pool=pool, model=MODEL),
            session_key="fuzz-1-1",
            limits=Limits(turns=9, response_tokens=500) if small else Limits(turns=10_000),
            sampling=SamplingSpec(max_tokens=dice.choice((None, None, None, 12, 300))),
            history=history,
            record=record,
        )
        stage = Stage(f"key-{dice.randrange(10**9)}", conversation, engine, turns, history)
        try:
            yield stage
        finally:
            await stage.close()
