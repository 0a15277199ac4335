"""The relay worker with two proxies for verl's recipe: one that is written from the contract alone, and Outrider's
own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request
from websockets.http11 import Response as HttpResponse

from api.compat.test_verl import QUESTION, TOOL
from api.compat.test_verl_workers import proxy, serving
from outrider.concurrency.retries import RetryPolicy
from outrider.errors import Conflict, Forbidden, NotFound, Unauthorized
from outrider.lab.fakes.scripted_engine import ScriptedEngine, scripted_logprob
from outrider.relay.verl import ProxyWorker
from outrider.tokens.rendering.renderer import make_renderer
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import unpack_ids, unpack_logprobs
from support.service import call, running_service, say, scripted_engine
from support.tokenizer import write_tokenizer
from support.waiting import until

SOON = RetryPolicy(first=0.01, longest=0.05)
REPLIES = (
    {"when": "a.txt", "reply": say("It is in a file.")},
    {"when": "Where is it?", "reply": "I look." + call("ls")},
)


class Timing(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    worker_received_at: float
    worker_inference_started_at: float
    worker_inference_completed_at: float
    worker_tool_parse_completed_at: float
    worker_response_sent_at: float


class Response(msgspec.Struct, kw_only=True):
    """A response as in the contract: fields without a default are required. Unknown fields are ignored."""

    type: str
    request_id: str
    completion_text: str | None
    content_text: str | None
    tool_calls: list[dict[str, Any]] | None
    finish_reason: str | None
    error: str | None
    token_ids: list[int] | None
    log_probs: list[float] | None
    timing: dict[str, float]
    node_id: str | None
    gpu_id: str | None
    worker_id: str
    rank_info: dict[str, Any] | None
    prompt_token_ids: list[int] | None = None
    weight_version: int | None = None


class Contract:
    """A proxy as in the recipe's contract. `workers` has the connections of its workers, `answers` the futures of its
    calls. If `close_with` is set, each connection is closed with this code after its hello. `refusals` holds the HTTP
    statuses with which the next attempts to connect are refused."""

    def __init__(self) -> None:
        self.workers: asyncio.Queue[ServerConnection] = asyncio.Queue()
        self.answers: dict[str, asyncio.Future[Response]] = {}
        self.pongs = 0
        self.hellos: list[dict[str, Any]] = []
        self.close_with: int | None = None
        self.refusals: list[int] = []
        self.url = ""

    def refuse(self, socket: ServerConnection, request: Request) -> HttpResponse | None:
        return socket.respond(self.refusals.pop(), "") if self.refusals else None

    async def take(self, socket: ServerConnection) -> None:
        hello = json.loads(await socket.recv())
        self.hellos.append(hello)
        if self.close_with is not None:
            await socket.close(self.close_with, "no")
            return
        await socket.send(json.dumps({"type": "ping"}))
        await socket.send(
            json.dumps({"type": "worker_hello_ack", "worker_id": hello["worker_id"], "status": "connected"})
        )
        await self.workers.put(socket)
        try:
            async for frame in socket:
                kind = json.loads(frame)["type"]
                if kind == "pong":
                    self.pongs += 1
                elif kind == "ping":
                    await socket.send(json.dumps({"type": "pong"}))
                else:
                    assert kind == "completion_response"
                    response = msgspec.json.decode(frame, type=Response)
                    self.answers.pop(response.request_id).set_result(response)
        except ConnectionClosed:
            return

    async def ask(self, socket: ServerConnection, number: str, **fields: Any) -> Response:
        usual = {
            "type": "completion_request",
            "request_id": number,
            "session_id": "one",
            "messages": [QUESTION],
            "temperature": 1.0,
            "top_p": 1.0,
            "max_tokens": 64,
            "stop": None,
            "tools": None,
            "repetition_penalty": 1.0,
            "stream": False,
            "traceparent": "00-0-0-00",
        }
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self.answers[number] = answer
        await socket.send(json.dumps(usual | fields))
        async with asyncio.timeout(5):
            return await answer


@asynccontextmanager
async def contract() -> AsyncIterator[Contract]:
    made = Contract()
    async with serve(made.take, "127.0.0.1", 0, process_request=made.refuse) as server:
        made.url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
        yield made


def worker_of(tmp_path: Path, url: str, engine: ScriptedEngine, **named: Any) -> ProxyWorker:
    renderer = make_renderer(Tokenizer.load(write_tokenizer(tmp_path / "tokenizer")), "qwen3")
    settings: dict[str, Any] = {"reconnecting": SOON, "worker_id": "w"} | named
    return ProxyWorker(url, engine, renderer, **settings)


@asynccontextmanager
async def running(*workers: ProxyWorker) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(worker.run()) for worker in workers]
        for worker in workers:
            await asyncio.wait_for(worker.attached.wait(), 5)
        try:
            yield
        finally:
            for task in running:
                task.cancel()


async def test_a_call_of_the_recipes_proxy(tmp_path: Path) -> None:
    engine = scripted_engine(tmp_path, REPLIES, version=7)
    facts = {"node_id": "n", "gpu_id": "0", "rank_info": {"rank": 1}}
    async with contract() as theirs:
        worker = worker_of(tmp_path, theirs.url, engine, facts=facts)
        async with running(worker):
            socket = await theirs.workers.get()
            first = await theirs.ask(socket, "1", tools=[TOOL])
            assert first.tool_calls is not None
            history = [
                QUESTION,
                {"role": "assistant", "content": first.content_text, "tool_calls": first.tool_calls},
                {"role": "tool", "content": "a.txt", "tool_call_id": first.tool_calls[0]["id"]},
            ]
            assert first.prompt_token_ids is not None
            assert first.token_ids is not None
            seen = [*first.prompt_token_ids, *first.token_ids]
            known = {"required_prefix_token_ids": seen}  # only Outrider's proxy sends this key
            second = await theirs.ask(socket, "2", tools=[TOOL], messages=history, **known)
            rendered = await theirs.ask(socket, "3", tools=[TOOL], messages=history)
        assert theirs.hellos == [{"type": "worker_hello", "worker_id": "w", "keeps_ids": True}]
        assert theirs.pongs == 1
    assert (first.content_text, first.finish_reason, first.error) == ("I look.", "tool_calls", None)
    assert first.completion_text is not None
    assert first.completion_text.startswith("I look.<tool_call>")
    assert (second.content_text, second.tool_calls, second.finish_reason) == ("It is in a file.", None, "stop")
    for response in (first, second):
        assert response.prompt_token_ids
        assert response.token_ids
        start = len(response.prompt_token_ids)
        expected = [scripted_logprob(start + at, token) for at, token in enumerate(response.token_ids)]
        assert response.log_probs == expected
        assert response.weight_version == 7
        assert (response.worker_id, response.node_id, response.gpu_id) == ("w", "n", "0")
        assert response.rank_info == {"rank": 1}
        times = msgspec.convert(response.timing, Timing)
        assert list(msgspec.structs.astuple(times)) == sorted(msgspec.structs.astuple(times))
    # The second prompt begins with the ids of the first prompt and reply. The template alone puts a line break before
    # the call.
    assert second.prompt_token_ids is not None
    assert second.prompt_token_ids[: len(seen)] == seen
    assert rendered.prompt_token_ids is not None
    assert rendered.prompt_token_ids[: len(seen)] != seen


async def test_many_calls_at_once_and_the_sampling(tmp_path: Path) -> None:
    engine = scripted_engine(tmp_path, [say("hello")])
    async with contract() as theirs, running(worker_of(tmp_path, theirs.url, engine)):
        socket = await theirs.workers.get()
        more: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.1, "stop": ["END"]}
        asking = (theirs.ask(socket, str(at), session_id=f"s-{at}", max_tokens=32, **more) for at in range(64))
        answers = await asyncio.gather(*asking)
        assert {answer.content_text for answer in answers} == {"hello"}
        asked = engine.requests[-1]
        assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.max_tokens) == (0.5, 0.9, 32)
        assert (asked.sampling.repetition_penalty, asked.sampling.stop) == (1.1, ("END",))
        short = await theirs.ask(socket, "short", max_tokens=1)
        assert (short.finish_reason, len(short.token_ids or [])) == ("length", 1)


async def test_a_call_that_fails_has_an_error_and_no_ids(tmp_path: Path) -> None:
    engine = scripted_engine(tmp_path, [{"reply": say("hello"), "fail": "unavailable", "after": 1}])
    async with contract() as theirs, running(worker_of(tmp_path, theirs.url, engine)):
        socket = await theirs.workers.get()
        wrong: tuple[dict[str, Any], ...] = ({}, {"messages": "x"}, {"messages": [{"role": "cat", "content": "x"}]})
        for number, fields in enumerate(wrong):
            response = await theirs.ask(socket, str(number), **fields)
            assert response.error
            assert (response.token_ids, response.log_probs, response.finish_reason) == (None, None, None)
        assert "messages[0]" in (response.error or "")


async def test_a_lost_connection_ends_its_calls_and_the_worker_comes_back(tmp_path: Path) -> None:
    engine = scripted_engine(tmp_path, [{"reply": say("hello"), "stall": 0}])
    async with contract() as theirs:
        worker = worker_of(tmp_path, theirs.url, engine)
        async with running(worker), asyncio.TaskGroup() as tasks:
            socket = await theirs.workers.get()
            calling = tasks.create_task(asyncio.wait_for(asyncio.shield(theirs.ask(socket, "1")), 5))
            await asyncio.wait_for(engine.stalled.wait(), 5)
            await socket.close()
            again = await asyncio.wait_for(theirs.workers.get(), 5)
            assert engine.abort_seen.is_set()
            await until(lambda: worker.connections == 2)
            assert again is not socket
            calling.cancel()


@pytest.mark.parametrize(("code", "kind"), [(4002, Conflict)])
async def test_a_proxy_that_takes_no_workers(tmp_path: Path, code: int, kind: type[Exception]) -> None:
    async with contract() as theirs:
        theirs.close_with = code
        with pytest.raises(kind, match="refuses this worker"):
            await asyncio.wait_for(worker_of(tmp_path, theirs.url, scripted_engine(tmp_path, REPLIES)).run(), 5)


@pytest.mark.parametrize("status", [403, 404])
async def test_a_worker_outlives_the_replies_of_a_reverse_proxy(tmp_path: Path, status: int) -> None:
    """A reverse proxy replies with 403 or 404 while the recipe's proxy restarts. The recipe's proxy had accepted the
    worker, so the worker tries again."""
    async with contract() as theirs:
        worker = worker_of(tmp_path, theirs.url, scripted_engine(tmp_path, REPLIES))
        async with running(worker):
            theirs.refusals = [status] * 3
            await (await theirs.workers.get()).close()
            await asyncio.wait_for(theirs.workers.get(), 5)
            assert not theirs.refusals


@pytest.mark.parametrize(("status", "kind"), [(401, Unauthorized), (403, Forbidden), (404, NotFound)])
async def test_a_status_that_refuses_a_new_worker(tmp_path: Path, status: int, kind: type[Exception]) -> None:
    async with contract() as theirs:
        theirs.refusals = [status]
        with pytest.raises(kind, match="refuses this worker"):
            await asyncio.wait_for(worker_of(tmp_path, theirs.url, scripted_engine(tmp_path, REPLIES)).run(), 5)


async def test_a_silent_proxy_is_left(tmp_path: Path) -> None:
    async with contract() as theirs:
        worker = worker_of(tmp_path, theirs.url, scripted_engine(tmp_path, REPLIES), silent_seconds=0.1)
        async with running(worker):
            await theirs.workers.get()
            await asyncio.wait_for(theirs.workers.get(), 5)


async def test_an_epoch_of_our_workers_at_our_proxy(tmp_path: Path) -> None:
    """The proxy's records have the ids and log-probabilities of the stored turns."""
    async with proxy(tmp_path) as (service, client, url):
        engines = [scripted_engine(tmp_path, REPLIES, version=7) for _ in range(2)]
        workers = [worker_of(tmp_path, url, engine, worker_id=f"w-{at}") for at, engine in enumerate(engines)]
        async with running(*workers):
            await serving(client)
            records = await asyncio.gather(*(client.roll_out(f"swe-{number}") for number in range(16)))
        groups = await service.store.groups_before(None, limit=16, harness="external", tenant=None)
        by_sid = {group.labels["verl.session"]: group.id for group in groups}
        for record in records:
            [session] = await service.store.sessions(by_sid[record.session_id])
            rows = await service.store.turns(session.id)
            assert [turn.completion_text for turn in record.turns] == ["I look.", "It is in a file."]
            for turn, own in zip(record.turns, rows, strict=True):
                assert turn.completion_token_ids == unpack_ids(own.output_ids).tolist()
                assert turn.completion_logprobs == unpack_logprobs(own.logprobs).tolist()
                start = own.prompt_length
                expected = [scripted_logprob(start + at, token) for at, token in enumerate(turn.completion_token_ids)]
                assert turn.completion_logprobs == expected
                assert (own.mode, own.versions[0].version) == ("capture", 7)
            assert rows[1].parent == 0, "the sampled ids are continued, not rendered again"
        assert all(engine.requests for engine in engines)


async def test_a_token_is_needed(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, compat=("verl",), token="operator-token-1") as (_, url):
        worker = worker_of(tmp_path, url, scripted_engine(tmp_path, REPLIES))
        with pytest.raises(Unauthorized, match="refuses this worker"):
            await asyncio.wait_for(worker.run(), 5)
        async with running(worker_of(tmp_path, url, scripted_engine(tmp_path, REPLIES), token="operator-token-1")):
            pass
