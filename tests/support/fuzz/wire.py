"""Makes one request to an ASGI application in this process, as a server would, and returns the reply.

Independent of the dialect. Invariant: if the application breaks the ASGI protocol, raises an error or takes too long,
the result is a Violation.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import MutableMapping
from typing import Any

import msgspec

from outrider.wire.http_server import DISCONNECT, Application, Disconnect
from support.fuzz.speaker import Request, Violation, check

BOUND_SECONDS = 30.0
"""Maximum duration of one reply, in seconds."""


class Answer(msgspec.Struct, kw_only=True):
    """The reply that the client received. `whole`: the reply is complete, which is never true if the client left early.
    `left`: the client left early."""

    status: int = 0
    headers: dict[bytes, bytes] = {}
    payload: bytes = b""
    whole: bool = False
    left: bool = False
    seconds: float = 0.0

    @property
    def streamed(self) -> bool:
        return self.headers.get(b"content-type", b"").startswith(b"text/event-stream")


async def exchange(app: Application, request: Request, *, leave_after: int | None = None) -> Answer:
    """Return the reply to a request. If `leave_after` is given, the client disconnects after this many parts of the
    reply."""
    answer, disconnect, begun = Answer(), Disconnect(), time.perf_counter()
    pieces = deque(request.pieces)
    told: list[bytes] = []

    async def receive() -> MutableMapping[str, Any]:
        if not pieces:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": pieces.popleft(), "more_body": bool(pieces)}

    async def send(message: MutableMapping[str, Any]) -> None:
        if disconnect.gone:
            return
        _take(answer, told, message)
        if leave_after is not None and len(told) >= leave_after and not answer.whole:
            answer.left = True
            asyncio.get_running_loop().call_soon(disconnect.set)
        await asyncio.sleep(0)

    scope = {
        "type": "http",
        "method": request.method,
        "path": request.path,
        "query_string": request.query,
        "headers": list(request.headers),
        "extensions": {DISCONNECT: disconnect},
    }
    try:
        async with asyncio.timeout(BOUND_SECONDS):
            await app(scope, receive, send)
    except TimeoutError as error:
        raise Violation(f"no reply within {BOUND_SECONDS:g} s") from error
    except Exception as error:  # every exception is a finding
        raise Violation(f"the application raised {type(error).__name__}: {error}") from error
    answer.seconds = time.perf_counter() - begun
    answer.payload = b"".join(told)
    _check_end(answer)
    return answer


def _take(answer: Answer, told: list[bytes], message: MutableMapping[str, Any]) -> None:
    if message["type"] == "http.response.start":
        check(not answer.status, "a second response was begun")
        answer.status, answer.headers = message["status"], dict(message["headers"])
        return
    check(answer.status, "a body before its response was begun")
    check(not answer.whole, "a body after its end")
    told.append(message["body"])
    answer.whole = not message.get("more_body", False)


def _check_end(answer: Answer) -> None:
    if answer.left:
        return
    check(answer.whole, "the reply has no end")
    length = answer.headers.get(b"content-length")
    check(length is None or int(length) == len(answer.payload), "content-length is not the body's length")
    check(answer.seconds < BOUND_SECONDS, f"a reply took {answer.seconds:.1f} s")
