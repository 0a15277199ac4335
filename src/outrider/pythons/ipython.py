"""The service's own IPython, for sandboxes whose Python has none.

It is the interpreter of portable.py with IPython and what that needs beside its standard library, in one folder that
is shown at its own path. It knows no sandbox. Invariant: nothing but IPython's own distributions gets into that
folder, whatever else the service's environment holds.
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

from outrider.config import cache_home
from outrider.pythons.portable import portable_command, portable_digest, portable_python
from outrider.pythons.publish import published

WITHOUT_IPYTHON = (
    "install IPython for the sandbox's own python3, in its image; or install it beside Outrider "
    "(pip install 'outrider[ipython]') and show it in the sandbox (mounts of pythons/ipython.py, as the built-in "
    "agent's tool 'ipython' does)"
)


def ipython_mounts() -> tuple[Path, ...]:
    """The host folders to show read-only at the same path; none when IPython is not installed beside Outrider. Made
    at the first call, which blocks for a second or two. Raises RuntimeUnavailable when that cannot be done."""
    place = _place()
    return () if place is None else (published(place, _build),)


def ipython_command() -> list[str]:
    """How to start that interpreter where `ipython_mounts` are shown; empty without IPython. Its own folders only, and
    no variables, decide what it imports."""
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
    """A distribution and all that it requires and is installed. What a requirement's marker rules out is not."""
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
    shutil.copytree(portable_python(), folder, copy_function=_linked, dirs_exist_ok=True)
    place = folder / sys.platlibdir / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for one in _closure("ipython").values():
        for path in one.files or ():
            if path.is_absolute() or ".." in path.parts:
                continue  # a script outside of site-packages
            source = Path(str(one.locate_file(path)))
            if source.is_file():
                (place / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, place / path)


def _linked(source: str, target: str) -> None:
    """The same file at another place, where the file system can do that."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
