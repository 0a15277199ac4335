"""The interface of a runtime. A runtime is one sandbox, started once and stopped exactly once.

The interface involves neither models nor rewards. Paths inside the sandbox are POSIX paths, absolute or relative to the
working directory. Invariant: after `stop` returns, no process of the sandbox is alive and no file of the sandbox is
left on the host.
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

    - `session_id` and `attempt` identify the sandbox.
    - `directory` is a private, empty directory on the host. The node removes it after `stop`.
    - `host` holds the parts that all sandboxes of the node share. It is open while any sandbox runs.
    - `gateway_url` and `gateway_socket` are the model gateway's addresses on the host.
    - `mounts` are host folders with harness programs, to mount read-only at the same path inside.
    - `layer` is None, or a file that `save_layer` of another sandbox of the same spec wrote. The new sandbox then
      starts with the contents of this file. Only a `SavesLayers` runtime receives a layer.
    - `gpus` are the GPUs that only this sandbox may use, named as in the setting `sandboxes.gpus`. The tuple is empty
      unless the kind has `gives_gpus`.
    - `ahead` is True for a sandbox that is started before any session needs it.
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
    """Exit code and outputs of a command. `exit_code` is None if the command reached its time limit and was killed
    (`timed_out`), and 128 + N if signal N killed the command. Outputs are raw bytes. The middle of an output longer
    than MAX_OUTPUT is cut out."""

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    seconds: float = 0.0

    def log_tail(self, *, limit: int = LOG_TAIL) -> str:
        """Return the last `limit` bytes of stdout and stderr, stdout first. Each stream gets half of the limit, plus
        what the other stream leaves free."""
        out, err = self.stdout.rstrip(), self.stderr.rstrip()
        err = err[-max(limit // 2, limit - len(out)) :]
        room = limit - len(err)
        out = out[-room:] if room else b""
        return b"\n".join(part for part in (out, err) if part).decode("utf-8", errors="replace")


class SandboxProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process in a sandbox. `pid` and `parent` are process ids as seen inside the sandbox. Times are seconds since
    the epoch; `end` is None while the process lives. `exit_code` is known only for children of the tool server."""

    pid: int
    parent: int
    command: str
    start: float
    end: float | None = None
    exit_code: int | None = None


class Display(msgspec.Struct, frozen=True):
    """A rich result of interpreter input, such as a plot. `data` holds the result in one or more formats, by MIME type:
    images as bytes, all other formats (JSON too) as text. A `text/plain` format is also part of the output."""

    data: dict[str, str | bytes]


class ShellResult(msgspec.Struct, frozen=True, kw_only=True):
    """Output of one shell or interpreter input, stdout and stderr merged in order. `displays` are IPython's rich
    results, at most 8 MiB together. Data that does not fit is replaced by a note."""

    output: str
    exit_code: int | None
    timed_out: bool = False
    displays: tuple[Display, ...] = ()


ShellKind = Literal["bash", "python", "ipython"]
"""Kinds of live shells: bash (sh in a sandbox without bash), Python as at its prompt, or IPython as in a notebook."""


class Shell(Protocol):
    """A live bash, Python or IPython that keeps its state between calls.

    `run` raises RuntimeFailure when the shell is gone. When `run` reaches its time limit, the running job is killed and
    the shell stays usable.
    """

    async def run(self, text: str, *, seconds: float) -> ShellResult: ...
    async def close(self) -> None: ...


class NoShell(RuntimeFailure):
    """Raised when the sandbox has no interpreter of that `kind`, or when an agent has made the interpreter unusable."""

    def __init__(self, kind: ShellKind, *, hint: str, log_tail: str | None) -> None:
        name = "IPython" if kind == "ipython" else "Python"
        super().__init__(f"no {name} in the sandbox", hint=hint, log_tail=log_tail, inside=True)
        self.kind: ShellKind = kind


class PatchConflict(ValueError):
    """Raised when a patch does not apply. No file was changed. The message is the output of git."""


