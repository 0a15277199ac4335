"""`outrider mcp`: the MCP server over standard input and output, for a service."""

from __future__ import annotations

from importlib.util import find_spec

from outrider.cli.options import command
from outrider.cli.terminal import Terminal
from outrider.client.client import Client
from outrider.environment import install_command
from outrider.errors import InvalidField


@command
def mcp(terminal: Terminal, service: Client) -> None:
    """Serve the MCP tools of a service over standard input and output.

    A coding agent starts this command, and calls the tools: to look at runs
    and, if the token's role allows, to cancel, retry, pause and drain. The
    service itself has the same tools at /mcp.

    Examples:

        claude mcp add outrider -- outrider mcp --url http://127.0.0.1:8700
    """
    if terminal.json:
        raise InvalidField("standard output has the messages of the protocol", field="--json", hint="leave --json out")
    if find_spec("mcp") is None:
        raise InvalidField("the command needs the package mcp", field="mcp", hint=install_command("mcp"))
    from outrider.mcp.server import mcp_server, serve_stdio  # late, because the package is an extra

    service.run(serve_stdio(mcp_server(service.asynchronous)))
