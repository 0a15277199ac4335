"""vLLM and SGLang behind a fake router. `tests/real/test_routers.py` runs the same checks with the real ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from engines.contract import collect
from engines.routers import CHECKS, KINDS, Kind, Worlds, fake_router, refuses_what_it_would_drop, worlds_of
from engines.upstream import Answer, upstream
from outrider.engines.pool.pool import EnginePool
from outrider.errors import EngineRejected, EngineUnavailable, InvalidField
from outrider.spec import EngineSpec


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_router_as_an_engine(
    kind: Kind, check: Callable[[Worlds], Awaitable[None]], tokenizer_folder: Path
) -> None:
    await check(worlds_of(kind, fake_router, tokenizer_folder))


async def test_what_a_router_would_drop_is_refused(tokenizer_folder: Path) -> None:
    await refuses_what_it_would_drop(worlds_of("sglang", fake_router, tokenizer_folder))


@pytest.mark.parametrize("kind", KINDS)
async def test_workers_out_of_reach_generate_and_cannot_be_told(kind: Kind, tokenizer_folder: Path) -> None:
    router = partial(fake_router, hidden=True)
    async with worlds_of(kind, router, tokenizer_folder)() as world, world.engine() as engine:
        await world.check_exact(engine, world.request())
        orders = engine.pause("abort"), engine.pause("finish"), engine.resume(), engine.update_weights(world.weights, 3)
        for order in orders:
            with pytest.raises(EngineRejected, match="none of its workers can be reached") as refused:
                await order
            assert "let the service connect" in (refused.value.hint or "")
        assert [worker.weights for worker in world.workers] == [None, None]
        await engine.set_version(3)  # weights that were changed from outside
        assert (await collect(engine.generate(world.request()))).versions[0].version == 3
        assert (await engine.health()).version == 3


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_is_no_router(kind: Kind, tokenizer_folder: Path) -> None:
    async with worlds_of(kind, fake_router, tokenizer_folder)() as world, EnginePool() as pool:
        with pytest.raises(InvalidField, match="it is not a router") as refused:
            await pool.add(EngineSpec(kind=f"{kind}-router", url=world.urls[0]))
        assert refused.value.hint == f"add it as {kind}={world.urls[0]}"
        assert pool.status() == []


async def test_a_worker_that_breaks_off_an_order_is_not_passed_over(tokenizer_folder: Path) -> None:
    """Such a worker may be alive and still generate. Only a worker that refuses connections is certainly gone."""
    pages = {"/v1/models": {"data": [{"id": "policy"}]}, "/weight_info": {"weight_version": "default"}}
    async with worlds_of("vllm", fake_router, tokenizer_folder)() as world, world.engine() as engine:
        async with upstream(Answer(cut=True), pages=pages) as (broken, _):
            await world.router.add(broken)
            with pytest.raises(EngineUnavailable):
                await engine.pause("abort")
        await engine.pause("abort")
