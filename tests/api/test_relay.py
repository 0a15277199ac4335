"""Workers that attach to a running service: who may attach, to which engine, and sessions with the workers' tokens."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from outrider.client.client import AsyncClient
from outrider.errors import Conflict, EngineUnavailable, InvalidField, NotFound, Unauthorized
from outrider.lab.fakes.scripted_engine import scripted_logprob
from outrider.relay import FunctionEngine, Worker
from outrider.service.service import Service
from outrider.spec import EngineSpec
from support.relay import AT_ONCE, CuttingProxy
from support.service import call, running_node, running_service, say, scripted_engine
from support.stamping import StampingEngine
from support.tokenizer import write_tokenizer

TASK = {
    "instruction": "say hello",
    "harness": {"agent": "tools"},
    "runtime": {"kind": "memory"},
    "evaluator": {"kind": "command", "run": "true"},
}
RELAY = EngineSpec(kind="relay", name="trainer", options={"resume_seconds": 1.0})


async def joined(service: Service, name: str = "trainer") -> None:
    """Return when sessions may use the engine."""
    async with asyncio.timeout(20):
        while not any(engine.ok for engine in service.pool.status() if engine.name == name):  # noqa: ASYNC110  # no event
            await asyncio.sleep(0)


async def test_sessions_run_on_a_worker_token_by_token(tmp_path: Path) -> None:
    """No engine is configured: the worker adds it. Ids and log-probabilities are stored as the worker sent them."""
    fake = scripted_engine(tmp_path, [call("ls"), say("hello")])
    async with (
        running_service(tmp_path=tmp_path, engines=()) as (service, url),
        AsyncClient(url) as client,
        Worker(url, fake, reconnecting=AT_ONCE) as worker,
    ):
        await worker.attached()
        await joined(service)
        await client.submit({"task": TASK, "n": 4})
        [group] = (await client.results(wait=30, samples=True)).groups
        assert group.samples is not None
        assert [sample.reward for sample in group.samples] == [1.0] * 4
        for sample in group.samples:
            for place, (token, trained, logprob) in enumerate(
                zip(sample.ids.tolist(), sample.loss_mask, sample.logprobs, strict=True)
            ):
                assert logprob == (scripted_logprob(place, token) if trained else 0.0)
            assert sum(sample.loss_mask) > 10
        [engine] = await client.engines()
        assert (engine.kind, engine.name, engine.ok, engine.model) == ("relay", "trainer", True, "scripted")


@pytest.mark.deep
async def test_sessions_survive_cut_connections(tmp_path: Path) -> None:
    fake = scripted_engine(tmp_path, [call("ls"), call("ls"), say("hello")])
    async with running_service(tmp_path=tmp_path, engines=()) as (service, url), AsyncClient(url) as client:
        proxy = CuttingProxy(url, cuts=20, most=4000, seed=3)
        async with proxy.open() as through, Worker(through, fake, reconnecting=AT_ONCE) as worker:
            await worker.attached()
            await joined(service)
            while proxy.made < 20:
                group = await client.submit({"task": TASK, "n": 8})
                [done] = await client.wait([group.id])
                assert [session.result.error for session in done.sessions] == [None] * 8
                assert [session.attempt for session in done.sessions] == [1] * 8


@pytest.mark.deep
@pytest.mark.parametrize("weights", [None, "weights"], ids=["trainer loads", "workers load"])
@pytest.mark.parametrize("mode", ["finish", "abort"])
async def test_weights_change_at_two_workers_while_their_connections_are_cut(
    tmp_path: Path, mode: Any, weights: str | None
) -> None:
    """Every token has the version that its worker had when the token was sampled: the token's letter shows the
    version."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    engines = [StampingEngine(tokenizer, length=100) for _ in range(2)]
    async with (
        running_service(tmp_path=tmp_path, engines=()) as (service, url),
        AsyncClient(url) as client,
        AsyncExitStack() as held,
    ):
        proxy = CuttingProxy(url, cuts=30, most=4000, seed=2)
        through = await held.enter_async_context(proxy.open())
        for engine in engines:
            worker = await held.enter_async_context(Worker(through, engine, reconnecting=AT_ONCE))
            await worker.attached()
        await joined(service)
        submitted = await client.submit({"task": TASK, "n": 24})
        for version in (1, 2, 3):
            while sum(engine.sampled for engine in engines) < 500 * version:  # noqa: ASYNC110  # no event
                await asyncio.sleep(0)
            status = await client.update_policy(version, mode=mode, weights=weights)
            assert [(engine.name, engine.version) for engine in status.engines] == [("trainer", version)]
        [done] = await client.wait([submitted.id])
        assert [session.result.error for session in done.sessions] == [None] * 24
        assert all(engine.version == 3 and engine.requests for engine in engines)
        assert [engine.loaded for engine in engines] == [["weights"] * 3 if weights else []] * 2
        versions = set()
        for session in done.sessions:
            [sample] = await client.samples(session.id)
            rows = zip(sample.ids, sample.loss_mask, sample.logprobs, sample.versions, strict=True)
            for place, (token, trains, logprob, version) in enumerate(rows):
                if trains:
                    assert token == engines[0].end or engines[0].letters.index(token) == version
                    assert logprob == scripted_logprob(place, token)
                    versions.add(version)
            assert sum(sample.loss_mask) == 101
            assert mode == "abort" or len(set(sample.versions)) == 2, "one version, and -1 for what was not sampled"
        assert mode == "finish" or versions == {0, 1, 2, 3}
        assert proxy.made > 3


