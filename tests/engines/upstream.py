"""A server that replies from a list: canned statuses and event streams that no good engine sends."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import orjson

from outrider.lab.fakes.engine_servers.app import serving
from outrider.wire.http_server import Receive, Scope, Send


class Answer(msgspec.Struct):
    """The response to one POST. `cut` breaks the connection off before the end of the body."""

    status: int = 200
    events: Sequence[Any] = ()
    headers: dict[str, str] = {}
    done: bool = True
    cut: bool = False
    message: str = "canned"


class Upstream:
    """Answers POSTs in order, repeating the last response, and GETs from `pages`. Records bodies and paths."""

    def __init__(self, *answers: Answer, pages: dict[str, Any] | None = None) -> None:
        self._answers = list(answers)
        self._pages = pages or {}
        self.posts: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[bytes, bytes]] = []
        self.clients: list[Any] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "GET":
            page = self._pages.get(scope["path"])
            await _json(send, 404 if page is None else 200, page)
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.posts.append((scope["path"], orjson.loads(body or b"null")))
        self.headers.append(dict(scope["headers"]))
        self.clients.append(scope["client"])
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        await _send(send, answer)


async def _json(send: Send, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
    raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": orjson.dumps(content)})


async def _send(send: Send, answer: Answer) -> None:
    if answer.status != 200:
        await _json(send, answer.status, {"error": {"message": answer.message}}, answer.headers)
        return
    # A content length that is not reached makes the server break the connection off.
    headers = [(b"content-length", b"1000000")] if answer.cut else []
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for event in answer.events:
        data = event if isinstance(event, bytes) else b"data: " + orjson.dumps(event) + b"\n\n"
        await send({"type": "http.response.body", "body": data, "more_body": True})
    if answer.cut:
        return
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n" if answer.done else b""})


@asynccontextmanager
async def upstream(*answers: Answer, pages: dict[str, Any] | None = None) -> AsyncGenerator[tuple[str, Upstream], None]:
    """Yield the server's URL and the server."""
    server = Upstream(*answers, pages=pages)
    async with serving(server) as url:
        yield url, server
