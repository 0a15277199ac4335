"""The agent server's rollouts against a real service, without NeMo Gym: rows, replies, failures, clients that leave.

The tests in `tests/trainers/nemo_gym` run the server behind NeMo Gym's own client.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request
from starlette.types import Message

from outrider.client.client import AsyncClient
from outrider.errors import EngineError, EngineUnavailable, HarnessError, InvalidField, ServiceError, ServiceStopping
from outrider.lab.fakes.engine_servers.app import serving
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.service.service import Service
from outrider.spec import EngineSpec
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trainers.attached_engines import AttachLimits
from outrider.trainers.nemo_gym import GymRollouts, NemoGymSettings, _answer
from outrider.trainers.shared_client import SharedClientLimits, shared_client
from support.nemo_rl_server import NemoRLServer
from support.scribe import Scribe, scribe_task
from support.service import running_service, say, scripted_engine
from support.tokenizer import write_tokenizer

from .gym_world import gym_row, message_log

OPTIONS = {"nemo_rl": True}


async def stays() -> None:
    await asyncio.Event().wait()


async def asked(rollouts: GymRollouts, row: Mapping[str, Any], left: Any = stays) -> dict[str, Any]:
    reply = await rollouts.run(json.dumps(row).encode(), left)
    assert reply is not None
    return reply


def stalling(tmp_path: Path) -> ScriptedEngine:
    """Return an engine whose first reply stops after a token, until it is released."""
    return scripted_engine(tmp_path, [{"reply": say("one"), "stall": 1}, say("two")])


async def ended(service: Service, number: int) -> list[Any]:
    """Return the service's first groups that have ended, at least `number`, with their samples."""
    found: list[Any] = []
    cursor = 0
    while len(found) < number:
        page = await service.results(after=cursor, wait=20, limit=100, samples=True)
        found, cursor = [*found, *page.groups], page.cursor
    return found


async def test_a_reply_is_the_row_token_for_token(tmp_path: Path) -> None:
    row = gym_row(scribe_task("gym tokens", rewards=[0.25]), 3) | {"_ng_task_index": 7}
    async with running_service(tmp_path=tmp_path, replies=[say("one"), say("two")]) as (service, url):
        async with GymRollouts(NemoGymSettings(url=url, metrics=["number"])) as rollouts:
            reply = await asked(rollouts, row)
        [group] = await ended(service, 1)
    [sample] = group.samples
    log = message_log(reply)
    assert [role for role, _, _ in log] == ["user", "assistant"] * 2
    assert [token for _, ids, _ in log for token in ids] == sample.ids[: sum(len(ids) for _, ids, _ in log)].tolist()
    assert [token for role, ids, _ in log if role == "assistant" for token in ids] == [
        token for token, trained in zip(sample.ids, sample.loss_mask, strict=True) if trained
    ]
    assert (reply["reward"], reply["number"], reply["outrider_turns"]) == (0.25, 0.0, 2.0)
    assert (reply["_rowidx"], reply["_ng_task_index"], reply["agent_ref"]) == (3, 7, row["agent_ref"])
    assert reply["responses_create_params"] == row["responses_create_params"]
    assert group.labels == {"nemo_gym.agent": "outrider_agent", "nemo_gym.row": "3", "nemo_gym.task": "7"}


