"""Frames over connections that may break at any point."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.wire import resumable
from outrider.wire.link import Disconnected, Socket
from outrider.wire.link_protocol import Close
from outrider.wire.resumable import ResumableSocket

MOST = 1 << 20


class Wire:
    """Both ends of a connection that breaks after `messages` messages. A later `send` fails; an end receives the
    messages that were sent before, and then `Disconnected`."""

    def __init__(self, messages: int) -> None:
        self._left = messages
        self._ways: tuple[asyncio.Queue[bytes | None], ...] = (asyncio.Queue(), asyncio.Queue())
        self.ends = (End(self, 0), End(self, 1))

    def put(self, way: int, message: bytes) -> None:
        if self._left == 0:
            raise Disconnected(1006)
        self._left -= 1
        self._ways[way].put_nowait(message)
        if self._left == 0:
            for each in self._ways:
                each.put_nowait(None)

    async def get(self, way: int) -> bytes:
        message = await self._ways[way].get()
        if message is None:
            self._ways[way].put_nowait(None)
            raise Disconnected(1006)
        return message


class End(Socket):
    """`Socket` of one end of a `Wire`. A message arrives one step of the event loop later; if the connection breaks
    within this step, `send` fails."""

    def __init__(self, wire: Wire, side: int) -> None:
        self._wire = wire
        self._side = side

    async def send(self, frame: bytes) -> None:
        await asyncio.sleep(0)
        self._wire.put(self._side, frame)

    async def receive(self) -> bytes:
        return await self._wire.get(1 - self._side)

    async def close(self, code: int, reason: str) -> None:
        """Nothing to close."""


async def connect(one: ResumableSocket, other: ResumableSocket, messages: int) -> None:
    """Carry frames between two sockets over a connection until the connection breaks."""
    wire = Wire(messages)
    replaced = one.take_over(), other.take_over()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(one.carry(wire.ends[0], other.received, replaced[0]))
        tasks.create_task(other.carry(wire.ends[1], one.received, replaced[1]))


@pytest.mark.deep
@settings(deadline=None, max_examples=200)
@given(
    frames=st.lists(st.binary(min_size=1, max_size=40), max_size=12),
    back=st.lists(st.binary(min_size=1, max_size=40), max_size=12),
    breaks=st.lists(st.integers(0, 12), max_size=12),
    seed=st.integers(0, 99),
)
def test_every_frame_arrives_whole_once_and_in_order(
    frames: list[bytes], back: list[bytes], breaks: list[int], seed: int
) -> None:
    async def run() -> None:
        one, other = (ResumableSocket(MOST, piece=7) for _ in range(2))
        draw = random.Random(seed)

        async def say(socket: ResumableSocket, said: list[bytes]) -> None:
            for frame in said:
                await socket.send(frame)
                for _ in range(draw.randrange(6)):
                    await asyncio.sleep(0)

        async def hear(socket: ResumableSocket, count: int) -> list[bytes]:
            return [await socket.receive() for _ in range(count)]

        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            tasks.create_task(say(one, frames))
            tasks.create_task(say(other, back))
            heard = tasks.create_task(hear(other, len(frames))), tasks.create_task(hear(one, len(back)))
            for messages in breaks:
                breaking = tasks.create_task(connect(one, other, messages))
                await asyncio.wait([breaking], timeout=0.002)
                breaking.cancel()
                await asyncio.wait([breaking])
            last = tasks.create_task(connect(one, other, 1000))
            await asyncio.wait(heard)
            last.cancel()
        assert [task.result() for task in heard] == [frames, back]

    asyncio.run(run())


async def test_what_arrived_is_forgotten() -> None:
    one, other = ResumableSocket(MOST), ResumableSocket(MOST)
    async with asyncio.TaskGroup() as tasks:
        wire = tasks.create_task(connect(one, other, 10_000))
        for _ in range(50):
            await one.send(b"x")
            await other.receive()
            await other.send(b"y")
            await one.receive()
        await one.send(b"last")
        await other.receive()
        wire.cancel()
    assert len(one._unacknowledged) <= 2
    assert len(other._unacknowledged) <= 1


def piece(data: bytes, *, more: bool = False, received: int = 0) -> bytes:
    return bytes([more]) + received.to_bytes(8, "little") + data


BROKEN = {
    "short": [b"short"],
    "acknowledges what was never sent": [piece(b"x", received=2)],
    "acknowledges far more": [piece(b"x", received=2**64 - 1)],
    "tiny pieces of a frame": [piece(b"x", more=True)] * 2,
    "empty pieces of a frame": [piece(b"", more=True)],
    "a long piece": [piece(bytes(resumable.PIECE + 1))],
    "a frame without end": [piece(bytes(resumable.PIECE), more=True)] * (MOST // resumable.PIECE + 1),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_a_peer_that_breaks_the_protocol_ends_its_connection(case: str) -> None:
    one = ResumableSocket(MOST)
    await one.send(b"a")
    wire = Wire(100)
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        carrying = tasks.create_task(one.carry(wire.ends[0], 0, one.take_over()))
        for each in BROKEN[case]:
            await wire.ends[1].send(each)
        assert (await carrying).code == Close.NONSENSE


async def test_a_peer_that_has_what_was_never_sent_gets_no_connection() -> None:
    one = ResumableSocket(MOST)
    await one.send(b"a")
    assert (await one.carry(Wire(100).ends[0], 1, one.take_over())).code == Close.NONSENSE


@pytest.mark.parametrize("why", ["no piece", "never sent", "replaced"])
async def test_nothing_keeps_a_socket_that_has_ended(why: str) -> None:
    async def use() -> weakref.ref[ResumableSocket]:
        one, wire = ResumableSocket(MOST), Wire(100)
        replaced = one.take_over()
        if why == "no piece":
            await wire.ends[1].send(b"short")
        elif why == "replaced":
            one.take_over()
        one.end(await one.carry(wire.ends[0], int(why == "never sent"), replaced))
        with pytest.raises(Disconnected):
            await one.receive()
        return weakref.ref(one)

    socket = await use()
    gc.collect()
    assert socket() is None


class Counting(Socket):
    """`Socket` of a peer that sends the same piece without end, and accepts every frame."""

    def __init__(self, data: bytes) -> None:
        self.given = 0
        self._data = data

    async def send(self, frame: bytes) -> None:
        await asyncio.sleep(0)

    async def receive(self) -> bytes:
        await asyncio.sleep(0)
        self.given += 1
        return self._data

    async def close(self, code: int, reason: str) -> None:
        """Nothing to close."""


@pytest.mark.parametrize("size", [1, 1000, resumable.PIECE])
async def test_what_nobody_reads_yet_is_not_taken_from_the_peer(size: int) -> None:
    unread = max(1 << 18, 2 * size)
    one, peer = ResumableSocket(MOST, most_unread=unread), Counting(piece(bytes(size)))
    most = unread // (size + resumable.FRAME_COST) + 1
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        carrying = tasks.create_task(one.carry(peer, 0, one.take_over()))
        while peer.given < most:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert peer.given == most
        await one.receive()
        while peer.given == most:  # noqa: ASYNC110
            await asyncio.sleep(0)
        carrying.cancel()


async def test_a_peer_that_acknowledges_nothing_is_kept_in_bounded_memory() -> None:
    one, peer = ResumableSocket(MOST), Counting(piece(b"x"))
    frame = bytes(resumable.PIECE)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        carrying = tasks.create_task(one.carry(peer, 0, one.take_over()))
        for _ in range(resumable.MAX_UNACKNOWLEDGED // len(frame) + 1):
            await one.send(frame)
        last = tasks.create_task(one.send(frame))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not last.done()
        one.end(Disconnected(1006))
        await last
        carrying.cancel()


async def test_an_end_is_told_when_all_that_came_before_was_read() -> None:
    one, other = ResumableSocket(MOST), ResumableSocket(MOST)
    await one.send(b"a")
    wire = Wire(100)
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        carried = [
            tasks.create_task(end.carry(socket, 0, end.take_over()))
            for end, socket in zip((one, other), wire.ends, strict=True)
        ]
        await asyncio.sleep(0.05)
        other.end(Disconnected(4410, "gone"))
        assert await other.receive() == b"a"
        with pytest.raises(Disconnected, match="gone"):
            await other.receive()
        for task in carried:
            task.cancel()


class Dead(Socket):
    """`Socket` of a dead connection whose loss is not noticed: sent frames vanish, and no frame arrives."""

    async def send(self, frame: bytes) -> None:
        """Drop the frame without waiting, because a server's socket has a buffer."""

    async def receive(self) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    async def close(self, code: int, reason: str) -> None:
        """Nothing to close."""


