"""The memory that a live conversation holds for each call, in bytes per call of 2,000 tokens.

A call brings two messages of 750 tokens and gets a reply of 500. The figure is the memory that Python has allocated and
not freed (tracemalloc) after the calls have ended and their client and engine are deleted: the memory that the service
holds between two turns. The ids alone, at four bytes each, are 8,000 bytes.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import tracemalloc
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from bench.corpus import Corpus
from bench.dialogue import Dialogue
from bench.parked import CONTEXT_TOKENS
from outrider.dialects.base import Completion, WireCall
from outrider.dialects.chat import CHAT_DIALECT
from outrider.engines.base import EngineOptions
from outrider.engines.pool.pool import EnginePool
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.sessions.calls.call import ModelBackend
from outrider.sessions.conversation import Conversation
from outrider.spec import Limits, SamplingSpec
from outrider.tokens.rendering.renderer import make_renderer
from outrider.trajectory import Turn

MESSAGE_TOKENS = 750
REPLY_TOKENS = 500
SOURCES = 6
"""Number of allocation sites reported, the largest first."""


CALL = WireCall("POST", "/v1/chat/completions")


class Plan(msgspec.Struct, frozen=True):
    conversations: int
    calls: int


FULL = Plan(conversations=5, calls=60)
QUICK = Plan(conversations=1, calls=60)


async def run(quick: bool) -> dict[str, Any]:
    return await measure(QUICK if quick else FULL)


async def measure(plan: Plan) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        corpus = await asyncio.to_thread(Corpus.make, Path(folder))
        options = {
            "replies": [{"ids": corpus.reply(REPLY_TOKENS)}],
            "chunk_tokens": REPLY_TOKENS,
            "context_tokens": CONTEXT_TOKENS,
        }
        engine = ScriptedEngine(EngineOptions(name="scripted", tokenizer=str(corpus.folder), options=options))
        async with EnginePool() as pool:
            await pool.add_engine(engine)
            endpoint = ModelBackend(renderer=make_renderer(corpus.tokenizer, "qwen3"), pool=pool, model="policy")
            return await _measured(corpus, endpoint, engine, plan)


async def _measured(corpus: Corpus, endpoint: ModelBackend, engine: ScriptedEngine, plan: Plan) -> dict[str, Any]:
    await _conversation(corpus, endpoint, calls=3, name="warm")
    engine.requests.clear()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.take_snapshot()
        live = [
            await _conversation(corpus, endpoint, calls=plan.calls, name=f"c{number}")
            for number in range(plan.conversations)
        ]
        engine.requests.clear()
        gc.collect()
        grown = tracemalloc.take_snapshot().compare_to(before, "filename")
    finally:
        tracemalloc.stop()
    calls = sum(conversation.turns for conversation in live)
    return {
        "calls": calls,
        "tokens_per_call": 2 * MESSAGE_TOKENS + REPLY_TOKENS,
        "bytes_per_call": sum(entry.size_diff for entry in grown) / calls,
        "most_held_by": {
            "/".join(Path(entry.traceback[0].filename).parts[-2:]): entry.size_diff / calls for entry in grown[:SOURCES]
        },
    }


async def _conversation(corpus: Corpus, endpoint: ModelBackend, *, calls: int, name: str) -> Conversation:
    """Return a conversation after `calls` calls."""
    conversation = Conversation(
        endpoint,
        session_key=name,
        limits=Limits(),
        sampling=SamplingSpec(),
        history="recorded",
        record=_not_stored,
    )
    dialect = CHAT_DIALECT
    dialogue = Dialogue(max_tokens=REPLY_TOKENS)
    for _ in range(calls):
        body = dialogue.ask(corpus.tokens(MESSAGE_TOKENS), corpus.tokens(MESSAGE_TOKENS))
        request = dialect.parse(CALL, body, {})
        async with aclosing(conversation.call(request, dialect=dialect.name)) as steps:
            async for batch in steps:
                for step in batch:
                    if isinstance(step, Completion):
                        dialogue.answer(dialect.reply(request, step))
    return conversation


async def _not_stored(turn: Turn) -> None:
    """Drop the turn, because a real store would write it to disk."""
