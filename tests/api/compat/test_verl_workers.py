"""The WebSocket of verl's workers, with workers that are written from the contract alone."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from outrider.api.compat.verl_workers import WorkerWaits, serve_worker
from outrider.config import VerlProxyConfig
from outrider.engines.adapters.verl_workers import CompletionResponse, VerlWorker, VerlWorkersEngine
from outrider.engines.base import ChatRequest, EngineOptions, SamplingParams
from outrider.errors import EngineError
from outrider.lab.fakes.engine_servers.app import serving as served
from outrider.service.service import Service
from support.service import running_service

from .test_verl import QUESTION, TOOL, Recipe

PROMPT, IDS = [1, 2, 3], [4, 5]


class CompletionRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A call of the contract: exactly these fields."""

    type: str
    request_id: str
    session_id: str
    messages: list[dict[str, Any]]
    temperature: float
    top_p: float
    max_tokens: int
    stop: list[str] | None
    tools: list[dict[str, Any]] | None
    repetition_penalty: float
    stream: bool


def answer(asked: CompletionRequest, **more: Any) -> dict[str, Any]:
    """Return the reply to a call, with all fields of the contract. The first call with tools is answered with a tool
    call."""
    first = asked.tools is not None and len(asked.messages) == 1
    calls = [{"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}]
    timing = dict.fromkeys(("worker_received_at", "worker_inference_started_at", "worker_response_sent_at"), 1.0)
    return {
        "type": "completion_response",
        "request_id": asked.request_id,
        "completion_text": "I look.<tool_call>" if first else "Done.",
        "content_text": "I look." if first else "Done.",
        "tool_calls": calls if first else None,
        "finish_reason": "tool_calls" if first else "stop",
        "error": None,
        "token_ids": IDS,
        "log_probs": [-0.5, -0.25],
        "timing": timing,
        "node_id": "n",
        "gpu_id": "0",
        "worker_id": "w",
        "rank_info": None,
        **more,
    }


class Worker:
    """A worker that answers every call with `answer` and the keys `more`, or only collects calls. A value of `more` may
    be a function of the call."""

    def __init__(self, socket: ClientConnection, more: dict[str, Any] | None) -> None:
        self.socket = socket
        self.more = more
        self.asked: list[CompletionRequest] = []
        self.news = asyncio.Event()

    async def work(self) -> None:
        try:
            async for frame in self.socket:
                assert isinstance(frame, str)
                if json.loads(frame)["type"] == "ping":
                    await self.socket.send(json.dumps({"type": "pong"}))
                    continue
                asked = msgspec.json.decode(frame, type=CompletionRequest)
                self.asked.append(asked)
                self.news.set()
                if self.more is not None:
                    more = {name: of(asked) if callable(of) else of for name, of in self.more.items()}
                    await self.socket.send(json.dumps(answer(asked, **more)))
        except ConnectionClosed:
            return


def prompt_of(asked: CompletionRequest) -> list[int]:
    """Return the prompt's ids, which continue the prompt of the previous call."""
    return PROMPT + [*IDS, 6] * (len(asked.messages) // 2)


def address(url: str) -> str:
    return url.replace("http", "ws") + "/ws/worker"


@asynccontextmanager
async def worker(url: str, name: str = "w", *, answers: bool = True, **more: Any) -> AsyncIterator[Worker]:
    async with connect(address(url)) as socket, asyncio.TaskGroup() as tasks:
        await socket.send(json.dumps({"type": "worker_hello", "worker_id": name}))
        acknowledged = json.loads(await socket.recv())
        assert acknowledged == {"type": "worker_hello_ack", "worker_id": name, "status": "connected"}
        made = Worker(socket, more if answers else None)
        working = tasks.create_task(made.work())
        try:
            yield made
        finally:
            working.cancel()


@asynccontextmanager
async def proxy(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Service, Recipe, str]]:
    """A service whose only engine is that of the workers."""
    async with (
        aiohttp.ClientSession() as http,
        running_service(tmp_path=tmp_path, compat=("verl",), **settings) as (service, url),
    ):
        await service.pool.remove("scripted")
        yield service, Recipe(http, url), url


async def serving(client: Recipe) -> None:
    """Wait until a worker can serve calls."""
    for _ in range(200):
        if (await client.ask("GET", "/health"))[0] == 200:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the worker got no work within 4 s")


async def test_an_epoch_through_two_workers(tmp_path: Path) -> None:
    async with proxy(tmp_path) as (_, client, url):
        more: dict[str, Any] = {"prompt_token_ids": prompt_of, "weight_version": 3}
        async with worker(url, "a", **more) as first, worker(url, "b", **more) as second:
            await serving(client)
            records = await asyncio.gather(*(client.roll_out(f"swe-{number}") for number in range(16)))
            health = json.loads((await client.ask("GET", "/health"))[1])
            assert health == {"status": "ok", "mode": "relay", "connected_workers": 2}
    for record in records:
        assert [turn.completion_token_ids for turn in record.turns] == [IDS, IDS]
        assert [turn.completion_logprobs for turn in record.turns] == [[-0.5, -0.25]] * 2
        assert [turn.completion_text for turn in record.turns] == ["I look.", "Done."]
        assert [turn.finish_reason for turn in record.turns] == ["tool_calls", "stop"]
    assert len(first.asked) + len(second.asked) == 32
    assert first.asked
    assert second.asked


async def test_what_a_worker_gets(tmp_path: Path) -> None:
    async with proxy(tmp_path) as (_, client, url), worker(url) as made:
        await serving(client)
        await client.status("POST", "/sessions/one", "created")
        settings: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "stop": ["END"], "repetition_penalty": 1.1}
        await client.chat("one", [QUESTION], tools=[TOOL], **settings)
        [asked] = made.asked
        assert (asked.temperature, asked.top_p, asked.max_tokens) == (0.5, 0.9, 64)
        assert (asked.stop, asked.repetition_penalty, asked.stream) == (["END"], 1.1, False)
        assert asked.messages == [QUESTION]
        assert asked.tools is not None
        assert asked.tools[0]["function"]["name"] == "bash"


async def test_without_prompt_ids_a_turn_is_text_and_the_record_has_the_ids(tmp_path: Path) -> None:
    """The ids of a reply alone do not show what the model has read: the record has these ids, and no row is made of
    them."""
    async with proxy(tmp_path) as (service, client, url), worker(url, rank_info={"rank": 1}):
        await serving(client)
        await client.status("POST", "/sessions/one", "created")
        await client.chat("one", [QUESTION])
        [turn] = (await client.record("one")).turns
        assert (turn.completion_text, turn.completion_token_ids) == ("Done.", IDS)
        assert turn.completion_logprobs == [-0.5, -0.25]
        assert (turn.worker_id, turn.node_id, turn.gpu_id, turn.rank_info) == ("w", "n", "0", {"rank": 1})
        assert turn.timing is not None
        assert turn.timing["worker_received_at"] == 1.0
        assert turn.timing["dispatched_at"] > 1e9
        assert turn.timing["relay_round_trip_ms"] > 0
        [group] = await service.store.groups_before(None, limit=9, harness="external", tenant=None)
        [session] = await service.store.sessions(group.id)
        [own] = await service.store.turns(session.id)
        assert (own.mode, own.output_ids, own.logprobs, own.prompt_length) == ("text", b"", b"", 0)


@pytest.mark.parametrize("more", [{"log_probs": [-0.5]}, {"token_ids": [-1, 5]}, {"token_ids": [1 << 40, 5]}])
async def test_impossible_ids_are_an_error(tmp_path: Path, more: dict[str, Any]) -> None:
    async with proxy(tmp_path) as (_, client, url), worker(url, **more):
        await serving(client)
        await client.status("POST", "/sessions/one", "created")
        body = {"model": "m", "messages": [QUESTION]}
        code, _ = await client.ask("POST", "/one/v1/chat/completions", body)
        assert code == 502
        assert (await client.record("one")).turns == []


async def test_a_lost_worker_fails_over_at_once(tmp_path: Path) -> None:
    async with proxy(tmp_path) as (_, client, url), worker(url, "deaf", answers=False) as deaf:
        await serving(client)
        await client.status("POST", "/sessions/one", "created")
        async with asyncio.TaskGroup() as tasks:
            calling = tasks.create_task(client.chat("one", [QUESTION]))
            await deaf.news.wait()
            async with worker(url, "good") as good:
                await deaf.socket.close()
                assert (await asyncio.wait_for(calling, 5))["content"] == "Done."
                assert len(good.asked) == 1


@pytest.mark.parametrize(
    ("first", "code"),
    [
        ("{", 4000),
        ('{"type": "worker_hello"}', 4000),
        ('{"type": "worker_hello", "worker_id": ""}', 4000),
        ('{"type": "ping"}', 4001),
        ('{"type": "other"}', 4001),
    ],
)
async def test_a_bad_hello(tmp_path: Path, first: str, code: int) -> None:
    async with proxy(tmp_path) as (_, _, url), connect(address(url)) as socket:
        await socket.send(first)
        await socket.wait_closed()
        assert socket.close_code == code


@asynccontextmanager
async def a_route(service: Service, waits: WorkerWaits) -> AsyncIterator[str]:
    """Serve the route for the service's workers with other waits, and yield its URL."""
    route = WebSocketRoute("/ws/worker", lambda socket: serve_worker(service, socket, waits=waits))
    async with served(Starlette(routes=[route]), websockets=1 << 20) as url:
        yield url


async def test_a_late_hello(tmp_path: Path) -> None:
    async with (
        proxy(tmp_path) as (service, _, _),
        a_route(service, WorkerWaits(hello=0.1)) as url,
        connect(address(url)) as socket,
    ):
        await socket.wait_closed()
        assert socket.close_code == 4000


@pytest.mark.deep
async def test_a_call_ends_after_the_setting(tmp_path: Path) -> None:
    settings = VerlProxyConfig(call_seconds=0.1)
    async with (
        proxy(tmp_path, verl_proxy=settings) as (_, client, url),
        worker(url, answers=False),
    ):
        await serving(client)
        await client.status("POST", "/sessions/a", "created")
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        code, reply = await client.ask("POST", "/a/v1/chat/completions", body)
        assert code == 503
        assert b"did not answer in 0.1 s" in reply


async def test_pings(tmp_path: Path) -> None:
    async with proxy(tmp_path) as (_, _, url), connect(address(url)) as socket:
        await socket.send(json.dumps({"type": "worker_hello", "worker_id": "w"}))
        await socket.recv()
        await socket.send('{"type": "ping"}')
        assert json.loads(await socket.recv()) == {"type": "pong"}
        await socket.send("no JSON")
        await socket.wait_closed()
        assert socket.close_code == 1008


async def test_a_silent_worker_is_lost(tmp_path: Path) -> None:
    async with (
        proxy(tmp_path) as (service, _, _),
        a_route(service, WorkerWaits(ping=0.05, silent=0.15)) as url,
        connect(address(url)) as socket,
    ):
        await socket.send(json.dumps({"type": "worker_hello", "worker_id": "w"}))
        await socket.wait_closed()
        assert socket.close_code == 1008


async def test_only_an_admin_attaches_a_worker(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, compat=("verl",), token="operator-token-1") as (_, url):
        with pytest.raises(InvalidStatus, match="401"):
            async with connect(address(url)):
                pass
        headers = {"Authorization": "Bearer operator-token-1"}
        async with connect(address(url), additional_headers=headers) as socket:
            await socket.send(json.dumps({"type": "worker_hello", "worker_id": "w"}))
            assert json.loads(await socket.recv())["type"] == "worker_hello_ack"


@pytest.mark.parametrize(("name", "value"), [("seed", 1), ("presence_penalty", 0.5), ("top_k", 5)])
async def test_parameters_that_workers_cannot_get_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    async with proxy(tmp_path) as (_, client, url), worker(url) as made:
        await serving(client)
        await client.status("POST", "/sessions/one", "created")
        body = {"model": "m", "messages": [QUESTION], name: value}
        code, reply = await client.ask("POST", "/one/v1/chat/completions", body)
        assert code >= 400
        assert name in reply.decode()
        assert not made.asked


GOLDEN = Path(__file__).parent / "golden" / "verl" / "a-worker.txt"
CHANGING = (
    (re.compile(r'"request_id":"[^"]*"'), '"request_id":"CALL"'),
    (re.compile(r'"session_id":"[^"]*"'), '"session_id":"SESSION"'),
)


async def test_the_wire_of_a_worker_is_as_before(tmp_path: Path) -> None:
    lines: list[str] = []

    async with proxy(tmp_path) as (_, client, url), connect(address(url)) as socket:

        async def say(message: dict[str, Any]) -> None:
            lines.append("> " + json.dumps(message, separators=(",", ":")))
            await socket.send(json.dumps(message))

        async def hear() -> dict[str, Any]:
            frame = await socket.recv()
            assert isinstance(frame, str)
            lines.append("< " + frame)
            told: dict[str, Any] = json.loads(frame)
            return told

        await say({"type": "worker_hello", "worker_id": "w"})
        await hear()
        await say({"type": "ping"})
        await hear()
        await serving(client)
        await client.status("POST", "/sessions/one", "created")
        async with asyncio.TaskGroup() as tasks:
            calling = tasks.create_task(client.chat("one", [QUESTION], tools=[TOOL]))
            asked = msgspec.convert(await hear(), CompletionRequest)
            await say(answer(asked))
        assert calling.result()["content"] == "I look."
        await say({"type": "worker_hello", "worker_id": "again"})
        await socket.wait_closed()
        lines.append(f"closed {socket.close_code} {socket.close_reason}")
    text = "\n".join(lines) + "\n"
    for pattern, name in CHANGING:
        text = pattern.sub(name, text)
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


KINDS = st.sampled_from(["worker_hello", "ping", "pong", "completion_response", "completion_request", "x"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=6,
)
KEYS = ("worker_id", "completion_text", "tool_calls", "finish_reason", "error", "token_ids", "log_probs", "timing")
MORE_KEYS = ("node_id", "rank_info", "prompt_token_ids", "weight_version", "weight_version_spans", "error_code")
FIELDS = st.dictionaries(st.sampled_from(KEYS + MORE_KEYS), VALUES, max_size=6)


def drawn() -> list[tuple[str, dict[str, Any]]]:
    """Return random messages: a type and further keys."""
    messages: list[tuple[str, dict[str, Any]]] = []

    @settings(max_examples=60, database=None)
    @given(KINDS, FIELDS)
    def collect(kind: str, fields: dict[str, Any]) -> None:
        messages.append((kind, fields))

    collect()
    return messages


async def test_random_messages_close_by_the_codes_of_the_contract(tmp_path: Path) -> None:
    async with proxy(tmp_path) as (_, client, url):
        for kind, fields in drawn():
            message = json.dumps({"type": kind, "request_id": "x", **fields})
            async with connect(address(url)) as socket:
                await socket.send(message)
                if kind != "worker_hello" or "worker_id" not in fields:
                    await socket.wait_closed()
                    assert socket.close_code in (4000, 4001), message
            async with worker(url, answers=False) as made:
                await made.socket.send(message)
                with suppress(ConnectionClosed):
                    await (await made.socket.ping())
                assert made.socket.close_code in (None, 1008), message
        async with worker(url):
            await serving(client)
            await client.status("POST", "/sessions/one", "created")
            assert (await client.chat("one", [QUESTION]))["content"] == "Done."


async def test_random_replies_are_a_reply_or_an_error_of_the_engine() -> None:
    engine = VerlWorkersEngine(EngineOptions(name="verl-workers"))
    request = ChatRequest(request_id="r", session_key="s", messages=(), tools=(), sampling=SamplingParams(max_tokens=8))
    usual = {"type": "completion_response", "completion_text": "x", "finish_reason": "stop", "token_ids": IDS}
    ended = {"reply": 0, "error": 0}
    workers: list[VerlWorker] = []
    for _, fields in drawn():

        def send(call: dict[str, Any], fields: dict[str, Any] = fields) -> None:
            message = {**usual, "log_probs": [-1.0, -1.0], **fields, "request_id": call["request_id"]}
            # The socket closes the connection of a worker whose message cannot be read.
            try:
                workers[-1].take(msgspec.json.decode(json.dumps(message), type=CompletionResponse))
            except msgspec.ValidationError:
                workers[-1].lost()

        workers.append(VerlWorker("w", send))
        engine.attach(workers[-1])
        try:
            async for chunk in engine.chat(request):
                assert chunk.output_ids is None or len(chunk.output_ids) == len(chunk.logprobs or [])
                assert chunk.report is not None
                assert 2 * len(chunk.report.output_ids) == len(chunk.report.logprobs)
                ended["reply"] += 1
        except EngineError:
            ended["error"] += 1
        engine.detach(workers[-1])
    assert min(ended.values()) > 0
