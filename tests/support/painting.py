"""An agent that sends three images: one that browsers can show, one that browsers cannot show, and one by URL."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import aiohttp

from outrider.harnesses.base import HarnessContext, HarnessOutcome
from support.pictures import ADDRESS, PNG


def picture(width: int = 200, height: int = 80) -> bytes:
    """Return a PNG with a gradient."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes(v for x in range(width) for v in (x, 2 * y, 140)) for y in range(height))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


class Painter:
    def __init__(self, options: Mapping[str, Any]) -> None:
        """There are no options."""

    async def init(self, context: HarnessContext) -> None:
        """The agent needs nothing in the sandbox."""

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        urls = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in (picture(), PNG)]
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in (*urls, ADDRESS)]
        content = [{"type": "text", "text": "Look at these."}, *parts]
        body = {"model": "any", "messages": [{"role": "user", "content": content}]}
        async with aiohttp.ClientSession() as http:
            url = f"{context.endpoint.base_url}/v1/chat/completions"
            async with http.post(url, json=body) as reply:
                if reply.status != 200:
                    raise ValueError(f"{reply.status}: {await reply.text()}")
        return HarnessOutcome()


def painting_task() -> dict[str, Any]:
    return {
        "instruction": "look",
        "harness": {"agent": "support.painting:Painter"},
        "runtime": {"kind": "memory"},
        "evaluator": {"kind": "command", "run": "true"},
    }
