"""What every runtime with a tool server inside has in common: commands, shells and files as calls to it.

It knows neither isolation nor processes and holds no state: a runtime adds `tools` (its connection) and `place` (where
a path given by the user is inside). Invariant: all that goes in or out passes through that one connection.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import re
import secrets
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec

from outrider.concurrency.cancellation import opened
from outrider.errors import RuntimeFailure
from outrider.pythons.ipython import WITHOUT_IPYTHON, ipython_command
from outrider.runtimes.base import (
    MAX_OUTPUT,
    MAX_PATCH,
    MAX_PATHS,
    Display,
    ExecResult,
    NoShell,
    PatchConflict,
    ShellKind,
    ShellResult,
)
from outrider.runtimes.tool_server.bundle import shell_program
from outrider.runtimes.tool_server.client import UNREADABLE, Done, ExecDone, Part, ShellDone, ShellOpened, ToolClient
from outrider.runtimes.tool_server.download import save_parts
from outrider.runtimes.tool_server.uploads import entries, open_plain

PIECE = 4 << 20
MAX_SNAPSHOT = 1 << 30
MAX_ANSWER = 64 << 20
CONFLICT_MAX = 1 << 16
HELP_SECONDS = 90.0

SHOWN_MAX = 9 << 20
"""More than an interpreter's rich results are; only what writes to its descriptor itself sends more."""
DISPLAYS = msgspec.msgpack.Decoder(
    Annotated[
        list[Annotated[dict[str, msgspec.Raw], msgspec.Meta(max_length=64)]],
        msgspec.Meta(max_length=1000),
    ]
)
"""How many there are is looked at before any is decoded."""
TEXT_TAGS = (*range(0xA0, 0xC0), 0xD9, 0xDA, 0xDB)
"""What msgpack begins text with."""
KILLED = 128 + signal.SIGKILL
NAMED_MIN = 16
"""Bytes of a patch for each file that it changes, at least."""


