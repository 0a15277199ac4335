"""The host's end of a connection to a tool server. Many calls can use it concurrently.

This module handles only frames and replies. Replies are decoded into closed types, because an agent in the sandbox may
have crafted them. Invariants:

- A cancelled call is also cancelled in the sandbox. The caller's cancellation continues only after the call's processes
  are dead, or after CANCEL_SECONDS.
- Received data costs bounded time and memory. If a server sends more than was requested, its connection is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from outrider.errors import RuntimeFailure
from outrider.sandbox.runtimes.base import MAX_OUTPUT
from outrider.sandbox.runtimes.guest.msgpack import pack

FRAME_MAX = 2 * MAX_OUTPUT + (4 << 20)
"""Maximum bytes of a frame. The largest frame is the reply to a command that filled both its output streams."""
PART_MIN = 1 << 10
"""A smaller part of a reply still counts as this many bytes against a limit, because handling a small part costs more
than its bytes."""
STRAY_MAX = 64 << 20
"""Maximum bytes of replies that no call waits for, such as parts that the server sent before it received a
cancellation. Each expected reply sets the count to zero."""
TEXT_MAX = 4096
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""The errors that decoding raises for data of a wrong type, text that is not UTF-8, and deep nesting."""
UNSENDABLE = (msgspec.MsgspecError, ValueError, TypeError, OverflowError)
"""The errors that encoding raises for text that is not Unicode, an integer of more than 64 bits, and other values that
msgpack cannot represent."""
GRACE_SECONDS = 30.0
"""Seconds that a call may exceed its own time limit. After this, the server is treated as stuck."""
LAST_LOOK_SECONDS = 0.5
"""Seconds after GRACE_SECONDS in which a reply is still accepted. The reply may have waited in the socket while this
event loop was blocked."""
CANCEL_SECONDS = 5.0

T = TypeVar("T", bound=msgspec.Struct)

Loss = Literal["gone", "stuck", "wrong", "closed"]
"""Why a connection was lost.

- "gone": the other end is closed.
- "stuck": the server does not respond.
- "wrong": the other end sent data that no tool server sends.
- "closed": the host's end was closed, or could not be opened."""

Number = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 32)]
"""An exit code, or the number of a shell. A reply with an integer outside this range is refused."""


class ToolReply(msgspec.Struct, frozen=True, array_like=True):
    call: int
    status: Literal["ok", "error", "part"]
    fields: msgspec.Raw


class Done(msgspec.Struct, frozen=True):
    """The reply to a call that returns nothing."""


class Refusal(msgspec.Struct, frozen=True):
    """The reply to a failed call. `code` is the kind of the error: the file is missing, the path is a directory, the
    sandbox's lifetime is over (`ended`), or anything else (`failed`)."""

    code: Literal["missing", "directory", "failed", "ended"]
    text: str


class ToolPart(msgspec.Struct, frozen=True):
    data: bytes


class ExecDone(msgspec.Struct, frozen=True):
    code: Number | None
    out: bytes
    err: bytes
    timed_out: bool
    us: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class ShellOpened(msgspec.Struct, frozen=True):
    """The reply to a call that opens a shell. `shell` is None if no program for this kind of shell could be started.
    `why` is then the output of the last program that was tried."""

    shell: Number | None
    why: bytes = b""


class ShellDone(msgspec.Struct, frozen=True):
    """The result of one input to a shell or interpreter. `shown` has the rich results as msgpack: a list of maps from
    MIME types to text or bytes, one map for each result."""

    out: bytes
    code: Number | None
    timed_out: bool = False
    shown: bytes = b""


Milliseconds = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
MOST_PROCESSES = 200
"""Maximum number of processes in one reply. `guest/process_watch.py` has the same number."""


class ProcessSeen(msgspec.Struct, frozen=True, array_like=True):
    """A process that the tool server has seen. Times are milliseconds before the reply."""

    pid: Number
    parent: Number
    command: Annotated[bytes, msgspec.Meta(max_length=TEXT_MAX)]
    began_ms_ago: Milliseconds
    ended_ms_ago: Milliseconds | None
    exit_code: Number | None


class ProcessesSeen(msgspec.Struct, frozen=True):
    processes: Annotated[list[ProcessSeen], msgspec.Meta(max_length=MOST_PROCESSES)]