async def test_rows_that_cannot_be_tasks_are_refused_at_once(tmp_path: Path) -> None:
    task = scribe_task("gym refused")
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    wrong: dict[bytes, str] = {
        b'{"task": ': "not JSON",
        b"[1]": "is a JSON list",
        b"{}": "no object responses_create_params",
        b"[" * 100_000: "not JSON",
        json.dumps(gym_row(5)).encode(): "column 'task' is a int",
        json.dumps(gym_row("{broken")).encode(): "column 'task' is not JSON",
        json.dumps(gym_row(task, tools=[{"type": "function", "name": "f"}])).encode(): "tools that Outrider's agent",
        json.dumps(gym_row(task, instructions="be brief")).encode(): "'be brief' cannot be passed",
        json.dumps(gym_row(task, stream=True)).encode(): "stream=True cannot be passed",
        json.dumps(gym_row(task, temperature="hot")).encode(): "temperature='hot' is no number",
        json.dumps(gym_row(task, metadata={"extra_body": "{"})).encode(): "extra_body is not JSON",
        json.dumps(gym_row(task, metadata=[1])).encode(): "metadata is a list",
        json.dumps(gym_row(task, metadata={"extra_body": [1]})).encode(): "extra_body is a list",
        json.dumps(gym_row(task, metadata={"extra_body": {"stop": ["x"]}})).encode(): "stop=.* cannot be passed",
        json.dumps(gym_row(task, metadata={"chat_template_kwargs": '{"date": 1}'})).encode(): "date=1 cannot be",
        json.dumps(gym_row(task, metadata={"chat_template_kwargs": {"enable_thinking": "no"}})).encode(): "true or",
        json.dumps(gym_row(task, input=[{"role": "user", "content": [image]}])).encode(): "has images",
        json.dumps(gym_row(task | {"colour": "red"})).encode(): "colour",
    }
    async with running_service(tmp_path=tmp_path) as (service, url):
        async with GymRollouts(NemoGymSettings(url=url)) as rollouts:
            for body, reason in wrong.items():
                with pytest.raises(InvalidField, match=reason) as refused:
                    await rollouts.run(body, stays)
                assert 400 <= refused.value.http_status < 500
        assert not (await service.results(after=0, wait=0, limit=10, samples=False)).groups


