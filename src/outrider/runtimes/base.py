"""The runtime seam: one sandbox, started once and stopped exactly once.

It knows neither models nor rewards. Paths inside the sandbox are POSIX paths, absolute or relative to the
working directory. Invariant: after `stop` returns, no process of the sandbox is alive and nothing of it is
left on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import msgspec

from outrider.errors import RuntimeFailure
from outrider.runtimes.node_host import Host
from outrider.spec import RuntimeSpec

MAX_OUTPUT = 10 << 20
"""Maximum bytes kept of one output stream. The middle of a longer one is replaced by a note of how much was cut."""

MAX_PATHS = 10_000
"""Maximum number of paths that `glob` returns by default."""

MAX_PATCH = 16 << 20
"""Maximum bytes of a patch's text, and of each file that it changes."""

LOG_TAIL = 4096
"""Maximum bytes of a failed program's output that its error carries."""


class SandboxContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a node gives a sandbox: its identity, a private host directory of its own that exists and is
    empty (the node removes it after `stop`), and where the model gateway listens on the host.

    `mounts` are host folders to show read-only at the same path inside (the harness programs). `host` is what all
    sandboxes of the node share, open for as long as any of them runs. `gpus` are the names, as in the setting
    `sandboxes.gpus`, of the GPUs that this sandbox alone may use; only a kind that `gives_gpus` is given any. `layer`
    is what `save_layer` of another sandbox of the same spec wrote, to start from; None for a new one. Only a
    `SavesLayers` runtime is given any.
    """

    session_id: str
    attempt: int
    directory: Path
    host: Host
    gateway_url: str
    gateway_socket: Path
    mounts: tuple[Path, ...] = ()
    layer: Path | None = None
    gpus: tuple[str, ...] = ()


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


class Display(msgspec.Struct, frozen=True):
    """A rich result of an input: its forms by MIME type, pictures as bytes, all else (JSON too) as text. The
    `text/plain` form, if there is one, is in the output as well."""

    data: dict[str, str | bytes]


class ShellResult(msgspec.Struct, frozen=True, kw_only=True):
    """Output of one shell or interpreter input, stdout and stderr merged in order. `displays` are IPython's rich
    results, at most 8 MiB together; in place of a form that does not fit there is a note."""

    output: str
    exit_code: int | None
    timed_out: bool = False
    displays: tuple[Display, ...] = ()


ShellKind = Literal["bash", "python", "ipython"]
"""bash (sh in a sandbox without it), Python as at its prompt, or IPython as in a notebook."""


class Shell(Protocol):
    """A live bash, Python or IPython that keeps its state from call to call.

    `run` raises RuntimeFailure when the shell is gone. On a time limit the running job is killed and the
    shell stays usable.
    """

    async def run(self, text: str, *, seconds: float) -> ShellResult: ...
    async def close(self) -> None: ...


class NoShell(RuntimeFailure):
    """A sandbox has no interpreter of that `kind`, or has none any more after an agent has worked in it."""

    def __init__(self, kind: ShellKind, *, hint: str, log_tail: str | None) -> None:
        name = "IPython" if kind == "ipython" else "Python"
        super().__init__(f"no {name} in the sandbox", hint=hint, log_tail=log_tail, inside=True)
        self.kind: ShellKind = kind


class PatchConflict(ValueError):
    """A patch does not apply, and nothing was changed. The text names the file and the hunk."""


class Availability(msgspec.Struct, frozen=True, kw_only=True):
    """Whether this machine can use something, and what is missing if not."""

    ok: bool
    detail: str
    hint: str | None = None


@runtime_checkable
class TakesOver(Protocol):
    """A kind whose sandboxes are `Outlives`."""

    def take_over(self, spec: RuntimeSpec, context: SandboxContext, handle: Mapping[str, str]) -> Runtime:
        """The sandbox in `context.directory`, which has outlived its node. Its `start` raises RuntimeFailure, and ends
        what is left of it, where it is not there any more."""
        ...


class RuntimeKind(Protocol):
    """A kind of sandbox, as `task.runtime.kind` names it: any object with these methods. A class may be both the kind,
    by class methods, and the `Runtime` that it creates.

    Three attributes are optional. `shows_mounts` is False for a kind in which programs cannot find what is in
    `SandboxContext.mounts`; `saves_layers` is True for one whose sandboxes are `SavesLayers`; `gives_gpus` is True for
    one in which programs can use the GPUs of `SandboxContext.gpus`, and no other. A kind whose sandboxes can outlive
    their node is a `TakesOver`, too.
    """

    def create(self, spec: RuntimeSpec, context: SandboxContext) -> Runtime:
        """A sandbox that has not started. Makes nothing on the host."""
        ...

    def available(self) -> Availability:
        """Whether this machine can run such sandboxes. Blocks, a first time perhaps for seconds."""
        ...

    def check_spec(self, spec: RuntimeSpec) -> None:
        """Called before anything of a task is stored. Raises InvalidField, naming the field, where this kind cannot be
        what the spec wants. Blocks for as long as a look at some files."""
        ...


class Runtime(Protocol):
    """One sandbox. Every method raises RuntimeFailure when the sandbox is broken or stopped.

    `endpoint` is the base URL (no trailing slash) at which a program inside reaches the model gateway, valid
    after `start`. `scratch` is a folder for files that are not the task's, as programs inside know it. `start` leaves
    nothing behind when it raises. `stop` is idempotent and never raises; a `start` that is under way fails.
    """

    endpoint: str
    scratch: str

    async def start(self) -> None: ...

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
        """Run a command to its end. A string goes to `bash -c`, or to `sh -c` in a sandbox without bash; a sequence
        is executed. With `merged` its errors are in `stdout`, in the order in which all was written. When it
        exceeds `seconds`, or the caller is cancelled, the command and all its descendants are killed."""
        ...

    async def open_shell(self, kind: ShellKind = "bash") -> Shell:
        """Raises NoShell, with a hint, when the sandbox has no interpreter of that kind."""
        ...

    async def read(self, path: str, *, limit: int = MAX_OUTPUT, follow: bool = True) -> bytes:
        """A file's bytes. Raises FileNotFoundError, IsADirectoryError, and RuntimeFailure for more than `limit` bytes,
        or for a symbolic link where `follow` is false."""
        ...

    async def write(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """Create or replace a file, with its parent folders."""
        ...

    async def glob(self, pattern: str, *, limit: int = MAX_PATHS) -> list[str]:
        """The paths that match, sorted, as Python's `glob.glob(pattern, recursive=True)` finds them: relative for a
        relative pattern, hidden files only where the pattern's part begins with a dot. `**` does not go through
        symbolic links. Raises RuntimeFailure for more than `limit` paths."""
        ...

    async def patch(self, text: str | bytes, *, cwd: str | None = None) -> list[str]:
        """Apply a unified diff, as `git apply` would, to the files below `cwd`: all of it or nothing. Returns the paths
        that were written or removed, as the diff names them. Raises PatchConflict."""
        ...

    async def upload(self, source: Path, target: str) -> None:
        """Copy a host file or folder (symbolic links that leave it are refused) to `target`."""
        ...

    async def snapshot(self, paths: Sequence[str], target: Path, *, alone: bool = False) -> None:
        """Write a tar archive of the given paths into the new host file `target`.

        Files that are missing, vanish meanwhile or may not be read are left out. With `alone`, everything else that
        runs in the sandbox is killed first, live shells too, so that nothing changes the files meanwhile. Raises
        RuntimeFailure, and leaves no file, when a file cannot be read for want of a resource, or the archive is larger
        than can be carried."""
        ...

    async def restore(self, archive: Path, paths: Sequence[str]) -> None:
        """Make `paths` what they were in another sandbox, whose `snapshot` is the host file `archive`.

        What was at them before is removed, and nothing of the archive is written anywhere else. An agent may have
        shaped the archive, so devices, sockets, pipes and links that lead out of `paths` are left out, except links to
        the system's folders."""
        ...

    async def stop(self) -> None: ...


