"""A portable Python interpreter, which runs in any root file system of this machine's architecture, even without Python
or shared libraries.

It is a folder with a copy of Outrider's interpreter, the standard library, the dynamic loader, and all shared libraries
that may be needed. Sandboxes see the folder at PORTABLE_AT. The copied loader starts the interpreter, so no file
outside of the folder is used. The loader gets the library path as an argument. It is not put into an environment
variable, because child processes would inherit the variable.

Invariant: the folder `python/DIGEST` in the cache is complete, has been tested, and never changes.
"""

from __future__ import annotations

import compileall
import functools
import hashlib
import shutil
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from outrider.concurrency.build_once import build_once
from outrider.environment import cache_home
from outrider.errors import RuntimeUnavailable

PORTABLE_AT = "/run/outrider-python"
FORMAT = "1"
"""The version of the folder's layout. Change it when `_build` changes, so that existing folders are not used any
more."""
LEFT_OUT = frozenset(
    [
        "test",
        "tests",
        "idlelib",
        "tkinter",
        "turtledemo",
        "ensurepip",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "dist-packages",
        "lib-dynload",
    ]
)
"""Folders of the standard library that the tool server does not need. `_build` copies `lib-dynload` separately."""
MODULES_LEFT_OUT = ("_tkinter", "_test", "_ctypes_test", "xx")
BESIDE_LIBC = ("libgcc_s.so.1",)
"""Libraries to copy even if no ELF file lists them as a dependency. glibc loads libgcc_s itself when a thread is
cancelled."""
PT_INTERP = 3
TRY_SECONDS = 60


def portable_python() -> Path:
    """Return the interpreter's folder, to be mounted at PORTABLE_AT. The first call builds the folder, which blocks for
    a few seconds. Raises RuntimeUnavailable if the build fails."""
    return _built(cache_home().absolute() / "python")


def portable_command(at: str = PORTABLE_AT) -> list[str]:
    """Return the command that starts the interpreter in the folder `at`. The caller appends Python's options and
    arguments."""
    loader = _loader()
    program = f"{at}/bin/python3"
    if loader is None:
        return [program]
    return [f"{at}/lib/{loader.name}", "--library-path", f"{at}/lib", program]


@functools.lru_cache(maxsize=8)  # cached, because every sandbox asks for it
def _built(home: Path) -> Path:
    return build_once(home / portable_digest(), _build)


def _executable() -> Path:
    """Return the path of the interpreter itself. In a virtual environment, `python` is only a link to the
    interpreter."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = Path(getattr(sys, "_base_executable", None) or Path(sys.base_prefix, "bin", name))
    return base.resolve()


def _stdlib() -> Path:
    return Path(sysconfig.get_path("stdlib")).resolve()


def _extensions() -> Path:
    """Return the folder with the compiled modules (`*.so`) of the standard library."""
    beside = _stdlib() / "lib-dynload"
    return beside if beside.is_dir() else Path(sysconfig.get_config_var("DESTSHARED") or beside)


def portable_digest() -> str:
    """Return the digest that names the folder. It covers the interpreter's version, the paths and times of its program
    and its library folders, and the program's size. Raises RuntimeUnavailable."""
    parts = [FORMAT, sys.version, sys.platlibdir]
    for path in (_executable(), _stdlib(), _extensions()):
        try:
            status = path.stat()
        except OSError as error:
            raise RuntimeUnavailable(f"cannot copy the interpreter for sandboxes without one: {error}") from error
        parts.append(f"{path}:{status.st_size if path.is_file() else ''}:{status.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _build(folder: Path) -> None:
    """Copy the interpreter into an empty folder, and test the copy. Raises RuntimeUnavailable."""
    if sys.platform != "linux":
        raise RuntimeUnavailable("an interpreter for sandboxes can only be made on Linux")
    executable, extensions = _executable(), _extensions()
    place = folder / sys.platlibdir / f"python{sys.version_info.major}.{sys.version_info.minor}"

    def left_out(folder: str, names: list[str]) -> list[str]:
        return [n for n in names if n in LEFT_OUT or n.startswith("config-") or ".opt-" in n or n.endswith(".a")]

    shutil.copytree(_stdlib(), place, ignore=left_out)
    compileall.compile_dir(place, quiet=2)  # fast if the compiled files were copied, too
    modules = [path for path in extensions.glob("*.so") if not path.name.startswith(MODULES_LEFT_OUT)]
    (folder / "bin").mkdir()
    (folder / "lib").mkdir(exist_ok=True)
    shutil.copy2(executable, folder / "bin" / "python3")
    (place / "lib-dynload").mkdir()
    for path in modules:
        shutil.copy2(path, place / "lib-dynload" / path.name)
    if (loader := _loader()) is not None:
        shutil.copy2(loader, folder / "lib" / loader.name)
        for name, path in _libraries(loader, [executable, *modules]).items():
            shutil.copy2(path, folder / "lib" / name)
    # Test the copy, because some interpreters do not find their standard library after they are moved.
    command = [*portable_command(str(folder)), "-I", "-c", "import ctypes, json, socket, sys; print(sys.prefix)"]
    done = subprocess.run(command, capture_output=True, text=True, env={}, timeout=TRY_SECONDS, check=False)
    if done.returncode != 0 or done.stdout.strip() != str(folder):
        raise RuntimeUnavailable(
            f"a copy of {_executable()} does not run",
            hint="run Outrider with a Python that was not moved after its installation, or use images with a Python",
            log_tail=(done.stdout + done.stderr)[-2000:],
        )


def _loader() -> Path | None:
    """Return the dynamic loader that the interpreter uses, or None for a statically linked interpreter."""
    named = _interpreter_of(_executable())
    return Path(named) if named else None


@functools.lru_cache(maxsize=8)
def _interpreter_of(program: Path) -> str | None:
    """Return the dynamic loader in the PT_INTERP entry of a 64-bit ELF program, or None without such an entry. Raises
    RuntimeUnavailable for other files."""
    with program.open("rb") as file:
        header = file.read(64)
        if header[:5] != b"\x7fELF\x02":
            raise RuntimeUnavailable(f"{program} is not a 64-bit ELF program")
        (table,) = struct.unpack_from("=Q", header, 32)
        size, count = struct.unpack_from("=HH", header, 54)
        for number in range(count):
            file.seek(table + number * size)
            entry = file.read(size)
            (kind,) = struct.unpack_from("=I", entry, 0)
            if kind == PT_INTERP:
                offset, _, _, length = struct.unpack_from("=QQQQ", entry, 8)
                file.seek(offset)
                return file.read(length).rstrip(b"\0").decode()
    return None


def _libraries(loader: Path, programs: Iterable[Path]) -> dict[str, Path]:
    """Return the paths of the shared libraries that the programs need, by library name. Libraries that this host does
    not have are left out: a module that needs one cannot be imported on the host either."""
    found: dict[str, Path] = {}
    for program in programs:
        # `loader --list` prints one line `NAME => PATH (ADDRESS)` for each library. The kernel's vDSO has no path.
        done = subprocess.run([str(loader), "--list", str(program)], capture_output=True, text=True, check=False)
        for line in done.stdout.splitlines():
            name, arrow, rest = line.strip().partition(" => ")
            path = Path(rest.rpartition(" (")[0])
            if arrow and path.is_absolute():
                found[Path(name).name] = path
    found.pop(loader.name, None)
    for libc in [path for name, path in found.items() if name.startswith("libc.")]:
        found.update({name: libc.parent / name for name in BESIDE_LIBC if (libc.parent / name).exists()})
    return found
