"""A stand-in for a service, for tests of the page: it serves the page's files and the replies that a test sets. So a
test decides when a reply arrives, and what is in it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from aiohttp import web

from outrider.api.page import FILES, HEADERS, page_file

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
NOW = 1_800_000_000.0


class StandIn:
    """`replies` has the reply of each path: JSON, or a coroutine function that makes the response. Other paths get a
    404. `asked` are the requests, with their queries. `cursor` is the id of the newest event."""

    def __init__(self) -> None:
        self.url = ""
        self.replies: dict[str, Any] = {"/v1/status": status(), "/v1/rates": rates(), "/v1/sessions": {"sessions": []}}
        self.replies["/v1/groups"] = {"groups": []}
        self.asked: list[str] = []
        self.cursor = 0
        self.streams: list[web.StreamResponse] = []
        self._ended = asyncio.Event()

    async def event(self, kind: str, *, group: str = "g-1", session: str | None = None) -> None:
        """Send an event to all open streams."""
        self.cursor += 1
        event = {"cursor": self.cursor, "kind": kind, "group_id": group, "session_id": session, "data": {}}
        for stream in self.streams:
            await stream.write(f"id: {self.cursor}\ndata: {json.dumps(event)}\n\n".encode())

    def hang_up(self) -> None:
        """End all open streams of events."""
        self._ended.set()
        self._ended = asyncio.Event()

    def count(self, path: str) -> int:
        return sum(asked.split("?")[0] == path for asked in self.asked)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path in FILES:
            name, media_type = FILES[path]
            return web.Response(body=page_file(name), headers={**HEADERS, "Content-Type": media_type})
        self.asked.append(str(request.rel_url))
        reply = self.replies.get(path)
        if callable(reply):
            made: web.StreamResponse = await reply(request)
            return made
        if reply is not None:
            return web.json_response(reply)
        if path == "/v1/events":
            return await self._stream(request)
        return failure(404, f"{path} is not served here")

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        await stream.write(b"retry: 1000\n\n")
        self.streams.append(stream)
        try:
            await self._ended.wait()
        finally:
            self.streams.remove(stream)
        return stream


def failure(status: int, message: str) -> web.Response:
    return web.json_response({"boundary": "service", "code": "c", "message": message}, status=status)


def status(**fields: Any) -> dict[str, Any]:
    states = {"queued": 0, "initializing": 0, "ready": 0, "running": 0, "evaluating": 0, "done": 0}
    return {
        "version": "1", "model": "m", "sessions": states, "nodes": [], "engines": [], "failing": [],
        "policy": {"version": 0, "paused": None}, **fields,
    }  # fmt: skip


def rates(*points: dict[str, float]) -> dict[str, Any]:
    return {"now": NOW, "step_seconds": 5.0, "points": list(points)}


def session(id: str = "s-1-0", *, group: str = "g-1", reward: float | None = None, **fields: Any) -> dict[str, Any]:
    """Return a session. Without a `reward` or a `result` it is still running."""
    verdict: dict[str, Any] = {"reward": reward, "metrics": {}, "reason": None, "turns": {}}
    result = None if reward is None else {"attempt": 1, "stop_reason": "completed", "verdict": verdict, "turns": 1}
    return {
        "id": id, "group_id": group, "sample_index": int(id.rpartition("-")[2]), "attempt": 1, "node": None,
        "state": "done" if result else "running", "created": NOW - 100, "updated": NOW - 50, "last_error": None,
        "result": result, **fields,
    }  # fmt: skip


def group(id: str = "g-1", *, n: int = 1, **fields: Any) -> dict[str, Any]:
    return {
        "id": id, "state": "active", "cancelled": False, "n": n, "priority": 0, "created": NOW - 100, "finished": None,
        "labels": {}, "submitted_by": None, "tenant": None, **fields,
    }  # fmt: skip


def turn(index: int = 0, *, sampled: str = "done", **fields: Any) -> dict[str, Any]:
    return {
        "index": index, "parent": None, "model": None, "join": "new", "cause": None, "forked_from": None,
        "kind": "main", "label": "", "depth": 0, "prompt_tokens": 1, "output_tokens": 1, "context": "say it",
        "sampled": sampled, "finish": "stop", "mode": "tokens", "dialect": "chat", "engine": "e", "tool_calls": 0,
        "malformed_calls": 0, "cached_tokens": None, "drift_tokens": 0, "versions": [],
        "timings": {"received": NOW - 90, "first_token": None, "finished": NOW - 80}, **fields,
    }  # fmt: skip


@asynccontextmanager
async def stand_in() -> AsyncIterator[StandIn]:
    service = StandIn()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", service.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    [(_, port)] = [address[:2] for address in runner.addresses]
    service.url = f"http://127.0.0.1:{port}"
    try:
        yield service
    finally:
        service.hang_up()
        with suppress(TimeoutError):
            await asyncio.wait_for(runner.cleanup(), 10)
