"""The engine of a campaign: vLLM's protocol, replies that are never the same, and a log of every token that it
samples.

`main(log, port, knobs)` serves the engine. A call is logged as a line of JSON (`Call`) before its first token is sent,
so that the log has every token that a client can have received, even after a kill.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import AsyncGenerator
from hashlib import sha256
from pathlib import Path

import msgspec

from campaign.seams import Knobs
from campaign.service import TOKENIZER
from outrider.cli.event_loop import run_service
from outrider.engines.base import Chunk, EngineHealth, GenerateRequest, PauseMode
from outrider.lab.fakes.engine_servers.app import engine_app, serving
from outrider.lab.fakes.engine_servers.asgi import ServeSettings
from outrider.lab.fakes.scripted_engine import scripted_logprob
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import FinishReason, Ids, LogprobKind, TokenMode
from outrider.wire.http_server import Application

REPLY_TOKENS = 24
CHUNK_TOKENS = 6
CHUNK_SECONDS = 0.03
END = "<|im_end|>"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Call(msgspec.Struct, frozen=True):
    """A generation: the id of its attempt, a digest of its prompt's ids, and all ids that it will sample."""

    session: str
    prompt: str
    ids: list[int]


def digest_of(prompt: Ids) -> str:
    return sha256(prompt.astype("<i4").tobytes()).hexdigest()[:16]


class LoggedEngine:
    """An `Engine` whose replies are random letters."""

    name = "campaign"
    mode = TokenMode.TOKENS
    logprob_kind = LogprobKind.SAMPLING

    def __init__(self, log: Path, tokenizer: Tokenizer, knobs: Knobs) -> None:
        self._knobs = knobs
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._letters = [tokenizer.encode(letter)[0] for letter in LETTERS]
        self._end = tokenizer.encode(END)[0]
        self._tokenizer = tokenizer

    async def start(self) -> None:
        """Do nothing: there are no resources to open."""

    async def close(self) -> None:
        os.close(self._log)

    async def health(self) -> EngineHealth:
        return EngineHealth(ok=True, model="campaign", context_tokens=32_768)

    async def pause(self, mode: PauseMode) -> None:
        raise NotImplementedError("a campaign does not pause its policy")

    async def resume(self) -> None:
        raise NotImplementedError("a campaign does not pause its policy")

    async def token_check(self, text: str) -> list[int] | None:
        return self._tokenizer.encode(text)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        ids = [*random.choices(self._letters, k=REPLY_TOKENS - 1), self._end]
        call = Call(session=request.session_key, prompt=digest_of(request.input_ids), ids=ids)
        os.write(self._log, msgspec.json.encode(call) + b"\n")
        wanted = min(REPLY_TOKENS, request.sampling.max_tokens)
        for start in range(0, wanted, CHUNK_TOKENS):
            await asyncio.sleep(max(CHUNK_SECONDS, self._knobs.chunk_seconds))
            while self._knobs.engine_silent:  # noqa: ASYNC110  # another process sets and resets this number
                await asyncio.sleep(CHUNK_SECONDS)
            some = ids[start : min(start + CHUNK_TOKENS, wanted)]
            last = start + len(some) == wanted
            position = len(request.input_ids) + start
            yield Chunk(
                ids=some,
                logprobs=[scripted_logprob(position + offset, token) for offset, token in enumerate(some)],
                finish=None if not last else FinishReason.STOP if some[-1] == self._end else FinishReason.LENGTH,
                stop_match=self._end if some[-1] == self._end else None,
            )


def main(log: str, port: str, knobs: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    tokenizer = Tokenizer.load(TOKENIZER)
    engine = LoggedEngine(Path(log), tokenizer, Knobs(Path(knobs)))
    run_service(_serve(engine_app(engine, "vllm", ServeSettings(tokenizer=tokenizer)), int(port)))


async def _serve(app: Application, port: int) -> None:
    async with serving(app, port=port):
        await asyncio.Event().wait()
