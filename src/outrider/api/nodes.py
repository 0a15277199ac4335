"""Control routes for the nodes that run sessions."""

from __future__ import annotations

from typing import Annotated

from fastapi import WebSocket

from outrider.api.control_router import Caller, ControlRouter, Serving, body
from outrider.nodes.messages import NAMING, NODE_NAME
from outrider.schemas import NodeList, PulledImages
from outrider.spec import PullSpec
from outrider.wire.asgi_socket import AsgiSocket
from outrider.wire.link_protocol import Close

ROUTES = ControlRouter("/nodes")


@ROUTES.get("", "read", NodeList)
async def nodes(service: Serving) -> NodeList:
    """List the nodes with their lanes and resources."""
    return service.nodes()


@ROUTES.post("/pull", "admin", PulledImages)
async def pull(service: Serving, spec: Annotated[PullSpec, body(PullSpec)]) -> PulledImages:
    """Pull an image from a registry on every machine that runs sessions. The reply is sent when each machine has the
    image or has failed, which may take minutes."""
    return await service.pull_image(spec)


@ROUTES.post("/{name}/drain", "admin", NodeList)
async def drain(service: Serving, name: str) -> NodeList:
    """Stop giving a node new sessions until it is resumed. Sessions that run on the node continue."""
    return await service.drain_node(name)


@ROUTES.post("/{name}/resume", "admin", NodeList)
async def resume(service: Serving, name: str) -> NodeList:
    """Give a drained node new sessions again."""
    return await service.drain_node(name, False)


@ROUTES.websocket("/{name}/join", "node")
async def join(websocket: WebSocket, name: str, service: Serving, caller: Caller) -> None:
    """Attach a node that runs on another machine, until the connection ends."""
    await websocket.accept()
    socket = AsgiSocket(websocket)
    if not NODE_NAME.fullmatch(name):
        await socket.close(Close.NONSENSE, NAMING)
        return
    await service.joined.attend(name, socket, caller.name)
