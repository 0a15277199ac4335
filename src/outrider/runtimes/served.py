"""What every runtime with a tool server inside has in common: commands, shells and files as calls to it.

It knows neither isolation nor processes and holds no state: a runtime adds `tools` (its connection) and `place` (where
a path given by the user is inside). Invariant: all that goes in or out passes through that one connection.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from outrider.errors import RuntimeFailure
from outrider.runtimes.base import MAX_OUTPUT, ExecResult, ShellResult
from outrider.runtimes.bundle import source
from outrider.runtimes.toolclient import Done, ExecDone, Part, ShellDone, ShellOpened, ToolClient
from outrider.runtimes.uploads import entries, open_plain

PIECE = 4 << 20
MAX_SNAPSHOT = 1 << 30


class ServedRuntime(ABC):
    """The calls of the Runtime protocol that go through a tool server."""

    @property
    @abstractmethod
    def tools(self) -> ToolClient:
        """The connection. Raises RuntimeFailure when the sandbox does not run."""

    @abstractmethod
    def place(self, path: str) -> str:
        """The absolute path, for the tool server, of a path the user gave."""

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] = {},
        cwd: str | None = None,
        stdin: bytes = b"",
        seconds: float,
    ) -> ExecResult:
        argv = ["bash", "-c", command] if isinstance(command, str) else list(command)
        args: dict[str, Any] = {
            "argv": argv,
            "env": dict(env),
            "cwd": self.place(cwd or "."),
            "stdin": stdin,
            "ms": round(seconds * 1000),
            "cap": MAX_OUTPUT,
        }
        try:
            done = await self.tools.call("exec", args, ExecDone, seconds=seconds)
        except OSError as error:
            raise RuntimeFailure(f"cannot run {argv[0]!r}: {error}") from error
        return ExecResult(
            exit_code=done.code,
            stdout=done.out,
            stderr=done.err,
            timed_out=done.timed_out,
            seconds=done.us / 1e6,
        )

    async def open_shell(self, kind: Literal["bash", "python"] = "bash") -> ServedShell:
        program = source("pythonshell") if kind == "python" else ""
        args = {"kind": kind, "cwd": self.place("."), "program": program}
        opened = await self.tools.call("shell_open", args, ShellOpened)
        return ServedShell(self.tools, opened.shell)

    async def read(self, path: str, *, limit: int = MAX_OUTPUT) -> bytes:
        place = self.place(path)
        pieces: list[bytes] = []
        total = 0
        while True:
            size = min(PIECE, limit + 1 - total)
            part = await self.tools.call("read", {"path": place, "offset": total, "size": size}, Part)
            pieces.append(part.data)
            total += len(part.data)
            if total > limit:
                raise RuntimeFailure(f"{path} is larger than {limit} bytes")
            if len(part.data) < size:
                return b"".join(pieces)

    async def write(self, path: str, data: bytes, *, executable: bool = False) -> None:
        mode = 0o755 if executable else 0o644
        for offset in range(0, max(1, len(data)), PIECE):
            await self._write(self.place(path), data[offset : offset + PIECE], mode, append=offset > 0)

    async def _write(self, place: str, data: bytes, mode: int, *, append: bool) -> None:
        args = {"path": place, "data": data, "mode": mode, "append": append}
        try:
            await self.tools.call("write", args, Done)
        except OSError as error:
            raise RuntimeFailure(f"cannot write {place}: {error}") from error

    async def upload(self, source: Path, target: str) -> None:
        for entry in await asyncio.to_thread(lambda: list(entries(source))):
            place = self.place(posixpath.join(target, entry.name) if entry.name else target)
            if entry.link is not None:
                await self.tools.call("link", {"path": place, "target": entry.link}, Done)
            elif entry.folder:
                await self.tools.call("folder", {"path": place}, Done)
            else:
                await self._upload_file(entry.path, place)

    async def _upload_file(self, path: Path, place: str) -> None:
        fd, mode = await asyncio.to_thread(open_plain, path)
        try:
            offset = 0
            while data := await asyncio.to_thread(os.pread, fd, PIECE, offset):
                await self._write(place, data, mode, append=offset > 0)
                offset += len(data)
            if offset == 0:
                await self._write(place, b"", mode, append=False)
        finally:
            os.close(fd)

    async def snapshot(self, paths: Sequence[str]) -> bytes:
        whole = bytearray()

        def keep(data: bytes) -> None:
            if len(whole) + len(data) <= MAX_SNAPSHOT:  # the server inside stops there by itself, if it is honest
                whole.extend(data)

        named = [[self.place(path), self.member(path)] for path in paths]
        await self.tools.call("snapshot", {"paths": named, "limit": MAX_SNAPSHOT}, Done, seconds=600.0, on_part=keep)
        return bytes(whole)

    @abstractmethod
    def member(self, path: str) -> str:
        """The name of `path` in a snapshot: as seen in the sandbox, without the leading slash."""


class ServedShell:
    """A shell that lives in the tool server. Inputs given at the same time run one after another."""

    def __init__(self, tools: ToolClient, number: int) -> None:
        self._tools = tools
        self._number = number
        self._turn = asyncio.Lock()

    async def run(self, text: str, *, seconds: float) -> ShellResult:
        args = {
            "shell": self._number,
            "text": text.encode("utf-8", "surrogateescape"),
            "ms": round(seconds * 1000),
            "cap": MAX_OUTPUT,
        }
        async with self._turn:
            done = await self._tools.call("shell_run", args, ShellDone, seconds=seconds)
        return ShellResult(output=done.out.decode("utf-8", "replace"), exit_code=done.code, timed_out=done.timed_out)

    async def close(self) -> None:
        await self._tools.call("shell_close", {"shell": self._number}, Done)
