"""Remote procedure calls between a service and a node over one connection. Each side can call the other.

`messages.py` defines the calls. Invariant: each call gets exactly one last reply, unless the connection ends first.

A side closes the connection if the other side breaks the protocol, for example:
- A value has a wrong type.
- A reply belongs to a call that was never made.
- The number of a call is not higher than the number of the previous call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any, Generic

import msgspec

from outrider.errors import UNREADABLE, OutriderError, ServiceError, error_from, record_of
from outrider.nodes.messages import (
    REPLIES,
    CallMessage,
    CallReply,
    CallRequest,
    CancelCall,
    NodeCall,
    NodeStream,
    R,
    framed,
)
from outrider.wire.link import Link
from outrider.wire.link_protocol import Close, Nonsense

log = logging.getLogger("outrider.node")

MAX_CALLS, MAX_CALL_BYTES = 1024, 64 << 20
"""Maximum number and maximum total bytes of the peer's unanswered calls. Streams (`NodeStream`) do not count. At either
limit, nothing more is read from the peer until one of the unanswered calls has been answered."""

Handler = Callable[[Any], Coroutine[Any, Any, object] | AsyncGenerator[object, None]]
"""A function that carries out the calls of one class. A handler of a `NodeStream` returns an asynchronous generator,
and must itself limit the number of open streams. A handler of other calls is a coroutine function. A handler raises
Nonsense if a call breaks the protocol."""


class CallEnded(Exception):
    """The stream has ended, and its last value has already been returned."""


class PendingCall(Generic[R]):
    """A call that has not received its last reply yet."""

    def __init__(self, calls: LinkCalls, number: int, kind: type[NodeCall[R]]) -> None:
        self._calls = calls
        self._number = number
        self._decoder: msgspec.msgpack.Decoder[R] = REPLIES[kind]
        self._replies: asyncio.Queue[tuple[CallReply, R | None]] = asyncio.Queue()
        self._ended = False

    def receive(self, reply: CallReply) -> None:
        """Queue a reply of the peer for `next`. Raises Nonsense if the reply's value has a wrong type."""
        if self._ended:
            return
        try:
            value = self._decoder.decode(reply.value) if memoryview(reply.value) else None
        except UNREADABLE as error:
            raise Nonsense(f"no message of this protocol: {error}") from error
        self._ended = not reply.more
        self._replies.put_nowait((reply, value))

    async def next(self) -> R:
        """Return the value of the next reply, or raise the error that the reply contains. Raises CallEnded after the
        last value of a stream, and ServiceError after the end of the connection."""
        reply, value = await self._replies.get()
        if reply.error is not None:
            raise error_from(reply.error)
        if not memoryview(reply.value):
            raise CallEnded
        return value  # type: ignore[return-value]  # None only if R includes None

    async def end(self) -> None:
        """Wait for the last reply."""
        while (await self._replies.get())[0].more:
            pass

    def cancel(self) -> None:
        """Ask the peer to cancel the call. Has no effect if the call has ended. Only a `NodeStream` can be
        cancelled."""
        if not self._ended:
            self._calls.send(CancelCall(self._number))

    def forget(self) -> None:
        """Ignore all later replies."""
        self._calls.forget(self._number)


