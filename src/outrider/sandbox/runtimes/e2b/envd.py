"""Runs a process in an E2B sandbox, and connects the process's standard input and output to a socket of this machine.

The wire format is the Connect protocol with JSON, as in E2B's own SDKs. `process.Process/Start` streams the output.
Each call of `SendInput` carries a piece of the input. Invariants:

- Pieces of the input arrive in order and at most once.
- If the output stream breaks or is silent for SILENCE_SECONDS, the socket is closed, because bytes may be missing.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from outrider.concurrency.retries import RetryPolicy
from outrider.errors import LOG_TAIL, RuntimeFailure
from outrider.sandbox.runtimes.e2b.api import (
    CALL_SECONDS,
    CONNECT_SECONDS,
    ENVD_PORT,
    PORT_CLOSED,
    UNREADABLE,
    E2BApi,
    E2BError,
    MadeSandbox,
    bounded,
    refusal,
    translated,
)

USER = "root"
"""The user of all processes in a sandbox. It may be root, because an E2B sandbox is a separate machine."""
PIECE = 1 << 20
"""Maximum bytes of input that one call sends."""
MAX_FRAME = 16 << 20
PING_SECONDS = 20
SILENCE_SECONDS = 120.0
"""The output stream is treated as broken if no frame arrives for this many seconds. The client asks the service for a
keep-alive every PING_SECONDS. A service that ignores this request sends a keep-alive every 90 seconds."""
BUSY = RetryPolicy(first=0.2, longest=10.0, attempts=20)
"""How to repeat a call whose reply has status 429. Such a call was not carried out."""
END_SECONDS = 2.0
"""Seconds to wait for the process to end, after input could not be sent to it."""
COMPRESSED, LAST = 1, 2
"""Flag bits of a frame. COMPRESSED: its content is compressed. LAST: it is the last frame of its stream."""


class DataEvent(msgspec.Struct, frozen=True):
    """A piece of the process's output, in base64."""

    stdout: str | None = None
    stderr: str | None = None


class EndEvent(msgspec.Struct, frozen=True, rename="camel"):
    exit_code: int = 0
    status: str = ""
    error: str | None = None


class StartEvent(msgspec.Struct, frozen=True):
    pid: int


class ProcessEvent(msgspec.Struct, frozen=True):
    """An event of a process. At most one field is set. In a keep-alive, none is."""

    start: StartEvent | None = None
    data: DataEvent | None = None
    end: EndEvent | None = None


class StartFrame(msgspec.Struct, frozen=True):
    event: ProcessEvent


class EnvdFault(msgspec.Struct, frozen=True):
    code: str = "unknown"
    message: str = ""


class LastFrame(msgspec.Struct, frozen=True):
    error: EnvdFault | None = None


