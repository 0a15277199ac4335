"""A task's own virtual environment: finds the folders of the host that a sandbox needs, and compiles the modules.

Invariant: if the paths in `shown` are mounted at the same paths in a sandbox, the environment's python starts, and
finds the standard library, packages and editable installs. All functions here block, except `compile_modules`.
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
"""Maximum length of a chain of symbolic links. Linux has the same limit."""
COMPILE_SECONDS = 300.0
UNCOMPILED = "(site-packages|test|idlelib|lib2to3|turtledemo)"
"""Matches parts of an interpreter's own library. They are not compiled, because no agent imports them."""

_SETTING = re.compile(r"^\s*(\w[\w-]*)\s*=\s*(.*?)\s*$", re.MULTILINE)
_MAPPED = re.compile(r"^(?:MAPPING|NAMESPACES)\b.*$", re.MULTILINE)
"""Matches the lines that name the folders of an editable package, in the finder module that setuptools generates."""
_QUOTED_PATH = re.compile(r"""(['"])(/.*?)\1""")


class Venv(msgspec.Struct, frozen=True, kw_only=True):
    """A virtual environment.

    prefix: its folder, as the task names it.
    shown: the folders and files of the host to mount in a sandbox. No path lies inside another of these paths, or in
        the host's /usr.
    of_system: true if the interpreter is in /usr.
    sources: the folders with modules to import.
    stamp: changes whenever a package is installed."""

    prefix: Path
    shown: tuple[Path, ...]
    of_system: bool
    sources: tuple[Path, ...]
    stamp: str

    @property
    def python(self) -> Path:
        return self.prefix / "bin" / "python"


def read_venv(path: str) -> Venv:
    """Read the virtual environment in a folder. Raises InvalidField if it is missing or broken, or if this user may not
    read something that it needs."""
    try:
        return _read(path)
    except OSError as error:
        raise InvalidField(
            f"{path!r} needs {error.filename}, which this service cannot read: {error.strerror}",
            field=FIELD,
            hint="let the service's user read it, or make the environment anew without it",
        ) from error


def _read(path: str) -> Venv:
    """Read the virtual environment in a folder. Raises InvalidField and OSError."""
    prefix = Path(os.path.normpath(path))
    if ":" in path:
        raise InvalidField("has a colon, which separates folders in PATH", field=FIELD)
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
    # `base` is the folder above the interpreter's folder if, as usual, it contains the library. Otherwise `base` is
    # only the interpreter's folder.
    above = interpreter.parent.parent
    base = above if _libraries(above) else interpreter.parent
    editable = [place for folder in packages for place in _outside(folder)]
    # To find its library, Python starts at `home` and follows symbolic links. So a sandbox also needs `home` and the
    # folders of the links.
    wanted = [prefix, *(link.parent for link in links), base, *([home] if home.is_dir() else []), *editable]
    # `named` has each path as given, and with its symbolic links resolved. `outermost` leaves out paths that are below
    # another one.
    named = list(dict.fromkeys(place for path in wanted for place in (path, Path(os.path.realpath(path)))))
    outermost = [path for path in named if not any(path != other and path.is_relative_to(other) for other in named)]
    libraries = [] if _of_system(base) else _libraries(base)
    seen = []
    for place in (prefix / "pyvenv.cfg", interpreter, *packages, *editable):
        with contextlib.suppress(OSError):  # the path may have just been removed
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
    """Return the symbolic links in the environment that would be broken in a sandbox, because their targets are not in
    `venv.shown` or `shown`."""
    roots = [Path(os.path.realpath(path)) for path in (*venv.shown, *shown)]
    leaving = _leaving(venv.prefix, venv.stamp)
    return [link for link, goal in leaving if not any(goal.is_relative_to(root) for root in roots)]


