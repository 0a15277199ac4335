"""The service's own IPython, for sandboxes whose Python does not have IPython.

One folder holds the interpreter of portable.py, IPython and the requirements of IPython. Sandboxes see the folder at
the same path as the host. Invariant: of the distributions in the service's environment, the folder holds only IPython
and its requirements.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata as metadata
import os
import re
import shutil
import sys
from pathlib import Path

from outrider.concurrency.build_once import build_once
from outrider.environment import cache_home
from outrider.sandbox.pythons.portable import portable_command, portable_digest, portable_python

WITHOUT_IPYTHON = (
    "install IPython for the sandbox's own python3, in its image; or install it beside Outrider "
    "(pip install ipython) and show it in the sandbox (mounts of pythons/ipython.py, as the built-in "
    "agent's tool 'ipython' does)"
)


def ipython_mounts() -> tuple[Path, ...]:
    """Return the host folders to mount read-only at the same paths, or none if IPython is not installed beside
    Outrider. The first call builds the folder and blocks for a second or two. Raises RuntimeUnavailable if the build
    fails."""
    place = _place()
    return () if place is None else (build_once(place, _build),)


def ipython_command() -> list[str]:
    """Return the command that starts the interpreter in a sandbox with `ipython_mounts`, or an empty list if IPython is
    not installed. With the options -E and -s, neither the sandbox's environment variables nor the user's site-packages
    influence imports."""
    place = _place()
    return [] if place is None else [*portable_command(str(place)), "-E", "-s"]


def _place() -> Path | None:
    digest = _digest()
    return None if digest is None else cache_home().absolute() / "ipython" / digest


@functools.cache  # installed packages do not change under a running service
def _digest() -> str | None:
    found = _closure("ipython")
    versions = sorted(f"{name} {one.version}" for name, one in found.items())
    return hashlib.sha256("\n".join([portable_digest(), *versions]).encode()).hexdigest()[:16] if found else None


def _closure(name: str) -> dict[str, metadata.Distribution]:
    """Return a distribution with its installed requirements, direct and indirect. Requirements of extras are left out.
    Other environment markers are ignored: if a marker excludes a requirement, it is usually not installed."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [name]
    while waiting:
        key = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if key in found:
            continue
        try:
            found[key] = metadata.distribution(key)
        except metadata.PackageNotFoundError:
            continue
        for requirement in found[key].requires or ():
            wanted, _, marker = requirement.partition(";")
            if "extra" not in marker and (named := re.match(r"[\w.-]+", wanted.strip())):
                waiting.append(named.group())
    return found


def _build(folder: Path) -> None:
    def link(source: str, target: str) -> None:
        """Make a hard link if the file system supports it, so that the standard library is not stored twice."""
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    shutil.copytree(portable_python(), folder, copy_function=link, dirs_exist_ok=True)
    place = folder / sys.platlibdir / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for one in _closure("ipython").values():
        for path in one.files or ():
            if path.is_absolute() or ".." in path.parts:
                continue  # the file is a script outside of site-packages
            source = Path(str(one.locate_file(path)))
            if source.is_file():
                (place / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, place / path)
