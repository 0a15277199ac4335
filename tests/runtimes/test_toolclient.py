"""The host's end against servers that misbehave."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import msgspec
import pytest

from outrider.errors import RuntimeFailure
from outrider.runtimes.toolclient import FRAME_MAX, Done, ExecDone, Part, ToolClient


def frame(*reply: object) -> bytes:
    body = msgspec.msgpack.encode(reply)
    return len(body).to_bytes(4, "big") + body


class Peer:
    """The far end of a client's connection, played by the test."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        end.setblocking(False)

    async def request(self) -> tuple[int, str, dict[str, object]]:
        loop = asyncio.get_running_loop()
        size = int.from_bytes(await loop.sock_recv(self.end, 4), "big")
        call, method, args = msgspec.msgpack.decode(await loop.sock_recv(self.end, size))
        return call, method, args

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.end, data)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[ToolClient, Peer]]:
    ours, theirs = socket.socketpair()
    client = ToolClient(ours, lambda: "its last words")
    await client.open()
    yield client, Peer(theirs)
    await client.close()
    theirs.close()


async def test_replies_find_their_calls_in_any_order(pair: tuple[ToolClient, Peer]) -> None:
    client, peer = pair
    parts: list[bytes] = []
    async with asyncio.TaskGroup() as group:
        one = group.create_task(client.call("a", {}, Part, on_part=parts.append))
        two = group.create_task(client.call("b", {"x": 1}, Part))
        first, second = await peer.request(), await peer.request()
        assert (first[1:], second[1:]) == (("a", {}), ("b", {"x": 1}))
        replies = frame(second[0], "ok", {"data": b"2"}) + frame(first[0], "part", {"data": b"p"})
        for byte in replies + frame(first[0], "ok", {"data": b"1"}):
            await peer.send(bytes([byte]))
    assert (one.result().data, two.result().data, parts) == (b"1", b"2", [b"p"])


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (frame(1, "error", {"code": "missing", "text": "x"}), FileNotFoundError),
        (frame(1, "error", {"code": "directory", "text": "x"}), IsADirectoryError),
        (frame(1, "error", {"code": "failed", "text": "x"}), RuntimeFailure),
        (frame(1, "ok", {"code": "no number"}), RuntimeFailure),
        (frame(1, "error", {"code": "other"}), RuntimeFailure),
        (frame("what"), RuntimeFailure),
        (b"\0\0\0\x03abc", RuntimeFailure),
        ((FRAME_MAX + 1).to_bytes(4, "big"), RuntimeFailure),
    ],
)
async def test_bad_replies_are_typed_errors(
    pair: tuple[ToolClient, Peer], reply: bytes, error: type[Exception]
) -> None:
    client, peer = pair
    await peer.send(reply)
    with pytest.raises(error):
        await client.call("exec", {}, ExecDone)


async def test_a_dead_server_fails_all_calls_with_its_last_words(pair: tuple[ToolClient, Peer]) -> None:
    client, peer = pair

    async def failing() -> RuntimeFailure:
        with pytest.raises(RuntimeFailure) as raised:
            await client.call("exec", {}, Done)
        return raised.value

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(failing()) for _ in range(3)]
        for _ in tasks:
            await peer.request()
        peer.end.close()
    assert {task.result().log_tail for task in tasks} == {"its last words"}
    assert (await failing()).message == "the sandbox's tool server is gone"


async def test_cancellation_waits_for_the_end_inside(pair: tuple[ToolClient, Peer]) -> None:
    client, peer = pair
    async with asyncio.TaskGroup() as group:
        task = group.create_task(client.call("exec", {}, Done))
        call, _, _ = await peer.request()
        task.cancel()
        assert await peer.request() == (0, "cancel", {"call": call})
        assert not task.done()
        await peer.send(frame(call, "ok", {}))
    assert task.cancelled()
