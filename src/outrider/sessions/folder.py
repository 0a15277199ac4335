"""A node's private folder below the system's temporary one, and the end of those whose node was killed.

It knows no session. Its path is short, because that of the node's Unix socket in it must fit into 107 bytes.
Invariant: a folder is removed only by a process that holds its lock, and a node holds its own for as long as it lives.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

PREFIX = "outrider-"
LOCK = "node.lock"


@dataclass(frozen=True)
class NodeFolder:
    """A folder and the descriptor of its lock, which goes with this process however that ends. Its methods block."""

    path: Path
    lock: int

    @classmethod
    def make(cls) -> Self:
        """A new one, after removing what dead nodes of this user left behind."""
        for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            if (left := cls._take(path)) is not None:
                left.remove()
        while True:
            path = Path(tempfile.mkdtemp(prefix=PREFIX))
            if (made := cls._take(path, os.O_CREAT)) is not None:
                return made

    def remove(self) -> None:
        """With all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)

    @classmethod
    def _take(cls, path: Path, flags: int = 0) -> Self | None:
        """The folder, if it is a node's, of this user, and nobody holds its lock."""
        try:
            lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
        except OSError:
            return None
        try:
            if os.fstat(lock).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return cls(path, lock)
        except BlockingIOError:
            pass
        os.close(lock)
        return None
