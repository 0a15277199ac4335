"""A link whose peer reads slowly, or not at all, and a link of a process that was stopped."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

import pytest

from outrider.nodes.messages import TO_SERVICE
from outrider.wire import link as link_module
from outrider.wire.link import Disconnected, Link, Socket
from outrider.wire.link_protocol import Beat, Close, encode


class Peer(Socket):
    """A `Socket` whose peer sends what is in `frames`, and takes a frame only while `takes` is set. A `Disconnected` in
    `frames` is the end of the connection."""

    def __init__(self) -> None:
        self.takes = asyncio.Event()
        self.taking = asyncio.Event()
        """Set once a frame waits for the peer."""
        self.frames: asyncio.Queue[bytes | Disconnected] = asyncio.Queue()
        self.taken_frames: list[bytes] = []

    async def send(self, frame: bytes) -> None:
        self.taking.set()
        await self.takes.wait()
        await asyncio.sleep(0)
        self.taken_frames.append(frame)

    async def receive(self) -> bytes:
        frame = await self.frames.get()
        if isinstance(frame, Disconnected):
            raise frame
        return frame

    async def close(self, code: int, reason: str) -> None:
        await self.takes.wait()


def linked(peer: Peer, *, heartbeat: float = 100, silence: float = 100) -> Link[Any]:
    return Link(peer, TO_SERVICE, heartbeat=heartbeat, silence=silence)


async def end(running: asyncio.Task[Disconnected]) -> None:
    running.cancel()
    await asyncio.wait([running])


async def test_room_is_not_given_to_all_that_wait_for_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link is not taken for one whose peer reads too slowly, however many senders wait for room."""
    monkeypatch.setattr(link_module, "CROWDED", 1000)
    monkeypatch.setattr(link_module, "MAX_WAITING", 5000)
    peer, waits = Peer(), 0
    link = linked(peer)

    class Counted(asyncio.Event):
        async def wait(self) -> Literal[True]:
            nonlocal waits
            waits += 1
            return await super().wait()

    link._spacious = Counted()
    link._spacious.set()
    running = asyncio.create_task(link.run(lambda message: None))

    async def say() -> None:
        await link.room()
        assert link._waiting_bytes <= 1000
        link.send_encoded(bytes(400))

    async with asyncio.timeout(60), asyncio.TaskGroup() as senders:
        for _ in range(100):
            senders.create_task(say())
        await peer.taking.wait()
        peer.takes.set()
    while len(peer.taken_frames) < 100:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert not running.done()
    assert waits <= 200, "the work grows with the square of the number of senders"
    await end(running)


async def test_nobody_waits_for_room_on_a_connection_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node may go away while the service waits to send it another task."""
    monkeypatch.setattr(link_module, "CROWDED", 1000)
    peer = Peer()
    link = linked(peer)
    running = asyncio.create_task(link.run(lambda message: None))
    for _ in range(5):
        link.send_encoded(bytes(400))
    await peer.taking.wait()
    waiting = asyncio.create_task(link.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    peer.frames.put_nowait(Disconnected(1006))
    async with asyncio.timeout(60):
        assert (await running).code == 1006
        await waiting


@pytest.mark.parametrize("sending", [True, False])
async def test_a_peer_that_takes_a_little_now_and_then_cannot_keep_a_closed_link(
    monkeypatch: pytest.MonkeyPatch, sending: bool
) -> None:
    monkeypatch.setattr(link_module, "CLOSE_SECONDS", 0.2, raising=False)
    peer = Peer()
    link = linked(peer, heartbeat=0.1)
    running = asyncio.create_task(link.run(lambda message: None))
    if sending:
        link.send_encoded(b"x")
        await peer.taking.wait()
    link.close(Close.SILENT, "it is given up")
    async with asyncio.timeout(60):
        while not running.done():
            peer.taken = peer.last_arrival = asyncio.get_running_loop().time()
            await asyncio.sleep(0.01)
    assert running.result().reason == "it is given up"


async def test_a_process_that_was_stopped_does_not_blame_its_peer_for_reading_nothing() -> None:
    peer = Peer()
    link = linked(peer, heartbeat=0.2, silence=0.4)
    running = asyncio.create_task(link.run(lambda message: None))
    link.send(Beat())
    await peer.taking.wait()
    await asyncio.sleep(0.05)
    time.sleep(1.0)  # noqa: ASYNC251  # stops the event loop, as SIGSTOP would
    await asyncio.sleep(0.15)  # the link looks at its peer in this time
    assert not running.done()
    peer.takes.set()
    peer.frames.put_nowait(encode(Beat()))
    await asyncio.sleep(0.1)
    assert not running.done()
    await end(running)


async def test_messages_that_have_piled_up_do_not_hold_up_the_event_loop() -> None:
    """While a link does not read, messages pile up in its socket. Afterwards, other work of the event loop goes on
    between them."""
    peer = Peer()
    read = others = 0
    for _ in range(100):
        peer.frames.put_nowait(encode({"type": "beat", "more": "x" * 60_000}))
    link = linked(peer)

    async def ready() -> None:
        nonlocal read
        read += 1

    running = asyncio.create_task(link.run(lambda message: None, ready=ready))
    while read <= 100:
        others += 1
        await asyncio.sleep(0)
    assert others >= 50
    await end(running)
