"""Finds out why a program could not be started in a sandbox: which file is missing, and how to change the task.

Invariant: a program, an interpreter or a loader is reported as missing only after a check in the sandbox. A library is
reported as missing only if the dynamic loader has said so. If the cause is unknown, the result is None.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import re
import shutil
import stat
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from outrider.environment import cache_home, environment
from outrider.errors import RuntimeFailure
from outrider.sandbox.runtimes.base import ExecResult, Runtime

NOT_FOUND = 127
NOT_EXECUTABLE = 126
"""Exit codes with which shells and the sandbox's tool server report that a program cannot be started."""

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH for a sandbox that does not set it or has no shell."""
FIND_PATH = 'printf %s "$PATH"'
HEAD = 4096
"""Number of bytes to read from the beginning of a file. These bytes contain the first line of a script, or the program
headers of an ELF file."""
SMALL = 1 << 16
"""Maximum bytes of a file that is read whole."""
MAX_SCRIPTS = 4
"""Maximum length of a chain of scripts, in which each script is the interpreter of the previous one. Linux has the same
limit."""
LOOK_SECONDS = 10.0
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
PT_INTERP = 3

_COMPLAINTS = (
    re.compile(r"^(?:\S*sh): (?:line )?\d+: (?P<name>.+?): (?:command )?not found$", re.MULTILINE),
    re.compile(r"^(?:\S*sh): (?:line )?\d+: (?P<name>/.+?): No such file or directory$", re.MULTILINE),
    re.compile(r"^(?:\S*/)?env: [\u2018'\"]?(?P<name>.+?)[\u2019'\"]?: No such file or directory$", re.MULTILINE),
)
"""Messages of bash, dash and env about a program that they do not find."""

_LIBRARY = re.compile(r"error while loading shared libraries: (?P<name>[^:\n]+): cannot open shared object file")
"""Message of the GNU C library's dynamic loader about a missing library. The loader then exits with 127, like a shell
that does not find a program."""

OTHER_ROOT = (
    "the program was built for another root file system: build it for the sandbox's, or link it statically, or install "
    "the missing file in the image, or remove task.runtime.image"
)


class Missing(msgspec.Struct, frozen=True):
    """A missing or unusable file: `message` describes it, and `hint` tells how to change the task."""

    message: str
    hint: str


async def find_missing(
    runtime: Runtime, command: Sequence[str], env: Mapping[str, str], result: ExecResult
) -> Missing | None:
    """Return why `command` could not be started. `result` is the result of the command. Returns None if the command was
    started, or if the cause is unknown."""
    if result.exit_code not in (NOT_FOUND, NOT_EXECUTABLE):
        return None
    sandbox = _Sandbox(runtime, env)
    stderr = result.stderr.decode("utf-8", errors="replace")
    complaints = [match for pattern in _COMPLAINTS for match in pattern.finditer(stderr)]
    try:
        found = await sandbox.unusable(command[0])
        if found is None and complaints:  # check the last program that a shell or `env` did not find
            found = await sandbox.unusable(max(complaints, key=lambda match: match.start())["name"])
        if found is None and (library := _LIBRARY.search(stderr)):
            found = Missing(f"it needs the library {library['name']}, which is not in the sandbox", OTHER_ROOT)
    except (RuntimeFailure, OSError, ValueError):
        return None  # the sandbox no longer responds, or the name of a program has a NUL
    return found


async def search_path(runtime: Runtime, env: Mapping[str, str], *, seconds: float) -> str:
    """Return the PATH of a program that is started in the sandbox with the variables `env`. Raises RuntimeFailure."""
    if own := env.get("PATH"):
        return own
    found = await runtime.exec(FIND_PATH, seconds=seconds)
    return found.stdout.decode("utf-8", errors="replace") or SYSTEM_PATH


class _Sandbox:
    """Looks for programs in a sandbox, as a program with the variables `env` would."""

    def __init__(self, runtime: Runtime, env: Mapping[str, str]) -> None:
        self._runtime = runtime
        self._env = env
        self._path = ""

    async def unusable(self, name: str, *, depth: int = MAX_SCRIPTS) -> Missing | None:
        """Return why the program cannot be started, or None if no cause is found. For a script, check its interpreter,
        too. An interpreter may itself be a script, so the check is repeated for up to `depth` interpreters."""
        place = await self._find(name)
        if place is None:
            return _not_there(name)
        test = await self._runtime.exec(["test", "-f", place, "-a", "-x", place], seconds=LOOK_SECONDS)
        # With any other exit code, the file is executable, or the sandbox has no command `test`.
        if test.exit_code == 1:
            return Missing(
                f"{place} is not executable", "chmod +x it; a prepare step that writes it takes executable = true"
            )
        head = await self._head(place)
        if not head.startswith(b"#!"):
            loader = _loader(head)
            if loader is None or await self._exists(loader):
                return None
            return Missing(f"{place} needs the loader {loader}, which is not in the sandbox", OTHER_ROOT)
        line = head[2:].split(b"\n", 1)[0].decode("utf-8", errors="replace")
        interpreter, *words = line.split() or [""]
        if line.endswith("\r"):
            return Missing(f"the first line of {place} ends with a carriage return", "save it with Unix line ends")
        if posixpath.basename(interpreter) == "env" and await self._exists(interpreter):
            programs = [word for word in words if not word.startswith("-") and "=" not in word]
            interpreter = programs[0] if programs else interpreter
        if (found := await self._find(interpreter)) is not None:
            return await self.unusable(found, depth=depth - 1) if depth else None
        why = _not_there(interpreter)
        return Missing(f"{place} is a script for {interpreter}, which is not in the sandbox", why.hint)

    async def _find(self, name: str) -> str | None:
        """Return the path of a program, or None. A name with a slash is a path. Any other name is looked up in the
        folders of PATH."""
        if "/" in name:
            return name if await self._exists(name) else None
        self._path = self._path or await search_path(self._runtime, self._env, seconds=LOOK_SECONDS)
        for folder in filter(None, self._path.split(":")):
            if await self._exists(f"{folder.rstrip('/')}/{name}"):
                return f"{folder.rstrip('/')}/{name}"
        return None

    async def _exists(self, path: str) -> bool:
        try:
            await self._runtime.read(path, limit=0)
        except FileNotFoundError:
            return False
        # The path exists: as a folder, as a file that cannot be read, or as a file longer than the limit of 0 bytes.
        except (RuntimeFailure, OSError):
            return True
        return True

    async def _head(self, path: str) -> bytes:
        """Return the first HEAD bytes of a file. If the file is large and the sandbox has no command `head`, read the
        file on the host. This works only for programs that Outrider has installed, because only they have the same path
        on the host."""
        try:
            return (await self._runtime.read(path, limit=SMALL))[:HEAD]
        except RuntimeFailure:
            result = await self._runtime.exec(["head", "-c", str(HEAD), path], seconds=LOOK_SECONDS)
        return result.stdout if result.exit_code == 0 else await asyncio.to_thread(_head_on_host, path)


def _head_on_host(path: str) -> bytes:
    """Read the beginning of a program in Outrider's cache on the host. Returns b"" for any other path: the task chooses
    the path, and other files of the host may be secret, or pipes."""
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(os.path.realpath(cache_home())):
        return b""
    try:
        fd = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    with open(fd, "rb") as file:
        return file.read(HEAD) if stat.S_ISREG(os.fstat(fd).st_mode) else b""


def _not_there(name: str) -> Missing:
    """Describe a program that the sandbox does not have. The hint depends on whether the host has the program in the
    service's PATH."""
    if "/" in name and not posixpath.isabs(name):
        return Missing(
            f"{name} is not in the sandbox, where it was looked for below the working directory",
            "a prepare step with `write` or `upload` puts it there",
        )
    # On the host, only the service's own PATH is searched. A task must not find out which other paths exist there.
    looked = f"{environment('PATH') or SYSTEM_PATH}:{SYSTEM_PATH}"
    named = "/" not in name or posixpath.dirname(name) in looked.split(":")
    on_host = shutil.which(name, path=looked) if named else None
    where = f"{name} is not in the sandbox" if "/" in name else f"{name} is in no folder of the sandbox's PATH"
    if on_host is None:
        put = (
            "install it in the image, or write it with a prepare step (`write` or `upload`), or show a folder of this "
            "machine"
        )
        show = f'mounts = [{{source = "{posixpath.dirname(name)}"}}] below [runtime]' if "/" in name else "mounts"
        return Missing(
            where,
            f"{put}: with venv below [harness] for a virtual environment, else with {show}; the operator allows the"
            " folder with `outrider serve --allow-path PATH`",
        )
    if on_host.startswith(tuple(f"{folder}/" for folder in SYSTEM)):
        return Missing(
            f"{where}, whose root is not the host's; on the host it is {on_host}",
            "install it in the image (outrider image build), or leave task.runtime.image out",
        )
    program = Path(on_host)
    venv = next((above for above in program.parents if (above / "pyvenv.cfg").is_file()), None)
    if venv is not None:
        hint = f'it is in a virtual environment: write venv = "{venv}" below [harness]; {_allow(venv)}'
    else:
        folder = program.parent.parent if program.parent.name == "bin" else program.parent
        # These folders contain many other files, so only the program is mounted.
        if folder in (Path("/"), Path.home(), Path.home() / ".local"):
            folder = program
        hint = f'show it to the sandbox: write mounts = [{{source = "{folder}"}}] below [runtime]; {_allow(folder)}'
    return Missing(f"{where}; on the host it is {on_host}", hint)


def _allow(path: Path) -> str:
    return f"the operator allows the path with `outrider serve --allow-path {path}`"


def _loader(head: bytes) -> str | None:
    """Return the dynamic loader that the first bytes of a 64-bit ELF program name, or None."""
    if head[:6] != b"\x7fELF\x02\x01" or len(head) < 64:
        return None
    (start,) = struct.unpack_from("<Q", head, 32)
    size, count = struct.unpack_from("<HH", head, 54)
    for offset in range(start, min(start + size * count, len(head) - 56), max(1, size)):
        kind, _, at, _, _, length = struct.unpack_from("<IIQQQQ", head, offset)
        if kind == PT_INTERP:
            return head[at : at + length].rstrip(b"\0").decode("utf-8", errors="replace") or None
    return None
