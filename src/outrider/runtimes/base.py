"""The runtime seam: one sandbox, started once and stopped exactly once.

It knows neither models nor rewards. Paths inside the sandbox are POSIX paths, absolute or relative to the
working directory. Invariant: after `stop` returns, no process of the sandbox is alive and nothing of it is
left on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, Self

import msgspec

from outrider.runtimes.host import Host
from outrider.spec import RuntimeSpec

MAX_OUTPUT = 10 << 20
"""Bytes kept of one output stream; the middle of a longer one is replaced by a note of how much was cut."""

LOG_TAIL = 4096
"""Bytes of a failed program's output that its error carries."""


class SandboxContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a node gives a sandbox: its identity, a private host directory of its own that exists and is
    empty (the node removes it after `stop`), and where the model gateway listens on the host.

    `mounts` are host folders to show read-only at the same path inside (the harness programs). `host` is what all
    sandboxes of the node share, open for as long as any of them runs.
    """

    session_id: str
    attempt: int
    directory: Path
    host: Host
    gateway_url: str
    gateway_socket: Path
    mounts: tuple[Path, ...] = ()


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """`exit_code` is None when the command was killed for its time limit (`timed_out`). A command that dies
    of signal N has exit code 128 + N. Outputs are raw bytes, truncated in the middle past MAX_OUTPUT."""

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    seconds: float = 0.0

    def log_tail(self, *, limit: int = LOG_TAIL) -> str:
        """The last `limit` bytes of stdout and stderr, stdout first; each may use what the other leaves free."""
        out, err = self.stdout.rstrip(), self.stderr.rstrip()
        err = err[-max(limit // 2, limit - len(out)) :]
        room = limit - len(err)
        out = out[-room:] if room else b""
        return b"\n".join(part for part in (out, err) if part).decode("utf-8", errors="replace")


class ShellResult(msgspec.Struct, frozen=True, kw_only=True):
    """Output of one shell or interpreter input, stdout and stderr merged in order."""

    output: str
    exit_code: int | None
    timed_out: bool = False


class Shell(Protocol):
    """A live bash or Python that keeps its state from call to call.

    `run` raises RuntimeFailure when the shell is gone. On a time limit the running job is killed and the
    shell stays usable.
    """

    async def run(self, text: str, *, seconds: float) -> ShellResult: ...
    async def close(self) -> None: ...


class Availability(msgspec.Struct, frozen=True, kw_only=True):
    """Whether this machine can use something, and what is missing if not."""

    ok: bool
    detail: str
    hint: str | None = None


class Runtime(Protocol):
    """One sandbox. Every method raises RuntimeFailure when the sandbox is broken or stopped.

    `endpoint` is the base URL (no trailing slash) at which a program inside reaches the model gateway, valid
    after `start`. `start` leaves nothing behind when it raises. `stop` is idempotent and never raises.
    """

    endpoint: str

    @classmethod
    def create(cls, spec: RuntimeSpec, context: SandboxContext) -> Self: ...

    @classmethod
    def available(cls) -> Availability: ...

    async def start(self) -> None: ...

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] = {},
        cwd: str | None = None,
        stdin: bytes = b"",
        seconds: float,
    ) -> ExecResult:
        """Run a command (a string goes to `bash -c`, a sequence is executed) to its end. When it exceeds
        `seconds`, or the caller is cancelled, the command and all its descendants are killed."""
        ...

    async def open_shell(self, kind: Literal["bash", "python"] = "bash") -> Shell: ...

    async def read(self, path: str, *, limit: int = MAX_OUTPUT) -> bytes:
        """A file's bytes. Raises FileNotFoundError, IsADirectoryError, or RuntimeFailure past `limit`."""
        ...

    async def write(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """Create or replace a file, with its parent folders."""
        ...

    async def upload(self, source: Path, target: str) -> None:
        """Copy a host file or folder (symbolic links that leave it are refused) to `target`."""
        ...

    async def snapshot(self, paths: Sequence[str]) -> bytes:
        """A tar archive of the given paths; missing ones are left out."""
        ...

    async def stop(self) -> None: ...