@runtime_checkable
class TellsCause(Protocol):
    """A runtime that can tell whether a sandbox was broken from inside."""

    async def broken_inside(self) -> bool:
        """Whether programs inside broke the sandbox. False for one that works, was not started or was stopped, where
        the host's own part has failed, and where the cause cannot be known."""
        ...


@runtime_checkable
class TellsImage(Protocol):
    """A runtime whose image may be replaced by another of the same name while the service runs."""

    async def image_is_current(self) -> bool:
        """Whether a sandbox that is started now would have the same image. Raises RuntimeFailure."""
        ...


class Outlives(Protocol):
    """A runtime whose sandboxes can outlive their node, with what runs in them: the next node goes on with them.
    See `TakesOver`."""

    async def may_outlive(self) -> Mapping[str, str]:
        """Have the sandbox wait for another node if this one dies; the handle with which that can take it over. It is
        a secret."""
        ...

    async def exec_once(
        self,
        name: str,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] = {},
        stdin: bytes = b"",
        seconds: float,
    ) -> ExecResult:
        """As `Runtime.exec`, for a command that outlives its node. If a command of that name was started before, this
        starts none and waits for the end of that one."""
        ...


class SavesLayers(Protocol):
    """A runtime that can carry everything that was written in a sandbox into another."""

    async def save_layer(self, target: Path) -> None:
        """Write the writable layer into a new host file, for `SandboxContext.layer` of another sandbox."""
        ...
