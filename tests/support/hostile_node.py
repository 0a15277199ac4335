"""A node that joins a service over a WebSocket and sends the messages that a test writes, valid or not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any, Self
from uuid import uuid4

import aiohttp
import msgspec

from outrider.nodes.messages import TO_NODE, WELCOME, CallRequest, NodeHello, Ready, Report, RunAttempt
from outrider.schemas import LaneStats, NodeStats, ResourceStats
from outrider.sessions.resources import Capacity
from outrider.wire.link_protocol import encode
from outrider.wire.resumable import HEADER, PIECE

CAPACITY = Capacity(cpus=4.0, memory_mb=4096)


class Ended(Exception):
    """The service has closed the connection."""

    def __init__(self, code: int | None, reason: str) -> None:
        super().__init__(f"{reason} ({code})")
        self.code = code
        self.reason = reason


def hello(**fields: Any) -> NodeHello:
    known: dict[str, Any] = {
        "version": version("outrider"),
        "instance": uuid4().hex,
        "machine": uuid4().hex,
        "host": "another machine",
        "capacity": CAPACITY,
        "received": 0,
    }
    return NodeHello(**known | fields)


def report(capacity: int = 8, **fields: Any) -> Report:
    """Return the report of a node with room for `capacity` sessions."""
    lane = LaneStats(name="run", size=capacity, in_use=0, waiting=0, served=0, waited_seconds=0.0)
    resources = ResourceStats(cpus=CAPACITY.cpus, memory_mb=CAPACITY.memory_mb)
    stats: dict[str, Any] = {"name": "x", "sessions": 0, "capacity": capacity, "lanes": (lane,), "resources": resources}
    return Report(stats=NodeStats(**stats | fields), uses=())


class HostileNode:
    """A node whose messages are written by the test. `received`: the number of pieces that the node claims to have
    received, by default the true number."""

    def __init__(self, websocket: aiohttp.ClientWebSocketResponse) -> None:
        self.websocket = websocket
        self.received = 0
        self._parts: list[bytes] = []

    @classmethod
    @asynccontextmanager
    async def joined(cls, url: str, name: str = "bad", *, capacity: int = 8, ready: bool = True) -> AsyncIterator[Self]:
        """Yield a node that has joined. Unless `ready` is false, the node has also reported room for sessions."""
        async with cls.dialled(url, name) as node:
            await node.send_bytes(encode(hello()))
            WELCOME.decode(await node.receive_bytes())
            if ready:
                await node.say(report(capacity), Ready())
            yield node

    @classmethod
    @asynccontextmanager
    async def dialled(cls, url: str, name: str = "bad", **options: Any) -> AsyncIterator[Self]:
        """Yield a node that is connected and has sent nothing."""
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{url}/v1/nodes/{name}/join", max_msg_size=0, **options) as websocket,
        ):
            yield cls(websocket)

    async def send_bytes(self, data: bytes) -> None:
        await self.websocket.send_bytes(data)

    async def receive_bytes(self) -> bytes:
        """Receive one binary message. Raises Ended."""
        message = await self.websocket.receive()
        if message.type is not aiohttp.WSMsgType.BINARY:
            raise Ended(self.websocket.close_code, message.extra or "")
        data: bytes = message.data
        return data

    async def say(self, *messages: msgspec.Struct | bytes) -> None:
        for message in messages:
            frame = message if isinstance(message, bytes) else encode(message)
            for start in range(0, len(frame), PIECE):
                more = start + PIECE < len(frame)
                head = bytes([more]) + self.received.to_bytes(HEADER - 1, "little")
                await self.send_bytes(head + frame[start : start + PIECE])

    async def hear(self) -> Any:
        """Return the next message of the service. Raises Ended."""
        while True:
            data = await self.receive_bytes()
            self.received += 1
            self._parts.append(data[HEADER:])
            if not data[0]:
                frame, self._parts = b"".join(self._parts), []
                return TO_NODE.decode(frame)

    async def given(self) -> CallRequest[RunAttempt]:
        """Return the service's next call that starts an attempt. All other messages are skipped."""
        while not (isinstance(message := await self.hear(), CallRequest) and isinstance(message.request, RunAttempt)):
            pass
        return message

    async def ended(self) -> Ended:
        """Read until the service closes the connection, and return the Ended."""
        try:
            while True:
                await self.hear()
        except Ended as end:
            return end
