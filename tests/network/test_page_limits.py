"""The proxy replaces addresses in the pages of a package index while it passes them on. A program in the sandbox
chooses the pages, so they may be huge, cut off or malformed."""

from __future__ import annotations

import asyncio
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from network.world import Answer, a_door, a_server, chunks, get, said
from outrider.destinations import Phase
from outrider.sandbox.network.proxy import AddressReplacer

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nTransfer-Encoding: chunked\r\n\r\n"


async def page(tmp_path: Path, answer: Answer, *, version: str = "HTTP/1.1") -> tuple[str, Any]:
    """Request a page of an index that replies as `answer` does. Return the reply and the door's counts for the
    index."""
    async with a_server(answer=answer) as server:
        index = f"http://index.test:{server.port}/simple/"
        names = {"index.test": [["127.0.0.1"]]}
        async with a_door(tmp_path, "mirror:pip", names=names, pip_index=index) as (door, _):
            request = get("http://pip.mirror.internal/simple/").replace("HTTP/1.1", version)
            return await said(tmp_path, request, seconds=60), door.uses[Phase.AGENT, "pip.mirror.internal:80"]


@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
async def test_addresses_are_replaced_wherever_a_page_is_divided(tmp_path: Path, size: int) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        at = head.split(b"Host: ")[1].split(b"\r\n")[0]
        text = (b"<a href=http://%s/x>" % at) * 40
        writer.write(HEAD)
        for start in range(0, len(text), size):
            piece = text[start : start + size]
            writer.write(b"%X;extension=1\r\n" % len(piece) + piece + b"\r\n")
        writer.write(b"0\r\n\r\n")

    for version in ("HTTP/1.1", "HTTP/1.0"):
        got, use = await page(tmp_path, answer, version=version)
        body = got.partition("\r\n\r\n")[2]
        assert (chunks(body) if version == "HTTP/1.1" else body) == "<a href=http://pip.mirror.internal/x>" * 40
        assert (use.failed, use.broken) == (0, False)


def test_the_longest_address_is_replaced() -> None:
    """If one address is the beginning of another, the longer one is replaced."""
    replacer = AddressReplacer([("http://a", "http://one"), ("http://a.b", "http://two")])
    assert replacer.replaced(b"http://a.b/ http://a/ http:/") + replacer.replaced(b"/a", last=True) == (
        b"http://two/ http://one/ http://one"
    )


async def test_a_huge_page_takes_little_memory(tmp_path: Path) -> None:
    """A page of 40 MiB takes less than 8 MiB of memory. A program may request the whole list of packages many times at
    once."""
    block = b"<a href='x'>x</a>\n" * 58_254

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n" % (40 * len(block)))
        for _ in range(40):
            writer.write(block)
            await writer.drain()

    async with a_server(answer=answer) as server:
        index = f"http://index.test:{server.port}/simple/"
        async with a_door(tmp_path, "mirror:pip", names={"index.test": [["127.0.0.1"]]}, pip_index=index):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "door")
            writer.write(get("http://pip.mirror.internal/simple/").encode())
            tracemalloc.start()
            try:
                taken = 0
                async with asyncio.timeout(60):
                    while data := await reader.read(1 << 20):
                        taken += len(data)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
                writer.close()
    assert taken > 40 * len(block)
    assert peak < 8 << 20, peak


@pytest.mark.parametrize(
    "body", [b"-5\r\nhello\r\n0\r\n\r\n", b"5\r\nhel", b"zz\r\n", b"", b"5\r\nhello\r\n", b"0x5\r\nhello\r\n0\r\n\r\n"]
)
async def test_a_page_cut_off_or_without_clear_chunks_is_a_failure_of_the_index(tmp_path: Path, body: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        writer.write(HEAD + body)

    got, use = await page(tmp_path, answer)
    assert got == "[reset]" or "0\r\n\r\n" not in got, "the client must see that the page is not complete"
    assert (use.failed, use.broken) == (1, True)
