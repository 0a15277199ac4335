"""`outrider mcp`: an MCP server over standard input and output. Its tools call a service."""

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

    A coding agent starts this command and calls the tools. The tools show runs.
    If the token's role allows it, they also cancel, retry, pause and drain. The
    service itself offers the same tools at its path /mcp.

    Examples:

        claude mcp add outrider -- outrider mcp --url http://127.0.0.1:8700
    """
    if terminal.json:
        raise InvalidField("standard output has the messages of the protocol", field="--json", hint="leave --json out")
    if find_spec("mcp") is None:
        raise InvalidField("the command needs the package mcp", field="mcp", hint=install_command("mcp"))
    from outrider.mcp.server import mcp_server, serve_stdio  # imported late, because the package `mcp` is optional

    service.run(serve_stdio(mcp_server(service.asynchronous)))
