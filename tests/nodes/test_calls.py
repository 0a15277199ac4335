"""The dispatcher of calls between a service and a node: replies, errors, cancellations, and lost connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast, get_args

import msgspec
import pytest

from outrider.errors import Conflict, ContextOverflow, OutriderError, Overflow, ServiceError
from outrider.nodes import messages
from outrider.nodes.calls import CallEnded, Handler, LinkCalls
from outrider.nodes.messages import (
    MAX_FROM_NODE,
    REPLIES,
    TO_SERVICE,
    CallReply,
    CallRequest,
    CallToNode,
    CallToService,
    CancelCall,
    KeepArtifact,
    NodeCall,
    NodeStream,
    ReadCarried,
    Take,
)
from outrider.nodes.remote_node import NodeConnection
from outrider.nodes.service_proxy import ServiceProxy
from outrider.sessions.resources import Capacity, ResourceAmount
from outrider.wire import link as link_module
from outrider.wire.link import Disconnected, Link, Socket
from outrider.wire.link_protocol import Nonsense, encode

READ = ReadCarried("s", 1)
TAKE = Take(ResourceAmount(cpus=1.0), 0)


@dataclass
class End(Socket):
    """A `Socket` whose frames another end receives."""

    received: asyncio.Queue[bytes | Disconnected] = field(default_factory=asyncio.Queue)
    other: End | None = None

    async def send(self, frame: bytes) -> None:
        assert self.other is not None
        self.other.received.put_nowait(frame)

    async def receive(self) -> bytes:
        if isinstance(frame := await self.received.get(), Disconnected):
            raise frame
        return frame

    async def close(self, code: int, reason: str) -> None:
        assert self.other is not None
        self.other.received.put_nowait(Disconnected(code, reason))


class Both:
    """The two ends of a connection, which carry out each other's calls with `handlers`."""

    def __init__(
        self, tasks: asyncio.TaskGroup, handlers: dict[type[NodeCall[Any]], Handler], *, elsewhere: bool
    ) -> None:
        one, two = End(), End()
        one.other, two.other = two, one
        links = [Link(end, TO_SERVICE, heartbeat=100, silence=100) for end in (one, two)]
        self.caller, self.callee = (
            LinkCalls(link, handlers, peer="it", spawn=tasks.create_task, elsewhere=elsewhere) for link in links
        )
        self.links = links
        self.running = [
            tasks.create_task(link.run(calls.receive, ready=calls.ready_for_more))  # type: ignore[arg-type]
            for link, calls in zip(links, (self.caller, self.callee), strict=True)
        ]

    def end(self) -> None:
        for calls, task in zip((self.caller, self.callee), self.running, strict=True):
            calls.end()
            calls.cancel()
            task.cancel()


@asynccontextmanager
async def both(*, elsewhere: bool = False, **handlers: Handler) -> AsyncIterator[Both]:
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        ends = Both(
            tasks, {getattr(messages, name): handler for name, handler in handlers.items()}, elsewhere=elsewhere
        )
        yield ends
        ends.end()


@pytest.mark.parametrize("kind", [*get_args(CallToNode), *get_args(CallToService)])
async def test_every_kind_of_call_has_a_reply_and_somebody_who_carries_it_out(kind: type[NodeCall[Any]]) -> None:
    assert kind in REPLIES
    link: Any = Link(End(), TO_SERVICE, heartbeat=1, silence=1)
    if kind in get_args(CallToNode):
        calls = ServiceProxy(End(), Capacity(cpus=1.0, memory_mb=1)).calls
    else:
        calls = NodeConnection("n", link, cast(Any, None), asyncio.TaskGroup(), dialled=True).calls
    assert kind in calls._handlers


async def test_many_calls_at_once_each_get_their_own_reply() -> None:
    async def carried(call: ReadCarried) -> bytes:
        await asyncio.sleep(0.001 * (20 - call.attempt))
        return b"%d" % call.attempt

    async with both(ReadCarried=carried) as ends:
        found = await asyncio.gather(*(ends.caller.call(ReadCarried("s", number)) for number in range(20)))
        assert found == [b"%d" % number for number in range(20)]


@pytest.mark.parametrize(
    "error",
    [Conflict("taken", hint="wait"), ServiceError("no", field="x", log_tail="log")],
    ids=lambda error: type(error).__name__,
)
async def test_an_error_arrives_with_its_fields(error: OutriderError) -> None:
    async def carried(call: ReadCarried) -> bytes:
        raise error

    async with both(ReadCarried=carried) as ends:
        with pytest.raises(type(error)) as caught:
            await ends.caller.call(READ)
        assert caught.value.record() == error.record()


async def test_an_overflow_arrives_with_its_numbers() -> None:
    async def carried(call: ReadCarried) -> bytes:
        raise ContextOverflow("long", overflow=Overflow(9, 8))

    async with both(ReadCarried=carried) as ends:
        with pytest.raises(ContextOverflow) as caught:
            await ends.caller.call(READ)
        assert caught.value.overflow == Overflow(9, 8)


