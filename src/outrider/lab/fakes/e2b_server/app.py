"""The fake E2B server. It starts sandboxes from templates, and keeps their time limits and metadata. It forwards
requests to `envd`, the daemon in each sandbox.

E2B's own SDK works with the server. Invariant: when `serving_e2b` ends, no sandbox is left.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qsl, unquote

from aiohttp import web

from outrider.concurrency.chores import Chores, Failures
from outrider.lab.fakes.e2b_server.envd import VERSION, FakeEnvd
from outrider.lab.fakes.e2b_server.machine import Machine

DEFAULT_SECONDS = 15
MAX_BODY = 256 << 20
ENVD_PATHS = ("/health", "/files", "/process.Process/", "/filesystem.Filesystem/")

Fault = Callable[[web.Request, Callable[[], Awaitable[web.StreamResponse]]], Awaitable[web.StreamResponse]]
"""A test's function that replies to a request. The function can call its second argument to get the server's own
reply."""


@dataclass
class FakeSandbox:
    id: str
    template: str
    metadata: dict[str, str]
    internet: bool
    machine: Machine
    envd: FakeEnvd
    token: str
    began: datetime
    end: datetime
    timer: asyncio.TimerHandle | None = None

    def listed(self) -> dict[str, Any]:
        return {
            "templateID": self.template,
            "sandboxID": self.id,
            "clientID": "fake",
            "startedAt": self.began.isoformat(),
            "endAt": self.end.isoformat(),
            "cpuCount": 1,
            "memoryMB": 512,
            "diskSizeMB": 512,
            "state": "running",
            "envdVersion": VERSION,
            "metadata": self.metadata,
        }


@dataclass
class FakeE2B:
    """The server's state.

    - `room`: the maximum number of sandboxes.
    - `page`: the maximum number of sandboxes in a page of `GET /v2/sandboxes`.
    - `faults`: maps a method and path (with `ID` in place of ids) to functions. Each function replies to one of the
      next requests with this method and path.
    - `requests`: the methods and paths of all requests except those to `envd`, with `ID` in place of ids.
    - `made`: the number of sandboxes created so far.
    """

    key: str = "e2b_fake"
    templates: frozenset[str] = frozenset(("base",))
    room: int = 1000
    page: int = 100
    url: str = ""
    sandboxes: dict[str, FakeSandbox] = field(default_factory=dict)
    faults: defaultdict[str, deque[Fault]] = field(default_factory=lambda: defaultdict(deque))
    requests: list[str] = field(default_factory=list)
    made: int = 0
    _starting: int = 0
    _replies: dict[str, dict[str, Any]] = field(default_factory=dict)
    chores: Chores = field(default_factory=lambda: Chores(Failures()))

    async def handle(self, request: web.Request) -> web.StreamResponse:
        name = f"{request.method} {self._without_id(request.path)}"

        async def reply() -> web.StreamResponse:
            if request.path.startswith(ENVD_PATHS):
                return await self._to_envd(request)
            return await self._control(request, name)

        if not request.path.startswith(ENVD_PATHS):
            self.requests.append(name)
        waiting = self.faults[name]
        return await (waiting.popleft()(request, reply) if waiting else reply())

    def _without_id(self, path: str) -> str:
        return "/".join("ID" if part in self.sandboxes or part.startswith("i") else part for part in path.split("/"))

    async def _to_envd(self, request: web.Request) -> web.StreamResponse:
        sandbox = self.sandboxes.get(request.headers.get("E2b-Sandbox-Id", ""))
        if sandbox is None:
            return refusal(502, "The sandbox was not found")
        if request.path != "/health" and request.headers.get("X-Access-Token") != sandbox.token:
            return refusal(401, "unauthorized access, please provide a valid access token")
        return await sandbox.envd.reply(request)

    async def _control(self, request: web.Request, name: str) -> web.StreamResponse:
        if request.headers.get("X-API-Key") != self.key:
            return refusal(401, "Invalid API key")
        if name in ("POST /sandboxes", "POST /v2/sandboxes"):
            return await self._create(request)
        if name in ("GET /sandboxes", "GET /v2/sandboxes"):
            return self._list(request)
        sandbox = self.sandboxes.get(next((p for p in request.path.split("/") if p in self.sandboxes), ""))
        if sandbox is None:
            return refusal(404, "The sandbox was not found")
        if name == "GET /sandboxes/ID":
            return web.json_response({**sandbox.listed(), "envdAccessToken": sandbox.token})
        if name == "DELETE /sandboxes/ID":
            await self.end(sandbox.id)
            return web.Response(status=204)
        if name == "POST /sandboxes/ID/timeout":
            self._set_term(sandbox, int((await request.json())["timeout"]))
            return web.Response(status=204)
        if name in ("POST /sandboxes/ID/connect", "POST /v2/sandboxes/ID/connect"):
            self._set_term(sandbox, int((await request.json()).get("timeout", DEFAULT_SECONDS)))
            return web.json_response(self._made(sandbox))
        return refusal(404, f"this server has no {name}")

    async def _create(self, request: web.Request) -> web.Response:
        try:
            asked = json.loads(await request.read())
            template, metadata = asked["templateID"], asked.get("metadata") or {}
            seconds = int(asked.get("timeout", DEFAULT_SECONDS))
        except (ValueError, KeyError, TypeError):
            return refusal(400, "the body has no templateID")
        if template not in self.templates:
            return refusal(404, f"template '{template}' not found")
        key = request.headers.get("Idempotency-Key", "")
        if key in self._replies:
            return web.json_response(self._replies[key], status=201)
        if len(self.sandboxes) + self._starting >= self.room:
            return refusal(429, "you have reached the maximum number of concurrent sandboxes", {"Retry-After": "1"})
        self._starting += 1
        try:
            machine = await Machine.start()
        finally:
            self._starting -= 1
        began = datetime.now(UTC)
        sandbox = FakeSandbox(
            id=f"i{secrets.token_hex(10)}",
            template=template,
            metadata=dict(metadata),
            internet=bool(asked.get("allow_internet_access", True)),
            machine=machine,
            envd=FakeEnvd(machine, dict(asked.get("envVars") or {})),
            token=secrets.token_hex(16),
            began=began,
            end=began,
        )
        self.sandboxes[sandbox.id] = sandbox
        self.made += 1
        self._set_term(sandbox, seconds)
        reply = self._made(sandbox)
        if key:
            self._replies[key] = reply
        return web.json_response(reply, status=201)

    def _made(self, sandbox: FakeSandbox) -> dict[str, Any]:
        return {
            "templateID": sandbox.template,
            "sandboxID": sandbox.id,
            "clientID": "fake",
            "envdVersion": VERSION,
            "envdAccessToken": sandbox.token,
            "domain": None,
        }

    def _list(self, request: web.Request) -> web.Response:
        asked = {unquote(k): unquote(v) for k, v in parse_qsl(request.query.get("metadata", ""))}
        found = [one.listed() for one in self.sandboxes.values() if asked.items() <= one.metadata.items()]
        if not request.path.startswith("/v2/"):
            return web.json_response(found)
        first = int(request.query.get("nextToken", "0"))
        end = first + min(self.page, int(request.query.get("limit", self.page)))
        return web.json_response(found[first:end], headers={"x-next-token": str(end)} if end < len(found) else {})

    def _set_term(self, sandbox: FakeSandbox, seconds: int) -> None:
        if sandbox.timer is not None:
            sandbox.timer.cancel()
        sandbox.end = datetime.now(UTC) + timedelta(seconds=seconds)
        sandbox.timer = asyncio.get_running_loop().call_later(seconds, self._expire, sandbox.id)

    def _expire(self, id: str) -> None:
        self.chores.create_task(self.end(id), name="end of a sandbox")

    async def end(self, id: str) -> None:
        """Kill the sandbox with this id, if it exists."""
        sandbox = self.sandboxes.pop(id, None)
        if sandbox is not None:
            if sandbox.timer is not None:
                sandbox.timer.cancel()
            await sandbox.machine.stop()


def refusal(status: int, message: str, headers: Mapping[str, str] = {}) -> web.Response:
    return web.json_response({"code": status, "message": message}, status=status, headers=headers)


@asynccontextmanager
async def serving_e2b(server: FakeE2B, port: int = 0) -> AsyncIterator[FakeE2B]:
    """Serve on a port of 127.0.0.1 within the block, and set `server.url` to the address."""
    app = web.Application(client_max_size=MAX_BODY)
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}"
    async with server.chores:
        try:
            yield server
        finally:
            for id in list(server.sandboxes):
                await server.end(id)
            await runner.cleanup()
