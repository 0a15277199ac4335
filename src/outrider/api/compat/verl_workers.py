"""Serves the WebSocket route for the workers of verl's recipe. These workers answer the model calls of one engine,
whose name is ENGINE.

Invariant: only requests that passed access control reach this route.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import WebSocket
from starlette.websockets import WebSocketDisconnect

from outrider.concurrency.cancellation import shielded
from outrider.engines.adapters.verl_workers import CompletionResponse, VerlWorker, VerlWorkersEngine
from outrider.errors import OutriderError
from outrider.spec import EngineSpec
from outrider.wire.link_protocol import close_reason

if TYPE_CHECKING:
    from outrider.service.service import Service

ENGINE = "verl-workers"
"""Both the name of the engine and its kind. If the engine does not exist, the first worker that connects adds it."""
BAD_HELLO, NO_HELLO, NOT_SERVED = 4000, 4001, 4002
NONSENSE = 1008


class WorkerWaits(msgspec.Struct, frozen=True, kw_only=True):
    """How long the service waits for a worker, in seconds.

    - `hello`: maximum time until the hello message.
    - `ping`: time between two pings, to which workers reply.
    - `silent`: a worker that has sent nothing for this time counts as lost.
    """

    hello: float = 10.0
    ping: float = 30.0
    silent: float = 90.0


WAITS = WorkerWaits()


class _Hello(msgspec.Struct, tag_field="type", tag="worker_hello"):
    """First message of a worker. `keeps_ids` is sent only by Outrider's own workers."""

    worker_id: str
    keeps_ids: bool = False


class _Ping(msgspec.Struct, tag_field="type", tag="ping"):
    pass


class _Pong(msgspec.Struct, tag_field="type", tag="pong"):
    pass


_MESSAGES = msgspec.json.Decoder(_Hello | _Ping | _Pong | CompletionResponse)


class _Refused(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


async def serve_worker(service: Service, websocket: WebSocket, *, waits: WorkerWaits = WAITS) -> None:
    """Serve one worker until its connection ends. The close codes are:
    - BAD_HELLO: the hello message is late, or cannot be parsed.
    - NO_HELLO: the first message is not a hello message.
    - NOT_SERVED: the engine cannot be added.
    - NONSENSE: a later message cannot be parsed, or the worker was silent for too long."""
    await websocket.accept()
    sending: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    try:
        hello = await _hello(websocket, waits)
        worker = VerlWorker(hello.worker_id, sending.put_nowait, keeps_ids=hello.keeps_ids)
        engine = await _engine(service)
        sending.put_nowait({"type": "worker_hello_ack", "worker_id": worker.worker_id, "status": "connected"})
        async with asyncio.TaskGroup() as group:
            sender = group.create_task(_send(websocket, sending), name="verl worker")
            seen = _Seen()
            pinger = group.create_task(_ping(worker, seen, waits), name="verl worker pings")
            engine.attach(worker)
            try:
                service.pool.probe_now(ENGINE)
                await _receive(websocket, worker, seen)
            finally:
                engine.detach(worker)
                sender.cancel()
                pinger.cancel()
    except* _Refused as refusals:
        [refused] = refusals.exceptions
        assert isinstance(refused, _Refused)
        with suppress(WebSocketDisconnect, OSError, RuntimeError):  # the connection may already be closed
            await websocket.close(refused.code, close_reason(str(refused)))
    except* (WebSocketDisconnect, OSError):
        pass


async def _hello(websocket: WebSocket, waits: WorkerWaits) -> _Hello:
    try:
        async with asyncio.timeout(waits.hello):
            first = _read(await _frame(websocket), BAD_HELLO)
    except TimeoutError:
        raise _Refused(BAD_HELLO, f"no worker_hello came within {waits.hello:g} s") from None
    if not isinstance(first, _Hello):
        raise _Refused(NO_HELLO, "the first message is no worker_hello")
    if not 1 <= len(first.worker_id) <= 200:
        raise _Refused(BAD_HELLO, "worker_id must have 1 to 200 characters")
    return first


async def _engine(service: Service) -> VerlWorkersEngine:
    """Return the engine of the workers, and add it if it is missing."""
    try:
        if service.pool.engine(ENGINE) is None:
            options = {"call_seconds": service.config.verl_proxy.call_seconds}
            await shielded(lambda: service.attach_engine(EngineSpec(kind=ENGINE, name=ENGINE, options=options)))
    except OutriderError as error:
        if service.pool.engine(ENGINE) is None:  # otherwise another worker has just added the engine
            raise _Refused(NOT_SERVED, error.message) from error
    engine = service.pool.engine(ENGINE)
    if not isinstance(engine, VerlWorkersEngine):
        raise _Refused(NOT_SERVED, f"engine {ENGINE!r} is of another kind")
    return engine


async def _send(websocket: WebSocket, sending: asyncio.Queue[dict[str, Any]]) -> None:
    while True:
        await websocket.send_text(msgspec.json.encode(await sending.get()).decode())


class _Seen:
    """Remembers when the worker last sent a message."""

    def __init__(self) -> None:
        self.at = time.monotonic()


async def _ping(worker: VerlWorker, seen: _Seen, waits: WorkerWaits) -> None:
    while True:
        await asyncio.sleep(waits.ping)
        if time.monotonic() - seen.at > waits.silent:
            raise _Refused(NONSENSE, f"no message came for {waits.silent:g} s")
        worker.send({"type": "ping"})


async def _receive(websocket: WebSocket, worker: VerlWorker, seen: _Seen) -> None:
    while True:
        message = _read(await _frame(websocket), NONSENSE)
        seen.at = time.monotonic()
        if isinstance(message, CompletionResponse):
            worker.take(message)
        elif isinstance(message, _Ping):
            worker.send({"type": "pong"})
        elif isinstance(message, _Hello):
            raise _Refused(NONSENSE, "a second worker_hello")


async def _frame(websocket: WebSocket) -> str | bytes:
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1006))
    return message.get("text") or message.get("bytes") or ""


def _read(frame: str | bytes, code: int) -> Any:
    try:
        return _MESSAGES.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if code == BAD_HELLO and _type_of(frame) not in (None, "worker_hello"):
            raise _Refused(NO_HELLO, "the first message is no worker_hello") from error
        raise _Refused(code, f"a message cannot be read: {error}") from error


def _type_of(frame: str | bytes) -> Any:
    """Return the type of a message that could not be parsed, or None."""
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        message = msgspec.json.decode(frame)
        return message.get("type") if isinstance(message, dict) else None
    return None
