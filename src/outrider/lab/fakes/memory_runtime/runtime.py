"""The runtime `memory`: files in memory, a very small shell, and failures on demand.

The runtime starts no process except git for patches, and uses the disk only for uploads, patches and archives. So tests
and benchmarks can run thousands of sessions. It passes the contract tests of the real runtimes, except those that need
Python or IPython. Invariant: if there is a MemoryLedger, it counts one start and one stop for each sandbox that has
started.
"""

from __future__ import annotations

import asyncio
import io
import posixpath
import shlex
import tarfile
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from outrider.errors import RuntimeFailure
from outrider.lab.fakes.memory_runtime.files import MemoryFiles
from outrider.lab.fakes.memory_runtime.shell import MemoryShell
from outrider.sandbox.runtimes.base import (
    MAX_OUTPUT,
    MAX_PATHS,
    Availability,
    ExecResult,
    NoShell,
    SandboxContext,
    Shell,
    ShellKind,
    ShellResult,
)
from outrider.sandbox.runtimes.command_feed import CommandFeed
from outrider.sandbox.runtimes.nvidia import variables
from outrider.sandbox.runtimes.tool_server.uploads import entries, open_plain
from outrider.spec import RuntimeSpec

FAIL_VARIABLE = "OUTRIDER_FAKE_FAIL"
"""Name of a variable in the spec's `env`. Its value lists the operations that must fail, separated by commas: start,
exec, shell, read, write."""


class MemoryLedger:
    """Counts the starts and stops of each sandbox, by (session, attempt)."""

    def __init__(self) -> None:
        self.started: Counter[tuple[str, int]] = Counter()
        self.stopped: Counter[tuple[str, int]] = Counter()

    @property
    def balanced(self) -> bool:
        """True if every sandbox was stopped as often as it was started."""
        return self.started == self.stopped


