"""The gateway with clients that send more than a node should hold in memory: endless bodies and enormous prompts."""

from __future__ import annotations

import asyncio
import io
import json
import re
import sys
from asyncio.subprocess import PIPE
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from bench.bodies import FLOODS
from bench.processes import ROOT

from api.test_gateway import CHAT, KEY, OneSession, a_gateway
from outrider.api.gateway import Gateway
from outrider.concurrency.cancellation import INLINE_BYTES
from outrider.concurrency.watchdog import Watchdog
from outrider.lab.fakes.engine_servers.app import serving
from outrider.sessions.calls.limits import MAX_IN_SESSION, MAX_TEXT_BODY
from sessions.world import a_world

QUICK = ("chat messages",)
HELD = 0.1
"""Maximum seconds of continuous work of the event loop. Allows for a machine that is twice as slow as an idle one."""
COUNT = f"/s/{KEY}/v1/messages/count_tokens"
WORDS = "many more wörds than fit "


async def opened(http: aiohttp.ClientSession, path: str, size: int, held: AsyncExitStack) -> Any:
    """Open a connection and send the head of a POST of `size` bytes."""
    base = http._base_url
    assert base is not None
    reader, writer = await asyncio.open_connection(base.host, base.port)
    held.callback(writer.transport.abort)
    writer.write(f"POST {path} HTTP/1.1\r\nhost: here\r\ncontent-length: {size}\r\n\r\n".encode())
    return reader, writer


async def refusal(reader: asyncio.StreamReader) -> tuple[int, Any]:
    head = await reader.readuntil(b"\r\n\r\n")
    size = int(head.lower().split(b"content-length: ")[1].split()[0])
    return int(head.split()[1]), json.loads(await reader.readexactly(size))["error"]


@pytest.mark.deep
async def test_bodies_that_arrive_side_by_side_share_one_bound(tmp_path: Path) -> None:
    size = MAX_TEXT_BODY - 1
    async with (
        a_gateway(tmp_path, "hi<|im_end|>", context_tokens=1 << 20) as (world, http),
        AsyncExitStack() as held,
    ):
        clients = [await opened(http, CHAT, size, held) for _ in range(MAX_IN_SESSION // size + 1)]
        for _, writer in clients:
            writer.write(b"x" * (size - 1))
        answers = [asyncio.ensure_future(refusal(reader)) for reader, _ in clients]
        done, waiting = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        assert [answer.result()[0] for answer in done] == [429]
        assert "this session" in done.pop().result()[1]["message"]
        for _, writer in clients:
            writer.write(b"x")
        assert {status for status, _ in await asyncio.gather(*waiting)} == {400}
        assert world.models.bodies.size == 0


async def test_calls_under_way_are_bounded_and_one_too_many_is_refused_alone(tmp_path: Path) -> None:
    async with (
        a_world(tmp_path, ["hi<|im_end|>"]) as world,
        serving(Gateway(OneSession(world.models), calls=2)) as url,
        aiohttp.ClientSession(url) as http,
        AsyncExitStack() as held,
    ):
        clients = [await opened(http, CHAT, 10, held) for _ in range(3)]
        answers = [asyncio.ensure_future(refusal(reader)) for reader, _ in clients]
        done, waiting = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        [(status, error)] = [answer.result() for answer in done]
        assert (status, "under way" in error["message"]) == (429, True)
        for _, writer in clients:
            writer.write(b"x" * 10)
        assert {status for status, _ in await asyncio.gather(*waiting)} == {400}
        assert world.models.under_way == 0


@pytest.mark.parametrize("path", [CHAT, COUNT])
async def test_without_a_key_no_body_is_waited_for(tmp_path: Path, path: str) -> None:
    async with a_gateway(tmp_path, "hi<|im_end|>") as (_, http), AsyncExitStack() as held:
        reader, _ = await opened(http, path.replace(KEY, "unknown"), MAX_TEXT_BODY, held)
        assert (await refusal(reader))[0] == 401


def asking(characters: int) -> dict[str, Any]:
    words = WORDS * (characters // len(WORDS) + 1)
    return {"model": "any", "max_tokens": 5, "messages": [{"role": "user", "content": words[:characters]}]}


@pytest.mark.deep
@pytest.mark.parametrize("path", [CHAT, COUNT, COUNT.removesuffix("/count_tokens")])
async def test_others_are_answered_while_a_long_prompt_is_encoded(tmp_path: Path, path: str) -> None:
    async with a_gateway(tmp_path, "hi<|im_end|>", context_tokens=1 << 20) as (_, http):
        answered = 0
        asked = asyncio.ensure_future(_posted(http, path, asking(512 << 10)))
        while not asked.done():
            async with http.get(f"/s/{KEY}/v1/models") as reply:
                assert reply.status == 200
            answered += 1
        status, body = await asked
        assert status == 200
        assert answered >= 10
        if path == COUNT:
            assert body["input_tokens"] > 100_000


@pytest.mark.parametrize("path", [CHAT, COUNT, COUNT.removesuffix("/count_tokens")])
async def test_a_prompt_far_beyond_the_context_is_refused_unread(tmp_path: Path, path: str) -> None:
    async with a_gateway(tmp_path, "hi<|im_end|>", context_tokens=4096) as (world, http):
        status, body = await _posted(http, path, asking(4 << 20))
        assert status == 400
        assert int(re.findall(r"\d+", body["error"]["message"])[0]) > 4096
        assert world.turns == []


@pytest.mark.usefixtures("others_objects_set_aside")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.deep) for name in FLOODS]
)
async def test_no_body_holds_the_event_loop(tmp_path: Path, name: str) -> None:
    """Bodies of three sizes: parsed at once, parsed outside of the loop, and too large. The measured time in which the
    loop's own thread works does not depend on the machine's other load."""
    sizes = (INLINE_BYTES - 1, 400 << 10, MAX_TEXT_BODY - (1 << 16))
    async with (
        a_world(tmp_path, ["hi<|im_end|>"] * 3, context_tokens=131_072) as world,
        serving(Gateway(OneSession(world.models))) as url,
        Watchdog() as watchdog,
    ):
        sender = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.bodies", f"{url}/s/{KEY}", name, *map(str, sizes)), stdout=PIPE, cwd=ROOT
        )
        out, _ = await sender.communicate()
        assert {int(status) for status in out.split()} <= {200, 400, 413}
        assert world.models.bodies.size == 0
    assert watchdog.stalls.held < HELD


async def _posted(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with http.post(path, data=io.BytesIO(json.dumps(body).encode())) as reply:
        return reply.status, await reply.json()