class Envd:
    """A client of the program `envd` in one sandbox."""

    def __init__(self, api: E2BApi, sandbox: MadeSandbox) -> None:
        settings = api.settings
        domain = sandbox.domain or settings.domain
        self._http = api.http
        self._url = settings.sandbox_url or f"https://{ENVD_PORT}-{sandbox.sandbox_id}.{domain}"
        self._headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(ENVD_PORT)}
        if sandbox.envd_access_token:
            self._headers["X-Access-Token"] = sandbox.envd_access_token
        if sandbox.traffic_access_token:
            self._headers["E2B-Traffic-Access-Token"] = sandbox.traffic_access_token

    async def is_closed(self) -> bool:
        """Return True if the service reports that the sandbox runs but `envd` no longer runs in it."""
        try:
            async with translated(), self._get("/health") as answer:
                return answer.status == 502 and PORT_CLOSED in str(refusal(answer, await bounded(answer)))
        except E2BError:
            return False

    def _get(self, path: str) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._http.get(self._url + path, headers=self._headers, allow_redirects=False)

    async def upload(self, path: str, data: AsyncIterator[bytes]) -> None:
        """Create or replace a file, with its parent folders. Raises E2BError, also if `envd` takes no further piece for
        CALL_SECONDS."""
        clock = asyncio.get_running_loop().time
        patience = asyncio.timeout(CALL_SECONDS)  # aiohttp itself limits only the wait for the reply

        async def taken() -> AsyncIterator[bytes]:
            async for piece in data:
                patience.reschedule(clock() + CALL_SECONDS)
                yield piece

        form = aiohttp.FormData()
        form.add_field("file", taken(), filename=path, content_type="application/octet-stream")
        query = {"path": path, "username": USER}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=CALL_SECONDS)
        async with (
            translated(),
            patience,
            self._http.post(
                f"{self._url}/files",
                params=query,
                data=form,
                headers=self._headers,
                timeout=timeout,
                allow_redirects=False,
            ) as answer,
        ):
            if answer.status >= 300:
                raise refusal(answer, await bounded(answer))

    @contextlib.asynccontextmanager
    async def start(self, command: Sequence[str], env: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Start a process, and yield the response that streams its events. Raises E2BError."""
        program, *args = command
        config = {"cmd": program, "args": args, "envs": dict(env), "cwd": "/"}
        body = frame(msgspec.json.encode({"process": config, "stdin": True}))
        headers = {
            **self._rpc_headers("application/connect+json"),
            "Keepalive-Ping-Interval": str(PING_SECONDS),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
        async with self._called("Start", body, headers, timeout) as answer:
            yield answer

    async def send(self, pid: int, data: bytes) -> None:
        """Write to the standard input of a process. Raises E2BError."""
        text = base64.b64encode(data).decode()
        body = msgspec.json.encode({"process": {"pid": pid}, "input": {"stdin": text}})
        async with self._called("SendInput", body, self._rpc_headers("application/json")) as answer:
            await bounded(answer)

    @contextlib.asynccontextmanager
    async def _called(
        self, method: str, body: bytes, headers: Mapping[str, str], timeout: aiohttp.ClientTimeout | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Call a method of envd's process service. If a reply has the status 429, the call is repeated, as BUSY
        describes. Raises E2BError."""
        options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        refusals = 0
        while True:
            async with (
                translated(),
                self._http.post(
                    f"{self._url}/process.Process/{method}",
                    data=body,
                    headers=headers,
                    allow_redirects=False,
                    **options,
                ) as answer,
            ):
                if answer.status == 200:
                    yield answer
                    return
                error = refusal(answer, await bounded(answer))
            refusals += 1
            if error.status != 429 or refusals >= (BUSY.attempts or 1):
                raise error
            await asyncio.sleep(BUSY.wait(refusals - 1, error.wait))

    def _rpc_headers(self, content: str) -> dict[str, str]:
        user = base64.b64encode(f"{USER}:".encode()).decode()
        return {
            **self._headers,
            "Content-Type": content,
            "Connect-Protocol-Version": "1",
            "Authorization": f"Basic {user}",
        }


def frame(data: bytes) -> bytes:
    """Return a message as a frame of a stream."""
    return struct.pack(">BI", 0, len(data)) + data


async def frames(stream: aiohttp.StreamReader) -> AsyncIterator[ProcessEvent]:
    """Yield a process's events until the stream's last frame. Raises E2BError if the stream ends too early, and
    ValueError for data that is not an event."""
    while True:
        try:
            flags, size = struct.unpack(">BI", await stream.readexactly(5))
            if size > MAX_FRAME or flags & COMPRESSED:
                raise ValueError("a frame that was not asked for")
            data = await stream.readexactly(size)
        except asyncio.IncompleteReadError as error:
            raise E2BError(0, "the stream ended in the middle") from error
        if flags & LAST:
            fault = msgspec.json.decode(data, type=LastFrame).error
            if fault is not None:
                raise E2BError(0, f"{fault.code}: {fault.message[:LOG_TAIL]}")
            return
        yield msgspec.json.decode(data, type=StartFrame).event


class ProcessSocket:
    """A process that `run` starts in a sandbox. `end` is a socket that carries the process's input and output. `exit`
    describes how the process ended. `exit` is None while the process runs, and stays None if the stream breaks."""

    def __init__(self, envd: Envd) -> None:
        self.end, self._far = socket.socketpair()
        self._far.setblocking(False)
        self._envd = envd
        self._log = b""
        self._reason = ""
        self.exit: EndEvent | None = None

    def log_tail(self) -> str:
        """Return the last lines of the process's standard error, and why the connection ended."""
        parts = [self._log.decode("utf-8", "replace").strip(), self._reason]
        return "\n".join(filter(None, parts))

    async def run(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Run the process until it ends, the stream breaks, or the task is cancelled. Raises nothing."""
        try:
            async with self._envd.start(command, env) as answer, asyncio.TaskGroup() as group:
                feeding: asyncio.Task[None] | None = None
                async for event in frames(answer.content):
                    if event.start is not None and feeding is None:
                        feeding = group.create_task(self._feed(event.start.pid))
                    if event.data is not None:
                        await self._put(event.data)
                    if event.end is not None:
                        self.exit = event.end
                        self._reason = f"the tool server ended: {event.end.error or event.end.status}"[:LOG_TAIL]
                        break
                if feeding is not None:
                    feeding.cancel()
        except* (E2BError, OSError, *UNREADABLE) as errors:
            self._reason = self._reason or f"{errors.exceptions[0]}"[:LOG_TAIL]
        finally:
            self._far.close()

    async def _put(self, data: DataEvent) -> None:
        loop = asyncio.get_running_loop()
        try:
            if data.stdout:
                await loop.sock_sendall(self._far, base64.b64decode(data.stdout, validate=True))
            if data.stderr:
                self._log = (self._log + base64.b64decode(data.stderr, validate=True))[-LOG_TAIL:]
        except binascii.Error as error:
            raise ValueError("output that is not base64") from error

    async def _feed(self, pid: int) -> None:
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(self._far, PIECE):
            try:
                await self._envd.send(pid, data)
            except E2BError:
                # The call may have failed because the process has ended. The output stream then reports the end during
                # this pause.
                await asyncio.sleep(END_SECONDS)
                raise
        raise OSError("this machine has closed the connection")

    def close(self) -> None:
        """Close this object's end of the socket pair. This is needed only if `run` was never called."""
        self._far.close()


def failure(what: str, error: E2BError) -> RuntimeFailure:
    return RuntimeFailure(f"the E2B service cannot {what}: {error}")
