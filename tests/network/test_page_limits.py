"""The size limits of a package index's pages, which a program in a sandbox can exceed by its choice of page."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.sandbox.network import proxy
from outrider.sandbox.network.requests import NotAllowed, ReplyHead, Unreachable


async def _body(data: bytes, head: bytes) -> bytes:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    passage: Any = SimpleNamespace(received=lambda number: None)
    reply = ReplyHead.read(head)
    return await proxy._whole_body(reply, reply.length, reader, proxy.Flow(passage))


async def test_a_page_too_large_is_refused_and_no_failure_of_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "MAX_REWRITTEN", 10)
    with pytest.raises(NotAllowed, match="too large"):
        await _body(b"x" * 11, b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n")


async def test_a_chunk_has_no_negative_size() -> None:
    with pytest.raises(Unreachable, match="not HTTP"):
        await _body(b"-5\r\nhello\r\n0\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
