"""Serves the WebSocket route for the workers of a relay engine.

`engines/relay/` handles the messages. Invariant: only requests that passed access control reach this route.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import msgspec
from fastapi import WebSocket

from outrider.api.control_router import ControlRouter, Serving
from outrider.engines.base import Engine
from outrider.engines.relay.attached_worker import AttachedWorker
from outrider.engines.relay.engine import RelayEngine
from outrider.errors import Conflict, OutriderError
from outrider.service.admission import parse_body
from outrider.spec import EngineSpec
from outrider.wire.asgi_socket import AsgiSocket
from outrider.wire.link_protocol import Close, close_reason

ROUTES = ControlRouter()


@ROUTES.websocket("/relay/{engine}", "admin")
async def attach(websocket: WebSocket, engine: str, service: Serving) -> None:
    """Attach a worker to the relay engine with this name. If there is no engine with this name, a relay engine is
    added. The connection is closed if the name is invalid, or if an engine of another kind has this name."""
    await websocket.accept()
    socket = AsgiSocket(websocket)
    pool = service.pool_of(engine)
    try:
        if pool.engine(engine) is None:
            await pool.add(parse_body(EngineSpec, msgspec.json.encode({"kind": "relay", "name": engine})))
        relay = pool.engine(engine)
        if not isinstance(relay, RelayEngine):
            raise Conflict(f"engine {engine!r} is no relay", hint="give the worker another engine name")
    except OutriderError as error:
        await socket.close(Close.CONFLICT, close_reason(error.message))
        return

    async def check(worker: AttachedWorker) -> None:
        await pool.health.check(cast(Engine, worker))  # the check uses only attributes that a worker also has

    await relay.serve(socket, check=check, attached=partial(pool.probe_now, engine))