class ServedRuntime(ABC):
    """The calls of the Runtime protocol that go through a tool server."""

    scratch = "/tmp"

    @property
    @abstractmethod
    def tools(self) -> ToolClient:
        """The connection. Raises RuntimeFailure when the sandbox does not run."""

    @abstractmethod
    def place(self, path: str) -> str:
        """The absolute path, for the tool server, of a path the user gave."""

    def starved(self) -> bool:
        """Whether the kernel has killed for want of the host's memory, and not of the sandbox's own, since this
        sandbox was started: what was killed in it may have been killed for that."""
        return False

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] = {},
        cwd: str | None = None,
        stdin: bytes = b"",
        merged: bool = False,
        seconds: float,
    ) -> ExecResult:
        by_shell = isinstance(command, str)
        args: dict[str, Any] = {
            "argv": [] if by_shell else list(command),
            "script": command if by_shell else "",
            "merged": merged,
            "env": dict(env),
            "cwd": self.place(cwd or "."),
            "stdin": stdin,
            "ms": round(seconds * 1000),
            "cap": MAX_OUTPUT,
        }
        try:
            done = await self.tools.call("exec", args, ExecDone, seconds=seconds)
        except OSError as error:
            raise RuntimeFailure(f"cannot run {command!r:.100}: {error}", inside=True) from error
        if done.code == KILLED and self.starved():
            raise RuntimeFailure(
                f"{command!r:.100} was killed, and the host has run out of memory meanwhile",
                hint="give the host's sandboxes less in all: sandboxes.memory_mb, and memory_mb of the tasks",
            )
        return ExecResult(
            exit_code=done.code,
            stdout=done.out,
            stderr=done.err,
            timed_out=done.timed_out,
            seconds=done.us / 1e6,
        )

    async def open_shell(self, kind: ShellKind = "bash") -> ServedShell:
        args = {
            "kind": kind,
            "cwd": self.place("."),
            "program": "" if kind == "bash" else await asyncio.to_thread(shell_program, kind),
            "fallback": ipython_command() if kind == "ipython" else [],
        }
        opened = await self.tools.call("shell_open", args, ShellOpened)
        if opened.shell is None:
            raise NoShell(
                kind,
                hint=WITHOUT_IPYTHON if kind == "ipython" else "use an image that has python3",
                log_tail=opened.why.decode("utf-8", "replace") or None,
            )
        return ServedShell(self.tools, opened.shell)

    async def read(self, path: str, *, limit: int = MAX_OUTPUT, follow: bool = True) -> bytes:
        place = self.place(path)
        pieces: list[bytes] = []
        total = 0
        while True:
            size = min(PIECE, limit + 1 - total)
            args = {"path": place, "offset": total, "size": size, "follow": follow}
            part = await self.tools.call("read", args, Part)
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
            raise RuntimeFailure(f"cannot write {place}: {error}", inside=True) from error

    async def glob(self, pattern: str, *, limit: int = MAX_PATHS) -> list[str]:
        fixed, wild = split_pattern(pattern)
        args = {"root": self.place(fixed or "."), "pattern": wild, "limit": limit}
        data = await self._helped("glob", args)
        if data.count(b"\0") > limit:
            raise RuntimeFailure(f"more than {limit} paths match {pattern!r}")
        return [fixed + path for path in data.decode("utf-8", "replace").split("\0")[:-1]]

    async def patch(self, text: str | bytes, *, cwd: str | None = None) -> list[str]:
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        if len(data) > MAX_PATCH:
            raise PatchConflict(f"the patch is larger than {MAX_PATCH} bytes")
        done = await self._helped("patch", {"cwd": self.place(cwd or "."), "text": data, "size": MAX_PATCH})
        if done[:1] != b"+":
            raise PatchConflict(done[1:CONFLICT_MAX].decode("utf-8", "replace"))
        if done.count(b"\0") > len(data) // NAMED_MIN:
            raise RuntimeFailure("the sandbox names more files than the patch has", inside=True)
        return done[1:].decode("utf-8", "replace").split("\0")

    async def _helped(self, method: str, args: Mapping[str, Any]) -> bytes:
        """What a helper of the tool server answers, which it does in parts."""
        whole = bytearray()
        try:
            await self.tools.call(method, args, Done, seconds=HELP_SECONDS, on_part=whole.extend, room=MAX_ANSWER)
        except OSError as error:
            raise RuntimeFailure(f"cannot {method} in the sandbox: {error}", inside=True) from error
        return bytes(whole)

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
        async with opened(partial(open_plain, path), lambda plain: os.close(plain[0])) as (fd, mode):
            offset = 0
            while data := await asyncio.to_thread(os.pread, fd, PIECE, offset):
                await self._write(place, data, mode, append=offset > 0)
                offset += len(data)
            if offset == 0:
                await self._write(place, b"", mode, append=False)

    async def snapshot(self, paths: Sequence[str], target: Path, *, alone: bool = False) -> None:
        named = [[self.place(path), self.member(path)] for path in paths]
        await save_parts(self.tools, "snapshot", {"paths": named, "alone": alone}, target, limit=MAX_SNAPSHOT)

    async def restore(self, archive: Path, paths: Sequence[str]) -> None:
        roots = [[posixpath.normpath(self.place(path)), self.member(path)] for path in self.outermost(paths)]
        args: dict[str, Any] = {"key": secrets.randbits(62), "roots": roots, "limit": MAX_SNAPSHOT}
        async with opened(partial(os.open, archive, os.O_RDONLY | os.O_CLOEXEC), os.close) as fd:
            offset, data = 0, b"-"
            while data:
                data = await asyncio.to_thread(os.pread, fd, PIECE, offset)
                offset += len(data)
                await self.tools.call("restore", {**args, "data": data, "last": not data}, Done, seconds=600.0)

    def outermost(self, paths: Sequence[str]) -> list[str]:
        """The paths that are below no other of them, each once."""
        named = {f"{self.member(path)}/": path for path in paths}
        return [path for name, path in named.items() if not any(name.startswith(up) for up in named if up != name)]

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
        output = done.out.decode("utf-8", "replace")
        try:
            displays = unpacked_displays(done.shown)
        except UNREADABLE:  # an input may write to any descriptor of its interpreter
            displays = ()
            output += "[the rich results of this input cannot be read]\n"
        return ShellResult(output=output, exit_code=done.code, timed_out=done.timed_out, displays=displays)

    async def close(self) -> None:
        await self._tools.call("shell_close", {"shell": self._number}, Done)


def unpacked_displays(packed: bytes) -> tuple[Display, ...]:
    """What an interpreter sent. Raises one of UNREADABLE for anything else: it shares a sandbox with an agent."""
    if len(packed) > SHOWN_MAX:
        raise ValueError("rich results that are larger than any interpreter's")
    found = DISPLAYS.decode(packed) if packed else []
    return tuple(Display({name: form_of(value) for name, value in one.items()}) for one in found)


def form_of(value: msgspec.Raw) -> str | bytes:
    if memoryview(value)[0] in TEXT_TAGS:
        return msgspec.msgpack.decode(value, type=str)
    return msgspec.msgpack.decode(value, type=bytes)


def split_pattern(pattern: str) -> tuple[str, str]:
    """The folder in front of the first part that has a wildcard, with its slash, and the rest."""
    parts = re.sub("/+", "/", pattern).split("/")
    fixed = 0
    while fixed < len(parts) - 1 and not any(char in parts[fixed] for char in "*?["):
        fixed += 1
    return "".join(f"{part}/" for part in parts[:fixed]), "/".join(parts[fixed:])
