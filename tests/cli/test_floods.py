"""`outrider serve` with few descriptors, and clients that open as many connections as they can."""

from __future__ import annotations

import asyncio
import io
import os
import resource
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from cli.test_serve import flags
from cli.world import program
from outrider.client.client import AsyncClient
from outrider.errors import Busy

FEW = 1024
CONNECTIONS = FEW // 8
"""Maximum number of connections of clients outside of sandboxes."""
OPERATOR = "operator-" + "x" * 32
READ_NOTHING = b"GET /openapi.json HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 16


@asynccontextmanager
async def serving(folder: Path, descriptors: int) -> AsyncIterator[tuple[str, int]]:
    """Run the service with this limit of descriptors. Yields its URL and its process id."""

    def restrict() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    process = await program("serve", *flags(folder), env=os.environ | {"OUTRIDER_TOKEN": OPERATOR}, preexec_fn=restrict)
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().split()[-1], process.pid
    finally:
        process.kill()
        await process.communicate()


async def connect(url: str, sent: bytes, held: AsyncExitStack) -> None:
    client = held.enter_context(socket.socket())
    client.setblocking(False)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # what the client does not read stays with the server
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", int(url.rsplit(":", 1)[1])))
    await loop.sock_sendall(client, sent)


async def is_served(url: str) -> None:
    """Check that a new client and the operator get replies."""
    began = time.monotonic()
    async with aiohttp.ClientSession(url) as http, http.get("/healthz") as reply:
        assert reply.status == 200
    async with AsyncClient(url, token=OPERATOR) as operator:
        await operator.status()
    assert time.monotonic() - began < 10, "a busy machine may take long, but not until a timeout"


def long_poll(token: str) -> bytes:
    call = "GET /v1/results?wait=60 HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer "
    return f"{call}{token}\r\n\r\n".encode()


@pytest.mark.deep
@pytest.mark.parametrize(
    ("descriptors", "number"), [(FEW, 3 * CONNECTIONS), pytest.param(20_000, 3200, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("with_token", [False, True], ids=["unread replies", "long polls"])
async def test_no_client_keeps_the_others_out(tmp_path: Path, descriptors: int, number: int, with_token: bool) -> None:
    async with serving(tmp_path, descriptors) as (url, _), AsyncExitStack() as held:
        sent = READ_NOTHING
        if with_token:
            async with AsyncClient(url, token=OPERATOR) as operator:
                sent = long_poll((await operator.create_token("reader", "read")).text)
        for count in range(number):
            await connect(url, sent, held)
            if count % (number // 8) == 0:
                await is_served(url)
        await is_served(url)


@pytest.mark.deep
async def test_calls_with_one_token_are_bounded(tmp_path: Path) -> None:
    """The bound includes long polls and event streams. Other tokens are not affected, and the refusal has a
    Retry-After."""
    async with serving(tmp_path, FEW) as (url, _), AsyncExitStack() as held:
        async with AsyncClient(url, token=OPERATOR) as operator:
            reader, other = [(await operator.create_token(name, "read")).text for name in ("reader", "other")]
        streams = await held.enter_async_context(
            aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {reader}"})
        )
        for _ in range(CONNECTIONS // 8):
            reply = await held.enter_async_context(streams.get("/v1/events"))
            assert reply.status == 200
        async with streams.get("/v1/results?wait=60") as refused:
            assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
            assert (await refused.json())["code"] == "busy"
        async with AsyncClient(url, token=other) as client:
            await client.status()
        async with AsyncClient(url, token=reader) as client:
            with pytest.raises(Busy):
                await client.status()
            reply.close()
            while True:  # until the service has detected the closed connection
                try:
                    await client.status()
                    break
                except Busy:
                    pass


def peak_mib(pid: int) -> float:
    """Return the maximum resident memory of a process so far, in MiB (proc(5))."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) / 1024


@pytest.mark.deep
@pytest.mark.parametrize(("descriptors", "number"), [(FEW, 12), pytest.param(20_000, 40, marks=pytest.mark.nightly)])
async def test_large_bodies_wait_for_each_other(tmp_path: Path, descriptors: int, number: int) -> None:
    """Concurrent bodies do not cause refusals, and together take little memory. (With few descriptors, 40 connections
    from one address are more than the service accepts before it has read their tokens, so there are only 12.)"""
    body = b'{"task": {}, "more": "%s"}' % (b"x" * (28 << 20))
    async with (
        serving(tmp_path, descriptors) as (url, pid),
        aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {OPERATOR}"}) as http,
    ):

        async def submit() -> int:
            async with http.post("/v1/groups", data=io.BytesIO(body)) as reply:
                await reply.read()
                return reply.status

        before = peak_mib(pid)
        assert await asyncio.gather(*(submit() for _ in range(number))) == [422] * number
        assert peak_mib(pid) - before < 300
