"""A sandbox with a tool server inside. It is the `Runtime` of every kind that runs real programs.

The kind supplies a function `launch`, and the mapping of paths. Everything else is done by calls to the tool server.
Invariants: the connection to the tool server is the only way in which this module exchanges data with the sandbox. When
`stop` returns or `start` raises an error, the launch has been undone.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import re
import secrets
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec

from outrider.concurrency.cancellation import opened_in_thread, shielded
from outrider.errors import InvalidField, RuntimeFailure, RuntimeUnavailable
from outrider.sandbox.pythons.ipython import WITHOUT_IPYTHON, ipython_command
from outrider.sandbox.runtimes.base import (
    GIT_APPLY,
    GIT_ENVIRONMENT,
    MAX_OUTPUT,
    MAX_PATCH,
    MAX_PATHS,
    PATCH_SECONDS,
    Display,
    ExecResult,
    NoShell,
    PatchConflict,
    SandboxContext,
    SandboxProcess,
    ShellKind,
    ShellResult,
)
from outrider.sandbox.runtimes.command_feed import CommandFeed
from outrider.sandbox.runtimes.tool_server.archive_download import download_archive
from outrider.sandbox.runtimes.tool_server.bundle import shell_program
from outrider.sandbox.runtimes.tool_server.client import (
    UNREADABLE,
    Done,
    ExecDone,
    ProcessesSeen,
    ShellDone,
    ShellOpened,
    ToolClient,
    ToolPart,
)
from outrider.sandbox.runtimes.tool_server.launch import BRIDGE_URL, Launch, RunningServer
from outrider.sandbox.runtimes.tool_server.uploads import entries, open_plain
from outrider.spec import RuntimeSpec

PIECE = 4 << 20
"""Maximum bytes of a file that one call transfers."""
MAX_SNAPSHOT = 1 << 30
MAX_ANSWER = 64 << 20
GLOB_SECONDS = 90.0
RESTORE_SECONDS = 600.0

SHOWN_MAX = 9 << 20
"""Maximum bytes of the rich results of one input. The interpreter itself sends at most 8 MiB. Results beyond 8 MiB can
only come from an agent's program that writes to the interpreter's descriptor."""
DISPLAYS = msgspec.msgpack.Decoder(
    Annotated[
        list[Annotated[dict[str, msgspec.Raw], msgspec.Meta(max_length=64)]],
        msgspec.Meta(max_length=1000),
    ]
)
"""Decoder of rich results. It limits the number of results, and the number of formats of each. The data in these
formats is not decoded here."""
TEXT_TAGS = (*range(0xA0, 0xC0), 0xD9, 0xDA, 0xDB)
"""The bytes with which a text can begin in msgpack."""
KILLED = 128 + signal.SIGKILL


@dataclass(frozen=True)
class SandboxPaths:
    """Maps the paths that callers give to paths in a sandbox.

    `work` is the host folder that takes the place of the spec's `workdir`. It is None in a sandbox with its own root.
    If `work` is set, relative paths are mapped into this folder, and so are absolute paths at or below `workdir`. Any
    other absolute path is a path on the host."""

    workdir: str
    work: str | None = None

    def server_path(self, path: str) -> str:
        """Return the absolute path that the tool server uses for `path`."""
        if self.work is None:
            return posixpath.join(self.workdir, path)
        seen = self._seen(path)
        inside = posixpath.relpath(seen, self.workdir)
        return seen if f"{inside}/".startswith("../") else posixpath.normpath(posixpath.join(self.work, inside))

    def member(self, path: str) -> str:
        """Return the name of `path` in a snapshot: its absolute path as callers give it, without the leading slash."""
        return self._seen(path).lstrip("/")

    def outermost(self, paths: Sequence[str]) -> list[str]:
        """Return `paths` without duplicates and without paths inside other ones. Paths on the host are also left out,
        because all sandboxes on the host share them."""
        own = paths
        if self.work is not None:
            own = [path for path in paths if f"{self.server_path(path)}/".startswith(f"{self.work}/")]
        named = {f"{self.member(path)}/": path for path in own}
        return [path for name, path in named.items() if not any(name.startswith(up) for up in named if up != name)]

    def _seen(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self.workdir, path))


class ToolServerSandbox:
    """One sandbox, which a function `launch` makes. `Runtime` explains the methods."""

    def __init__(
        self,
        launch: Launch,
        spec: RuntimeSpec,
        context: SandboxContext,
        *,
        paths: SandboxPaths | None = None,
        endpoint: str = BRIDGE_URL,
        scratch: str = "/tmp",
    ) -> None:
        self.endpoint = endpoint
        self.scratch = scratch
        self._launch = launch
        self._spec = spec
        self._context = context
        self._paths = paths or SandboxPaths(spec.workdir)
        self._launched = AsyncExitStack()
        self._server: RunningServer | None = None
        self._begun = False
        self._changing = asyncio.Lock()
        """A lock, held while the sandbox is started or stopped."""
        self._starting: asyncio.Timeout | None = None
        self._lifetime_end = 0.0
        self.commands = CommandFeed()
        """See `ReportsCommands`."""

    @property
    def server(self) -> RunningServer:
        """The running tool server. Raises RuntimeFailure if the sandbox does not run."""
        if self._server is None:
            raise RuntimeFailure("the sandbox does not run")
        return self._server

    async def start(self) -> None:
        if self._begun:
            raise RuntimeFailure("a sandbox starts once")
        self._begun = True
        self._lifetime_end = asyncio.get_running_loop().time() + self._spec.lifetime_seconds
        # This timeout never expires by itself. `stop` reschedules it, to cancel the launch and nothing else.
        starting = asyncio.timeout(None)
        try:
            async with self._changing, starting:
                self._starting = starting
                self._server = await self._launched.enter_async_context(self._launch(self._spec, self._context))
        except InvalidField as error:  # files that the spec names may have been deleted after the check
            raise RuntimeUnavailable(error.message, field=error.field, hint=error.hint) from error
        except OSError as error:  # TimeoutError is an OSError
            if starting.expired():
                raise RuntimeFailure("the sandbox was stopped while it started") from error
            raise RuntimeFailure(f"the sandbox cannot be started: {error}") from error
        finally:
            self._starting = None

    async def stop(self) -> None:
        self._begun = True
        if self._starting is not None and not self._starting.expired():
            self._starting.reschedule(asyncio.get_running_loop().time())
        await shielded(self._stop)

    async def _stop(self) -> None:
        async with self._changing:
            self._server = None
            await self._launched.aclose()

    async def broken_inside(self) -> bool:
        """See `TellsCause`."""
        if self._server is None:
            return False
        match self._server.tools.loss:
            case "wrong":
                return True
            case "gone":
                in_time = asyncio.get_running_loop().time() < self._lifetime_end
                return in_time and await self._server.ended_inside()
            case "stuck":
                return self._server.stopped_inside() or self._server.crowded()
            case _:
                return False

    async def image_is_current(self) -> bool:
        """See `TellsImage`."""
        return await self.server.image_is_current()

    async def save_layer(self, target: Path) -> None:
        """Save the writable layer (see `SavesLayers`). All programs in the sandbox are killed first. Only the user of
        this process can read the new file."""
        limit = self.server.layer_limit
        if limit == 0:
            raise RuntimeFailure(f"{self._spec.kind!r} sandboxes cannot save their writable layer")
        await download_archive(self.server.tools, "save_layer", {}, target, limit=limit)

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
        server = self.server
        by_shell = isinstance(command, str)
        text = command if isinstance(command, str) else shlex.join(command)
        args: dict[str, Any] = {
            "argv": [] if by_shell else list(command),
            "script": command if by_shell else "",
            "merged": merged,
            "env": dict(env),
            "cwd": self._paths.server_path(cwd or "."),
            "stdin": stdin,
            "ms": round(seconds * 1000),
            "cap": MAX_OUTPUT,
        }
        with self.commands.running(text) as note_exit:
            try:
                done = await server.tools.call("exec", args, ExecDone, seconds=seconds)
            except OSError as error:
                raise RuntimeFailure(f"cannot run {command!r:.100}: {error}", inside=True) from error
            note_exit(done.code)
        if done.code == KILLED and server.starved():
            raise RuntimeFailure(
                f"{command!r:.100} was killed, and the host has run out of memory meanwhile",
                hint="lower sandboxes.memory_mb, or memory_mb of the tasks: the host needs memory for all sandboxes",
            )
        return ExecResult(
            exit_code=done.code,
            stdout=done.out,
            stderr=done.err,
            timed_out=done.timed_out,
            seconds=done.us / 1e6,
        )

    async def open_shell(self, kind: ShellKind = "bash") -> ToolServerShell:
        args = {
            "kind": kind,
            "cwd": self._paths.server_path("."),
            "program": "" if kind == "bash" else await asyncio.to_thread(shell_program, kind),
            "fallback": ipython_command() if kind == "ipython" else [],
        }
        reply = await self.server.tools.call("shell_open", args, ShellOpened)
        if reply.shell is None:
            raise NoShell(
                kind,
                hint=WITHOUT_IPYTHON if kind == "ipython" else "use an image that has python3",
                log_tail=reply.why.decode("utf-8", "replace") or None,
            )
        return ToolServerShell(self.server.tools, reply.shell, self.commands)

    async def processes(self) -> list[SandboxProcess]:
        """See `ListsProcesses`."""
        reply = await self.server.tools.call("processes", {}, ProcessesSeen)
        now = time.time()
        return [
            SandboxProcess(
                pid=seen.pid,
                parent=seen.parent,
                command=seen.command.decode("utf-8", "replace"),
                start=now - seen.began_ms_ago / 1000,
                end=None if seen.ended_ms_ago is None else now - seen.ended_ms_ago / 1000,
                exit_code=seen.exit_code,
            )
            for seen in reply.processes
        ]

    async def read(self, path: str, *, limit: int = MAX_OUTPUT, follow: bool = True) -> bytes:
        place = self._paths.server_path(path)
        pieces: list[bytes] = []
        total = 0
        while True:
            size = min(PIECE, limit + 1 - total)
            args = {"path": place, "offset": total, "size": size, "follow": follow}
            part = await self.server.tools.call("read", args, ToolPart)
            pieces.append(part.data)
            total += len(part.data)
            if total > limit:
                raise RuntimeFailure(f"{path} is larger than {limit} bytes")
            if len(part.data) < size:
                return b"".join(pieces)

    async def write(self, path: str, data: bytes, *, executable: bool = False) -> None:
        mode = 0o755 if executable else 0o644
        for offset in range(0, max(1, len(data)), PIECE):
            await self._write(self._paths.server_path(path), data[offset : offset + PIECE], mode, append=offset > 0)

    async def _write(self, place: str, data: bytes, mode: int, *, append: bool) -> None:
        await self._make("write", {"path": place, "data": data, "mode": mode, "append": append})

    async def _make(self, method: str, args: Mapping[str, Any]) -> None:
        """Call a method that makes the file, link or folder at `args["path"]`. Raises RuntimeFailure."""
        try:
            await self.server.tools.call(method, args, Done)
        except OSError as error:
            raise RuntimeFailure(f"cannot write {args['path']}: {error}", inside=True) from error

    async def glob(self, pattern: str, *, limit: int = MAX_PATHS) -> list[str]:
        fixed, wild = split_pattern(pattern)
        args = {"root": self._paths.server_path(fixed or "."), "pattern": wild, "limit": limit}
        data = bytearray()
        try:
            await self.server.tools.call("glob", args, Done, seconds=GLOB_SECONDS, on_part=data.extend, room=MAX_ANSWER)
        except OSError as error:
            raise RuntimeFailure(f"cannot glob in the sandbox: {error}", inside=True) from error
        if data.count(b"\0") > limit:
            raise RuntimeFailure(f"more than {limit} paths match {pattern!r}")
        return [fixed + path for path in data.decode("utf-8", "surrogateescape").split("\0")[:-1]]

    async def patch(self, text: str | bytes, *, cwd: str | None = None) -> None:
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        if len(data) > MAX_PATCH:
            raise PatchConflict(f"the patch is larger than {MAX_PATCH} bytes")
        done = await self.exec(GIT_APPLY, env=GIT_ENVIRONMENT, cwd=cwd, stdin=data, seconds=PATCH_SECONDS)
        if done.exit_code in (1, 128):
            raise PatchConflict(done.log_tail())
        if done.exit_code != 0:
            hint = "patches are applied by git: use an image with git" if done.exit_code == 127 else None
            raise RuntimeFailure("git applies no patch here", hint=hint, log_tail=done.log_tail(), inside=True)

    async def upload(self, source: Path, target: str) -> None:
        for entry in await asyncio.to_thread(lambda: list(entries(source))):
            place = self._paths.server_path(posixpath.join(target, entry.name) if entry.name else target)
            if entry.link is not None:
                await self._make("link", {"path": place, "target": entry.link})
            elif entry.folder:
                await self._make("folder", {"path": place})
            else:
                opened = opened_in_thread(partial(open_plain, entry.path), lambda plain: os.close(plain[0]))
                async with opened as (fd, mode):
                    offset = 0
                    while data := await asyncio.to_thread(os.pread, fd, PIECE, offset):
                        await self._write(place, data, mode, append=offset > 0)
                        offset += len(data)
                    if offset == 0:  # an empty file is created, too
                        await self._write(place, b"", mode, append=False)

    async def snapshot(self, paths: Sequence[str], target: Path, *, alone: bool = False) -> None:
        named = [[self._paths.server_path(path), self._paths.member(path)] for path in paths]
        await download_archive(
            self.server.tools, "snapshot", {"paths": named, "alone": alone}, target, limit=MAX_SNAPSHOT
        )

    async def restore(self, archive: Path, paths: Sequence[str]) -> None:
        outermost = self._paths.outermost(paths)
        roots = [[posixpath.normpath(self._paths.server_path(path)), self._paths.member(path)] for path in outermost]
        args: dict[str, Any] = {"key": secrets.randbits(62), "roots": roots, "limit": MAX_SNAPSHOT}
        tools = self.server.tools
        async with opened_in_thread(partial(os.open, archive, os.O_RDONLY | os.O_CLOEXEC), os.close) as fd:
            offset, data = 0, b"-"  # not empty, because empty data means the end of the archive
            try:
                while data:
                    data = await asyncio.to_thread(os.pread, fd, PIECE, offset)
                    offset += len(data)
                    part = {**args, "data": data, "last": not data}
                    await tools.call("restore", part, Done, seconds=RESTORE_SECONDS)
            except BaseException:  # BaseException includes CancelledError
                tools.send("drop_restore", {"key": args["key"]})
                raise


class ToolServerShell:
    """A live shell in a sandbox. Concurrent inputs run one after another."""

    def __init__(self, tools: ToolClient, number: int, commands: CommandFeed) -> None:
        self._tools = tools
        self._commands = commands
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
            with self._commands.running(text) as note_exit:
                done = await self._tools.call("shell_run", args, ShellDone, seconds=seconds)
                note_exit(done.code)
        output = done.out.decode("utf-8", "replace")
        try:
            displays = unpacked_displays(done.shown)
        except UNREADABLE:  # an agent's code can write anything to the descriptor for rich results
            displays = ()
            output += "[the rich results of this input cannot be read]\n"
        return ShellResult(output=output, exit_code=done.code, timed_out=done.timed_out, displays=displays)

    async def close(self) -> None:
        await self._tools.call("shell_close", {"shell": self._number}, Done)


def unpacked_displays(packed: bytes) -> tuple[Display, ...]:
    """Decode the rich results that an interpreter sent. Raises one of the errors in UNREADABLE for invalid data, which
    an agent may have sent."""
    if len(packed) > SHOWN_MAX:
        raise ValueError("the rich results are larger than an interpreter sends")
    found = DISPLAYS.decode(packed) if packed else []
    return tuple(Display({name: form_of(value) for name, value in one.items()}) for one in found)


def form_of(value: msgspec.Raw) -> str | bytes:
    if memoryview(value)[0] in TEXT_TAGS:
        return msgspec.msgpack.decode(value, type=str)
    return msgspec.msgpack.decode(value, type=bytes)


def split_pattern(pattern: str) -> tuple[str, str]:
    """Split a pattern into a path without wildcards, and the rest. The rest begins at the first part with a wildcard.
    If no part has a wildcard, the rest is the last part. The path is "" or ends with a slash."""
    parts = re.sub("/+", "/", pattern).split("/")
    fixed = 0
    while fixed < len(parts) - 1 and not any(char in parts[fixed] for char in "*?["):
        fixed += 1
    return "".join(f"{part}/" for part in parts[:fixed]), "/".join(parts[fixed:])
