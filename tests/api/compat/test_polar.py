"""Polar's interface over HTTP, with a strict client: tasks, callbacks, early stops, cancellations, lists, events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from outrider.client.client import AsyncClient
from outrider.config import LanesConfig, QueueConfig
from outrider.evaluators.base import Outcome
from outrider.service.service import Service
from outrider.spec import EvaluatorSpec, TokenSpec
from outrider.trajectory import Verdict
from support.answering import answering
from support.polar import (
    Completions,
    DeletedSession,
    Dispatched,
    GatewayHealth,
    GatewaySessions,
    Health,
    Inference,
    PolarClient,
    Refused,
    RolloutStatus,
    SessionInfo,
    SessionResult,
    TaskResult,
    Tasks,
    TaskSessions,
    TaskStatus,
)
from support.service import call, running_service, say
from support.waiting import until

HANG = 3600.0


def task(task_id: str = "t1", *, seconds: float = 0.0, reward: float | None = 0.5, **more: Any) -> dict[str, Any]:
    """Return a task whose agent calls the model once. The task has a fixed reward, or no evaluator if `reward` is
    None."""
    evaluator = {"strategy": "api.compat.test_polar:Fixed", "config": {"reward": reward}}
    return {
        "task_id": task_id,
        "instruction": "Say hello.",
        "agent": {"import_path": "support.coin:OneCall", "model_name": "small", "settings": {"seconds": seconds}},
        "runtime": {"kwargs": {"kind": "memory"}},
        **({} if reward is None else {"evaluator": evaluator}),
        **more,
    }


class Fixed:
    """Grades with the reward in its options. A negative reward raises an error."""

    def __init__(self, spec: EvaluatorSpec) -> None:
        self._reward = float(spec.options["reward"])

    async def evaluate(self, outcome: Outcome) -> Verdict:
        if self._reward < 0:
            raise RuntimeError("the grader is broken")
        return Verdict(reward=self._reward)


@asynccontextmanager
async def serving(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Service, PolarClient, str]]:
    async with (
        running_service(tmp_path=tmp_path, compat=("polar",), **settings) as (service, url),
        PolarClient(f"{url}/polar") as client,
    ):
        yield service, client, url


async def ended(client: PolarClient, task_id: str = "t1") -> TaskStatus:
    async def look() -> TaskStatus | None:
        status = await client.task(task_id)
        return None if status.status in ("running", "cancelling") else status

    found: TaskStatus = await until(look)
    return found


async def test_a_task_with_eight_samples(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client, _):
        told = await client.submit(task(num_samples=8, metadata={"group_id": 7, "rollout_step": 3}))
        assert (told.task_id, told.status) == ("t1", "running")
        done = await ended(client)
        assert (done.status, done.total_sessions, done.completed_sessions) == ("completed", 8, 8)
        assert done.result_paths == []
        assert len({result.session_id for result in done.results}) == 8
        for number, result in enumerate(done.results):
            assert (result.status, result.error, result.task_id) == ("COMPLETED", None, "t1")
            assert (result.metadata["group_id"], result.metadata["rollout_step"]) == (7, 3)
            assert result.metadata["outrider"]["sample_index"] == number
            [trace] = result.trajectory.traces
            assert (trace.reward, trace.finish_reason) == (0.5, "stop")
            assert trace.loss_mask == [1] * len(trace.response_ids) != []
            assert trace.prompt_messages == [{"role": "user", "content": "Say hello."}]
            assert trace.response_messages == [{"role": "assistant", "content": "hello"}]


@pytest.mark.parametrize("builder", ["per_request", "prefix_merging"])
async def test_rows_equal_those_of_the_native_api(tmp_path: Path, builder: str) -> None:
    agent = {"import_path": "tools", "settings": {}}
    replies = [call("echo one"), call("echo two"), say("done")]
    asked = task(builder={"strategy": builder, "config": {}}, agent=agent)
    async with serving(tmp_path, replies=replies) as (service, client, url), AsyncClient(url) as native:
        await client.submit(asked)
        done = await ended(client)
        [group] = (await native.results(samples=True)).groups
        [sample] = group.samples or ()
        [result] = done.results
        turns = await service.store.turns(result.session_id)
    traces = result.trajectory.traces
    start = sample.prompt_length
    if builder == "prefix_merging":
        [trace] = traces
        assert trace.prompt_ids + trace.response_ids == sample.ids.tolist()
        assert trace.loss_mask == sample.loss_mask[start:].tolist()
        assert trace.response_logprobs == sample.logprobs[start:].tolist()
        assert [message["role"] for message in trace.response_messages] == [
            *("assistant", "tool", "assistant", "tool", "assistant")
        ]
    else:
        assert len(traces) == 3
        for trace, (begin, end) in zip(traces, sample.turn_spans, strict=True):
            assert trace.prompt_ids == sample.ids[:begin].tolist()
            assert trace.response_ids == sample.ids[begin:end].tolist()
            assert trace.response_logprobs == sample.logprobs[begin:end].tolist()
            assert trace.loss_mask == [1] * (end - begin)
        assert [trace.finish_reason for trace in traces] == ["tool_calls", "tool_calls", "stop"]
        assert [len(trace.prompt_messages) for trace in traces] == [
            sum(len(turn.messages) for turn in turns[: number + 1]) + number for number in range(3)
        ]
    assert {trace.reward for trace in traces} == {sample.reward} == {0.5}
    trained = sum(sum(trace.loss_mask) for trace in traces)
    assert trained == sample.trained_tokens == result.trajectory.metadata["trained_tokens"]
    assert all(trace.tools for trace in traces)


async def test_the_callback_is_the_task_result(tmp_path: Path) -> None:
    got: list[tuple[str, bytes]] = []
    received = asyncio.Event()

    async def receive(request: web.Request) -> web.Response:
        got.append((request.headers["Idempotency-Key"], await request.read()))
        if len(got) == 1:  # the outbox tries again
            return web.Response(status=503)
        received.set()
        return web.Response()

    async with answering(receive) as receiver, serving(tmp_path) as (service, client, _):
        await client.submit(task(num_samples=2, callback_url=f"{receiver}/done"))
        async with asyncio.timeout(30):
            await received.wait()
        [group] = await service.store.translated_groups("operator", "polar", limit=9)
        assert [name for name, _ in got] == [group.id] * 2
        assert got[0] == got[1]
        result = TaskResult.model_validate_json(got[1][1])
        assert result.model_dump() == (await client.task("t1")).model_dump(include=set(TaskResult.model_fields))
        assert (result.status, len(result.results)) == ("completed", 2)


@pytest.mark.deep
async def test_a_callback_waits_for_a_service_with_polars_form(tmp_path: Path) -> None:
    """A service that was started again without the interface keeps the callback, and sends nothing in another form."""
    got: list[bytes] = []
    received = asyncio.Event()
    open_for_calls = False

    async def receive(request: web.Request) -> web.Response:
        got.append(await request.read())
        if open_for_calls:
            received.set()
            return web.Response()
        return web.Response(status=503)

    async with answering(receive) as receiver:
        async with serving(tmp_path) as (_, client, _):
            await client.submit(task(callback_url=receiver))
            await ended(client)
        before = len(got)
        open_for_calls = True
        async with running_service(tmp_path=tmp_path) as (service, _):

            async def tried() -> str | None:
                [row] = await service.store.deliveries(now=9e12, limit=1)
                return row.fault if row.tries > before else None

            assert "--compat polar" in await until(tried)
            assert len(got) == before
        async with serving(tmp_path), asyncio.timeout(30):
            await received.wait()
        assert TaskResult.model_validate_json(got[-1]).status == "completed"


async def test_failed_tasks_and_cancelled_tasks_are_called_back(tmp_path: Path) -> None:
    got: dict[str, TaskResult] = {}
    received = asyncio.Event()

    async def receive(request: web.Request) -> web.Response:
        result = TaskResult.model_validate_json(await request.read())
        got[result.task_id] = result
        if len(got) == 2:
            received.set()
        return web.Response()

    async with answering(receive) as receiver, serving(tmp_path) as (_, client, _):
        await client.submit(task("broken", reward=-1.0, callback_url=receiver))
        await client.submit(task("slow", seconds=HANG, callback_url=receiver))
        assert (await client.cancel("slow")).status in ("cancelling", "cancelled")
        async with asyncio.timeout(50):
            await received.wait()
    assert {name: result.status for name, result in got.items()} == {"broken": "failed", "slow": "cancelled"}
    for result in got.values():
        [session] = result.results
        assert session.status == session.trajectory.status == "ERROR"
        assert session.trajectory.traces == []  # never a reward of zero
    assert "evaluator" in (got["broken"].results[0].error or "")
    assert (got["slow"].results[0].error or "").startswith("cancelled")


async def test_enough_usable_sessions_stop_the_others(tmp_path: Path) -> None:
    lanes = LanesConfig(run=2)
    async with serving(tmp_path, lanes=lanes) as (_, client, _):
        await client.submit(task(num_samples=8, early_stop_min_usable_sessions=2, seconds=0.2))
        done = await ended(client)
        assert done.status == "completed"
        graded = [result for result in done.results if result.status == "COMPLETED"]
        others = [result for result in done.results if result.status == "ERROR"]
        assert 2 <= len(graded) < 8
        assert len(graded) + len(others) == 8
        for result in others:
            assert result.metadata["outrider"]["stop_reason"] == "early_stop"
            assert (result.trajectory.traces, (result.error or "")[:10]) == ([], "early_stop")


async def test_a_task_is_cancelled_before_it_is_submitted(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client, _):
        with pytest.raises(Refused, match="no task") as unknown:
            await client.cancel("late")
        assert unknown.value.status == 404
        for _ in range(2):
            told = await client.cancel("late", register_if_missing="true")
            assert (told.status, told.total_sessions, told.results) == ("cancelled", 0, [])
        assert (await client.task("late")).status == "cancelled"
        with pytest.raises(Refused, match=r"task_id: .*late.* cancelled before it was submitted") as refused:
            await client.submit(task("late"))
        assert refused.value.status == 409
        await client.submit(task("other"))
        told = await client.cancel("other", register_if_missing="true")  # the task exists, so it is cancelled
        assert told.total_sessions == 1
    async with serving(tmp_path) as (service, client, _):  # the cancellation was stored
        with pytest.raises(Refused, match="409"):
            await client.submit(task("late"))
        await service.store._db.write(lambda tx: tx.execute("UPDATE refused_keys SET until = 0"))
        await client.submit(task("late"))


async def test_a_submission_is_repeated(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, client, _):
        await asyncio.gather(*(client.submit(task()) for _ in range(3)))
        assert len(await service.store.groups()) == 1
        with pytest.raises(Refused, match="'t1' was used for another request") as conflict:
            await client.submit(task(num_samples=2))
        assert conflict.value.status == 409


async def test_lists_and_states(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client, url):
        await client.submit(task("a", reward=1.0, num_samples=2, builder={"strategy": "prefix_merging"}))
        await ended(client, "a")
        await client.submit(task("b", seconds=HANG))

        async def runs() -> bool:
            return (await client.call(TaskSessions, "GET", "/tasks/b/sessions")).sessions[0].status == "RUNNING"

        await until(runs)
        tasks = (await client.call(Tasks, "GET", "/tasks")).tasks
        assert [(one.task_id, one.status, one.mean_reward) for one in tasks] == [
            ("b", "running", None),
            ("a", "completed", 1.0),
        ]
        assert (tasks[1].mean_traces, tasks[1].mean_completions, tasks[1].model) == (1.0, 1.0, "small")
        for query, expected in (
            ({"status": "running"}, ["b"]),
            ({"harness": "support.coin:OneCall"}, ["b", "a"]),
            ({"harness": "codex"}, []),
            ({"since": tasks[0].created_at}, ["b"]),
            ({"limit": 1}, ["b"]),
        ):
            found = await client.call(Tasks, "GET", "/tasks", **query)
            assert [one.task_id for one in found.tasks] == expected, query
        for bad in ({"limit": 0}, {"limit": 1001}, {"status": "odd"}, {"since": "nan"}):
            with pytest.raises(Refused, match=f"422: {next(iter(bad))}"):
                await client.call(Tasks, "GET", "/tasks", **bad)
        sessions = (await client.call(TaskSessions, "GET", "/tasks/a/sessions")).sessions
        assert [(one.status, one.reward, one.timing is None) for one in sessions] == [("COMPLETED", 1.0, False)] * 2
        status = await client.call(RolloutStatus, "GET", "/rollout/status")
        assert (status.tasks, status.pipeline.pending_sessions) == ({"a": "completed", "b": "running"}, 0)
        assert await client.call(Health, "GET", "/health") == Health(status="ok", nodes=1)
        [node] = await client.nodes()
        assert (node.metrics.run_inflight, node.draining, node.gateway_url) == (1, False, url)
        assert (await client.call(type(node), "DELETE", f"/nodes/{node.node_id}")).draining
        with pytest.raises(Refused, match="404"):
            await client.call(type(node), "GET", "/nodes/none")


async def test_sessions_and_completions(tmp_path: Path) -> None:
    replies = [call("echo one"), say("done")]
    async with serving(tmp_path, replies=replies) as (_, client, _):
        await client.submit(task(agent={"import_path": "tools"}))
        [result] = (await ended(client)).results
        name = result.session_id
        listed = await client.call(GatewaySessions, "GET", "/sessions", task_id="t1")
        assert [(one.session_id, one.completion_count, one.status) for one in listed.sessions] == [
            (name, 2, "COMPLETED")
        ]
        assert (await client.call(GatewaySessions, "GET", "/gateway/sessions", status="RUNNING")).sessions == []
        info = await client.call(SessionInfo, "GET", f"/sessions/{name}")
        assert info.result == result
        told = await client.call(Completions, "GET", f"/sessions/{name}/completions")
        first, second = told.completions
        assert first.response["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "bash"
        assert second.request["messages"][-1] == {**second.request["messages"][-1], "role": "tool"}
        assert second.response["choices"][0]["message"]["content"] == "done"
        assert first.metadata["response_ids"] == result.trajectory.traces[0].response_ids
        deleted = await client.call(DeletedSession, "DELETE", f"/sessions/{name}")
        assert (deleted.deleted, (await client.task("t1")).status) == (True, "completed")
        with pytest.raises(Refused, match="400: session_id"):
            await client.call(SessionInfo, "GET", "/sessions/a b")
        with pytest.raises(Refused, match="404"):
            await client.call(SessionInfo, "GET", "/sessions/s-none")


async def test_a_native_group_is_no_task(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client, url), AsyncClient(url) as native:
        group = await native.submit(
            {
                "task": {
                    "instruction": "x",
                    "harness": {"agent": "support.coin:OneCall"},
                    "runtime": {"kind": "memory"},
                    "evaluator": {"kind": "completed"},
                },
                "idempotency_key": "polar:t1",
            }
        )
        await native.wait([group.id])
        assert (await client.call(Tasks, "GET", "/tasks")).tasks == []
        for path in ("/rollout/task/t1", f"/sessions/{group.sessions[0].id}", "/tasks/t1/sessions"):
            with pytest.raises(Refused, match="404"):
                await client.text("GET", path)
        with pytest.raises(Refused, match="404"):
            await client.cancel("t1")
        with pytest.raises(Refused, match="409"):
            await client.submit(task())
        with pytest.raises(Refused, match="409"):
            await client.cancel("t1", register_if_missing="true")


async def test_events(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client, url), asyncio.timeout(30):
        seen: list[tuple[str, str | None]] = []
        ids: list[str] = []
        async for name, number, data in client.events():
            if name == "hello":
                await client.submit(task())
                continue
            assert data["task_id"] == "t1"
            seen.append((name, data.get("status")))
            ids.append(number)
            if name == "task.completed":
                break
        assert seen[0][0] == "task.created"
        states = [status for name, status in seen if name == "session.state_changed"]
        assert states == ["INITIALIZING", "READY", "RUNNING", "EVALUATING", "COMPLETED"]
        assert seen[-1] == ("task.completed", "completed")
        more_digits_than_int_takes = {"Last-Event-ID": "9" * 5000}
        async with aiohttp.request("GET", f"{url}/polar/events", headers=more_digits_than_int_takes) as reply:
            assert (reply.status, "Last-Event-ID: must be the id" in await reply.text()) == (422, True)
        async for name, number, _ in client.events(**{"Last-Event-ID": ids[0]}):  # nothing is lost
            if name != "hello":
                assert number == ids[1]
                break
        async for name, _, _ in client.events("/gateway/events", **{"Last-Event-ID": "0"}):
            if name != "hello":
                assert name == "session.state_changed"
                break


async def test_events_of_a_session_made_alone_are_of_no_task(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client, _), asyncio.timeout(30):
        seen = []
        async for name, _, data in client.events():
            if name == "hello":
                await client.call(SessionInfo, "POST", "/sessions", {"session_id": "mine"})
                await client.call(DeletedSession, "DELETE", "/sessions/mine")
                continue
            seen.append((name, data["session_id"], data["status"]))
            if data["status"] == "ERROR":
                break
        assert {name for name, _, _ in seen} == {"session.state_changed"}
        assert {session for _, session, _ in seen} == {"mine"}


async def test_generation_is_paused(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client, _):
        told = await client.call(Inference, "POST", "/admin/inference/pause", timeout_seconds=30)
        assert (told.paused, told.inflight, told.engine) == (True, 0, "scripted")
        assert (await client.call(Inference, "GET", "/admin/inference/status")).paused
        assert not (await client.call(Inference, "POST", "/gateway/admin/inference/resume")).paused
        health = await client.call(GatewayHealth, "GET", "/gateway/health")
        assert (health.status, health.active_sessions) == ("ok", 0)
        with pytest.raises(Refused, match="timeout_seconds"):
            await client.call(Inference, "POST", "/admin/inference/pause", timeout_seconds=0)


async def test_a_pause_that_takes_too_long_does_not_stay(tmp_path: Path) -> None:
    slow = [{"reply": "hello", "stall": 1}]
    async with serving(tmp_path, replies=slow) as (service, client, _):
        await client.submit(task())

        async def inflight() -> int:
            return (await client.call(Inference, "GET", "/admin/inference/status")).inflight

        await until(inflight)
        with pytest.raises(Refused, match="504: 1 generations were in flight"):
            await client.call(Inference, "POST", "/admin/inference/pause", timeout_seconds=0.05)
        assert service.pool.policy.status().paused is None


async def test_a_full_queue_has_polars_status_and_the_seconds_to_wait(tmp_path: Path) -> None:
    settings = {"queue": QueueConfig(sessions=1), "lanes": LanesConfig(init=1, run=1, eval=1, ready=1)}
    async with serving(tmp_path, **settings) as (_, client, url), aiohttp.ClientSession() as http:
        await client.submit(task(seconds=HANG, num_samples=8))
        async with http.post(f"{url}/polar/rollout/task/submit", json=task("t2")) as reply:
            assert (reply.status, int(reply.headers["Retry-After"]) > 0) == (503, True), await reply.text()


async def test_one_of_many_requests_at_once_makes_a_session(tmp_path: Path) -> None:
    """Of several requests with one id all but one are refused. Otherwise two clients could share a session without
    notice."""
    dispatched = task("t9")
    async with serving(tmp_path) as (service, client, _):
        for body in ({"session_id": "m"}, {**dispatched, "session_id": "d"}):
            made = await asyncio.gather(
                *(client.text("POST", "/sessions", body) for _ in range(20)), return_exceptions=True
            )
            refused = [each for each in made if isinstance(each, Refused)]
            assert (len(refused), {each.status for each in refused}) == (19, {409})
        assert len(await service.store.groups()) == 2


async def test_a_task_without_an_evaluator_has_no_reward(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client, _):
        await client.submit(task(reward=None))
        [result] = (await ended(client)).results
        [trace] = result.trajectory.traces
        assert (result.status, trace.reward, result.metadata["outrider"]["reward"]) == ("COMPLETED", None, None)
        assert set(trace.loss_mask) == {1}
        [session] = (await client.call(TaskSessions, "GET", "/tasks/t1/sessions")).sessions
        [listed] = (await client.call(Tasks, "GET", "/tasks")).tasks
        assert (session.status, session.reward, listed.mean_reward) == ("COMPLETED", None, None)


async def test_time_that_is_over(tmp_path: Path) -> None:
    """When the agent's time is over, the timeout is graded. When the session's time is over, nothing trains."""
    slow = {"import_path": "support.coin:CallAndWait"}
    async with serving(tmp_path) as (_, client, _):
        await client.submit(task("own", agent=slow, metadata={"agent_timeout": 0.5}))
        await client.submit(task("all", agent=slow, timeout_seconds=0.5))
        [own], [all] = (await ended(client, "own")).results, (await ended(client, "all")).results
        assert (own.status, own.trajectory.status, own.trajectory.traces[0].reward) == ("TIMEOUT", "TIMEOUT", 0.5)
        assert set(own.trajectory.traces[0].loss_mask) == {1}
        assert (all.status, all.error and all.error[:15]) == ("TIMEOUT", "session_timeout")
        assert [(trace.reward, set(trace.loss_mask)) for trace in all.trajectory.traces] == [(None, {0})]
        assert (own.trajectory.metadata["trained_tokens"] > 0, all.trajectory.metadata["trained_tokens"]) == (True, 0)


async def test_gateways_of_polar_cannot_register(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client, _):
        for path in ("/nodes/register", "/nodes/n/heartbeat", "/callbacks/session_result"):
            with pytest.raises(Refused, match=r"400: .*outrider nodes join"):
                await client.text("POST", path, {})


CHAT = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
MESSAGES = {"model": "any", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
GEMINI = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}


async def test_a_session_whose_agent_the_client_starts(tmp_path: Path) -> None:
    async with serving(tmp_path, replies=[say(f"reply {n}") for n in range(9)]) as (_, client, url):
        made = await client.call(SessionInfo, "POST", "/sessions", {"session_id": "mine", "task_id": "t"})
        assert (made.session_id, made.task_id, made.status, made.completion_count) == ("mine", "t", "RUNNING", 0)
        with pytest.raises(Refused, match="409: session_id: there is, or was, a session 'mine'"):
            await client.call(SessionInfo, "POST", "/sessions", {"session_id": "mine"})
        calls: list[tuple[str, dict[str, Any], dict[str, str]]] = [
            ("/v1/chat/completions", CHAT, {"X-Session-Id": "mine"}),
            ("/v1/chat/completions?session_id=mine", CHAT, {}),
            ("/v1/chat/completions", CHAT | {"_proxy_session_id": "mine"}, {}),
            ("/v1/chat/completions", CHAT, {"Authorization": "Bearer mine"}),
            ("/v1/messages", MESSAGES, {"x-api-key": "mine"}),
            ("/v1/responses", {"model": "any", "input": "hi"}, {"X-Session-Id": "mine"}),
            ("/v1beta/models/any:generateContent", GEMINI, {"X-Session-Id": "mine"}),
            ("/v1beta/models/any:streamGenerateContent?key=mine&alt=sse", GEMINI, {}),
            ("/gateway/v1/chat/completions", CHAT | {"stream": True}, {"X-Session-Id": "mine"}),
        ]
        deep: list[Any] = []
        for _ in range(900):  # deeper than what orjson writes
            deep = [deep]
        async with aiohttp.ClientSession() as http:
            for number, (path, body, headers) in enumerate(calls):
                async with http.post(f"{url}/polar{path}", json=body, headers=headers) as reply:
                    assert reply.status == 200, (path, await reply.text())
                    assert await reply.read()
                info = await client.call(SessionInfo, "GET", "/sessions/mine")
                assert info.completion_count == number + 1, path
            for path, body, headers in (
                ("/v1/chat/completions", CHAT, {"X-Session-Id": "other"}),
                ("/v1/chat/completions", CHAT, {}),
                ("/v1/messages", MESSAGES | {"_proxy_session_id": "other"}, {}),
                ("/v1/messages", MESSAGES | {"_proxy_session_id": "other", "deep": deep}, {}),
            ):
                async with http.post(f"{url}/polar{path}", json=body, headers=headers) as reply:
                    assert (reply.status, "error" in await reply.json()) == (401, True), path
        told = await client.call(Completions, "GET", "/sessions/mine/completions")
        apis = [record.metadata["api_type"] for record in told.completions]
        assert apis == ["chat"] * 4 + ["messages", "responses", "gemini", "gemini", "chat"]
        [listed] = (await client.call(GatewaySessions, "GET", "/sessions")).sessions
        assert (listed.session_id, listed.completion_count, listed.node_id) == ("mine", 9, "external")
        assert (await client.call(Tasks, "GET", "/tasks")).tasks == []
        await client.call(DeletedSession, "DELETE", "/sessions/mine")
        info = await until(lambda: over(client, "mine"))
        assert info.result is not None
        assert (info.status, info.result.session_id, info.result.trajectory.traces) == ("ERROR", "mine", [])
        other = await client.call(SessionInfo, "POST", "/sessions", {})
        assert other.session_id.startswith("sk-polar-")
        assert other.task_id == other.session_id


async def over(client: PolarClient, session_id: str) -> SessionInfo | None:
    info = await client.call(SessionInfo, "GET", f"/sessions/{session_id}")
    return info if info.result else None


async def test_a_session_is_dispatched_alone(tmp_path: Path) -> None:
    """A session that Polar's rollout server dispatches alone has the caller's id, and its callback is a
    SessionResult."""
    got: asyncio.Queue[bytes] = asyncio.Queue()

    async def receive(request: web.Request) -> web.Response:
        await got.put(await request.read())
        return web.Response()

    body = task("t1", session_id="s.1", remaining_timeout_seconds=60, builder={"strategy": "per_request"})
    async with answering(receive) as receiver, serving(tmp_path) as (_, client, url), asyncio.timeout(30):
        told = await client.call(Dispatched, "POST", "/sessions", body | {"callback_url": receiver})
        assert (told.session_id, told.task_id, told.status) == ("s.1", "t1", "REGISTERED")
        result = SessionResult.model_validate_json(await got.get())
        assert (result.session_id, result.task_id, result.trajectory.traces[0].reward) == ("s.1", "t1", 0.5)
        info = await until(lambda: over(client, "s.1"))
        assert info.result == result
        with pytest.raises(Refused, match="409"):
            await client.call(Dispatched, "POST", "/sessions", body)
        with pytest.raises(Refused, match="400: session_id: is required"):
            await client.call(Dispatched, "POST", "/sessions", task("t2"))
        with pytest.raises(Refused, match="404"):  # a session alone is no task
            await client.task("t1")
        async with (  # the service runs its agent, so its id gives no access to model calls
            aiohttp.ClientSession() as http,
            http.post(f"{url}/polar/v1/chat/completions", json=CHAT, headers={"X-Session-Id": "s.1"}) as reply,
        ):
            assert reply.status == 401


async def test_tasks_and_sessions_are_their_tenants(tmp_path: Path) -> None:
    """Two tenants may use the same ids, and cannot access each other's tasks and sessions."""
    async with running_service(tmp_path=tmp_path, compat=("polar",), token="o" * 40) as (service, url):
        specs = (
            TokenSpec(name="ann", role="submit"),
            TokenSpec(name="bob", role="submit"),
            TokenSpec(name="eve", role="read"),
        )
        tokens = [(await service.tokens.create(spec)).text for spec in specs]
        async with (
            PolarClient(f"{url}/polar", tokens[0]) as ann,
            PolarClient(f"{url}/polar", tokens[1]) as bob,
            PolarClient(f"{url}/polar", tokens[2]) as eve,
        ):
            await ann.submit(task(runtime=None))
            await ann.call(SessionInfo, "POST", "/sessions", {"session_id": "s"})
            [session] = (await ended(ann)).results
            for path in ("/rollout/task/t1", "/tasks/t1/sessions", f"/sessions/{session.session_id}", "/sessions/s"):
                with pytest.raises(Refused, match="404"):
                    await bob.text("GET", path)
            for path in ("/rollout/task/t1", f"/sessions/{session.session_id}"):
                with pytest.raises(Refused, match="404"):
                    await bob.text("DELETE", path)
            assert (await bob.call(Tasks, "GET", "/tasks")).tasks == []
            assert (await bob.call(GatewaySessions, "GET", "/sessions")).sessions == []
            assert (await bob.cancel("t1", register_if_missing="true")).total_sessions == 0
            assert (await ann.task("t1")).status == "completed"
            for called in ("POST /rollout/task/submit", "DELETE /rollout/task/t1", "POST /sessions"):
                method, path = called.split()
                with pytest.raises(Refused, match="403"):
                    await eve.text(method, path, {})
            with pytest.raises(Refused, match="403"):
                await ann.call(Inference, "POST", "/admin/inference/pause")
            async with PolarClient(f"{url}/polar", "o" * 40) as operator:
                await operator.submit(task())  # ann's task has the same id
                await ended(operator)
                mine = (await operator.call(TaskSessions, "GET", "/tasks/t1/sessions")).sessions[0].session_id
                named = set()
                async with asyncio.timeout(10):
                    async for name, _, data in operator.events(**{"Last-Event-ID": "0"}):
                        named.add(data.get("session_id", mine))
                        if name == "task.completed":
                            break
                assert named == {mine}
            headers = {"X-Session-Id": "s"}
            async with aiohttp.ClientSession() as http:
                for token, status in ((tokens[0], 200), (tokens[1], 401)):
                    own = {**headers, "Authorization": f"Bearer {token}"}
                    async with http.post(f"{url}/polar/v1/chat/completions", json=CHAT, headers=own) as reply:
                        assert reply.status == status
                ways = ({"X-Session-Id": "s"}, {"x-api-key": "s"}, {"x-goog-api-key": "s"})
                for sent in (*ways, {"session_id": "s"}, {"key": "s"}):
                    query = {} if sent in ways else sent
                    own = {"Authorization": f"Bearer {tokens[0]}", **({} if query else sent)}
                    path = f"{url}/polar/v1/chat/completions"
                    async with http.post(path, json=CHAT, headers=own, params=query) as reply:
                        assert reply.status == 200
                own = {**headers, "Authorization": "Bearer s"}  # a session's id is no token
                async with http.post(f"{url}/polar/v1/chat/completions", json=CHAT, headers=own) as reply:
                    assert (reply.status, "not a token" in (await reply.json())["detail"]) == (401, True)
