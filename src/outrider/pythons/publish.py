"""Folders of the cache that are made once and then only read.

It knows nothing of what is in them. Invariant: a folder is at its place only when it is whole, however many processes
make it at once and wherever any of them is killed.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def published(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, filled by `build` (given an empty folder beside it) if nobody has done so yet. Blocks while another
    process is at it. What `build` raises is raised."""
    if folder.is_dir():
        return folder
    home = folder.parent
    home.mkdir(parents=True, exist_ok=True)
    with (home / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        for left in home.glob(".part-*"):  # by builders that were killed: a live one would hold the lock
            shutil.rmtree(left)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=home))
        try:
            part.chmod(0o755)
            build(part)
            part.rename(folder)
        except BaseException:  # also a cancel: nothing half made stays
            shutil.rmtree(part, ignore_errors=True)
            raise
    return folder
