"""The runtime interface: one sandbox, started once and stopped exactly once.

The interface involves neither models nor rewards. Paths inside the sandbox are POSIX paths, absolute or relative to
the working directory. Invariant: after `stop` returns, no process of the sandbox is alive and no file of the sandbox
is left on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import msgspec

from outrider.errors import LOG_TAIL, RuntimeFailure, RuntimeUnavailable
from outrider.sandbox.runtimes.command_feed import CommandFeed
from outrider.spec import RuntimeSpec

if TYPE_CHECKING:
    from outrider.sandbox.runtimes.node_host import Host

MAX_OUTPUT = 10 << 20
"""Maximum bytes kept of one output stream. The middle of a longer stream is replaced by a note with the number of bytes
cut."""

MAX_PATHS = 10_000
"""Maximum number of paths that `glob` returns by default."""

MAX_PATCH = 16 << 20
"""Maximum bytes of a patch's text."""
PATCH_SECONDS = 120.0
GIT_APPLY = ("git", "apply", "--whitespace=nowarn", "-")
GIT_ENVIRONMENT = {
    "GIT_DIR": "/dev/null",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "LC_ALL": "C",
}
"""Variables that make git apply a patch to the files of a folder, whether or not the folder is in a repository."""


class SandboxContext(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters that a node passes to a new sandbox.

    `session_id` and `attempt` identify the sandbox. `directory` is a private directory of the host, which exists and is
    empty; the node removes the directory after `stop`. `host` holds the parts shared by all sandboxes of the node, and
    is open while any sandbox runs. `gateway_url` and `gateway_socket` are the model gateway's addresses on the host.
    `mounts` are host folders to mount read-only at the same path inside (the harness programs). `layer` is the start
    state: the file written by `save_layer` of another sandbox of the same spec, or None for a new sandbox. Only a
    `SavesLayers` runtime receives a layer. `gpus` are the names, as in the setting `sandboxes.gpus`, of the GPUs that
    only this sandbox may use. The tuple is empty unless the kind has `gives_gpus`. `ahead` is True for a sandbox that
    no session waits for.
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
    ahead: bool = False


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """Exit code and outputs of a command. `exit_code` is None when the command was killed for its time limit
    (`timed_out`), and 128 + N when signal N killed the command. Outputs are raw bytes, truncated in the middle past
    MAX_OUTPUT."""

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    seconds: float = 0.0

    def log_tail(self, *, limit: int = LOG_TAIL) -> str:
        """Return the last `limit` bytes of stdout and stderr, stdout first; each stream may use the space left free by
        the other."""
        out, err = self.stdout.rstrip(), self.stderr.rstrip()
        err = err[-max(limit // 2, limit - len(out)) :]
        room = limit - len(err)
        out = out[-room:] if room else b""
        return b"\n".join(part for part in (out, err) if part).decode("utf-8", errors="replace")


class SandboxProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process in a sandbox. `pid` and `parent` are ids of the sandbox's own. Times are seconds since the epoch; `end`
    is None while the process lives. `exit_code` is known only for children of the tool server."""

    pid: int
    parent: int
    command: str
    start: float
    end: float | None = None
    exit_code: int | None = None


class Display(msgspec.Struct, frozen=True):
    """A rich result of an interpreter's input. `data` holds the result's forms by MIME type: images as bytes, all other
    forms (JSON too) as text. A `text/plain` form is in the output as well."""

    data: dict[str, str | bytes]


class ShellResult(msgspec.Struct, frozen=True, kw_only=True):
    """Output of one shell or interpreter input, stdout and stderr merged in order. `displays` are IPython's rich
    results, at most 8 MiB together. A note replaces a form that does not fit."""

    output: str
    exit_code: int | None
    timed_out: bool = False
    displays: tuple[Display, ...] = ()


ShellKind = Literal["bash", "python", "ipython"]
"""Kinds of live shells: bash (sh in a sandbox without bash), Python as at its prompt, or IPython as in a notebook."""


class Shell(Protocol):
    """A live bash, Python or IPython that keeps its state between calls.

    `run` raises RuntimeFailure when the shell is gone. On a time limit the running job is killed and the shell stays
    usable.
    """

    async def run(self, text: str, *, seconds: float) -> ShellResult: ...
    async def close(self) -> None: ...


class NoShell(RuntimeFailure):
    """The sandbox has no interpreter of that `kind`, or an agent has made the interpreter unusable."""

    def __init__(self, kind: ShellKind, *, hint: str, log_tail: str | None) -> None:
        name = "IPython" if kind == "ipython" else "Python"
        super().__init__(f"no {name} in the sandbox", hint=hint, log_tail=log_tail, inside=True)
        self.kind: ShellKind = kind


class PatchConflict(ValueError):
    """A patch does not apply, and no file was changed. The error's text is the output of git."""


class Availability(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a check of this machine: `ok`, and a description of the feature or of the missing part."""

    ok: bool
    detail: str
    hint: str | None = None

    @classmethod
    def found(cls, describe: Callable[[], str]) -> Availability:
        """Return an availability that is `ok`. Its detail is the text that `describe` returns. If `describe` raises
        RuntimeUnavailable, the availability is not `ok`, and has the error's message and hint."""
        try:
            return cls(ok=True, detail=describe())
        except RuntimeUnavailable as error:
            return cls(ok=False, detail=error.message, hint=error.hint)


class RuntimeKind(Protocol):
    """A kind of sandbox, as named by `task.runtime.kind`: any object with these methods. With class methods, a class
    may be both the kind and the `Runtime` that the kind creates.

    Six attributes are optional. `shows_mounts` is False for a kind whose programs cannot see the folders of
    `SandboxContext.mounts`. `saves_layers` is True for a kind whose sandboxes implement `SavesLayers`. `gives_gpus` is
    True for a kind whose programs can use exactly the GPUs of `SandboxContext.gpus`. `uses_image_store` is True for a
    kind whose images are those of `outrider image`. `filters_network` is True for a kind whose programs reach nothing
    but `SandboxContext.gateway_socket`, at BRIDGE_URL. `part` exists for a kind whose sandboxes run elsewhere: it is
    the class of the shared part that a node's host opens for this kind (see `Host.part`).
    """

    def create(self, spec: RuntimeSpec, context: SandboxContext) -> Runtime:
        """Return a sandbox that has not started. Creates nothing on the host."""
        ...

    def available(self) -> Availability:
        """Return whether this machine can run sandboxes of this kind. The first call may block for seconds."""
        ...

    def check_spec(self, spec: RuntimeSpec) -> None:
        """Check a spec before the task is stored. Raises InvalidField, naming the field, if this kind cannot fulfil
        the spec. Blocks for a check of a few files."""
        ...


class Runtime(Protocol):
    """One sandbox. Every method raises RuntimeFailure when the sandbox is broken or stopped.

    `endpoint` is the base URL (no trailing slash) of the model gateway for programs inside, valid after `start`.
    `scratch` is the path of a folder in the sandbox for files that do not belong to the task. `start` leaves nothing
    behind when it raises. `stop` is idempotent, never raises, and makes a concurrent `start` fail.
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
        """Run a command to its end. A string is run by `bash -c`, or by `sh -c` in a sandbox without bash; a sequence
        is executed directly. With `merged`, stderr is in `stdout`, in the order of writing. When the command exceeds
        `seconds`, or the caller is cancelled, the command and all its descendants are killed."""
        ...

    async def open_shell(self, kind: ShellKind = "bash") -> Shell:
        """Open a live shell. Raises NoShell, with a hint, when the sandbox has no interpreter of that kind."""
        ...

    async def read(self, path: str, *, limit: int = MAX_OUTPUT, follow: bool = True) -> bytes:
        """Return a file's bytes. Raises FileNotFoundError (also if a parent of the path is a file) and
        IsADirectoryError. Raises RuntimeFailure for a file of more than `limit` bytes and, if `follow` is false, for a
        symbolic link."""
        ...

    async def write(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """Create or replace a file, with its parent folders."""
        ...

    async def glob(self, pattern: str, *, limit: int = MAX_PATHS) -> list[str]:
        """Return the matching paths, sorted. The rules are those of Python's `glob.glob(pattern, recursive=True)`: a
        relative pattern gives relative paths, and a hidden name matches only a part of the pattern that begins with a
        dot. `**` does not follow symbolic links. Raises RuntimeFailure for more than `limit` paths."""
        ...

    async def patch(self, text: str | bytes, *, cwd: str | None = None) -> None:
        """Apply a unified diff to the files below `cwd` by `git apply`: completely or not at all. Raises PatchConflict
        if the patch does not apply or is too large, and RuntimeFailure if git fails. If the sandbox has no git, the
        error has a hint."""
        ...

    async def upload(self, source: Path, target: str) -> None:
        """Copy a host file or folder to `target`. Symbolic links that lead out of the folder are refused."""
        ...

    async def snapshot(self, paths: Sequence[str], target: Path, *, alone: bool = False) -> None:
        """Write a tar archive of the given paths into the new host file `target`.

        Files that are missing, vanish during the call or may not be read are left out. With `alone`, every other
        process of the sandbox is killed first, live shells too, so that no process changes the files during the copy.
        Raises RuntimeFailure, and leaves no file, when a file cannot be read for lack of a resource, or the archive
        exceeds the maximum size."""
        ...

    async def restore(self, archive: Path, paths: Sequence[str]) -> None:
        """Bring `paths` to their state in another sandbox, whose `snapshot` is the host file `archive`.

        Files that exist at `paths` are removed first, and nothing of the archive is written anywhere else. An agent
        may have crafted the archive. Therefore devices, sockets, pipes and links that lead out of `paths` are left
        out, except links to the system's folders."""
        ...

    async def stop(self) -> None: ...


@runtime_checkable
class TellsCause(Protocol):
    """A runtime that can detect whether a sandbox was broken from inside."""

    async def broken_inside(self) -> bool:
        """Return whether programs inside broke the sandbox. Returns False for a working, unstarted or stopped sandbox,
        after a failure of the host's own part, and when the cause cannot be determined."""
        ...


@runtime_checkable
class ReportsCommands(Protocol):
    """A runtime that announces the commands that it runs."""

    commands: CommandFeed


@runtime_checkable
class ListsProcesses(Protocol):
    """A runtime that lists the processes that its programs have started."""

    async def processes(self) -> list[SandboxProcess]:
        """Return the processes that began, ended or changed their command line since the last call, each in its newest
        state. Processes that ran for a short time may be missing. Raises RuntimeFailure."""
        ...


@runtime_checkable
class TellsImage(Protocol):
    """A runtime whose image may be replaced by another image of the same name while the service runs."""

    async def image_is_current(self) -> bool:
        """Return whether a sandbox started now would have the same image. Raises RuntimeFailure."""
        ...


@runtime_checkable
class QueuesStarts(Protocol):
    """A runtime whose `start` may wait until another system has room, or until its turn."""

    def queued_seconds(self) -> float:
        """Return the seconds, up to now, for which the start has waited for the other system. No time limit counts
        these seconds."""
        ...


class SavesLayers(Protocol):
    """A runtime that can copy every file written in a sandbox into another sandbox."""

    async def save_layer(self, target: Path) -> None:
        """Write the writable layer into a new host file, for `SandboxContext.layer` of another sandbox."""
        ...
