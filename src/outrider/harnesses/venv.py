"""A task's own virtual environment: which host folders a sandbox needs for it to work, and compiling its modules.

It reads files and links, and runs nothing except in `compile_modules`. Invariant: with the folders of `shown` at their
own paths the environment's python starts, and finds its standard library, its packages and editable installs.
Everything here blocks, except `compile_modules`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from outrider.environment import cache_home
from outrider.errors import InvalidField

log = logging.getLogger("outrider.harness")

FIELD = "task.harness.venv"
MAX_HOPS = 40
"""Maximum links followed one after the other; Linux follows as many."""
COMPILE_SECONDS = 300.0
UNCOMPILED = "(site-packages|test|idlelib|lib2to3|turtledemo)"
"""Parts of an interpreter's own library that no agent in an environment imports."""

_SETTING = re.compile(r"^\s*(\w[\w-]*)\s*=\s*(.*?)\s*$", re.MULTILINE)
_MAPPED = re.compile(r"^(?:MAPPING|NAMESPACES)\b.*$", re.MULTILINE)
"""The line in which setuptools' finder of an editable package names its folders."""
_QUOTED_PATH = re.compile(r"""(['"])(/.*?)\1""")


class Venv(msgspec.Struct, frozen=True, kw_only=True):
    """A virtual environment. `prefix` is its folder as the task names it. `shown` are the host folders and files that a
    sandbox needs, none below another and none in the host's /usr; `of_system` says that its interpreter is in /usr.
    `sources` are the folders that it imports modules from; `stamp` changes when something is installed in it."""

    prefix: Path
    shown: tuple[Path, ...]
    of_system: bool
    sources: tuple[Path, ...]
    stamp: str

    @property
    def python(self) -> Path:
        return self.prefix / "bin" / "python"


def read_venv(path: str) -> Venv:
    """The virtual environment in a folder. Raises InvalidField for a folder that holds none, or one that is broken."""
    prefix = Path(os.path.normpath(path))
    if ":" in path:
        raise InvalidField("has a colon, with which it cannot be in PATH", field=FIELD)
    home = _home(prefix)
    links: list[Path] = []
    interpreter = prefix / "bin" / "python"
    while interpreter.is_symlink() and len(links) < MAX_HOPS:
        links.append(interpreter)
        interpreter = Path(os.path.normpath(interpreter.parent / interpreter.readlink()))
    if not os.access(interpreter, os.X_OK) or not interpreter.is_file():
        raise InvalidField(
            f"the interpreter of {path!r} is gone: bin/python leads to {interpreter}",
            field=FIELD,
            hint="make the environment anew",
        )
    packages = [folder for folder in sorted(prefix.glob("lib/python3*/site-packages")) if folder.is_dir()]
    if not packages:
        raise InvalidField(f"{path!r} has no lib/python3*/site-packages", field=FIELD, hint="make it anew")
    # The folder that holds the interpreter and its library; where the library is elsewhere, the interpreter's own.
    above = interpreter.parent.parent
    base = above if _libraries(above) else interpreter.parent
    editable = [place for folder in packages for place in _outside(folder)]
    # Python finds its library by following the links from `home`, so that the folders of these links are needed too.
    wanted = [prefix, *(link.parent for link in links), base, *([home] if home.is_dir() else []), *editable]
    # Each as it is named and as it resolves, without what is below another of them.
    named = list(dict.fromkeys(place for path in wanted for place in (path, Path(os.path.realpath(path)))))
    outermost = [path for path in named if not any(path != other and path.is_relative_to(other) for other in named)]
    libraries = [] if _of_system(base) else _libraries(base)
    seen = []
    for place in (prefix / "pyvenv.cfg", interpreter, *packages, *editable):
        with contextlib.suppress(OSError):  # it has just been removed
            status = place.stat()
            seen.append((str(place), status.st_mtime_ns, status.st_ino))
    return Venv(
        prefix=prefix,
        shown=tuple(place for place in outermost if not _of_system(place)),
        of_system=_of_system(base),
        sources=tuple(dict.fromkeys(place.resolve() for place in (*packages, *editable, *libraries))),
        stamp=hashlib.sha256(json.dumps(seen).encode()).hexdigest(),
    )


def stray_links(venv: Venv, shown: Sequence[Path]) -> list[Path]:
    """The links in the environment that lead to something on the host which is neither in `shown` nor in
    `venv.shown`."""
    roots = [Path(os.path.realpath(path)) for path in (*venv.shown, *shown)]
    leaving = _leaving(venv.prefix, venv.stamp)
    return [link for link, goal in leaving if not any(goal.is_relative_to(root) for root in roots)]


@functools.lru_cache(maxsize=32)  # `stamp` makes it pure; it may look at many thousand files
def _leaving(prefix: Path, stamp: str) -> tuple[tuple[Path, Path], ...]:
    """The links that lead out of the environment to something that exists, and where they lead."""
    links: list[Path] = []
    waiting = [str(prefix)]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    links.append(Path(entry.path))
                elif entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
    inside = prefix.resolve()
    goals = ((link, Path(os.path.realpath(link))) for link in links)
    return tuple((link, goal) for link, goal in goals if goal.exists() and not goal.is_relative_to(inside))