class MemoryRuntime:
    """A sandbox in memory. Once the sandbox has started, the ledger counts the first stop of the sandbox, but not a
    further one."""

    ledger: ClassVar[MemoryLedger | None] = None
    shows_mounts: ClassVar[bool] = False
    saves_layers: ClassVar[bool] = True
    gives_gpus: ClassVar[bool] = True
    scratch = "/tmp"

    def __init__(self, spec: RuntimeSpec, context: SandboxContext) -> None:
        self.endpoint = context.gateway_url.rstrip("/")
        self._spec = spec
        self._key = (context.session_id, context.attempt)
        self._layer = context.layer
        self._failing = set(filter(None, spec.env.get(FAIL_VARIABLE, "").split(",")))
        env = {"PATH": "/usr/bin:/bin", "HOME": "/root", "LANG": "C.UTF-8", **spec.env}
        self._env = {**env, **variables(context.gpus)}
        self._files = MemoryFiles()
        self._state: Literal["new", "running", "stopped"] = "new"
        self._ended = asyncio.Event()
        self.commands = CommandFeed()

    @classmethod
    def create(cls, spec: RuntimeSpec, context: SandboxContext) -> Self:
        return cls(spec, context)

    @classmethod
    def with_ledger(cls, ledger: MemoryLedger) -> type[Self]:
        """Return a new runtime class whose sandboxes report to `ledger`."""
        return type("LedgeredMemoryRuntime", (cls,), {"ledger": ledger})

    @classmethod
    def check_spec(cls, spec: RuntimeSpec) -> None:
        """Accept every spec, because tests may use any field."""

    @classmethod
    def available(cls) -> Availability:
        return Availability(ok=True, detail="a fake for tests: files in memory and a very small shell")

    async def start(self) -> None:
        if self._state != "new":
            raise RuntimeFailure("a sandbox starts once")
        if "start" in self._failing:
            self._state = "stopped"  # in this state, the ledger counts neither a start nor a stop
            raise RuntimeFailure("the sandbox failed to start, as it was told to")
        self._state = "running"
        if self.ledger is not None:
            self.ledger.started[self._key] += 1
        if self._layer is not None:
            await asyncio.to_thread(self._unpack, self._layer, ["/"])
        self._files.make_folder(self._spec.workdir)

    async def stop(self) -> None:
        if self._state == "running" and self.ledger is not None:
            self.ledger.stopped[self._key] += 1
        self._state = "stopped"
        self._ended.set()

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
        self.check("exec")
        shell = MemoryShell(self._files, {**self._env, **env}, self._path(cwd or "."), merged=merged)
        started = time.monotonic()
        code: int | None = None
        timed_out = False
        if self._files.is_folder(shell.cwd):
            work = shell.run(command, stdin) if isinstance(command, str) else shell.run_argv(command, stdin)
            with self.commands.running(command if isinstance(command, str) else shlex.join(command)) as note_exit:
                try:
                    async with asyncio.timeout(seconds):
                        code = await self.until_stopped(work)
                except TimeoutError:
                    timed_out = True
                note_exit(code)
        else:
            code = 127  # real sandboxes have this exit code for a missing working directory
            shell.err += f"{shell.cwd}: No such file or directory\n".encode()
        return ExecResult(
            exit_code=code,
            stdout=truncated(shell.out),
            stderr=b"" if merged else truncated(shell.err),
            timed_out=timed_out,
            seconds=time.monotonic() - started,
        )

    async def until_stopped(self, work: Coroutine[Any, Any, int]) -> int:
        """Return the result of `work`. Raises RuntimeFailure if the sandbox is stopped first. So a `sleep`, for
        example, ends with its sandbox, as a real command does."""
        async with asyncio.TaskGroup() as group:
            job = group.create_task(work)
            ended = group.create_task(self._ended.wait())
            await asyncio.wait({job, ended}, return_when=asyncio.FIRST_COMPLETED)
            job.cancel()
            ended.cancel()
        if job.cancelled():
            raise RuntimeFailure("the sandbox was stopped")
        return job.result()

    async def open_shell(self, kind: ShellKind = "bash") -> Shell:
        self.check("shell")
        if kind != "bash":
            raise NoShell(kind, hint="runtime kind 'memory' has bash only; kind 'process' has Python", log_tail=None)
        return MemoryBash(self, MemoryShell(self._files, self._env, self._spec.workdir, merged=True))

    async def read(self, path: str, *, limit: int = MAX_OUTPUT, follow: bool = True) -> bytes:
        self.check("read")
        data = self._files.read(self._path(path))
        if len(data) > limit:
            raise RuntimeFailure(f"{path} is larger than {limit} bytes")
        return data

    async def write(self, path: str, data: bytes, *, executable: bool = False) -> None:
        self.check("write")
        self._put(self._path(path), data)

    async def glob(self, pattern: str, *, limit: int = MAX_PATHS) -> list[str]:
        self.check("read")
        found = self._files.glob(self._spec.workdir, pattern)
        if len(found) > limit:
            raise RuntimeFailure(f"more than {limit} paths match {pattern!r}")
        return found

    async def patch(self, text: str | bytes, *, cwd: str | None = None) -> None:
        self.check("write")
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        await asyncio.to_thread(self._files.patch, self._path(cwd or "."), data)

    async def upload(self, source: Path, target: str) -> None:
        self.check("write")
        for entry in await asyncio.to_thread(lambda: list(entries(source))):
            path = self._path(posixpath.join(target, entry.name) if entry.name else target)
            if entry.folder:
                self._files.make_folder(path)
            else:
                # Read the file that `entries` found behind the link. Do not open the link itself, because it may have
                # been replaced since.
                plain = entry.path if entry.link is None else entry.path.parent / entry.link
                self._put(path, await asyncio.to_thread(plain_bytes, Path(posixpath.normpath(plain))))

    async def snapshot(self, paths: Sequence[str], target: Path, *, alone: bool = False) -> None:
        """Write an archive of the paths. `alone` has no effect: in other runtimes, it first kills all other processes,
        but this runtime has none."""
        self.check("read")
        sink = io.BytesIO()
        with tarfile.open(fileobj=sink, mode="w") as archive:
            for path in map(self._path, paths):
                for name in [path, *self._files.below(path)]:
                    info = tarfile.TarInfo(name.lstrip("/"))
                    if self._files.is_file(name):
                        data = self._files.read(name)
                        info.size = len(data)
                        archive.addfile(info, io.BytesIO(data))
                    elif self._files.is_folder(name):
                        info.type = tarfile.DIRTYPE
                        archive.addfile(info)
        await asyncio.to_thread(write_new, target, sink.getvalue())

    async def restore(self, archive: Path, paths: Sequence[str]) -> None:
        self.check("write")
        roots = [self._path(path) for path in paths]
        for root in roots:
            self._files.remove(root)
        await asyncio.to_thread(self._unpack, archive, roots)

    async def save_layer(self, target: Path) -> None:
        await self.snapshot(["/"], target)

    def check(self, operation: str) -> None:
        """Raise RuntimeFailure if the sandbox is not running, or if `operation` must fail (FAIL_VARIABLE)."""
        if self._state != "running":
            raise RuntimeFailure("the sandbox does not run")
        if operation in self._failing:
            raise RuntimeFailure(f"{operation} failed in the sandbox, as it was told to")

    def _path(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self._spec.workdir, path))

    def _put(self, path: str, data: bytes) -> None:
        try:
            self._files.make_folder(posixpath.dirname(path))
            self._files.write(path, data)
        except OSError as error:
            raise RuntimeFailure(f"cannot write {path}: {error!r}") from error

    def _unpack(self, source: Path, roots: Sequence[str]) -> None:
        """Write the archive's files and folders that are at or below one of `roots`. The call blocks."""
        try:
            with tarfile.open(source) as archive:
                for member in archive:
                    name = posixpath.normpath(f"/{member.name}")
                    if not any(name == root or name.startswith(root.rstrip("/") + "/") for root in roots):
                        continue
                    if member.isdir():
                        self._files.make_folder(name)
                    elif (data := archive.extractfile(member)) is not None and member.isreg():
                        self._put(name, data.read())
        except (tarfile.TarError, OSError) as error:
            raise RuntimeFailure(f"the archive cannot be put back: {error}") from error


