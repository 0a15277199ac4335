"""The interface of a runtime. A runtime is one sandbox. It is started once and stopped exactly once.

Models and rewards play no part here. Paths inside a sandbox are POSIX paths, absolute or relative to the working
directory. Invariant: after `stop` returns, no process of the sandbox is alive, and none of its files is left on the
host.
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
"""Maximum bytes that are kept of one output stream. In a longer stream, a note with the number of missing bytes
replaces the middle."""

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
    "XDG_CONFIG_HOME": "/dev/null",
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
    - `layer` is None, or a file that `save_layer` wrote for another sandbox of the same spec. The new sandbox then
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
    """The result of a command. `exit_code` is 128 + N if signal N killed the command. It is None if the command was
    killed at its time limit (`timed_out`). The outputs are raw bytes. The middle of an output longer than MAX_OUTPUT is
    cut out."""

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    seconds: float = 0.0

    def log_tail(self, *, limit: int = LOG_TAIL) -> str:
        """Return the end of stdout and then of stderr, at most `limit` bytes together. Each stream gets half of the
        limit, plus what the other does not need."""
        out, err = self.stdout.rstrip(), self.stderr.rstrip()
        err = err[-max(limit // 2, limit - len(out)) :]
        room = limit - len(err)
        out = out[-room:] if room else b""
        return b"\n".join(part for part in (out, err) if part).decode("utf-8", errors="replace")


class SandboxProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process in a sandbox.

    - `pid` and `parent` are process ids inside the sandbox.
    - `start` and `end` are seconds since the epoch. `end` is None while the process lives.
    - `exit_code` is known only for children of the tool server."""

    pid: int
    parent: int
    command: str
    start: float
    end: float | None = None
    exit_code: int | None = None


class Display(msgspec.Struct, frozen=True):
    """A rich result of code that an interpreter ran, such as a plot. `data` has the result in one or more formats, by
    MIME type. Images are bytes. All other formats are text, including JSON. A `text/plain` format is also part of the
    output."""

    data: dict[str, str | bytes]


class ShellResult(msgspec.Struct, frozen=True, kw_only=True):
    """The output of one input to a live shell or interpreter. stdout and stderr are merged in order. `displays` are
    IPython's rich results, at most 8 MiB together. A note replaces data that does not fit."""

    output: str
    exit_code: int | None
    timed_out: bool = False
    displays: tuple[Display, ...] = ()


ShellKind = Literal["bash", "python", "ipython"]
"""Kinds of live shells: `bash` (or sh if the sandbox has no bash), `python` as at Python's prompt, and `ipython` as in
a notebook."""


class Shell(Protocol):
    """A live bash, Python or IPython that keeps its state between calls.

    `run` raises RuntimeFailure if the shell has ended. At its time limit, `run` kills the running job, and the shell
    stays usable.
    """

    async def run(self, text: str, *, seconds: float) -> ShellResult: ...
    async def close(self) -> None: ...


class NoShell(RuntimeFailure):
    """Raised if the sandbox has no interpreter of the given `kind`, or if an agent has made that interpreter
    unusable."""

    def __init__(self, kind: ShellKind, *, hint: str, log_tail: str | None) -> None:
        name = "IPython" if kind == "ipython" else "Python"
        super().__init__(f"no {name} in the sandbox", hint=hint, log_tail=log_tail, inside=True)
        self.kind: ShellKind = kind


class PatchConflict(ValueError):
    """Raised if a patch does not apply. No file has changed. The error message is the output of git."""


class Availability(msgspec.Struct, frozen=True, kw_only=True):
    """Whether this machine supports a feature. `detail` describes the feature or, if `ok` is False, what is missing."""

    ok: bool
    detail: str
    hint: str | None = None

    @classmethod
    def found(cls, describe: Callable[[], str]) -> Availability:
        """Return an availability with the text that `describe` returns. If `describe` raises RuntimeUnavailable, the
        result is not `ok`, and has the message and hint of this error."""
        try:
            return cls(ok=True, detail=describe())
        except RuntimeUnavailable as error:
            return cls(ok=False, detail=error.message, hint=error.hint)


class RuntimeKind(Protocol):
    """A kind of sandbox. `task.runtime.kind` names the kind. Any object with these methods is a kind. A class can be
    both a kind and the `Runtime` that this kind creates, if the methods of the kind are class methods.

    A kind may have these attributes:

    - `shows_mounts` is False if programs in the sandbox cannot see the folders in `SandboxContext.mounts`.
    - `saves_layers` is True if the sandboxes implement `SavesLayers`.
    - `gives_gpus` is True if programs can use exactly the GPUs in `SandboxContext.gpus`.
    - `uses_image_store` is True if the sandboxes start from images of `outrider image`.
    - `filters_network` is True if programs can reach only `SandboxContext.gateway_socket`, at the address BRIDGE_URL.
    - `part` is a class. All sandboxes of a node share one object of it (see `Host.part`). A kind has this attribute if
      its sandboxes run on other machines.
    """

    def create(self, spec: RuntimeSpec, context: SandboxContext) -> Runtime:
        """Return a sandbox that has not started. Creates nothing on the host."""
        ...

    def available(self) -> Availability:
        """Return whether sandboxes of this kind can run on this machine. The first call may block for seconds."""
        ...

    def check_spec(self, spec: RuntimeSpec) -> None:
        """Check a spec before its task is stored. Raises InvalidField, which names the field, if this kind cannot
        fulfil the spec. The call blocks briefly, because it checks a few files."""
        ...


