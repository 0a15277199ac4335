"""Imitates `envd`, the daemon in each E2B sandbox. Its API starts processes and transfers files."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
from asyncio import StreamReader
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from outrider.lab.fakes.e2b_server.connect import ConnectFault, fault_reply, frame, last_frame, messages, read
from outrider.lab.fakes.e2b_server.machine import FileFault, Machine

VERSION = "0.6.4"
PIECE = 32 << 10
SIGNALS = {"SIGNAL_SIGTERM": 15, "SIGNAL_SIGKILL": 9}
FILE_CALLS = {"Stat": "stat", "ListDir": "list", "MakeDir": "make", "Move": "move", "Remove": "remove"}


class RunningProcess:
    """A process, and a queue of its events for each response that streams them."""

    def __init__(self, process: Process, config: dict[str, Any], tag: str | None) -> None:
        self.process = process
        self.config = config
        self.tag = tag
        self.followers: set[asyncio.Queue[dict[str, Any]]] = set()
        self.end: dict[str, Any] | None = None

    def publish(self, event: dict[str, Any]) -> None:
        for queue in self.followers:
            queue.put_nowait(event)


class FakeEnvd:
    """The API of `envd` for one sandbox (`machine`). `reply` handles every request."""

    def __init__(self, machine: Machine, env: dict[str, str]) -> None:
        self._machine = machine
        self._env = env
        self._processes: dict[int, RunningProcess] = {}
        self._calls: dict[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]] = {
            "List": self._list,
            "SendInput": self._send_input,
            "SendSignal": self._send_signal,
            "CloseStdin": self._close_stdin,
            "Update": self._nothing,
        }

    async def reply(self, request: web.Request) -> web.StreamResponse:
        service, _, method = request.path.strip("/").partition("/")
        try:
            if request.path == "/health":
                return web.Response(status=204)
            if request.path == "/files":
                return await (self._download if request.method == "GET" else self._upload)(request)
            if service == "filesystem.Filesystem" and method in FILE_CALLS:
                return web.json_response(await self._file(FILE_CALLS[method], read(await request.read())))
            if service == "process.Process" and method in ("Start", "Connect"):
                return await self._stream(request, method)
            if service == "process.Process" and method == "StreamInput":
                return await self._stream_input(request)
            if service == "process.Process" and method in self._calls:
                return web.json_response(await self._calls[method](read(await request.read())))
        except (ConnectFault, FileFault) as fault:
            return fault_reply(fault.code, str(fault))
        return fault_reply("unimplemented", f"this server has no {request.path}")

    async def _stream(self, request: web.Request, method: str) -> web.StreamResponse:
        (asked,) = messages(await request.read()) or [{}]
        running = await self._start(asked) if method == "Start" else self._process(asked)
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        running.followers.add(queue)
        every = float(request.headers.get("Keepalive-Ping-Interval", "90"))
        answer = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        try:
            await answer.prepare(request)
            await answer.write(frame({"event": {"start": {"pid": running.process.pid}}}))
            if method == "Start":
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._follow(running))
                    await _write_events(answer, queue, every)
            else:
                await _write_events(answer, queue, every)
            await answer.write(last_frame())
        except (ConnectionError, ExceptionGroup):
            pass  # the client has disconnected, and the process keeps running
        finally:
            running.followers.discard(queue)
        return answer

    async def _start(self, asked: dict[str, Any]) -> RunningProcess:
        config = asked.get("process") or {}
        command = [config.get("cmd", ""), *config.get("args", [])]
        cwd = config.get("cwd") or "/home/user"
        process = await self._machine.run(command, {**self._env, **config.get("envs", {})}, cwd)
        if not asked.get("stdin") and process.stdin is not None:
            process.stdin.close()
        running = self._processes[process.pid] = RunningProcess(process, config, asked.get("tag"))
        return running

    async def _follow(self, running: RunningProcess) -> None:
        process = running.process
        assert process.stdout is not None
        assert process.stderr is not None
        await asyncio.gather(_publish(running, "stdout", process.stdout), _publish(running, "stderr", process.stderr))
        code = await process.wait()
        end: dict[str, Any] = {
            "exited": code >= 0,
            "status": f"exit status {code}" if code >= 0 else f"signal: {-code}",
        }
        if code:
            end["exitCode"] = code if code >= 0 else -1
            end["error"] = end["status"]
        self._processes.pop(process.pid, None)
        self._machine.processes.pop(process.pid, None)
        running.publish({"end": end})

    async def _stream_input(self, request: web.Request) -> web.StreamResponse:
        first, *rest = messages(await request.read())
        running = self._process(first["start"])
        for message in rest:
            if "data" in message:
                await self._write(running, message["data"])
        return web.Response(body=frame({}) + last_frame(), headers={"Content-Type": "application/connect+json"})

    async def _list(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {
            "processes": [
                {"config": one.config, "pid": pid, **({"tag": one.tag} if one.tag else {})}
                for pid, one in self._processes.items()
            ]
        }

    async def _send_input(self, asked: dict[str, Any]) -> dict[str, Any]:
        await self._write(self._process(asked), asked)
        return {}

    async def _write(self, running: RunningProcess, asked: dict[str, Any]) -> None:
        stdin = running.process.stdin
        assert stdin is not None
        try:
            stdin.write(base64.b64decode(asked["input"]["stdin"]))
            await stdin.drain()
        except (KeyError, ValueError) as error:
            raise ConnectFault("invalid_argument", "input without stdin in base64") from error
        except OSError as error:
            raise ConnectFault("not_found", "the process does not read") from error

    async def _send_signal(self, asked: dict[str, Any]) -> dict[str, Any]:
        self._machine.signal(self._process(asked).process.pid, SIGNALS.get(asked.get("signal", ""), 15))
        return {}

    async def _close_stdin(self, asked: dict[str, Any]) -> dict[str, Any]:
        stdin = self._process(asked).process.stdin
        assert stdin is not None
        stdin.close()
        return {}

    async def _nothing(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {}

    def _process(self, asked: dict[str, Any]) -> RunningProcess:
        wanted = asked.get("process") or {}
        for pid, one in self._processes.items():
            if pid == wanted.get("pid") or (one.tag is not None and one.tag == wanted.get("tag")):
                return one
        raise ConnectFault("not_found", f"no process {wanted}")

    async def _file(self, op: str, asked: dict[str, Any]) -> dict[str, Any]:
        path = asked.get("path") or asked.get("source") or ""
        more: dict[str, Any] = {"depth": max(1, int(asked.get("depth", 1)))} if op == "list" else {}
        if op == "move":
            more["target"] = absolute(asked.get("destination", ""))
        reply: dict[str, Any] = json.loads(await self._machine.file(op, absolute(path), **more))
        return reply

    async def _download(self, request: web.Request) -> web.StreamResponse:
        return await self._by_http(lambda: self._machine.file("read", absolute(request.query.get("path", ""))))

    async def _upload(self, request: web.Request) -> web.StreamResponse:
        written: list[Any] = []

        async def write(path: str, data: bytes) -> None:
            written.append(json.loads(await self._machine.file("write", absolute(path), data)))

        async def write_all() -> bytes:
            if request.content_type.startswith("multipart/"):
                async for part in await request.multipart():
                    data = await part.read()  # type: ignore[union-attr]  # a part is never itself multipart
                    await write(request.query.get("path") or part.filename or "", bytes(data))  # type: ignore[union-attr]
            else:
                await write(request.query.get("path", ""), await request.read())
            return json.dumps(written).encode()

        answer = await self._by_http(write_all)
        answer.content_type = "application/json"
        return answer

    async def _by_http(self, work: Callable[[], Awaitable[bytes]]) -> web.Response:
        try:
            return web.Response(body=await work())
        except FileFault as fault:
            status = 404 if fault.code == "not_found" else 400
            return web.json_response({"code": status, "message": str(fault)}, status=status)


async def _publish(running: RunningProcess, name: str, stream: StreamReader) -> None:
    while data := await stream.read(PIECE):
        running.publish({"data": {name: base64.b64encode(data).decode()}})


async def _write_events(answer: web.StreamResponse, queue: asyncio.Queue[dict[str, Any]], every: float) -> None:
    while True:
        event: dict[str, Any] = {"keepalive": {}}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(every):
                event = await queue.get()
        await answer.write(frame({"event": event}))
        if "end" in event:
            return


def absolute(path: str) -> str:
    """Return the absolute form of a path that may be relative to the user's home folder."""
    return os.path.normpath(os.path.join("/home/user", path))
