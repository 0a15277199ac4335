"""Inference servers that ProRL's clients add and clear, servers of tenants, and the form of errors."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engines.test_prorl_engine import token_route
from outrider.config import ModelConfig
from outrider.lab.fakes.engine_servers import ServeSettings, engine_app, serving
from outrider.spec import TokenSpec
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import TokenMode
from support.answering import answering
from support.prorl import Declined, Detail, ProrlClient, Status
from support.service import RENDERER, say, scripted_engine

from .prorl_world import instance, prorl_service


def model(tmp_path: Path, context: int | None = 32768) -> ModelConfig:
    return ModelConfig(tokenizer=str(tmp_path / "tokenizer"), renderer=RENDERER, context_tokens=context)


async def test_a_token_route_needs_the_models_context(tmp_path: Path) -> None:
    fake = scripted_engine(tmp_path, [say("hello")])
    async with prorl_service(tmp_path, engines=()) as (service, client), answering(token_route(fake)) as route:
        with pytest.raises(Declined, match=r"422: .*--context"):
            await client.add_llm_server(route)
        assert service.engines() == ()


async def test_a_token_route_and_stock_servers_are_attached_once(tmp_path: Path) -> None:
    fake = scripted_engine(tmp_path, [say("from the route")])
    settings = ServeSettings(tokenizer=Tokenizer.load(tmp_path / "tokenizer"))
    async with (
        prorl_service(tmp_path, engines=(), model=model(tmp_path)) as (service, client),
        answering(token_route(fake)) as route,
        serving(engine_app(scripted_engine(tmp_path, [say("from vllm")]), "vllm", settings)) as vllm,
    ):
        await client.start()
        with pytest.raises(Declined, match=r"503: .*no inference server"):
            await client.process(instance())
        assert "kind prorl" in await client.add_llm_server(route)
        assert "already attached" in await client.add_llm_server(f"{route}/")
        result = await client.process(instance())
        assert result.messages[-1].content == "from the route"
        assert result.messages[-1].logprobs
        assert not result.filter
        assert await client.clear_llm_server() == "1 engines are detached; the policy's next version is 1"
        assert await client.clear_llm_server() == "no engine was attached"
        assert service.engines() == ()
        assert "kind vllm" in await client.add_llm_server(f"{vllm}/v1")
        assert [engine.mode for engine in service.engines()] == [TokenMode.TOKENS]
        result = await client.process(instance(1))
        assert result.messages[-1].content == "from vllm"
        [group, _] = await service.store.groups()
        [turn] = await service.store.turns((await service.store.sessions(group.id))[0].id)
        assert [span.version for span in turn.versions] == [1]
        with pytest.raises(Declined, match="503"):
            await client.add_llm_server("http://127.0.0.1:9/v1")
        with pytest.raises(Declined, match="422"):
            await client.add_llm_server("no address")


async def test_a_job_waits_while_the_weights_change(tmp_path: Path) -> None:
    fake = scripted_engine(tmp_path, [say("hello")])
    async with (
        prorl_service(tmp_path, engines=(), model=model(tmp_path)) as (service, client),
        answering(token_route(fake)) as route,
        asyncio.TaskGroup() as tasks,
    ):
        await client.start()
        await client.add_llm_server(route)
        waiting = tasks.create_task(client.process(instance(seconds=0.3), job_id="j1"))
        while not await service.store.groups():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await client.clear_llm_server()
        assert service.pool.policy.status().paused == "finish"
        await asyncio.sleep(0.5)  # meanwhile the agent's call is held back
        assert not waiting.done()
        await client.add_llm_server(route)
        assert (await waiting).resolved
        assert service.pool.policy.status().paused is None


async def test_a_clear_that_fails_halfway_does_not_pause_the_policy_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = scripted_engine(tmp_path, [say("hello")])
    async with (
        prorl_service(tmp_path, engines=(), model=model(tmp_path)) as (service, client),
        answering(token_route(fake)) as route,
    ):
        await client.start()
        await client.add_llm_server(route)
        remove = service.pool.remove

        async def removed_with_an_error(name: str) -> None:
            await remove(name)
            raise OSError("its connections do not close")

        monkeypatch.setattr(service.pool, "remove", removed_with_an_error)
        with pytest.raises(Declined, match="500"):
            await client.clear_llm_server()
        monkeypatch.undo()
        assert service.pool.policy.status().paused == "finish"
        await client.add_llm_server(route)
        assert (service.pool.policy.status().paused, service.pool.policy.version) == (None, 1)
        assert (await client.process(instance())).resolved


async def test_other_engines_go_on_after_a_clear(tmp_path: Path) -> None:
    fake = scripted_engine(tmp_path, [say("hello")])
    async with (
        prorl_service(tmp_path, model=model(tmp_path)) as (service, client),
        answering(token_route(fake)) as route,
    ):
        await client.start()
        await client.add_llm_server(route)
        await client.clear_llm_server()
        assert [engine.name for engine in service.engines()] == ["scripted"]
        assert service.pool.policy.status().paused is None
        assert (await client.process(instance())).resolved


async def test_tenants_have_servers_of_their_own(tmp_path: Path) -> None:
    async with prorl_service(tmp_path, token="root") as (service, client):
        texts = [(await service.tokens.create(TokenSpec(name=name, role="submit"))).text for name in ("a", "b")]
        place = client.url.removeprefix("http://")
        async with (
            ProrlClient(f"http://x:{texts[0]}@{place}/prorl") as first,
            ProrlClient(f"http://x:{texts[1]}@{place}") as second,
        ):
            await first.start()
            with pytest.raises(Declined, match="503"):
                await second.status()
            await second.start()
            result = await first.process(instance(), job_id="same")
            other = await second.process(instance(1), job_id="same")
            assert (result.instance_id, other.instance_id) == ("i0", "i1")
            with pytest.raises(Declined, match=r"403: .*'admin'"):
                await first.add_llm_server("http://127.0.0.1:9")
            await first.stop()
            assert (await second.status()).status == "running"
        for path in ("/start", "/prorl/start"):
            with pytest.raises(Declined, match="401: this service requires a token"):  # in the contract's form
                await client.call(Status, "POST", path)


async def test_every_error_has_the_form_of_the_contract(tmp_path: Path) -> None:
    """Errors that no handler raised have this form, too. Errors of Outrider's own routes keep their form."""
    async with prorl_service(tmp_path) as (_, client):
        for called in ("GET /process", "GET /prorl/process", "POST /prorl/unknown", "DELETE /prorl/status"):
            status, content = await client.send(*called.split())
            assert (status, Detail.model_validate_json(content).detail) == (404, f"{called} is not served here")
        for path in ("/unknown", "/v1/unknown", "/prorl2/process"):
            status, content = await client.send("POST", path)
            assert (status, b'"code":"not_found"' in content) == (404, True)