@pytest.mark.parametrize("steps", range(4))
async def test_a_connection_that_nobody_knew_to_be_dead_takes_nothing_with_it(steps: int) -> None:
    one, other = ResumableSocket(MOST), ResumableSocket(MOST)
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        dead = tasks.create_task(one.carry(Dead(), 0, one.take_over()))
        await one.send(b"a")
        await asyncio.sleep(0.01)
        wire = Wire(1000)
        replaced = one.take_over()
        for _ in range(steps):
            await asyncio.sleep(0)
        await one.send(b"b")
        there = tasks.create_task(other.carry(wire.ends[1], 0, other.take_over()))
        here = tasks.create_task(one.carry(wire.ends[0], other.received, replaced))
        assert [await other.receive(), await other.receive()] == [b"a", b"b"]
        assert (await dead).code == 1006
        for task in (there, here):
            task.cancel()


async def test_of_two_connections_at_once_the_later_one_counts() -> None:
    one, other = ResumableSocket(MOST), ResumableSocket(MOST)
    await one.send(b"a")
    wire = Wire(1000)
    first, second = one.take_over(), one.take_over()
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        late = tasks.create_task(one.carry(Dead(), 0, first))
        carried = [
            tasks.create_task(one.carry(wire.ends[0], 0, second)),
            tasks.create_task(other.carry(wire.ends[1], 0, other.take_over())),
        ]
        assert await other.receive() == b"a"
        assert (await late).code == 1006
        for task in carried:
            task.cancel()
