"""The receiver of callbacks. The receiver stores every push, and answers some of the stored pushes with an error."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web

from outrider.schemas import GroupView, JsonGroupView

REFUSED = 0.1


class Receiver:
    """`pushes` are the bodies by idempotency key, which is the id of the group; `taken` are the keys of the pushes that
    were answered with 2xx."""

    def __init__(self, rng: random.Random) -> None:
        self.url = ""
        self.pushes: defaultdict[str, list[GroupView]] = defaultdict(list)
        self.taken: set[str] = set()
        self._rng = rng

    async def receive(self, request: web.Request) -> web.Response:
        key = request.headers["Idempotency-Key"]
        self.pushes[key].append(msgspec.json.decode(await request.read(), type=JsonGroupView).view())
        if self._rng.random() < REFUSED:
            return web.Response(status=503)
        self.taken.add(key)
        return web.Response(status=204)


@asynccontextmanager
async def receiving(rng: random.Random) -> AsyncIterator[Receiver]:
    receiver = Receiver(rng)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/done", receiver.receive)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert runner.addresses
        receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/done"
        yield receiver
    finally:
        await asyncio.shield(runner.cleanup())