class Availability(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a check of this machine. `detail` describes the feature, or the missing part if `ok` is False."""

    ok: bool
    detail: str
    hint: str | None = None

    @classmethod
    def found(cls, describe: Callable[[], str]) -> Availability:
        """Return an availability whose detail is the text that `describe` returns. If `describe` raises
        RuntimeUnavailable, the availability is not `ok`, and has the error's message and hint."""
        try:
            return cls(ok=True, detail=describe())
        except RuntimeUnavailable as error:
            return cls(ok=False, detail=error.message, hint=error.hint)


class RuntimeKind(Protocol):
    """A kind of sandbox, as named by `task.runtime.kind`. Any object with these methods is a kind. A class whose
    methods are class methods can be both the kind and its `Runtime`.

    A kind may have these attributes:

    - `shows_mounts` is False if programs in the sandbox cannot see the folders of `SandboxContext.mounts`.
    - `saves_layers` is True if the sandboxes implement `SavesLayers`.
    - `gives_gpus` is True if programs can use exactly the GPUs of `SandboxContext.gpus`.
    - `uses_image_store` is True if the images are those of `outrider image`.
    - `filters_network` is True if programs reach nothing but `SandboxContext.gateway_socket`, at BRIDGE_URL.
    - `part` is the class whose object all sandboxes of a node share (see `Host.part`). A kind has this attribute if its
      sandboxes run on other machines.
    """

    def create(self, spec: RuntimeSpec, context: SandboxContext) -> Runtime:
        """Return a sandbox that has not started. Creates nothing on the host."""
        ...

    def available(self) -> Availability:
        """Return whether this machine can run sandboxes of this kind. The first call may block for seconds."""
        ...

    def check_spec(self, spec: RuntimeSpec) -> None:
        """Check a spec before the task is stored. Raises InvalidField, naming the field, if this kind cannot fulfil the
        spec. Blocks briefly, because a few files are checked."""
        ...


class Runtime(Protocol):
    """One sandbox. Every method raises RuntimeFailure when the sandbox is broken or stopped.

    `endpoint` is the base URL (no trailing slash) of the model gateway for programs inside, valid after `start`.
    `scratch` is a folder in the sandbox for files that do not belong to the task. If `start` raises, it leaves nothing
    behind. `stop` is idempotent, never raises, and makes a concurrent `start` fail.
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
        """Run a command to its end. A string is run by `bash -c`, or by `sh -c` in a sandbox without bash. A sequence
        is executed directly. With `merged`, stderr is in `stdout`, in the order of writing. When the command exceeds
        `seconds`, or the caller is cancelled, the command and all its descendants are killed."""
        ...

    async def open_shell(self, kind: ShellKind = "bash") -> Shell:
        """Open a live shell. Raises NoShell, with a hint, when the sandbox has no interpreter of that kind."""
        ...

    async def read(self, path: str, *, limit: int = MAX_OUTPUT, follow: bool = True) -> bytes:
        """Return a file's bytes.

        Raises FileNotFoundError (also if a parent of the path is a file) and IsADirectoryError. Raises RuntimeFailure
        for a file of more than `limit` bytes. If `follow` is false, raises RuntimeFailure for a symbolic link."""
        ...

    async def write(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """Create or replace a file, with its parent folders."""
        ...

    async def glob(self, pattern: str, *, limit: int = MAX_PATHS) -> list[str]:
        """Return the matching paths, sorted, as Python's `glob.glob(pattern, recursive=True)` does. A relative pattern
        gives relative paths. A hidden name matches only if that part of the pattern begins with a dot too. Unlike in
        Python, `**` does not follow symbolic links. Raises RuntimeFailure for more than `limit` paths."""
        ...

    async def patch(self, text: str | bytes, *, cwd: str | None = None) -> None:
        """Apply a unified diff to the files below `cwd` with `git apply`, completely or not at all. Raises
        PatchConflict if the patch does not apply or is too large. Raises RuntimeFailure if git fails, with a hint if
        the sandbox has no git."""
        ...

    async def upload(self, source: Path, target: str) -> None:
        """Copy a host file or folder to `target`. Symbolic links that lead out of the folder are refused."""
        ...

    async def snapshot(self, paths: Sequence[str], target: Path, *, alone: bool = False) -> None:
        """Write a tar archive of the given paths into the new host file `target`.

        Files that are missing, unreadable or deleted during the call are left out. With `alone`, every other process of
        the sandbox is killed first, live shells too, so that no process changes the files during the copy. If a file
        cannot be read for lack of a resource, or the archive exceeds the maximum size, the call raises RuntimeFailure
        and leaves no file."""
        ...

    async def restore(self, archive: Path, paths: Sequence[str]) -> None:
        """Make `paths` as they were in another sandbox, of which `snapshot` wrote the host file `archive`.

        Files that exist at `paths` are removed first. Nothing is written outside `paths`. An agent may have crafted the
        archive. Therefore devices, sockets, pipes and links that lead out of `paths` are skipped, except links to the
        system's folders."""
        ...

    async def stop(self) -> None: ...


@runtime_checkable
class TellsCause(Protocol):
    """A runtime that can detect whether a sandbox was broken from inside."""

    async def broken_inside(self) -> bool:
        """Return whether programs inside broke the sandbox. Returns False for a working, unstarted or stopped sandbox.
        Also returns False if the host's own part failed, and if the cause cannot be determined."""
        ...


@runtime_checkable
class ReportsCommands(Protocol):
    """A runtime that announces the commands that it runs."""

    commands: CommandFeed


@runtime_checkable
class ListsProcesses(Protocol):
    """A runtime that lists the processes that its programs have started."""

    async def processes(self) -> list[SandboxProcess]:
        """Return the processes that began, ended or changed their command line since the last call, each with its
        latest state. Short-lived processes may be missing. Raises RuntimeFailure."""
        ...


@runtime_checkable
class TellsImage(Protocol):
    """A runtime that can detect whether its image's name now refers to a different image."""

    async def image_is_current(self) -> bool:
        """Return whether a sandbox started now would have the same image. Raises RuntimeFailure."""
        ...


@runtime_checkable
class QueuesStarts(Protocol):
    """A runtime whose `start` may wait in a queue, or until the service that runs its sandboxes has room."""

    def queued_seconds(self) -> float:
        """Return how many seconds the start has waited so far. No time limit includes these seconds."""
        ...


class SavesLayers(Protocol):
    """A runtime that can save every file written in a sandbox, for use in another sandbox."""

    async def save_layer(self, target: Path) -> None:
        """Write the sandbox's writable layer into a new host file, for use as `SandboxContext.layer` of another
        sandbox."""
        ...