class MemoryBash:
    """The shell that `open_shell` returns. It keeps the state of its MemoryShell between inputs."""

    def __init__(self, runtime: MemoryRuntime, shell: MemoryShell) -> None:
        self._runtime = runtime
        self._shell = shell
        self._turn = asyncio.Lock()

    async def run(self, text: str, *, seconds: float) -> ShellResult:
        self._runtime.check("shell")
        if self._shell.ended:
            raise RuntimeFailure("the shell is gone")
        code: int | None = None
        timed_out = False
        async with self._turn:
            self._shell.out.clear()
            with self._runtime.commands.running(text) as note_exit:
                try:
                    async with asyncio.timeout(seconds):
                        code = await self._runtime.until_stopped(self._shell.run(text))
                except TimeoutError:
                    timed_out = True
                note_exit(code)
            output = truncated(self._shell.out).decode(errors="replace")
        return ShellResult(output=output, exit_code=code, timed_out=timed_out)

    async def close(self) -> None:
        self._shell.ended = True


def truncated(data: bytearray) -> bytes:
    """Return at most MAX_OUTPUT bytes of output. In longer output, a note replaces the bytes in the middle."""
    half = MAX_OUTPUT // 2
    cut = len(data) - 2 * half
    return bytes(data) if cut <= 0 else bytes(data[:half]) + b"\n[... %d bytes cut ...]\n" % cut + bytes(data[-half:])


def plain_bytes(path: Path) -> bytes:
    fd, _ = open_plain(path)
    with open(fd, "rb") as file:
        return file.read()


def write_new(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
