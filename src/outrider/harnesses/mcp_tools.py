"""The tools of the MCP servers of a task, for in-process agents. The servers run in the sandbox.

The client is the optional package `mcp`, which is imported only when needed. A runtime cannot keep the pipes of a
process open, so a server uses two named pipes instead. A live shell reads the server's output line by line, and a
separate command writes each message to the server's input. Invariant: when the block of `mcp_tools` ends, the servers
end, and an exception in the block is raised unchanged.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from outrider.environment import install_command
from outrider.errors import LOG_TAIL, HarnessError, HarnessUnavailable, RuntimeFailure
from outrider.harnesses.base import HarnessContext
from outrider.harnesses.toolbox import PROBE_SECONDS, Tool
from outrider.sandbox.runtimes.base import Runtime, Shell
from outrider.spec import MAX_SECONDS, McpServer

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp import ClientSession
    from mcp.shared.message import SessionMessage

NAME = "mcp__{server}__{tool}"
"""The model's name for a tool of a server."""
START_SECONDS = 120.0
"""Maximum seconds to start a server and list its tools."""
SEND_SECONDS = 30.0
"""Maximum seconds that a server takes to read a message."""
MAX_PAGES = 100
"""Maximum pages of a server's list of tools."""

START = """
mkdir -p {folder} && rm -f {folder}/in {folder}/out && mkfifo {folder}/in {folder}/out
(. {folder}/start) <>{folder}/in >{folder}/out 2>{folder}/err &
exec 4<{folder}/out
"""
"""Shell script that starts a server in the background, and waits until the server has opened its output. The server
opens its input for writing, too, so that the input never ends."""
NEXT = """IFS= read -r line <&4 && printf '%s\\n' "$line\""""
SEND = 'cat > "$0"'
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""Matches an escape that JSON has for a surrogate, lone or not."""


def mcp_available() -> bool:
    return importlib.util.find_spec("mcp") is not None


@asynccontextmanager
async def mcp_tools(context: HarnessContext) -> AsyncIterator[list[Tool]]:
    """Start the task's MCP servers, and yield their tools. Raises HarnessUnavailable if the package `mcp` is not
    installed, and HarnessError if a server does not start."""
    servers = context.task.harness.mcp_servers
    if servers and not mcp_available():
        raise HarnessUnavailable(
            "MCP servers of in-process agents need the package mcp on the node",
            field="task.harness.mcp_servers",
            hint=f"run: {install_command('mcp')}",
        )
    async with AsyncExitStack() as stack:
        tools: list[Tool] = []
        for number, server in enumerate(servers):
            folder = f"{context.runtime.scratch}/outrider-mcp-{number}"
            tools += await stack.enter_async_context(_served(context.runtime, server, folder))
        yield tools


@asynccontextmanager
async def _served(runtime: Runtime, server: McpServer, folder: str) -> AsyncIterator[list[Tool]]:
    import anyio
    from mcp import ClientSession

    shell = await runtime.open_shell("bash")
    failure: Exception | None = None
    try:
        await runtime.write(f"{folder}/start", _script(server).encode())
        begun = await shell.run(START.format(folder=shlex.quote(folder)), seconds=START_SECONDS)
        if begun.exit_code != 0:
            raise HarnessError(f"the MCP server {server.name!r} cannot be started", log_tail=begun.output[-LOG_TAIL:])
        to_session, received = anyio.create_memory_object_stream["SessionMessage | Exception"](0)
        sent, from_session = anyio.create_memory_object_stream["SessionMessage"](0)
        async with anyio.create_task_group() as group:
            group.start_soon(_receive, shell, to_session)
            group.start_soon(_send, runtime, f"{folder}/in", from_session)
            async with ClientSession(received, sent) as session:
                # Catch an exception of the block here, and raise it again outside of the task groups, because the task
                # groups would wrap the exception in an ExceptionGroup.
                try:
                    yield await _started(session, runtime, server, folder)
                except Exception as error:
                    failure = error
            group.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await shell.close()
    if failure is not None:
        raise failure


async def _started(session: ClientSession, runtime: Runtime, server: McpServer, folder: str) -> list[Tool]:
    """Return the tools of a server that has started."""
    from mcp_types import PaginatedRequestParams

    try:
        async with asyncio.timeout(START_SECONDS):
            await session.initialize()
            tools: list[Tool] = []
            page = await session.list_tools()
            for _ in range(MAX_PAGES):
                tools += [_tool(session, server, found) for found in page.tools]
                if page.next_cursor is None:
                    break
                page = await session.list_tools(params=PaginatedRequestParams(cursor=page.next_cursor))
            return tools
    except Exception as error:  # the package mcp raises several types of errors
        try:
            errors = (await runtime.read(f"{folder}/err")).decode("utf-8", errors="replace")
        except FileNotFoundError:
            errors = ""
        raise HarnessError(
            f"the MCP server {server.name!r} did not start: {type(error).__name__}: {error}",
            hint="the log tail is the end of what the server wrote to its standard error",
            log_tail=errors[-LOG_TAIL:],
        ) from error


def _tool(session: ClientSession, server: McpServer, found: Any) -> Tool:
    """Return the server's tool `found` as a tool for the agent."""

    async def call(context: HarnessContext, arguments: Mapping[str, Any]) -> str:
        try:
            result = await session.call_tool(found.name, dict(arguments))
        except Exception as error:  # the server or the connection failed
            # In a broken sandbox, the next command raises RuntimeFailure. Otherwise the model gets the error as the
            # result.
            await context.runtime.exec(["true"], seconds=PROBE_SECONDS)
            return f"the MCP server {server.name} failed: {error or type(error).__name__}"
        text = "\n".join(map(_text, result.content))
        if not text and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        return f"the tool failed: {text}" if result.is_error else text

    return Tool(
        spec={
            "type": "function",
            "function": {
                "name": NAME.format(server=server.name, tool=found.name),
                "description": found.description or "",
                "parameters": found.input_schema,
            },
        },
        run=call,
    )