async def test_a_client_that_leaves_before_its_row_has_come_is_no_failure_of_the_server() -> None:
    messages: list[Message] = [
        {"type": "http.request", "body": b'{"responses', "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Message:
        return messages.pop(0)

    request = Request({"type": "http", "method": "POST", "path": "/run", "headers": []}, receive)
    reply = await _answer(GymRollouts(NemoGymSettings()), request)
    assert reply.status_code == 503


async def test_sampling_of_the_row_and_of_its_extra_body(tmp_path: Path) -> None:
    harmless: dict[str, Any] = {
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "model": "m",
        "reasoning": None,
    }
    extra = {"extra_body": '{"seed": 5}', "chat_template_kwargs": '{"enable_thinking": false}', "source": "x"}
    row = gym_row(scribe_task("gym sampling"), **harmless, metadata=extra)
    other = gym_row(
        scribe_task("gym objects"),
        metadata={
            "extra_body": {"min_p": 0.25, "chat_template_kwargs": {"thinking": True}},
            "chat_template_kwargs": "",
        },
    )
    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client:
        async with GymRollouts(NemoGymSettings(url=url)) as rollouts:
            reply = await asked(rollouts, row)
            objects = await asked(rollouts, other)
        [sampling, _] = [turn.sampling for turn in await client.turns(reply["response"]["id"])]
        [given, _] = [turn.sampling for turn in await client.turns(objects["response"]["id"])]
    assert (sampling["temperature"], sampling["top_p"], sampling["max_tokens"]) == (0.5, 1.0, 64)
    assert sampling["seed"] is not None
    assert (sampling["thinking"], given["thinking"], given["min_p"]) == (False, True, 0.25)


async def test_a_session_of_two_rows_is_refused_or_its_main_row(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        async with GymRollouts(NemoGymSettings(url=url)) as rollouts:
            with pytest.raises(InvalidField, match="2 rows that train, and NeMo RL takes one"):
                await asked(rollouts, gym_row(scribe_task("gym two rows", rewrites=[0])))
        async with GymRollouts(NemoGymSettings(url=url, rows="main", max_row_tokens=30)) as rollouts:
            reply = await asked(rollouts, gym_row(scribe_task("gym main row", rewrites=[0])))
    assert reply["outrider_rows_left_out"] == 1.0
    assert reply["outrider_cut_tokens"] > 0
    assert sum(len(ids) for _, ids, _ in message_log(reply)) <= 30


async def test_rows_that_would_not_train_are_not_left_out(tmp_path: Path) -> None:
    """A masked branch has a row, but no token of the row can be trained on, so the row does not count as left out."""
    task = scribe_task("gym masked", titles=[0]) | {"branches": {"auxiliary": "mask"}}
    async with running_service(tmp_path=tmp_path) as (service, url):
        async with GymRollouts(NemoGymSettings(url=url)) as rollouts:
            reply = await asked(rollouts, gym_row(task))
        [group] = await ended(service, 1)
    assert [sample.reward for sample in group.samples] == [1.0, None]
    assert reply["outrider_rows_left_out"] == 0.0


async def test_a_failure_is_an_error_and_never_a_reward(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url), GymRollouts(NemoGymSettings(url=url)) as rollouts:
        with pytest.raises(HarnessError, match="the scribe fell ill") as failed:
            await asked(rollouts, gym_row(scribe_task("gym ill", fails=[0])))
        well = await asked(rollouts, gym_row(scribe_task("gym well")))
    assert failed.value.http_status >= 500
    assert well["reward"] == 1.0
    async with (  # the service has ended
        shared_client(url, None, limits=SharedClientLimits(first_patience=0.1)),
        GymRollouts(NemoGymSettings(url=url)) as rollouts,
    ):
        with pytest.raises(ServiceError, match="cannot reach the service") as away:
            await asked(rollouts, gym_row(scribe_task("gym away")))
    assert away.value.http_status >= 500


async def test_a_client_that_comes_again_gets_the_same_rollout(tmp_path: Path) -> None:
    row = gym_row(scribe_task("gym again"))
    left = asyncio.Event()
    engine = stalling(tmp_path)
    async with (
        running_service(tmp_path=tmp_path, engine=engine) as (service, url),
        GymRollouts(NemoGymSettings(url=url)) as rollouts,
    ):
        first = asyncio.create_task(rollouts.run(json.dumps(row).encode(), left.wait))
        await engine.stalled.wait()
        left.set()
        assert await first is None
        second = asyncio.create_task(asked(rollouts, row))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait([second])
        engine.release()
        reply = await asked(rollouts, row)
        other = await asked(rollouts, row)  # in the next epoch the row is a rollout of its own
        groups = await ended(service, 2)
    ids = {sample.session_id for group in groups for sample in group.samples}
    assert {reply["response"]["id"], other["response"]["id"]} == ids
    assert Scribe.started["gym again"] == 2


async def test_equal_rows_at_once_are_rollouts_of_their_own(tmp_path: Path) -> None:
    row = gym_row(scribe_task("gym twice"))
    async with running_service(tmp_path=tmp_path) as (_, url), GymRollouts(NemoGymSettings(url=url)) as rollouts:
        replies = await asyncio.gather(asked(rollouts, row), asked(rollouts, row))
    assert len({reply["response"]["id"] for reply in replies}) == 2


async def test_a_rollout_that_nobody_wants_is_cancelled(tmp_path: Path) -> None:
    left = asyncio.Event()
    body = json.dumps(gym_row(scribe_task("gym unwanted"))).encode()
    engine = stalling(tmp_path)
    async with (
        running_service(tmp_path=tmp_path, engine=engine) as (service, url),
        GymRollouts(NemoGymSettings(url=url), retry_seconds=0.05) as rollouts,
    ):
        first = asyncio.create_task(rollouts.run(body, left.wait))
        await engine.stalled.wait()
        left.set()
        assert await first is None
        [group] = await ended(service, 1)
    assert group.cancelled


async def test_the_end_of_the_server_cancels_its_rollouts(tmp_path: Path) -> None:
    body = json.dumps(gym_row(scribe_task("gym ends"))).encode()
    engine = stalling(tmp_path)
    async with running_service(tmp_path=tmp_path, engine=engine) as (service, url):
        async with GymRollouts(NemoGymSettings(url=url)) as rollouts:
            waiting = asyncio.create_task(rollouts.run(body, stays))
            await engine.stalled.wait()
        with pytest.raises(ServiceStopping):
            await waiting
        [group] = await ended(service, 1)
    assert group.cancelled


async def test_a_rollout_goes_on_when_the_service_is_restarted(tmp_path: Path) -> None:
    row = gym_row(scribe_task("gym restart", rewards=[0.5]))
    engine = stalling(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with GymRollouts(NemoGymSettings(url=f"http://127.0.0.1:{port}")) as rollouts:
        async with running_service(tmp_path=tmp_path, engine=engine, port=port):
            running = asyncio.create_task(asked(rollouts, row))
            await engine.stalled.wait()
        async with running_service(tmp_path=tmp_path, replies=[say("one"), say("two")], port=port) as (service, _):
            reply = await running
            [group] = await ended(service, 1)
    assert (reply["reward"], group.samples[0].session_id) == (0.5, reply["response"]["id"])
    assert message_log(reply)


async def test_nemo_rls_servers_are_attached_and_a_rollout_of_several_turns_is_one_row(tmp_path: Path) -> None:
    """The servers render the messages, and a rendered reply has other ids than the sampled reply."""
    server = NemoRLServer(Tokenizer.load(write_tokenizer(tmp_path / "tokenizer")))
    row = gym_row(scribe_task("gym capture"))
    async with serving(server) as engine, running_service(tmp_path=tmp_path, engines=()) as (service, url):
        await service.pool.add(EngineSpec(kind="openai", name="nemo-rl-7", url=engine, model="m", options=OPTIONS))
        settings = NemoGymSettings(url=url, engines=[f"{engine}/v1", f"{engine}/v1/"], model="m")
        async with GymRollouts(settings) as rollouts:
            replies = await asyncio.gather(*(asked(rollouts, row) for _ in range(3)))
        attached = {status.name: status.url for status in service.pool.status()}
    assert attached == {"nemo-rl-0": engine, "nemo-rl-1": engine}
    for reply in replies:
        assert [role for role, _, _ in message_log(reply)] == ["user", "assistant"] * 2
        assert reply["outrider_rows_left_out"] == 0.0
    with pytest.raises(InvalidField, match="needs the setting model"):
        GymRollouts(NemoGymSettings(engines=["http://127.0.0.1:9/v1"]))


@pytest.mark.deep
async def test_servers_that_cannot_be_attached_or_refuse_the_sampling_are_failures_of_engines(tmp_path: Path) -> None:
    server = NemoRLServer(Tokenizer.load(write_tokenizer(tmp_path / "tokenizer")))
    async with serving(server) as engine, running_service(tmp_path=tmp_path, engines=()) as (_, url):
        async with GymRollouts(NemoGymSettings(url=url, engines=["http://127.0.0.1:9/v1"], model="m")) as rollouts:
            with pytest.raises(EngineUnavailable) as away:
                await asked(rollouts, gym_row(scribe_task("gym no engine")))
        async with GymRollouts(NemoGymSettings(url=url, engines=[engine], model="m")) as rollouts:
            with pytest.raises(EngineError, match="neither the train sampling") as refused:
                await asked(rollouts, gym_row(scribe_task("gym hot"), temperature=0.9))
    assert away.value.http_status >= 500
    assert refused.value.http_status >= 500


async def test_a_rollout_with_attached_servers_waits_for_a_service_that_restarts(tmp_path: Path) -> None:
    server = NemoRLServer(Tokenizer.load(write_tokenizer(tmp_path / "tokenizer")))
    row = gym_row(scribe_task("gym restarted"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with serving(server) as engine:
        settings = NemoGymSettings(url=f"http://127.0.0.1:{port}", engines=[f"{engine}/v1"], model="m")
        async with GymRollouts(settings, limits=AttachLimits(look_seconds=0.0)) as rollouts:
            async with running_service(tmp_path=tmp_path, engines=(), port=port):
                first = await asked(rollouts, row)
            waiting = asyncio.create_task(asked(rollouts, row))
            await asyncio.wait([waiting], timeout=0.3)  # the service is down
            assert not waiting.done()
            async with running_service(tmp_path=tmp_path, engines=(), port=port):
                second = await waiting
    assert first["response"]["id"] != second["response"]["id"]


async def test_rollouts_that_wait_for_the_first_look_fail_together() -> None:
    settings = NemoGymSettings(url="http://127.0.0.1:9", engines=["http://127.0.0.1:9/v1"], model="m")
    async with GymRollouts(settings, limits=AttachLimits(first_patience=0.5)) as rollouts:
        clock = asyncio.get_running_loop().time
        begun = clock()
        rows = [gym_row(scribe_task("gym down"), number) for number in range(20)]
        outcomes = await asyncio.gather(*(asked(rollouts, row) for row in rows), return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {ServiceError}
        assert clock() - begun < 5.0
