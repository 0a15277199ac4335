"""The scripted engine in the worlds of its tests: by itself, and behind each protocol that serves it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from engines.contract import Factory, Rig
from outrider.concurrency.retries import RetryPolicy
from outrider.engines.adapters.sglang import SGLangEngine
from outrider.engines.adapters.vllm import VLLMEngine
from outrider.engines.base import Chunk, Engine, EngineOptions, GenerateRequest, TakesConstraints
from outrider.engines.relay.engine import RelayEngine
from outrider.lab.fakes.engine_servers import ServeSettings, engine_app, serving
from outrider.lab.fakes.scripted_engine import ScriptedEngine, scripted_logprob
from outrider.relay import FunctionEngine, Worker
from outrider.tokens.rendering.tokenizer import Tokenizer
from support.relay import AT_ONCE, relay_served

CONTEXT_TOKENS = 512
REPLY = (
    "First the file is written, then é is run.\n<tool_call>\n"
    '{"name": "locate", "arguments": {"item": "maple"}}\n</tool_call><|im_end|>'
)
STALL = 3
HASTY = RetryPolicy(first=0.0, longest=0.0, attempts=2)

World = Literal[
    "direct",
    "vllm",
    "vllm-0.31",
    "vllm-0.26",
    "vllm-completions",
    "sglang",
    "sglang-incremental",
    "sglang-spans",
    "relay",
    "relay-function",
]

SETTINGS: dict[World, tuple[Literal["vllm", "sglang"], dict[str, Any]]] = {
    "vllm": ("vllm", {}),
    "vllm-0.31": ("vllm", {"text_token_ids": True}),
    "vllm-0.26": (
        "vllm",
        {"text_token_ids": True, "labels": False, "cached_token_counts": False, "finishes_aborted": False},
    ),
    "vllm-completions": ("vllm", {"generate_route": False}),
    "sglang": ("sglang", {}),
    "sglang-incremental": ("sglang", {"incremental": True}),
    "sglang-spans": ("sglang", {"spans": True}),
}
ADAPTERS: dict[str, type[VLLMEngine] | type[SGLangEngine]] = {"vllm": VLLMEngine, "sglang": SGLangEngine}


def scripted(folder: Path, name: str = "scripted", **options: Any) -> ScriptedEngine:
    options = {"replies": [REPLY], "context_tokens": CONTEXT_TOKENS} | options
    return ScriptedEngine(EngineOptions(name=name, tokenizer=str(folder), options=options))


def factory_of(world: World, folder: Path) -> Factory:
    """Return a contract factory. `folder` holds a tokenizer.json."""

    @asynccontextmanager
    async def factory(*, slow: bool = False) -> AsyncGenerator[Rig, None]:
        replies = [{"reply": REPLY, "stall": STALL}] if slow else [REPLY]
        fake = scripted(folder, replies=replies)
        async with reached(world, fake, folder) as engine:
            yield _rig(engine, fake, Tokenizer.load(folder))

    return factory


@asynccontextmanager
async def reached(world: World, fake: Engine, folder: Path) -> AsyncGenerator[Engine, None]:
    """Yield the started engine through which this world reaches the fake."""
    if world == "direct":
        yield fake
        return
    if world in ("relay", "relay-function"):
        relay = RelayEngine(EngineOptions(name=world))
        served = fake if world == "relay" else function_of(fake, Tokenizer.load(folder))
        async with relay_served(relay) as url, Worker(url, served, reconnecting=AT_ONCE) as worker:
            await worker.attached()
            yield relay
        return
    protocol, settings = SETTINGS[world]
    app = engine_app(fake, protocol, ServeSettings(tokenizer=Tokenizer.load(folder), **settings))
    async with serving(app) as url:
        engine = ADAPTERS[protocol](EngineOptions(name=world, url=url), retry=HASTY)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()


def function_of(fake: Engine, tokenizer: Tokenizer) -> FunctionEngine:
    """An engine with only the fake's generate function, and the values that a trainer would configure."""

    async def generate(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        async with aclosing(fake.generate(request)) as chunks:
            async for chunk in chunks:
                yield msgspec.structs.replace(chunk, versions=())

    async def trouble() -> str:
        return (await fake.health()).detail

    return FunctionEngine(
        generate,
        model="scripted",
        context_tokens=CONTEXT_TOKENS,
        constraints=fake.constraints if isinstance(fake, TakesConstraints) else (),
        tokenize=tokenizer.encode,
        healthy=trouble,
    )


def _rig(engine: Engine, fake: ScriptedEngine, tokenizer: Tokenizer) -> Rig:
    ids = tokenizer.encode(REPLY)

    def oracle(request: GenerateRequest) -> tuple[list[int], list[float]]:
        start = len(request.input_ids)
        return ids, [scripted_logprob(start + offset, token_id) for offset, token_id in enumerate(ids)]

    async def aborted() -> None:
        await fake.abort_seen.wait()

    return Rig(
        engine=engine,
        prompt=np.array(tokenizer.encode("<|im_start|>user\nWhere is it?<|im_end|>\n"), dtype=np.int32),
        max_tokens=200,
        context_tokens=CONTEXT_TOKENS,
        decode=tokenizer.decode,
        encode=tokenizer.encode,
        aborted=aborted,
        kill=fake.kill,
        finish=fake.release,
        oracle=oracle,
    )
