"""The HTTP server under all that we serve: uvicorn, which here also tells an application when its client hangs up.

ASGI's own way, waiting for `http.disconnect`, takes a second task for every request. It knows no route. Invariant: an
application that asked is told once, whether the client left before or after it asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

HANG_UP = "outrider.hang_up"
BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75


class HangUp:
    """One request's client: gone or not, and who wants to know."""

    __slots__ = ("_told", "gone")

    def __init__(self) -> None:
        self.gone = False
        self._told: Callable[[], object] | None = None

    def tell(self, callback: Callable[[], object] | None) -> None:
        """Have `callback` called when the client leaves, at once if it has left; None takes that back."""
        self._told = callback
        if self.gone and callback is not None:
            callback()

    def leave(self) -> None:
        self.gone = True
        if self._told is not None:
            self._told()


class _Corked:
    """A transport whose writes of one turn of the event loop leave together: a reply's head, its first event and its
    first words are one system call instead of three."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._call_soon = asyncio.get_running_loop().call_soon
        self._waiting: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._waiting:
            self._call_soon(self._flush)
        self._waiting.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            if not self._transport.is_closing():
                self._transport.write(b"".join(waiting))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Protocol(HttpToolsProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(_Corked(transport))  # type: ignore[arg-type]  # it passes on what it has not

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {HANG_UP: HangUp()}  # type: ignore[dict-item]  # typed for dicts alone

    def connection_lost(self, exc: Exception | None) -> None:
        cycle = self.cycle
        super().connection_lost(exc)
        if cycle is not None and cycle.disconnected:
            hang_up_of(cycle.scope).leave()  # type: ignore[arg-type]  # a TypedDict there


def hang_up_of(scope: Scope) -> HangUp:
    found: HangUp = scope["extensions"][HANG_UP]
    return found


async def while_connected(scope: Scope, work: Awaitable[None]) -> None:
    """Do the work, unless the client hangs up first: the work is then cancelled, and that is no error."""
    worker = asyncio.current_task()
    assert worker is not None
    hang_up = hang_up_of(scope)
    hang_up.tell(worker.cancel)
    try:
        await work
    except asyncio.CancelledError:
        if not hang_up.gone:
            raise
        worker.uncancel()
    finally:
        hang_up.tell(None)


def server_settings(application: Application) -> uvicorn.Config:
    """For servers that run in somebody else's event loop and are told by him when to end."""
    return uvicorn.Config(
        application,
        http=_Protocol,
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        server_header=False,
        date_header=False,
    )