class LinkCalls:
    """Makes calls to the peer over a connection, and carries out the peer's calls.

    `handlers`: the handler for each class of call that the peer may make.
    `spawn`: starts the task in which a handler runs.
    `peer`: describes the peer in errors and log lines.
    `elsewhere`: True if this side is a node on another machine (see `framed`)."""

    def __init__(
        self,
        link: Link[Any],
        handlers: Mapping[type[NodeCall[Any]], Handler],
        *,
        peer: str,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        elsewhere: bool = False,
    ) -> None:
        self._link = link
        self._handlers = handlers
        self._peer = peer
        self._spawn = spawn
        self._elsewhere = elsewhere
        self._made = 0
        self._pending: dict[int, PendingCall[Any]] = {}
        self._asked = -1
        """The number of the peer's latest call; -1 before the first call."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._streams: dict[int, tuple[type[NodeCall[Any]], int]] = {}
        """Class and size in bytes of each open stream of the peer, by call number."""
        self._unanswered: dict[int, int] = {}
        """Sizes in bytes of the peer's unanswered calls, by call number."""
        self._answered = asyncio.Event()
        self.ended = False

    def begin(self, request: NodeCall[R]) -> PendingCall[R]:
        """Start a call. The caller must call `PendingCall.forget` when it needs no more replies. Raises ServiceError if
        the connection has ended, or if the request cannot be sent."""
        if self.ended:
            raise self._gone()
        number = self._made
        frame = framed(CallRequest(number, request), elsewhere=self._elsewhere)
        self._made += 1
        self._pending[number] = pending = PendingCall(self, number, type(request))
        self._link.send_encoded(frame)
        return pending

    @contextmanager
    def pending(self, request: NodeCall[R]) -> Iterator[PendingCall[R]]:
        """Start a call with `begin`, and forget it at the end of the block."""
        call = self.begin(request)
        try:
            yield call
        finally:
            call.forget()

    async def call(self, request: NodeCall[R]) -> R:
        """Make a call and return the value of the reply. Waits first while too many bytes are queued for sending
        (`room`). Raises the errors of `begin` and `PendingCall.next`. If the caller is cancelled, the peer still
        carries out the call."""
        await self.room()
        with self.pending(request) as call:
            return await call.next()

    async def stream(self, request: NodeStream[R]) -> AsyncGenerator[R, None]:
        """Make a call, and yield the value of each reply. Waits first while too many bytes are queued for sending
        (`room`). If this generator is closed early, the peer cancels the call."""
        await self.room()
        with self.pending(request) as call:
            try:
                while True:
                    yield await call.next()
            except CallEnded:
                return
            finally:
                call.cancel()

    async def room(self) -> None:
        """Wait while too many bytes are queued for sending (`Link.room`). If large calls did not wait, the queue would
        reach the length at which the link closes, although the peer reads all the time."""
        await self._link.room()

    def send(self, message: msgspec.Struct) -> None:
        self._link.send(message)

    def forget(self, number: int) -> None:
        self._pending.pop(number, None)

    def receive(self, message: CallRequest[Any] | CallMessage) -> None:
        """Handle a message of the peer. Raises Nonsense if the message breaks the protocol."""
        match message:
            case CallRequest():
                self._carry_out(message.call, message.request)
            case CancelCall():
                if message.call in self._streams:
                    self._tasks[message.call].cancel()
            case CallReply():
                if (call := self._pending.get(message.call)) is not None:
                    call.receive(message)
                elif message.call >= self._made:
                    raise Nonsense(f"a reply to call {message.call}, which was never made")

    def streams(self, *kinds: type[NodeCall[Any]]) -> list[int]:
        """Return the request sizes, in bytes, of the peer's open streams of these classes."""
        return [size for kind, size in self._streams.values() if kind in kinds]

    async def ready_for_more(self) -> None:
        """Wait until the peer's unanswered calls are below MAX_CALLS and MAX_CALL_BYTES."""
        while len(self._unanswered) >= MAX_CALLS or sum(self._unanswered.values()) > MAX_CALL_BYTES:
            self._answered.clear()
            await self._answered.wait()

    def end(self) -> None:
        """Make every pending call fail with ServiceError, because the connection has ended."""
        self.ended = True
        gone = self._gone().record()
        for number, call in self._pending.items():
            call.receive(CallReply(number, error=gone))

    def cancel(self) -> None:
        """Cancel the peer's calls that this side is carrying out."""
        for task in self._tasks.values():
            task.cancel()

    def _gone(self) -> ServiceError:
        return ServiceError(f"{self._peer} is gone")

    def _carry_out(self, number: int, request: NodeCall[Any]) -> None:
        if number <= self._asked:
            raise Nonsense(f"call {number} came after {self._asked}")
        self._asked = number
        work = self._handlers[type(request)](request)
        if isinstance(request, NodeStream):
            self._streams[number] = type(request), self._link.size
        else:
            self._unanswered[number] = self._link.size
        self._tasks[number] = task = self._spawn(self._answer(number, work))
        # A callback records the end of the task. Code in the task could not always do so: a task that is cancelled
        # before its first step runs none of its code.
        task.add_done_callback(partial(self._note_end, number, work))

    async def _answer(self, number: int, work: Coroutine[Any, Any, object] | AsyncGenerator[object, None]) -> None:
        try:
            if isinstance(work, AsyncGenerator):
                async with aclosing(work):
                    async for value in work:
                        await self._reply(CallReply(number, msgspec.Raw(framed(value)), more=True))
                reply = CallReply(number)
            else:
                reply = CallReply(number, msgspec.Raw(framed(await work)))
        except Nonsense as error:
            self._link.close(Close.NONSENSE, str(error))
            return
        except Exception as error:
            if not isinstance(error, OutriderError):
                log.exception("a call of %s failed", self._peer)
            reply = CallReply(number, error=record_of(error))
        try:
            await self._reply(reply)
        except ServiceError as error:
            await self._reply(CallReply(number, error=error.record()))

    async def _reply(self, reply: CallReply) -> None:
        """Wait while too many bytes are queued for sending (`room`), then send a reply. Raises ServiceError if the
        reply is too long."""
        frame = framed(reply, elsewhere=self._elsewhere)
        await self.room()
        self._link.send_encoded(frame)

    def _note_end(self, number: int, work: object, task: asyncio.Task[None]) -> None:
        del self._tasks[number]
        self._streams.pop(number, None)
        self._unanswered.pop(number, None)
        self._answered.set()
        if task.cancelled():
            if isinstance(work, Coroutine):
                work.close()  # the task may have been cancelled before it awaited the coroutine
            self._link.send(CallReply(number))
