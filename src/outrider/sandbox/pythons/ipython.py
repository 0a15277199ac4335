"""An IPython for sandboxes whose own Python does not have IPython.

One folder contains the interpreter of portable.py, IPython and the packages that IPython requires, except jedi. A
sandbox sees the folder at the same path as the host. Invariant: the folder contains no other packages of the service's
environment.
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

LEFT_OUT = ("jedi",)
"""Required packages that are left out of the folder. IPython uses jedi only to complete names while a person types, and
works without it. Every pod copies the folder, and jedi would be two thirds of the files in it."""
WITHOUT_IPYTHON = (
    "install IPython for the sandbox's own python3, in its image; or install it beside Outrider "
    "(pip install ipython) and show it in the sandbox (mounts of pythons/ipython.py, as the built-in "
    "agent's tool 'ipython' does)"
)


def ipython_mounts() -> tuple[Path, ...]:
    """Return the host folders that a sandbox needs for IPython, to be mounted read-only at the same paths. The result
    is empty if IPython is not installed in Outrider's environment.

    The first call builds the folder, which blocks for a second or two. Raises RuntimeUnavailable if the build fails.
    """
    place = _place()
    return () if place is None else (build_once(place, _build),)


def ipython_command() -> list[str]:
    """Return the command that starts Python with IPython in a sandbox with `ipython_mounts`. The list is empty if
    IPython is not installed. The options -E and -s protect imports from the sandbox's environment variables and from
    the user's site-packages."""
    place = _place()
    return [] if place is None else [*portable_command(str(place)), "-E", "-s"]


def _place() -> Path | None:
    digest = _digest()
    return None if digest is None else cache_home().absolute() / "ipython" / digest


@functools.cache  # cached, because installed packages do not change while the service runs
def _digest() -> str | None:
    found = _closure("ipython")
    versions = sorted(f"{name} {one.version}" for name, one in found.items())
    return hashlib.sha256("\n".join([portable_digest(), *versions]).encode()).hexdigest()[:16] if found else None


def _closure(name: str) -> dict[str, metadata.Distribution]:
    """Return an installed package together with those of its direct and indirect requirements that are installed.
    Requirements of extras and the packages of LEFT_OUT are skipped. Other markers, such as `python_version < "3.11"`,
    are not evaluated: a package that they exclude is usually not installed."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [name]
    while waiting:
        key = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if key in found or key in LEFT_OUT:
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
        """Copy a file as a hard link where possible, so that the standard library uses disk space only once."""
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    shutil.copytree(portable_python(), folder, copy_function=link, dirs_exist_ok=True)
    place = folder / sys.platlibdir / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for one in _closure("ipython").values():
        for path in one.files or ():
            if path.is_absolute() or ".." in path.parts:
                continue  # a script, which is installed outside of site-packages
            source = Path(str(one.locate_file(path)))
            if source.is_file():
                (place / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, place / path)