def _text(part: Any) -> str:
    """Return one part of a tool's result as text."""
    text = getattr(part, "text", None) or getattr(getattr(part, "resource", None), "text", None)
    return text if isinstance(text, str) else f"[{part.type}: not shown]"


def _script(server: McpServer) -> str:
    """Return a shell script that becomes the server, using exec."""
    variables = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in server.env.items())
    return f"{variables}exec {shlex.join([server.command or '', *server.args])}\n"


def _without_surrogates(line: str) -> str:
    """Return a line of JSON in which lone surrogates are question marks. The package mcp refuses them, but a server may
    write them: JavaScript cuts texts between the two halves of a character."""
    if SURROGATE.search(line) is None:
        return line
    try:
        return json.dumps(json.loads(line), ensure_ascii=False).encode("utf-8", "replace").decode()
    except (ValueError, RecursionError):
        return line


async def _receive(shell: Shell, to_session: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
    """Pass the server's messages on until the server ends or the sandbox breaks."""
    import anyio
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter
    from pydantic import ValidationError

    async with to_session:
        while True:
            try:
                line = await shell.run(NEXT, seconds=MAX_SECONDS)
            except RuntimeFailure:
                return
            if line.exit_code != 0:
                return
            try:
                message = jsonrpc_message_adapter.validate_json(_without_surrogates(line.output), by_name=False)
            except ValidationError:
                continue  # this line is not a protocol message
            try:
                await to_session.send(SessionMessage(message))
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                return


async def _send(runtime: Runtime, pipe: str, from_session: MemoryObjectReceiveStream[SessionMessage]) -> None:
    """Pass messages on to the server until the server no longer reads them or the sandbox breaks."""
    async with from_session:
        async for message in from_session:
            line = message.message.model_dump_json(by_alias=True, exclude_unset=True) + "\n"
            try:
                done = await runtime.exec(["sh", "-c", SEND, pipe], stdin=line.encode(), seconds=SEND_SECONDS)
            except RuntimeFailure:
                return
            if done.exit_code != 0:
                return
