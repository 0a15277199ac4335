"""The host's end of the connection to a tool server, against servers that misbehave."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Coroutine

import msgspec
import pytest

from outrider.errors import RuntimeFailure
from outrider.sandbox.runtimes.tool_server.client import (
    FRAME_MAX,
    GRACE_SECONDS,
    PART_MIN,
    STRAY_MAX,
    TEXT_MAX,
    Done,
    ExecDone,
    ToolClient,
    ToolPart,
)
from support.clock import pass_time, stop_time


def frame(*reply: object) -> bytes:
    return raw(msgspec.msgpack.encode(reply))


def raw(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


class Peer:
    """The server's end of a client's connection, played by the test."""

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
        one = group.create_task(client.call("a", {}, ToolPart, on_part=parts.append))
        two = group.create_task(client.call("b", {"x": 1}, ToolPart))
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
        (raw(b"\x93\x01\xa2ok" + b"\x91" * 100_000 + b"\xc0"), RuntimeFailure),
        (raw(b"\x93\x01\xa2ok\x81\xa1x" + b"\x91" * 900 + b"\xc0"), RuntimeFailure),
        (raw(b"\x93\x01\xa5error\x82\xa4code\xa6failed\xa4text\xa1\xff"), RuntimeFailure),
        (frame(1, "ok", {"code": 1 << 40, "out": b"", "err": b"", "timed_out": False, "us": 0}), RuntimeFailure),
    ],
)
async def test_bad_replies_are_typed_errors(
    pair: tuple[ToolClient, Peer], reply: bytes, error: type[Exception]
) -> None:
    client, peer = pair
    await peer.send(reply)
    with pytest.raises(error) as raised:
        await client.call("exec", {}, ExecDone)
    if isinstance(raised.value, RuntimeFailure):
        assert raised.value.inside or client.loss == "wrong"


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
    assert (client.loss, (await failing()).inside) == ("gone", False)


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


async def test_a_cancellation_that_comes_with_the_reply_waits_for_nothing(pair: tuple[ToolClient, Peer]) -> None:
    client, peer = pair
    stop_time()  # with stopped time, a wait for a second reply would not end
    task = asyncio.create_task(client.call("exec", {}, Done))
    call, _, _ = await peer.request()
    client.data_received(frame(call, "ok", {}))
    task.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert task.cancelled()


@pytest.mark.parametrize("size", [0, 5000])
async def test_a_server_that_sends_more_parts_than_asked_for_is_dropped(
    pair: tuple[ToolClient, Peer], size: int
) -> None:
    """Empty parts count, too, because each of them costs something."""
    client, peer = pair
    parts: list[bytes] = []
    flood = frame(1, "part", {"data": b"x" * size}) * 30
    await peer.send(flood)
    with pytest.raises(RuntimeFailure, match="more than it was asked for"):
        await client.call("glob", {}, Done, on_part=parts.append, room=20 * PART_MIN)
    assert sum(map(len, parts)) <= 21 * PART_MIN
    assert len(parts) < 30


@pytest.mark.timeout(60)
@pytest.mark.parametrize("stray", [frame(7, "ok", {}), frame(1, "part", {"data": b""})])
async def test_a_server_that_floods_what_nobody_waits_for_is_dropped(
    pair: tuple[ToolClient, Peer], stray: bytes
) -> None:
    client, peer = pair
    async with asyncio.TaskGroup() as group:
        task = group.create_task(failure(client.call("exec", {}, Done)))
        await peer.request()
        for _ in range(STRAY_MAX // PART_MIN // 1000 + 1):
            try:
                await peer.send(stray * 1000)
            except OSError:
                break
    assert "nobody waits for" in task.result().message


async def failure(call: Coroutine[None, None, object]) -> RuntimeFailure:
    with pytest.raises(RuntimeFailure) as raised:
        await call
    return raised.value


async def test_what_a_server_says_of_an_error_is_cut(pair: tuple[ToolClient, Peer]) -> None:
    client, peer = pair
    await peer.send(frame(1, "error", {"code": "failed", "text": "x" * 5_000_000}))
    assert len((await failure(client.call("exec", {}, Done))).message) == TEXT_MAX


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_a_client_closed_while_it_opens_leaves_nothing(turns: int) -> None:
    """No transport is left, and no callback for a descriptor that has another owner by then."""
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    ours, theirs = socket.socketpair()
    client = ToolClient(ours, lambda: "")
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        opening = group.create_task(failure(client.open()))
        for _ in range(turns):
            await asyncio.sleep(0)
        await client.close()
    assert opening.result().message == "the sandbox was stopped"
    async with asyncio.timeout(10):
        await client.close()
    assert ours.fileno() == -1
    with theirs:
        theirs.setblocking(False)
        assert theirs.recv(1) == b""
    assert faults == []


async def test_arguments_that_cannot_be_sent_are_a_failure_of_their_call(pair: tuple[ToolClient, Peer]) -> None:
    client, peer = pair
    for value in ("\ud800", 1 << 70):
        assert (await failure(client.call("exec", {"script": value}, Done))).message.startswith("cannot send exec")
    assert client._calls == {}
    async with asyncio.TaskGroup() as group:
        task = group.create_task(client.call("a", {}, Done))
        await peer.send(frame((await peer.request())[0], "ok", {}))
    assert task.result() == Done()


@pytest.mark.parametrize("turns", [1, 2])
def test_a_client_whose_opening_is_cancelled_is_lost(turns: int) -> None:
    """The test runs on the event loop of a service (uvloop), whose transports take longer to close."""
    uvloop = pytest.importorskip("uvloop")

    async def cancelled() -> None:
        ours, theirs = socket.socketpair()
        client, peer = ToolClient(ours, lambda: ""), Peer(theirs)
        async with asyncio.TaskGroup() as group:
            opening = group.create_task(client.open())
            for _ in range(turns):
                await asyncio.sleep(0)
            opening.cancel()
        assert opening.cancelled()
        assert "was not opened" in (await failure(client.call("stop", {}, Done))).message
        await client.close()
        assert await asyncio.get_running_loop().sock_recv(peer.end, 1) == b""
        theirs.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(cancelled())


async def test_a_server_that_does_not_answer_is_stuck_and_one_whose_answer_lies_there_is_not(
    pair: tuple[ToolClient, Peer],
) -> None:
    """This also holds if the event loop was blocked for longer than the call may take."""
    stop_time()
    client, peer = pair
    async with asyncio.TaskGroup() as group:
        answered = group.create_task(client.call("a", {}, Done, seconds=0.1))
        number, _, _ = await peer.request()
        peer.end.send(frame(number, "ok", {}))
        await pass_time(GRACE_SECONDS + 0.4, step=GRACE_SECONDS + 0.4)
        await answered
        stuck = group.create_task(failure(client.call("b", {}, Done, seconds=0.1)))
        await peer.request()
        await pass_time(GRACE_SECONDS + 1)
        assert "stuck in b" in (await stuck).message