class Runtime(Protocol):
    """One sandbox. Every method raises RuntimeFailure if the sandbox is broken or stopped.

    `endpoint` is the base URL of the model gateway for programs inside, without a final slash. It is valid after
    `start`. `scratch` is a folder in the sandbox for files that do not belong to the task. If `start` raises, it leaves
    nothing behind. `stop` may be called twice, never raises, and makes a concurrent `start` fail.
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
        of words is executed directly. With `merged`, `stdout` also has the output of stderr, in the order of writing.
        After `seconds`, or if the caller is cancelled, the command and all its descendants are killed."""
        ...

    async def open_shell(self, kind: ShellKind = "bash") -> Shell:
        """Open a live shell. Raises NoShell, with a hint, if the sandbox has no interpreter of the given kind."""
        ...

    async def read(self, path: str, *, limit: int = MAX_OUTPUT, follow: bool = True) -> bytes:
        """Return the content of a file.

        Raises FileNotFoundError if the file is missing, or if a parent of the path is a file. Raises IsADirectoryError
        for a folder. Raises RuntimeFailure for a file of more than `limit` bytes. If `follow` is false, a symbolic link
        also raises RuntimeFailure."""
        ...

    async def write(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """Create or replace a file, with its parent folders."""
        ...

    async def glob(self, pattern: str, *, limit: int = MAX_PATHS) -> list[str]:
        """Return the paths that match a pattern, sorted. The rules are those of Python's `glob.glob(pattern,
        recursive=True)`, but `**` does not follow symbolic links. A relative pattern gives relative paths. A name that
        begins with a dot only matches a part of the pattern that also begins with a dot. Bytes that are not UTF-8 are
        surrogate escapes. Raises RuntimeFailure for more than `limit` paths."""
        ...

    async def patch(self, text: str | bytes, *, cwd: str | None = None) -> None:
        """Apply a unified diff to the files below `cwd` with `git apply`, completely or not at all. Raises
        PatchConflict if the patch does not apply or is too large. Raises RuntimeFailure if git fails. This error has a
        hint if the sandbox has no git."""
        ...

    async def upload(self, source: Path, target: str) -> None:
        """Copy a host file or folder to `target`. Symbolic links that lead out of the folder are refused."""
        ...

    async def snapshot(self, paths: Sequence[str], target: Path, *, alone: bool = False) -> None:
        """Write a tar archive of the given paths into the new host file `target`.

        Files are left out if they are missing, unreadable, or deleted during the call. With `alone`, the call first
        kills all other processes of the sandbox, including live shells, so that no process changes the files during the
        copy. If the archive is too large, or a resource such as memory runs out, the call raises RuntimeFailure and
        leaves no `target`."""
        ...

    async def restore(self, archive: Path, paths: Sequence[str]) -> None:
        """Give the files at `paths` the state that they had in another sandbox. `archive` is the host file that
        `snapshot` wrote for that sandbox.

        Existing files at `paths` are removed first. Nothing is written outside `paths`. An agent may have crafted the
        archive, so devices, sockets and pipes are skipped. Links that lead out of `paths` are skipped, too, except for
        symbolic links to system folders."""
        ...

    async def stop(self) -> None: ...


@runtime_checkable
class TellsCause(Protocol):
    """A runtime that can detect whether a sandbox was broken from inside."""

    async def broken_inside(self) -> bool:
        """Return True if programs inside broke the sandbox. Returns False for a working, unstarted or stopped sandbox.
        Also returns False if the host's side failed, or if the cause cannot be determined."""
        ...


@runtime_checkable
class ReportsCommands(Protocol):
    """A runtime that announces the commands that it runs."""

    commands: CommandFeed


@runtime_checkable
class ListsProcesses(Protocol):
    """A runtime that lists the processes that its programs have started."""

    async def processes(self) -> list[SandboxProcess]:
        """Return the processes that have begun, ended or changed their command line since the last call, in their
        latest state. Short-lived processes may be missing. Raises RuntimeFailure."""
        ...


@runtime_checkable
class TellsImage(Protocol):
    """A runtime that can tell whether the name of its image now refers to another image."""

    async def image_is_current(self) -> bool:
        """Return whether a sandbox that starts now would get the same image. Raises RuntimeFailure."""
        ...


@runtime_checkable
class QueuesStarts(Protocol):
    """A runtime whose `start` may have to wait: in a queue of the node, or until a service on other machines has
    room."""

    def queued_seconds(self) -> float:
        """Return how many seconds `start` has waited so far. Time limits do not count these seconds."""
        ...


class SavesLayers(Protocol):
    """A runtime that can save every file written in a sandbox, for use in another sandbox."""

    async def save_layer(self, target: Path) -> None:
        """Write the sandbox's writable layer into a new host file, for use as `SandboxContext.layer` of another
        sandbox."""
        ...
