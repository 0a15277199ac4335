"""The rollouts of verifiers against a real service, without verifiers: rows, traces, failures, the client's server.

The tests in `tests/trainers/verifiers` run verifiers' own environment, evaluation and environment server.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines.upstream import Answer, upstream
from outrider.client.client import AsyncClient
from outrider.engines.base import EngineOptions
from outrider.errors import EngineError, HarnessError, InvalidField, ServiceError
from outrider.lab.fakes.engine_servers import ServeSettings, engine_app, serving
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.spec import EngineSpec
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trainers.attached_engines import AttachLimits
from outrider.trainers.shared_client import SharedClientLimits, shared_client
from outrider.trainers.verifiers import ModelServer, TraceParts, VerifiersRollouts, VerifiersSettings
from outrider.trajectory import ChatRow, Sample
from support.ports import free_port
from support.scribe import scribe_task
from support.service import running_service, say
from support.tokenizer import write_tokenizer

from .verifiers_world import model_server, training_samples

TRAINS = ModelServer(url="http://unused", model="m", api_key=None, trains=True)
EVALUATES = ModelServer(url="http://unused", model="m", api_key=None, trains=False)
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "logprobs": True, "max_tokens": 64}


async def run(
    rollouts: VerifiersRollouts, task: Any, server: ModelServer = TRAINS, sampling: Any = SAMPLING, **more: Any
) -> TraceParts:
    given = {"prompt": "say it", "sampling": sampling, "labels": {}} | more
    return await rollouts.run({"task": task}, server, **given)


async def samples_of(service: Any) -> list[Sample]:
    page = await service.results(after=0, wait=20, limit=100, samples=True)
    return [sample for group in page.groups for sample in group.samples or ()]


async def test_each_row_is_a_path_and_each_trained_token_is_trained_once(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=[say("one"), say("two")]) as (service, url):
        rollouts = VerifiersRollouts(VerifiersSettings(url=url, metrics=["number"]))
        parts = await run(rollouts, scribe_task("vf rows", rewards=[0.25], rewrites=[0]))
        rows = await samples_of(service)
        turns = await service.reader.turns(rows[0].session_id)
    found = training_samples(parts.nodes)
    assert len(rows) == len(found) == 2
    for (ids, mask, logprobs), row in zip(found, rows, strict=True):
        assert ids == row.ids.tolist()
        assert mask == [bool(one) for one in row.loss_mask]
        assert logprobs == row.logprobs.tolist()
    assert sum(sum(mask) for _, mask, _ in found) == sum(turn.output_tokens for turn in turns)
    assert [node["message"]["content"] for node in parts.nodes if node["parent"] is None] == ["say it", "say it"]
    assert [call["node"] is not None for call in parts.calls] == [True] * 3
    assert Counter(call["node"] for call in parts.calls).most_common(1)[0][1] == 1
    assert parts.reply == "two"
    assert parts.info["reward"] == 0.25
    assert (parts.metrics["number"], parts.metrics["outrider_rows"], parts.metrics["outrider_rows_left_out"]) == (
        0,
        2,
        0,
    )


async def test_tokens_of_replies_that_nobody_has_seen_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = AsyncClient.chat_rows

    async def without_replies(client: AsyncClient, session: str) -> list[ChatRow]:
        rows = await whole(client, session)
        return [
            msgspec.structs.replace(row, messages=[one for one in row.messages if "weight" not in one]) for row in rows
        ]

    monkeypatch.setattr(AsyncClient, "chat_rows", without_replies)
    async with running_service(tmp_path=tmp_path) as (service, url):
        parts = await run(VerifiersRollouts(VerifiersSettings(url=url)), scribe_task("vf unseen"))
        [row] = await samples_of(service)
    [(ids, mask, logprobs)] = training_samples(parts.nodes)
    assert (ids, logprobs) == (row.ids.tolist(), row.logprobs.tolist())
    assert mask == [bool(one) for one in row.loss_mask]


async def test_the_main_row_alone_and_cut(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (service, url):
        rollouts = VerifiersRollouts(VerifiersSettings(url=url, rows="main", max_row_tokens=30))
        parts = await run(rollouts, scribe_task("vf main", rewrites=[0]))
        [main, _] = await samples_of(service)
    [(ids, mask, logprobs)] = training_samples(parts.nodes)
    assert ids == main.ids[: len(ids)].tolist()
    assert mask == [bool(one) for one in main.loss_mask[: len(ids)]]
    assert logprobs == main.logprobs[: len(ids)].tolist()
    assert sum(mask) == main.loss_mask[:30].sum()
    assert (parts.metrics["outrider_rows_left_out"], parts.metrics["outrider_truncated"]) == (1, 1)
    assert parts.metrics["outrider_cut_tokens"] == main.trained_tokens - sum(mask) > 0


async def test_rewards_of_turns_are_in_the_info_and_rewards_of_rows_are_refused(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        rollouts = VerifiersRollouts(VerifiersSettings(url=url))
        parts = await run(rollouts, scribe_task("vf turns", turns={"1": 0.5}))
        with pytest.raises(InvalidField, match=r"other rewards for its rows \[1\]"):
            await run(rollouts, scribe_task("vf row rewards", rewrites=[0], rows={"1": 3.0}))
    assert parts.info["turn_rewards"] == {"1": 0.5}


async def test_the_sampling_of_training_and_of_evaluation(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (service, url):
        rollouts = VerifiersRollouts(VerifiersSettings(url=url))
        parts = await run(rollouts, scribe_task("vf sampling"), max_turns=2, system_prompt="Be brief.")
        quiet = await run(rollouts, scribe_task("vf own"), EVALUATES, {})
        with pytest.raises(InvalidField, match="reasoning_effort='high' cannot be passed"):
            await run(rollouts, scribe_task("vf effort"), sampling={"reasoning_effort": "high"})
        groups = (await service.results(after=0, wait=0, limit=10, samples=False)).groups
        priorities = {group.priority for group in groups}
    assert parts.calls[0]["sampling"].items() >= {"temperature": 1.0, "top_p": 1.0, "max_tokens": 64}.items()
    assert parts.nodes[0]["message"]["content"] == "Be brief.\n\nsay it"
    assert quiet.nodes[0]["message"]["content"] == "say it"
    assert len(groups) == 2
    assert priorities == {0, 100}


async def test_a_failure_is_an_error_and_never_a_reward(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        rollouts = VerifiersRollouts(VerifiersSettings(url=url))
        for server in (TRAINS, EVALUATES):
            with pytest.raises(HarnessError, match="the scribe fell ill"):
                await run(rollouts, scribe_task(f"vf ill {server.trains}", fails=[0]), server)
        with pytest.raises(InvalidField, match="colour"):
            await run(rollouts, scribe_task("vf odd") | {"colour": "red"})
        limited = await run(rollouts, scribe_task("vf limited") | {"limits": {"turns": 1}})
    assert limited.stop == "max_turns"
    async with shared_client(url, None, limits=SharedClientLimits(first_patience=0.1)):
        with pytest.raises(ServiceError, match="cannot reach the service"):
            await run(rollouts, scribe_task("vf away"))
    settings = VerifiersSettings(url=url, engines="client")
    attaching = VerifiersRollouts(settings, limits=AttachLimits(first_patience=0.5))
    began = asyncio.get_running_loop().time()
    away = await asyncio.gather(
        *(run(attaching, scribe_task("vf all away")) for _ in range(20)), return_exceptions=True
    )
    assert {type(error) for error in away} == {ServiceError}
    assert asyncio.get_running_loop().time() - began < 5  # not 20 times half a second


async def test_texts_of_a_hosted_model_are_enough_for_an_evaluation_alone(tmp_path: Path) -> None:
    said = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}]}
    pages = {"/v1/models": {"object": "list", "data": [{"id": "their-model"}]}, "/health": {}}
    async with (
        upstream(Answer(events=[said]), pages=pages) as (hosted, heard),
        running_service(tmp_path=tmp_path, engines=()) as (_, url),
    ):
        options = {"ids": False}
        settings = VerifiersSettings(url=url, engines="client", engine_kind="openai", engine_options=options)
        rollouts = VerifiersRollouts(settings)
        server = ModelServer(url=f"{hosted}/v1", model="their-model", api_key="secret", trains=False)
        parts = await run(rollouts, scribe_task("vf text"), server)
        with pytest.raises(EngineError, match="no token to train on"):
            await run(rollouts, scribe_task("vf text trains"), replace(server, trains=True))
    assert training_samples(parts.nodes) == []
    assert [node["sampled"] for node in parts.nodes] == [False, True, False, True]
    assert parts.reply == "hello"
    assert heard.headers[0][b"authorization"] == b"Bearer secret"
    assert "secret" not in repr(server)


async def test_the_clients_server_is_attached_and_versions_are_named_by_the_salt(tmp_path: Path) -> None:
    """prime-rl names a new version before it pauses the server and changes the weights, so the service sends the server
    no order."""
    orders: list[str] = []
    folder = write_tokenizer(tmp_path / "tokenizer")
    tokenizer = str(folder)
    fake = ScriptedEngine(EngineOptions(name="fake", tokenizer=tokenizer, options={"replies": [say("hello")]}))
    await fake.start()
    app = engine_app(fake, "vllm", ServeSettings(tokenizer=Tokenizer.load(folder), labels=False, dev_mode=True))

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        orders.append(scope["path"])
        await app(scope, receive, send)

    async with serving(noting) as engine, running_service(tmp_path=tmp_path, engines=()) as (service, url):
        rollouts = VerifiersRollouts(VerifiersSettings(url=url, engines="client"))
        server = ModelServer(url=f"{engine}/v1", model="policy", api_key=None, trains=True)
        first = await run(rollouts, scribe_task("vf salt 3"), server, SAMPLING | {"cache_salt": "3"})
        both = await asyncio.gather(
            *(run(rollouts, scribe_task(f"vf salt {salt}"), server, SAMPLING | {"cache_salt": salt}) for salt in "54")
        )
        for other in (replace(server, url="http://127.0.0.1:9/v1"), replace(server, model="judge")):
            with pytest.raises(InvalidField, match="and the service serves 'policy' at"):
                await run(rollouts, scribe_task("vf other"), other)
        [status] = service.pool.status()
    await fake.close()
    assert (status.name, status.url) == ("verifiers-0", engine)
    assert {parts.metrics["outrider_version_max"] for parts in (first, *both)} == {3, 5}
    assert first.metrics["outrider_version_min"] == 3
    assert "/inference/v1/generate" in orders
    assert not {"/pause", "/resume", "/update_weight_version", "/collective_rpc"} & set(orders)


async def test_the_clients_server_is_attached_again_after_a_restart_in_the_middle_of_a_rollout(tmp_path: Path) -> None:
    replies: list[str | dict[str, Any]] = [{"reply": say("one"), "stall": 1}, say("two")]
    port = free_port()
    settings = VerifiersSettings(url=f"http://127.0.0.1:{port}", engines="client")
    rollouts = VerifiersRollouts(settings, limits=AttachLimits(look_seconds=0.2))
    async with model_server(tmp_path, replies) as (fake, engine), rollouts.held():
        server = ModelServer(url=f"{engine}/v1", model="policy", api_key=None, trains=True)
        async with running_service(tmp_path=tmp_path, engines=(), port=port):
            task = scribe_task("vf anew", rewards=[0.5])
            running = asyncio.create_task(run(rollouts, task, server, SAMPLING | {"cache_salt": "7"}))
            await fake.stalled.wait()
        fake.release()
        async with running_service(tmp_path=tmp_path, engines=(), port=port) as (service, _):
            parts = await running
            [sample] = await samples_of(service)
    assert sample.reward == 0.5
    assert parts.metrics["outrider_version_min"] == 7


async def test_environment_servers_of_several_processes_attach_one_engine(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    fake = ScriptedEngine(EngineOptions(name="fake", tokenizer=str(folder), options={"replies": [say("hello")]}))
    await fake.start()
    app = engine_app(fake, "vllm", ServeSettings(tokenizer=Tokenizer.load(folder)))
    async with serving(app) as engine, running_service(tmp_path=tmp_path, engines=()) as (service, url):
        # All processes remove an engine that an earlier training has left.
        await service.pool.add(EngineSpec(kind="vllm", name="verifiers-7", url=engine))
        server = ModelServer(url=engine, model="policy", api_key=None, trains=True)
        settings = VerifiersSettings(url=url, engines="client")
        several = [VerifiersRollouts(settings) for _ in range(4)]
        salted = SAMPLING | {"cache_salt": "2"}
        made = await asyncio.gather(
            *(run(rollouts, scribe_task(f"vf several {at}"), server, salted) for at, rollouts in enumerate(several))
        )
        [status] = service.pool.status()
    await fake.close()
    assert (status.name, status.ok) == ("verifiers-0", True)
    assert {parts.metrics["outrider_version_min"] for parts in made} == {2}


async def test_prime_rls_policy_takes_the_name_of_its_adapter(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    fake = ScriptedEngine(EngineOptions(name="fake", tokenizer=str(folder), options={"replies": [say("hello")]}))
    await fake.start()
    asked: list[str] = []

    def served(model: str) -> Any:
        return engine_app(fake, "vllm", ServeSettings(tokenizer=Tokenizer.load(folder), model=model, labels=False))

    apps = {"base": served("base"), "adapter": served("adapter")}
    now = ["base"]

    async def current(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/inference/v1/generate":
            asked.append(now[0])
        await apps[now[0]](scope, receive, send)

    async with serving(current) as engine, running_service(tmp_path=tmp_path, engines=()) as (service, url):
        rollouts = VerifiersRollouts(VerifiersSettings(url=url, engines="client"))
        base = ModelServer(url=engine, model="base", api_key=None, trains=True)
        await run(rollouts, scribe_task("vf base"), base, SAMPLING | {"cache_salt": "0"})
        now[0] = "adapter"
        await run(rollouts, scribe_task("vf adapter"), replace(base, model="adapter"), SAMPLING | {"cache_salt": "1"})
        await run(rollouts, scribe_task("vf late"), base, SAMPLING | {"cache_salt": "1"})
        [status] = service.pool.status()
    await fake.close()
    assert (status.name, status.model) == ("verifiers-0", "adapter")
    assert asked == ["base"] * 2 + ["adapter"] * 4
