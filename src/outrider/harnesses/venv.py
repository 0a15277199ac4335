"""A task's own virtual environment: what of the host a sandbox must be shown for it to work, and its bytecode.

It reads files and links and runs nothing, but for `compiled`. Invariant: with the folders of `shown` at their own
paths, the environment's python starts, and finds its standard library, its packages, and what is installed editable.
Everything here blocks, but for `compiled`.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from outrider.config import cache_home
from outrider.errors import InvalidField

log = logging.getLogger("outrider.harness")

FIELD = "task.harness.venv"
MAX_HOPS = 40
"""Of links that lead from one to the next; as many as Linux follows."""
COMPILE_SECONDS = 300.0
UNCOMPILED = "(site-packages|test|idlelib|lib2to3|turtledemo)"
"""What of an interpreter's own library an environment does not import, or no agent does."""

_SETTING = re.compile(r"^\s*(\w[\w-]*)\s*=\s*(.*?)\s*$", re.MULTILINE)
_MAPPED = re.compile(r"^(?:MAPPING|NAMESPACES)\b.*$", re.MULTILINE)
"""Where setuptools' finder of an editable package says which folders it stands for."""
_QUOTED_PATH = re.compile(r"""(['"])(/.*?)\1""")


class Venv(msgspec.Struct, frozen=True, kw_only=True):
    """`prefix` is the environment as the task names it. `shown` are host folders and files, none below another and none
    of the host's /usr, whose interpreter it has if it is `of_system`. `sources` are the folders whose modules it
    imports; `stamp` changes when something is installed in it."""

    prefix: Path
    shown: tuple[Path, ...]
    of_system: bool
    sources: tuple[Path, ...]
    stamp: str

    @property
    def python(self) -> Path:
        return self.prefix / "bin" / "python"


def read_venv(path: str) -> Venv:
    """Raises InvalidField for a folder that is no virtual environment, or one that no longer works."""
    prefix = Path(os.path.normpath(path))
    if ":" in path:
        raise InvalidField("has a colon, with which it cannot be in PATH", field=FIELD)
    home = _home(prefix)
    *links, interpreter = _hops(prefix / "bin" / "python")
    if not os.access(interpreter, os.X_OK) or not interpreter.is_file():
        raise InvalidField(
            f"the interpreter of {path!r} is gone: bin/python leads to {interpreter}",
            field=FIELD,
            hint="make the environment anew",
        )
    packages = [folder for folder in sorted(prefix.glob("lib/python3*/site-packages")) if folder.is_dir()]
    if not packages:
        raise InvalidField(f"{path!r} has no lib/python3*/site-packages", field=FIELD, hint="make it anew")
    base = _base(interpreter)
    editable = [place for folder in packages for place in _outside(folder)]
    # Python looks for its library by following the links from `home`: the folders they are in are shown, too.
    wanted = [prefix, *(link.parent for link in links), base, *([home] if home.is_dir() else []), *editable]
    libraries = [] if _of_system(base) else _libraries(base)
    return Venv(
        prefix=prefix,
        shown=tuple(place for place in _outermost(wanted) if not _of_system(place)),
        of_system=_of_system(base),
        sources=tuple(dict.fromkeys(place.resolve() for place in (*packages, *editable, *libraries))),
        stamp=_stamp([prefix / "pyvenv.cfg", interpreter, *packages, *editable]),
    )


def stray_links(venv: Venv, shown: Sequence[Path]) -> list[Path]:
    """The links in the environment to what is there on the host, but not in `shown`, nor in what it shows itself."""
    roots = [Path(os.path.realpath(path)) for path in (*venv.shown, *shown)]
    leaving = _leaving(venv.prefix, venv.stamp)
    return [link for link, goal in leaving if not any(goal.is_relative_to(root) for root in roots)]


@functools.lru_cache(maxsize=32)  # as good as pure, given `stamp`; there may be many thousand files to look at
def _leaving(prefix: Path, stamp: str) -> tuple[tuple[Path, Path], ...]:
    """The links that lead out of the environment to something, and where to."""
    inside = prefix.resolve()
    goals = ((link, Path(os.path.realpath(link))) for link in _links_below(prefix))
    return tuple((link, goal) for link, goal in goals if goal.exists() and not goal.is_relative_to(inside))