class Stopped(msgspec.Struct, frozen=True):
    """The reply to `stop`. `left` is the number of processes that the server could not kill."""

    left: Number = 0


@dataclass(slots=True)
class CallInFlight:
    """A call that waits for its reply. `room` is how many bytes the server may still send in parts."""

    outcome: asyncio.Future[msgspec.Raw]
    on_part: Callable[[bytes], None] | None = None
    room: int = 0


def encoded(message: list[Any]) -> bytes:
    """Return a message as msgpack. Raises one of the errors in UNSENDABLE. msgspec refuses text with surrogate escapes,
    such as a file name that is not UTF-8, but the slower module of the tool server's end sends it as raw bytes."""
    try:
        return msgspec.msgpack.encode(message)
    except UnicodeEncodeError:
        body = bytearray()
        pack(message, body)
        return bytes(body)


class ToolClient(asyncio.Protocol):
    """One connection to a tool server. `log_tail` returns the last part of the server's standard error, for error
    messages. `loss` is the reason why the connection was lost, and None before the loss."""

    def __init__(self, end: socket.socket, log_tail: Callable[[], str]) -> None:
        """`end` is one end of a Unix stream connection to the server. This object closes it later."""
        self._end: socket.socket | None = end
        """None after `open` has passed the socket to the transport."""
        self.log_tail = log_tail
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._calls: dict[int, CallInFlight] = {}
        self._number = 0
        self._received = bytearray()
        self._stray = STRAY_MAX
        self._lost: str | None = None
        self.loss: Loss | None = None
        self._closed = asyncio.Event()

    async def open(self) -> None:
        """Open the connection. Call this only once. Raises RuntimeFailure if the connection is closed before it is
        open."""
        self._check()
        end, self._end = self._end, None
        try:
            self._transport, _ = await self._loop.create_unix_connection(lambda: self, sock=end)
        # BaseException includes CancelledError; the loop closes an incomplete transport itself
        except BaseException:
            self._lose("the connection to the tool server was not opened", "closed")
            raise
        if self._lost is not None:
            self._transport.abort()
            await self._closed.wait()
            raise self._failure(self._lost)

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        while len(received) >= 4:
            size = int.from_bytes(received[:4], "big")
            if size > FRAME_MAX:
                return self._lose("the tool server sent an oversized frame", "wrong")
            if len(received) < 4 + size:
                return None
            frame = bytes(memoryview(received)[4 : 4 + size])
            del received[: 4 + size]
            try:
                self._take(msgspec.msgpack.decode(frame, type=ToolReply), max(size, PART_MIN))
            except UNREADABLE:
                self._lose("the tool server sent data that cannot be decoded", "wrong")
            if self._lost is not None:
                received.clear()
        return None

    def connection_lost(self, error: Exception | None) -> None:
        self._lose("the sandbox's tool server is gone", "gone")
        self._closed.set()

    def pause(self) -> None:
        """Read nothing until `resume` is called. The server blocks when the buffers of the socket are full."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def send_raw(self, data: bytes) -> None:
        """Send the server's own code as raw bytes, before the first frame."""
        if self._transport is not None:
            self._transport.write(data)

    async def call(
        self,
        method: str,
        args: Mapping[str, Any],
        reply: type[T],
        *,
        seconds: float = 60.0,
        on_part: Callable[[bytes], None] | None = None,
        room: int = 0,
    ) -> T:
        """Call a method, and wait for the reply. Raises FileNotFoundError or IsADirectoryError if the server reports
        that a path in the sandbox is missing or is a folder. Any other failure, such as arguments that cannot be
        encoded, raises RuntimeFailure.

        seconds: the call's time limit in the sandbox. If no reply arrives within GRACE_SECONDS after this time, the
            server is treated as stuck.
        room: the maximum size of all parts together, in bytes. If the server sends more, the connection is dropped.
        """
        self._check()
        if self._transport is None:
            raise self._failure("the connection to the tool server is not open")
        self._number += 1
        number = self._number
        self._send(number, method, args)
        outcome: asyncio.Future[msgspec.Raw] = self._loop.create_future()
        self._calls[number] = CallInFlight(outcome, on_part, room)
        alarm = self._loop.call_later(
            seconds + GRACE_SECONDS, self._loop.call_later, LAST_LOOK_SECONDS, self._stuck, number, method
        )
        try:
            fields = await outcome
        except asyncio.CancelledError:
            # Let the server kill the call's processes, and wait up to CANCEL_SECONDS for the server's confirmation.
            # This is not needed if the reply arrived just as the call was cancelled: `outcome` then has a result.
            if self._lost is None and outcome.cancelled():
                ended: asyncio.Future[msgspec.Raw] = self._loop.create_future()
                self._calls[number] = CallInFlight(ended)
                self.send("cancel", {"call": number})
                with contextlib.suppress(TimeoutError, RuntimeFailure, OSError):
                    async with asyncio.timeout(CANCEL_SECONDS):
                        await ended
            raise
        finally:
            alarm.cancel()
            self._calls.pop(number, None)
        try:
            return msgspec.msgpack.decode(fields, type=reply)
        except UNREADABLE as error:
            raise self._failure(f"the tool server sent a wrong reply: {error}", inside=True) from error

    def send(self, method: str, args: Mapping[str, Any]) -> None:
        """Call a method that sends no reply. Does nothing if the connection is lost."""
        if self._transport is not None and self._lost is None:
            self._send(0, method, args)

    def backlog(self) -> int:
        """Return how many bytes wait in this process to be sent."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def _stuck(self, number: int, method: str) -> None:
        call = self._calls.get(number)
        if call is not None and not call.outcome.done():
            self._lose(f"the tool server is stuck in {method}", "stuck")

    def fail_all(self, reason: str) -> None:
        """Let all calls in flight fail. The connection stays open for new calls."""
        failure = self._failure(reason)
        for call in self._calls.values():
            if not call.outcome.done():
                call.outcome.set_exception(failure)
                # Read the exception here. Otherwise asyncio would log the exception if the caller is being cancelled,
                # because then nobody else reads it.
                call.outcome.exception()

    async def close(self) -> None:
        """Drop the connection, and wait until it is closed. Calls in flight fail, and the server then exits."""
        self._lose("the sandbox was stopped", "closed")
        if self._transport is not None:
            await self._closed.wait()

    def _send(self, number: int, method: str, args: Mapping[str, Any]) -> None:
        try:
            body = encoded([number, method, args])
        except UNSENDABLE as error:
            raise self._failure(f"cannot send {method} to the sandbox: {error}") from error
        assert self._transport is not None
        self._transport.write(len(body).to_bytes(4, "big") + body)

    def _take(self, reply: ToolReply, size: int) -> None:
        """Handle one reply. `size` is how many bytes count for its frame (see PART_MIN)."""
        call = self._calls.get(reply.call)
        if call is None or call.outcome.done() or (reply.status == "part" and call.on_part is None):
            self._stray -= size
            if self._stray < 0:
                self._lose("the tool server keeps sending data that nobody waits for", "wrong")
        elif reply.status == "part":
            data = msgspec.msgpack.decode(reply.fields, type=ToolPart).data
            call.room -= max(len(data), PART_MIN)
            # The last part counts as PART_MIN even if it is smaller. So a reply within its limit may bring `room` below
            # 0, but not below -PART_MIN.
            if call.room < -PART_MIN:
                self._lose("the tool server sent more than it was asked for", "wrong")
            elif call.on_part is not None:
                call.on_part(data)
        else:
            self._stray = STRAY_MAX
            if reply.status == "ok":
                call.outcome.set_result(reply.fields)
            else:
                call.outcome.set_exception(self._refused(msgspec.msgpack.decode(reply.fields, type=Refusal)))

    def _refused(self, refusal: Refusal) -> Exception:
        text = refusal.text[:TEXT_MAX]
        if refusal.code == "missing":
            return FileNotFoundError(text)
        if refusal.code == "directory":
            return IsADirectoryError(text)
        return self._failure(text, inside=refusal.code == "failed")

    def _check(self) -> None:
        """Raise RuntimeFailure if the connection is lost."""
        if self._lost is not None:
            raise self._failure(self._lost)

    def _failure(self, message: str, *, inside: bool = False) -> RuntimeFailure:
        return RuntimeFailure(message, log_tail=self.log_tail() or None, inside=inside)

    def _lose(self, reason: str, loss: Loss) -> None:
        if self._lost is not None:
            return
        self._lost, self.loss = reason, loss
        if self._transport is not None:
            self._transport.abort()
        elif self._end is not None:  # `_end` is None if `open` has passed the socket on
            self._end.close()
        self.fail_all(reason)
