"""The service's own IPython, for sandboxes whose Python has none.

It is the interpreter of portable.py with IPython and its requirements beside the standard library, in one folder that
sandboxes see at its own path. It knows no sandbox. Invariant: that folder holds IPython's own distributions and no
others of the service's environment.
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
from outrider.pythons.portable import portable_command, portable_digest, portable_python

WITHOUT_IPYTHON = (
    "install IPython for the sandbox's own python3, in its image; or install it beside Outrider "
    "(pip install 'outrider[ipython]') and show it in the sandbox (mounts of pythons/ipython.py, as the built-in "
    "agent's tool 'ipython' does)"
)


def ipython_mounts() -> tuple[Path, ...]:
    """The host folders to show read-only at the same path; none when IPython is not installed beside Outrider. They are
    made at the first call, which blocks for a second or two. Raises RuntimeUnavailable when that fails."""
    place = _place()
    return () if place is None else (build_once(place, _build),)


def ipython_command() -> list[str]:
    """The command that starts that interpreter where `ipython_mounts` are shown; empty without IPython. -E and -s: no
    variable of the sandbox and no folder of its user decides what is imported."""
    place = _place()
    return [] if place is None else [*portable_command(str(place)), "-E", "-s"]


def _place() -> Path | None:
    digest = _digest()
    return None if digest is None else cache_home().absolute() / "ipython" / digest


@functools.cache  # what is installed does not change under a running service
def _digest() -> str | None:
    found = _closure("ipython")
    versions = sorted(f"{name} {one.version}" for name, one in found.items())
    return hashlib.sha256("\n".join([portable_digest(), *versions]).encode()).hexdigest()[:16] if found else None


def _closure(name: str) -> dict[str, metadata.Distribution]:
    """A distribution and those of its requirements, however indirect, that are installed. Extras are left out; what a
    marker rules out is mostly not installed."""
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
        """A hard link where the file system has them: the standard library need not be on the disk twice."""
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    shutil.copytree(portable_python(), folder, copy_function=link, dirs_exist_ok=True)
    place = folder / sys.platlibdir / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for one in _closure("ipython").values():
        for path in one.files or ():
            if path.is_absolute() or ".." in path.parts:
                continue  # a script outside of site-packages
            source = Path(str(one.locate_file(path)))
            if source.is_file():
                (place / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, place / path)