async def test_a_bug_is_an_error_of_that_call_only(caplog: pytest.LogCaptureFixture) -> None:
    async def carried(call: ReadCarried) -> bytes:
        return b"%d" % (1 // call.attempt)

    async with both(ReadCarried=carried) as ends:
        with pytest.raises(ServiceError, match="ZeroDivisionError"):
            await ends.caller.call(ReadCarried("s", 0))
        assert await ends.caller.call(READ) == b"1"
    assert "a call of it failed" in caplog.text


async def test_what_is_too_long_or_cannot_be_sent_fails_its_call_only() -> None:
    long = bytes(MAX_FROM_NODE)
    values: list[object] = [long, 1 << 70, b"x"]

    async def carried(call: ReadCarried) -> object:
        return values[call.attempt]

    async with both(elsewhere=True, ReadCarried=carried) as ends:
        with pytest.raises(ServiceError, match="too long"):
            await ends.caller.call(ReadCarried("s", 0))
        with pytest.raises(ServiceError, match="cannot be sent"):
            await ends.caller.call(ReadCarried("s", 1))
        with pytest.raises(ServiceError, match=r"KeepArtifact of .* too long"):
            await ends.caller.call(KeepArtifact("s", 1, long))
        assert await ends.caller.call(ReadCarried("s", 2)) == b"x"


async def test_calls_that_are_large_together_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many calls at once do not fill the queue of the link so far that the link closes."""
    monkeypatch.setattr(link_module, "CROWDED", 1000)
    monkeypatch.setattr(link_module, "MAX_WAITING", 5000)

    async def kept(call: KeepArtifact) -> str:
        return f"{call.attempt}"

    async def taken(call: Take) -> AsyncGenerator[tuple[str, ...], None]:
        yield (call.tenant,)

    async def take(number: int) -> list[tuple[str, ...]]:
        request = Take(ResourceAmount(cpus=1.0), 0, f"{number:060}")
        return [value async for value in ends.caller.stream(request)]

    async with both(KeepArtifact=kept, Take=taken) as ends:
        found = await asyncio.gather(*(ends.caller.call(KeepArtifact("s", number, bytes(400))) for number in range(50)))
        assert found == [f"{number}" for number in range(50)]
        assert all(await asyncio.gather(*map(take, range(100))))


async def test_a_stream_that_is_cancelled_ends_at_the_other_end_too() -> None:
    ended = asyncio.Event()

    async def take(call: Take) -> AsyncGenerator[tuple[str, ...], None]:
        try:
            yield ("gpu",)
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with both(Take=take) as ends:
        with ends.caller.pending(TAKE) as call:
            assert await call.next() == ("gpu",)
            assert not ended.is_set()
            call.cancel()
            with pytest.raises(CallEnded):
                await call.next()
        assert ended.is_set()
        assert ends.callee.streams(Take) == []


async def test_a_call_that_is_no_stream_cannot_be_cancelled_and_its_late_reply_is_dropped() -> None:
    may = asyncio.Event()
    done: list[int] = []

    async def carried(call: ReadCarried) -> bytes:
        if not call.attempt:
            await may.wait()
        done.append(call.attempt)
        return b"x"

    async with both(ReadCarried=carried) as ends:
        given_up = asyncio.create_task(ends.caller.call(ReadCarried("s", 0)))
        await ends.caller.call(READ)
        given_up.cancel()
        ends.links[0].send(CancelCall(0))
        await ends.caller.call(READ)
        may.set()
        while len(done) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert await ends.caller.call(READ) == b"x"
        assert done == [1, 1, 0, 1]


async def test_the_end_of_the_connection_fails_the_calls_of_both_ends() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def carried(call: ReadCarried) -> bytes:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return b""

    async with both(ReadCarried=carried) as ends:
        waiting = asyncio.create_task(ends.caller.call(READ))
        await begun.wait()
        ends.end()
        with pytest.raises(ServiceError, match="it is gone"):
            await waiting
        with pytest.raises(ServiceError, match="it is gone"):
            await ends.caller.call(READ)
        await ended.wait()


WRONG: dict[str, tuple[Callable[[LinkCalls], Any], str]] = {
    "a reply to nothing": (lambda calls: CallReply(7), "never made"),
    "a value of another type": (lambda calls: CallReply(0, msgspec.Raw(encode({"a": 1}))), "no message"),
    "a number again": (lambda calls: CallRequest(-1, READ), "came after"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_what_no_honest_end_sends(case: str) -> None:
    make, why = WRONG[case]

    async def carried(call: ReadCarried) -> bytes:
        await asyncio.Event().wait()
        return b""

    async with both(ReadCarried=carried) as ends:
        with ends.caller.pending(READ), pytest.raises(Nonsense, match=why):
            ends.caller.receive(make(ends.caller))


def test_only_streams_may_be_cancelled() -> None:
    streams = {kind.__name__ for kind in REPLIES if issubclass(kind, NodeStream)}
    assert streams == {"RunAttempt", "Take", "GenerateTokens", "GenerateChat"}