async def test_a_worker_that_comes_after_an_update_loads_its_weights_before_it_serves(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    other, engine = StampingEngine(tokenizer, name="other"), StampingEngine(tokenizer)
    async with running_service(tmp_path=tmp_path, engines=()) as (service, url), AsyncClient(url) as client:
        await service.pool.add_engine(other)
        await client.update_policy(4, weights="weights-4")
        async with Worker(url, engine, reconnecting=AT_ONCE):
            await joined(service)
            assert (engine.loaded, engine.version) == (["weights-4"], 4)
            await client.remove_engine("other")
            [done] = await client.wait([(await client.submit({"task": TASK})).id])
            [sample] = await client.samples(done.sessions[0].id)
            assert (sample.min_version, sample.max_version) == (4, 4)
            engine.fails["update_weights"] = EngineUnavailable("no memory")
            with pytest.raises(EngineUnavailable, match="no memory"):
                await client.update_policy(5, weights="weights-5")
            status = await client.policy()
            assert (status.version, status.paused) == (4, None)


async def test_weights_are_not_sent_to_a_worker_whose_trainer_changes_them(tmp_path: Path) -> None:
    async with (
        running_service(tmp_path=tmp_path, engines=()) as (service, url),
        AsyncClient(url) as client,
        Worker(url, _never, reconnecting=AT_ONCE) as worker,
    ):
        await joined(service)
        with pytest.raises(InvalidField, match="cannot be loaded from here by trainer"):
            await client.update_policy(1, weights="weights")
        worker.set_version(1)
        status = await client.update_policy(1)
        assert (status.version, status.engines[0].version, status.engines[0].ok) == (1, 1, True)


@pytest.mark.parametrize("token", [None, "wrong"])
async def test_a_worker_needs_the_services_token(tmp_path: Path, token: str | None) -> None:
    async with running_service(tmp_path=tmp_path, token="secret") as (service, url):
        with pytest.raises(Unauthorized, match="401"):
            await Worker(url, _never, token=token).run()
        assert [engine.name for engine in service.pool.status()] == ["scripted"]
        async with Worker(url, _never, token="secret") as worker:
            await worker.attached()


async def test_a_web_page_cannot_attach_a_worker(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url), aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect(f"{url}/v1/relay/trainer", headers={"Origin": "https://evil.example"})
        assert refused.value.status == 401


async def test_programs_in_sandboxes_cannot_attach_a_worker(tmp_path: Path) -> None:
    async with running_node(tmp_path=tmp_path) as (opened, _):
        connector = aiohttp.UnixConnector(str(opened.node.gateway_socket))
        async with aiohttp.ClientSession(connector=connector) as session:
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await session.ws_connect("http://here/v1/relay/trainer")
            assert refused.value.status == 404


async def test_an_engine_of_another_kind_takes_no_worker(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        with pytest.raises(Conflict, match="'scripted' is no relay"):
            await Worker(url, _never, engine="scripted").run()


async def test_another_route_is_no_relay(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        with pytest.raises(NotFound, match="404"):
            await Worker(f"{url}/elsewhere", _never).run()


async def test_a_worker_with_another_models_tokenizer_is_refused(tmp_path: Path) -> None:
    def tokenize(text: str) -> list[int]:
        return [1, 2, 3]

    async with running_service(tmp_path=tmp_path) as (service, url):
        with pytest.raises(Conflict, match="tokenises text differently"):
            await Worker(url, FunctionEngine(_never, tokenize=tokenize)).run()
        assert [engine.ok for engine in service.pool.status()] == [True, False]


async def test_a_configured_relay_waits_for_its_workers(tmp_path: Path) -> None:
    """The service starts without a worker, and submitted sessions wait for one."""
    fake = scripted_engine(tmp_path, [say("hello")])
    async with running_service(tmp_path=tmp_path, engines=(RELAY,)) as (_, url), AsyncClient(url) as client:
        [engine] = await client.engines()
        assert not engine.ok
        assert "no worker is attached" in engine.detail
        submitted = await client.submit({"task": TASK, "n": 2})
        async with Worker(url, fake, reconnecting=AT_ONCE) as worker:
            await worker.attached()
            [done] = await client.wait([submitted.id])
        assert [session.result.error for session in done.sessions] == [None, None]


async def test_a_worker_that_dies_is_replaced_without_losing_a_session(tmp_path: Path) -> None:
    """The first worker loses its connection before the first token. A second worker, which attaches later, runs the
    same attempts."""
    stalled = scripted_engine(tmp_path, [{"reply": say("hello"), "stall": 0}])
    spare = scripted_engine(tmp_path, [say("hello")])
    async with (
        running_service(tmp_path=tmp_path, engines=(RELAY,)) as (service, url),
        AsyncClient(url) as client,
        AsyncExitStack() as held,
    ):
        proxy = CuttingProxy(url)
        through = await held.enter_async_context(proxy.open())
        first = await held.enter_async_context(Worker(through, stalled, reconnecting=AT_ONCE))
        await first.attached()
        await joined(service)
        submitted = await client.submit({"task": TASK, "n": 3})
        await stalled.stalled.wait()
        proxy.closed = True
        await proxy.cut()
        second = await held.enter_async_context(Worker(url, spare, reconnecting=AT_ONCE))
        await second.attached()
        [done] = await client.wait([submitted.id])
        assert [session.result.error for session in done.sessions] == [None] * 3
        assert [session.attempt for session in done.sessions] == [1] * 3
        assert len(spare.requests) >= 3


@pytest.mark.deep
async def test_a_restarted_service_has_its_workers_back(tmp_path: Path) -> None:
    fake = scripted_engine(tmp_path, [say("hello")])
    async with AsyncExitStack() as held:
        proxy = CuttingProxy("http://127.0.0.1:9")
        through = await held.enter_async_context(proxy.open())
        worker = await held.enter_async_context(Worker(through, fake, reconnecting=AT_ONCE))
        for start in (1, 2):
            async with (
                running_service(tmp_path=tmp_path, engines=(RELAY,)) as (service, url),
                AsyncClient(url) as client,
            ):
                proxy.target = url
                await joined(service)
                group = await client.submit({"task": TASK, "n": 2})
                [done] = await client.wait([group.id])
                assert [session.result.error for session in done.sessions] == [None, None]
                assert worker.connections >= start


async def test_an_engine_that_is_removed_lets_its_workers_go(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (service, url), AsyncClient(url) as client:
        worker = Worker(url, _never, reconnecting=AT_ONCE)
        running = asyncio.create_task(worker.run())
        await worker.attached()
        await joined(service)
        assert [engine.name for engine in await client.remove_engine("trainer")] == ["scripted"]
        with pytest.raises(Conflict, match="was removed") as refused:
            await running
        assert "adds it again" in (refused.value.hint or "")


async def _never(request: Any) -> Any:
    raise EngineUnavailable("nothing is generated here")
