"""Engines that two trainings attach to one service, under names with the same prefix."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.client.client import AsyncClient
from outrider.engines.base import EngineOptions
from outrider.errors import Conflict
from outrider.lab.fakes.engine_servers import ServeSettings, engine_app, serving
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trainers.attached_engines import AttachedEngines, AttachLimits
from support.scribe import scribe_task
from support.service import running_service, say
from support.tokenizer import write_tokenizer


@asynccontextmanager
async def server(tmp_path: Path, *, stall: bool = False) -> AsyncIterator[tuple[ScriptedEngine, dict[str, Any]]]:
    """Yield the engine of a vLLM server, and the spec by which a trainer attaches the server."""
    folder = write_tokenizer(tmp_path / "tokenizer")
    replies = [{"reply": say("hello"), "stall": 1}] if stall else [say("hello")]
    fake = ScriptedEngine(EngineOptions(name="fake", tokenizer=str(folder), options={"replies": replies}))
    await fake.start()
    async with serving(engine_app(fake, "vllm", ServeSettings(tokenizer=Tokenizer.load(folder)))) as url:
        yield fake, {"kind": "vllm", "url": url, "model": "policy", "options": {"control": False}}
    await fake.close()


async def test_engines_that_another_training_uses_are_not_replaced(tmp_path: Path) -> None:
    async with (
        server(tmp_path, stall=True) as (fake, theirs),
        server(tmp_path) as (_, ours),
        running_service(tmp_path=tmp_path, engines=()) as (service, url),
        AsyncClient(url) as client,
    ):
        await AttachedEngines("t").attach(client, [theirs])
        await client.submit({"task": scribe_task("attached in use") | {"instruction": "say it"}})
        await asyncio.wait_for(fake.stalled.wait(), 20)
        with pytest.raises(Conflict, match=r"another training has attached the engine t-0"):
            await AttachedEngines("t").attach(client, [ours])
        assert not await AttachedEngines("t").attach(client, [theirs])  # another process of the same training
        assert [(status.name, status.url) for status in service.pool.status()] == [("t-0", theirs["url"])]
        fake.release()


async def test_engines_that_another_training_has_put_in_the_place_of_ours_are_an_error(tmp_path: Path) -> None:
    async with (
        server(tmp_path) as (_, theirs),
        server(tmp_path) as (_, ours),
        running_service(tmp_path=tmp_path, engines=()) as (service, url),
        AsyncClient(url) as client,
    ):
        mine = AttachedEngines("t", limits=AttachLimits(look_seconds=0.0))
        assert await mine.attach(client, [ours])
        assert await AttachedEngines("t").attach(client, [theirs])  # our engine had no sessions, so it may be replaced
        with pytest.raises(Conflict, match="another training has attached"):
            await mine.attach(client, [ours])
        assert [(status.name, status.url) for status in service.pool.status()] == [("t-0", theirs["url"])]


async def test_of_two_trainings_that_begin_at_once_one_gets_the_service(tmp_path: Path) -> None:
    async with (
        server(tmp_path) as (_, theirs),
        server(tmp_path) as (_, ours),
        running_service(tmp_path=tmp_path, engines=()) as (service, url),
        AsyncClient(url) as client,
    ):
        outcomes = await asyncio.gather(
            *(AttachedEngines("t").attach(client, [engine]) for engine in (theirs, ours)), return_exceptions=True
        )
        [status] = service.pool.status()
    assert sorted(map(str, map(type, outcomes))) == sorted(map(str, (bool, Conflict))), outcomes
    assert status.name == "t-0"


async def test_an_engine_of_the_services_own_is_an_error(tmp_path: Path) -> None:
    async with (
        server(tmp_path) as (_, theirs),
        server(tmp_path) as (_, ours),
        running_service(tmp_path=tmp_path, engines=()) as (service, url),
        AsyncClient(url) as client,
    ):
        await client.add_engine({**theirs, "name": "vllm-0"})
        with pytest.raises(Conflict, match="the service also has the engine vllm-0 for the policy"):
            await AttachedEngines("t").attach(client, [ours])
        assert [status.name for status in service.pool.status()] == ["vllm-0"]
        assert await AttachedEngines("t").attach(client, [theirs])  # the same server under another name
