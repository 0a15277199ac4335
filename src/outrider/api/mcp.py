"""Serves `/mcp`: an MCP server over streamable HTTP. Its tools call the control API within this process, with the
headers of the caller.

Invariant: a tool may do only what the caller's token may do. The audit log treats a tool's calls of the control API
like those of other clients.
"""

from __future__ import annotations

import asyncio
from importlib import import_module
from importlib.util import find_spec

from starlette.responses import Response

from outrider.api.access import caller_in, check
from outrider.environment import install_command
from outrider.errors import NotFound
from outrider.wire.http_server import Application, Receive, Scope, Send

PATH = "/mcp"


class McpEndpoint:
    """The ASGI application at PATH. Access control has checked the caller. `control` is the control API, with access
    control of its own."""

    def __init__(self, control: Application) -> None:
        self._control = control

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = caller_in(scope)
        check(f"POST {PATH}", "read", caller)
        # GET and DELETE have no use: the server sends nothing on its own, and keeps no state
        if scope["method"] != "POST":
            await Response(status_code=405, headers={"Allow": "POST"})(scope, receive, send)
            return
        if find_spec("mcp") is None:
            raise NotFound(f"{PATH} needs the package mcp on the service's machine", hint=install_command("mcp"))
        server = await asyncio.to_thread(import_module, "outrider.mcp.server")
        await server.serve_http(self._control, caller.may, scope, receive, send)
