"""A tap between Outrider and a vLLM server. It passes requests on unchanged, and records generations.

It depends on the token route's format and not on Outrider. Invariant: a generation is recorded when its last byte has
been passed on, with the ids that the server received and the ids that it returned.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
from aiohttp import web

TOKEN_ROUTE = "/inference/v1/generate"
CLOSED = 403
"""HTTP status of vLLM's token route if the route is closed."""
HOP_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection"})
MAX_REQUEST = 16 << 20


@dataclass(frozen=True)
class Generation:
    """One call of the token route: prompt ids, sampled ids and their log-probabilities."""

    prompt: list[int]
    output: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Tap:
    """A running tap. `url` is the server's URL through the tap."""

    url: str
    generations: list[Generation]


@asynccontextmanager
async def tapped(server_url: str, *, token_route: bool = True) -> AsyncIterator[Tap]:
    """Run a tap in front of the server at `server_url`. `token_route` is True if calls of the token route are passed
    on. Otherwise they get the status CLOSED."""
    generations: list[Generation] = []
    async with aiohttp.ClientSession(server_url, auto_decompress=False) as http:

        async def pass_on(request: web.Request) -> web.StreamResponse:
            if request.path == TOKEN_ROUTE and not token_route:
                return web.Response(status=CLOSED)
            asked = await request.read()
            headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_HEADERS}
            async with http.request(request.method, request.path_qs, data=asked, headers=headers) as reply:
                passed = web.StreamResponse(status=reply.status)
                passed.content_type = reply.content_type
                await passed.prepare(request)
                answered = b""
                async for data in reply.content.iter_any():
                    answered += data
                    await passed.write(data)
            if request.path == TOKEN_ROUTE and reply.status == 200:
                generations.append(_generation(asked, answered))
            await passed.write_eof()
            return passed

        application = web.Application(client_max_size=MAX_REQUEST)
        application.router.add_route("*", "/{path:.*}", pass_on)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            yield Tap(f"http://127.0.0.1:{port}", generations)
        finally:
            await runner.cleanup()


def _generation(asked: bytes, answered: bytes) -> Generation:
    """Parse a whole exchange. Raises KeyError or ValueError if the exchange is not in the token route's format."""
    payloads = [line.removeprefix(b"data: ") for line in answered.split(b"\n") if line.startswith(b"data: ")]
    choices = [choice for data in payloads if data != b"[DONE]" for choice in json.loads(data)["choices"]]
    entries = [entry for choice in choices if choice["token_ids"] for entry in choice["logprobs"]["content"]]
    return Generation(
        prompt=json.loads(asked)["token_ids"],
        output=[entry["token_id"] for entry in entries],
        logprobs=[entry["logprob"] for entry in entries],
    )
