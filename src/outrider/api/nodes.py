"""Control routes for the nodes that run sessions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response, WebSocket

from outrider.api.access import caller_in
from outrider.api.control_bodies import whole_body
from outrider.api.control_replies import json_reply
from outrider.api.openapi import answers, takes
from outrider.nodes.messages import NAMING, NODE_NAME
from outrider.schemas import NodeList, PulledImages
from outrider.service.admission import parse_body
from outrider.service.service import Service
from outrider.spec import PullSpec
from outrider.wire.asgi_socket import AsgiSocket
from outrider.wire.frames import Close


def node_routes(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/v1/nodes")

    @routes.get("", **answers(NodeList))
    async def nodes() -> Response:
        """List the nodes with their lanes and resources."""
        return json_reply(service.nodes())

    @routes.post("/pull", **takes(PullSpec), **answers(PulledImages))
    async def pull(request: Request) -> Response:
        """Have every machine that runs sessions get an image from a registry. Replies when each machine has the image
        or has reported an error, which may take minutes."""
        return json_reply(await service.pull_image(parse_body(PullSpec, await whole_body(request))))

    @routes.post("/{name}/drain", **answers(NodeList))
    async def drain(name: str) -> Response:
        """Stop giving a node new sessions until it is resumed. Its sessions under way go on."""
        return json_reply(await service.drain_node(name))

    @routes.post("/{name}/resume", **answers(NodeList))
    async def resume(name: str) -> Response:
        """Give a drained node new sessions again."""
        return json_reply(await service.drain_node(name, False))

    @routes.websocket("/{name}/join")
    async def join(websocket: WebSocket, name: str) -> None:
        """Attach a node on another machine for as long as the connection lasts."""
        await websocket.accept()
        socket = AsgiSocket(websocket)
        if not NODE_NAME.fullmatch(name):
            await socket.close(Close.NONSENSE, NAMING)
            return
        await service.joined.attend(name, socket, caller_in(websocket.scope).name)

    return routes