# The scan is cached, because it visits many thousands of files. A new `stamp` causes a new scan.
@functools.lru_cache(maxsize=32)
def _leaving(prefix: Path, stamp: str) -> tuple[tuple[Path, Path], ...]:
    """Return the symbolic links that lead out of the environment, each with its target. Broken links are left out."""
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
    """Compile modules that have no bytecode, into their `__pycache__` folders. A sandbox cannot write to these folders,
    so its Python would compile each imported module again at every start.

    Each state of the environment is compiled once. If another session is already compiling the same state, the function
    returns at once. The function never raises an error, because compiling only saves time. PYTHONPYCACHEPREFIX is no
    alternative: every Python that the agent starts would inherit this variable and ignore its own bytecode, and its
    start would take 340 ms instead of 54 ms.
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
        return  # another session compiles them
    except OSError as error:
        log.warning("the modules of %s cannot be compiled: %s", venv.prefix, error)


def _own(folder: Path) -> bool:
    """Return True if this user owns the folder. In a folder of another user, new files would break that user's next
    upgrade."""
    try:
        return folder.stat().st_uid == os.geteuid() and os.access(folder, os.W_OK)
    except OSError:
        return False


async def _compile(venv: Venv, sources: Sequence[Path], seconds: float) -> bool:
    """Run compileall for at most `seconds`. Returns True if it ended with exit code 0 or 1. Exit code 1 means that some
    files could not be compiled, for example because they are for another version of Python."""
    log.info("compiling the modules of %s", venv.prefix)
    libraries = [re.escape(str(folder)) for folder in sources if (folder / "os.py").exists()]
    left_out = f"^({'|'.join(libraries) or '-'})/{UNCOMPILED}/"
    # compileall runs as one process. With several processes, it would take 5 s of processor time even if everything is
    # already compiled.
    program = await asyncio.create_subprocess_exec(
        *(str(venv.python), "-I", "-S", "-m", "compileall", "-q", "-q", "-x", left_out, *map(str, sources)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={},
        start_new_session=True,  # so that Ctrl-C reaches only this process, which kills the child below
    )
    try:
        async with asyncio.timeout(seconds):
            await program.wait()
    except TimeoutError:
        log.warning(
            "the modules of %s are not all compiled after %g s; the next session continues", venv.prefix, seconds
        )
        return False
    finally:
        if program.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                program.kill()
            await program.wait()
    return program.returncode in (0, 1)


def _home(prefix: Path) -> Path:
    """Return the folder of the base interpreter, as pyvenv.cfg names it. Raises InvalidField if this file is missing or
    broken."""
    try:
        settings = dict(_SETTING.findall((prefix / "pyvenv.cfg").read_text("utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidField(
            f"{str(prefix)!r} is no virtual environment: it has no pyvenv.cfg that can be read",
            field=FIELD,
            hint="name a folder made by `python -m venv` or `uv venv`; for a conda environment, use "
            "task.runtime.mounts and the full paths of its programs",
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
    """Return the folders and files that Python imports from outside of the environment. They are named in the .pth
    files in `packages` and in the records of editable installs."""
    found = []
    for file in sorted(packages.glob("*.pth")):
        for line in map(str.strip, _text(file).splitlines()):
            if line and not line.startswith(("#", "import ", "import\t")) and (packages / line).exists():
                found.append(Path(os.path.normpath(packages / line)))
    for finder in sorted(packages.glob("__editable__*_finder.py")):
        for _, path in _QUOTED_PATH.findall("\n".join(_MAPPED.findall(_text(finder)))):
            found += [place for place in (Path(path), Path(f"{path}.py")) if place.exists()]
    projects = []
    # For an editable install, every installer writes this file.
    for record in sorted(packages.glob("*.dist-info/direct_url.json")):
        try:
            origin = json.loads(_text(record))
            editable = bool(origin["dir_info"]["editable"])
            project = Path(unquote(urlsplit(origin["url"]).path))
        except (ValueError, KeyError, TypeError):
            continue  # not an editable install
        if editable and project.is_dir() and not any(place.is_relative_to(project) for place in found):
            projects.append(project)
    return [*found, *projects]


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="surrogateescape")
    except OSError:
        return ""
