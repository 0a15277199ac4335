"""Runs a preset's program with options against the scripted model, and records the program's requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import ClientSession, ClientTimeout, UnixConnector, web

from outrider.harnesses.install import install
from outrider.harnesses.presets import load_preset
from outrider.lab.certify import run
from outrider.lab.certify.gateway_tap import GatewayTap, tapped
from outrider.lab.certify.judge import RowVerdict, Subject
from outrider.lab.certify.rows import row_named
from outrider.sessions.node import LocalNode
from outrider.spec import HarnessSpec, RuntimeSpec

PASSED = (
    "authorization",
    "content-type",
    "x-api-key",
    "x-goog-api-key",
    "anthropic-version",
    "anthropic-beta",
    "accept",
)


class RecordedRun(msgspec.Struct):
    """The JSON bodies of a run's requests in order, and the verdict of its row."""

    bodies: list[dict[str, Any]] = []
    verdict: RowVerdict | None = None

    @property
    def first(self) -> dict[str, Any]:
        """The first request that offers tools."""
        return next(body for body in self.bodies if body.get("tools"))


async def ran_with(preset: str, options: Mapping[str, Any], row: str = "three-turns") -> RecordedRun:
    """Install the program, and run the row's task with these options in a sandbox of kind `process`."""
    await asyncio.to_thread(install, preset)
    wire = RecordedRun()

    @asynccontextmanager
    async def recorded(node: LocalNode, words: Iterable[str]) -> AsyncIterator[GatewayTap]:
        async with tapped(node, words) as tap, _recording(node, wire.bodies):
            yield tap

    found = row_named(row)
    assert found is not None
    subject = Subject(
        name=preset,
        harness=HarnessSpec(preset=preset, options=dict(options)),
        runtime=RuntimeSpec(kind="process"),
        hint=load_preset(preset).certify,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "tapped", recorded)
        [wire.verdict] = (await run.certify(subject, [found], agent_seconds=90)).rows
    return wire


@asynccontextmanager
async def _recording(node: LocalNode, bodies: list[dict[str, Any]]) -> AsyncIterator[None]:
    """Run a proxy in front of the gateway that records the JSON bodies of POST requests."""

    async def passed_on(request: web.Request) -> web.StreamResponse:
        data = await request.read()
        if request.method == "POST" and data:
            bodies.append(json.loads(data))
        headers = {name: value for name, value in request.headers.items() if name.lower() in PASSED}
        async with client.request(
            request.method, f"http://gateway{request.raw_path}", data=data, headers=headers
        ) as reply:
            response = web.StreamResponse(status=reply.status, headers={"content-type": reply.headers["content-type"]})
            await response.prepare(request)
            async for piece in reply.content.iter_any():
                await response.write(piece)
            return response

    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", passed_on)
    runner = web.AppRunner(app)
    gateway = UnixConnector(str(node.gateway_socket))
    async with ClientSession(connector=gateway, timeout=ClientTimeout(total=120)) as client:
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            with node.gateway_at(f"http://{host}:{port}"):
                yield
        finally:
            await runner.cleanup()