async def compile_modules(venv: Venv, *, seconds: float = COMPILE_SECONDS) -> None:
    """Compile modules that have no bytecode yet, into their `__pycache__` folders. These are read-only in a sandbox,
    where Python would otherwise compile every module it imports at every start.

    It is done once for each state of the environment, by whoever comes first; others do not wait. It never raises,
    because it only saves time. A cache folder of our own (PYTHONPYCACHEPREFIX) would be inherited by every Python that
    the agent starts, which would then ignore its own bytecode: one took 340 ms to start instead of 54.
    """
    sources = [folder for folder in venv.sources if _own(folder)]
    name = hashlib.sha256(str(venv.prefix).encode()).hexdigest()[:16]
    state = cache_home().absolute() / "venvs" / name
    try:
        state.parent.mkdir(parents=True, exist_ok=True)
        with state.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.seek(0)
            if file.read() == venv.stamp or not sources:
                return
            if await _compile(venv, sources, seconds):
                file.truncate(0)
                file.write(venv.stamp)
    except BlockingIOError:
        return  # another session compiles it
    except OSError as error:
        log.warning("the modules of %s cannot be compiled: %s", venv.prefix, error)


def _own(folder: Path) -> bool:
    """Whether the folder is this user's: files that we write into another user's would break that user's next
    upgrade."""
    try:
        return folder.stat().st_uid == os.geteuid() and os.access(folder, os.W_OK)
    except OSError:
        return False


async def _compile(venv: Venv, sources: Sequence[Path], seconds: float) -> bool:
    """Whether it came to its end. It exits with 1 for files that are no Python of that version, which do not matter."""
    log.info("compiling the modules of %s", venv.prefix)
    libraries = [re.escape(str(folder)) for folder in sources if (folder / "os.py").exists()]
    left_out = f"^({'|'.join(libraries) or '-'})/{UNCOMPILED}/"
    # In one process: with several it takes 5 s of processor time to find that there is nothing to do.
    program = await asyncio.create_subprocess_exec(
        *(str(venv.python), "-I", "-S", "-m", "compileall", "-q", "-q", "-x", left_out, *map(str, sources)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={},
        start_new_session=True,  # so that Ctrl-C reaches only this process, which ends it below
    )
    try:
        async with asyncio.timeout(seconds):
            await program.wait()
    except TimeoutError:
        log.warning("the modules of %s are not compiled after %g s; it goes on later", venv.prefix, seconds)
        return False
    finally:
        if program.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                program.kill()
            await program.wait()
    return program.returncode in (0, 1)


def _home(prefix: Path) -> Path:
    """The folder of the interpreter that the environment was made with, from its pyvenv.cfg."""
    try:
        settings = dict(_SETTING.findall((prefix / "pyvenv.cfg").read_text("utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidField(
            f"{str(prefix)!r} is no virtual environment: it has no pyvenv.cfg that can be read",
            field=FIELD,
            hint="name the folder that `python -m venv` or `uv venv` made; one of conda has no base interpreter: show "
            "it with task.runtime.mounts, and name its programs by their whole paths",
        ) from error
    home = settings.get("home", "")
    if not os.path.isabs(home):
        raise InvalidField(f"{str(prefix)!r} does not say where its interpreter is (home in pyvenv.cfg)", field=FIELD)
    return Path(os.path.normpath(home))


def _libraries(base: Path) -> list[Path]:
    return [module.parent for module in sorted(base.glob("lib/python3*/os.py"))]


def _of_system(path: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to("/usr")


def _outside(packages: Path) -> list[Path]:
    """Folders and files outside that the packages import: lines of .pth files, and editable installs."""
    found = []
    for file in sorted(packages.glob("*.pth")):
        for line in map(str.strip, _text(file).splitlines()):
            if line and not line.startswith(("#", "import ", "import\t")) and (packages / line).exists():
                found.append(Path(os.path.normpath(packages / line)))
    for finder in sorted(packages.glob("__editable__*_finder.py")):
        for _, path in _QUOTED_PATH.findall("\n".join(_MAPPED.findall(_text(finder)))):
            found += [place for place in (Path(path), Path(f"{path}.py")) if place.exists()]
    projects = []
    for record in sorted(packages.glob("*.dist-info/direct_url.json")):  # every installer writes one
        try:
            told = json.loads(_text(record))
            editable = bool(told["dir_info"]["editable"])
            project = Path(unquote(urlsplit(told["url"]).path))
        except (ValueError, KeyError, TypeError):
            continue  # no editable install
        if editable and project.is_dir() and not any(place.is_relative_to(project) for place in found):
            projects.append(project)
    return [*found, *projects]


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="surrogateescape")
    except OSError:
        return ""