async def compiled(venv: Venv, *, seconds: float = COMPILE_SECONDS) -> None:
    """Compile what has no bytecode yet, into the `__pycache__` folders where Python looks for it: a sandbox sees them
    read-only, and without them compiles every module that it imports at every start. It is done once for each state of
    the environment, by whoever comes first; others do not wait for it. Never raises: it saves time, nothing else.

    Not into a folder of our own (PYTHONPYCACHEPREFIX): every Python that the agent starts would be told of it, too,
    and none would look at its own bytecode any more; one that took 54 ms to start took 340.
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
        return  # another session is at it
    except OSError as error:
        log.warning("the modules of %s cannot be compiled: %s", venv.prefix, error)


def _own(folder: Path) -> bool:
    """In another user's folder, what we wrote would be in the way of that user's next upgrade."""
    try:
        return folder.stat().st_uid == os.geteuid() and os.access(folder, os.W_OK)
    except OSError:
        return False


async def _compile(venv: Venv, sources: Sequence[Path], seconds: float) -> bool:
    """Whether it came to its end; files that are no Python of that version, for which it ends with 1, do not matter."""
    log.info("compiling the modules of %s", venv.prefix)
    libraries = [re.escape(str(folder)) for folder in sources if (folder / "os.py").exists()]
    left_out = f"^({'|'.join(libraries) or '-'})/{UNCOMPILED}/"
    # By one process: with several it takes five seconds of a processor to see that there is nothing to do.
    program = await asyncio.create_subprocess_exec(
        *(str(venv.python), "-I", "-S", "-m", "compileall", "-q", "-q", "-x", left_out, *map(str, sources)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={},
        start_new_session=True,  # Ctrl-C is told to us, and then it is to end as below
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
    """The folder of the interpreter that it was made with, as it says itself."""
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


def _hops(path: Path) -> list[Path]:
    """Where a path leads, link by link, as each is named: itself first, last what is no link."""
    found = [path]
    while found[-1].is_symlink() and len(found) <= MAX_HOPS:
        found.append(Path(os.path.normpath(found[-1].parent / found[-1].readlink())))
    return found


def _base(interpreter: Path) -> Path:
    """The folder with the interpreter and its library, or the folder of the interpreter alone if it has none."""
    above = interpreter.parent.parent
    return above if _libraries(above) else interpreter.parent


def _libraries(base: Path) -> list[Path]:
    return [module.parent for module in sorted(base.glob("lib/python3*/os.py"))]


def _of_system(path: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to("/usr")


def _outside(packages: Path) -> list[Path]:
    """What the packages import from elsewhere: lines of .pth files, and packages that are installed editable."""
    found = []
    for file in sorted(packages.glob("*.pth")):
        for line in map(str.strip, _text(file).splitlines()):
            if line and not line.startswith(("#", "import ", "import\t")) and (packages / line).exists():
                found.append(Path(os.path.normpath(packages / line)))
    for finder in sorted(packages.glob("__editable__*_finder.py")):
        for _, path in _QUOTED_PATH.findall("\n".join(_MAPPED.findall(_text(finder)))):
            found += [place for place in (Path(path), Path(f"{path}.py")) if place.exists()]
    projects = filter(None, map(_project, sorted(packages.glob("*.dist-info/direct_url.json"))))
    return [*found, *(project for project in projects if not any(place.is_relative_to(project) for place in found))]


def _project(record: Path) -> Path | None:
    """The folder of a package that is installed editable, as every installer writes it down."""
    try:
        told = json.loads(_text(record))
        editable = bool(told["dir_info"]["editable"])
        project = Path(unquote(urlsplit(told["url"]).path))
    except (ValueError, KeyError, TypeError):
        return None
    return project if editable and project.is_dir() else None


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="surrogateescape")
    except OSError:
        return ""


def _outermost(paths: Sequence[Path]) -> tuple[Path, ...]:
    """Each path as it is named and where it really is, without those below another of them."""
    named = dict.fromkeys(place for path in paths for place in (path, Path(os.path.realpath(path))))
    return tuple(path for path in named if not any(path != above and path.is_relative_to(above) for above in named))


def _links_below(folder: Path) -> Iterator[Path]:
    waiting = [str(folder)]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    yield Path(entry.path)
                elif entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)


def _stamp(paths: Sequence[Path]) -> str:
    """Of what changes when something is installed or taken away."""
    seen = [(str(path), *_times(path)) for path in paths]
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()


def _times(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_ino)
