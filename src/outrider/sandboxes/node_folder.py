"""A node's private folder below the system's temporary one, and the end of those whose node was killed.

It knows no session. Its path is short, because that of the node's Unix socket in it must fit into 107 bytes. Whatever
runs for a sandbox of the node carries the folder's name (see runtimes/kernel/process_marks.py): so a keeper, a small
process beside the node, kills it when the node dies without a word, and the next node that starts does it again and
removes the folder. Invariant: a folder is removed, and what it marks killed, only by a process that holds its lock or
by its keeper, and a node holds its own for as long as it lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from outrider.runtimes.guest.filesystem.tree_writer import empty_folder
from outrider.runtimes.guest.filesystem.trees import FOLDER
from outrider.runtimes.kernel import process_marks
from outrider.runtimes.node_host import PREFIX

log = logging.getLogger("outrider.node")

LOCK = "node.lock"


@dataclass(frozen=True)
class NodeFolder:
    """A folder, the descriptor of its lock, which goes with this process however that ends, and its keeper, if this
    is a living node's. Its methods block."""

    path: Path
    lock: int
    keeper: subprocess.Popen[bytes] | None = None

    @classmethod
    def make(cls) -> Self:
        """A new one, after the end of what dead nodes of this user left behind."""
        cls.sweep()
        while True:
            path = Path(tempfile.mkdtemp(prefix=PREFIX))
            if (made := cls._take(path, os.O_CREAT)) is not None:
                try:
                    return cls(made.path, made.lock, _keeper(path.name))
                except BaseException:  # without a keeper, nothing of it may be used
                    made.remove()
                    raise

    @classmethod
    def sweep(cls) -> int:
        """Remove the folders of dead nodes of this user; how many there were."""
        ended = 0
        for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            if (left := cls._take(path)) is not None:
                left.remove()
                ended += 1
        return ended

    def remove(self) -> None:
        """With all that is in it, and all processes that carry its mark."""
        if alive := process_marks.kill_marked(f"{self.path.name}/"):
            log.error("%d processes of the sandboxes in %s cannot be killed", alive, self.path)
        with contextlib.suppress(OSError):  # what cannot be removed is told below
            self._empty()
        remove_tree(self.path)
        os.close(self.lock)
        if self.keeper is not None:
            self.keeper.kill()
            self.keeper.communicate()

    def _empty(self) -> None:
        """But for the lock: what a kill left of a folder without one would be nobody's."""
        for entry in os.scandir(self.path):
            if entry.is_dir(follow_symlinks=False):
                remove_tree(Path(entry.path))
            elif entry.name != LOCK:
                os.unlink(entry.path)

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
                if os.fstat(lock).st_nlink:  # else another has just removed the folder
                    return cls(path, lock)
        except BlockingIOError:
            pass
        os.close(lock)
        return None


def remove_tree(path: Path) -> None:
    """Remove a folder and all in it; what cannot be removed is left and told once. Blocks."""
    faults: list[str] = []

    def note(function: object, name: str, info: tuple[type[BaseException], BaseException, object]) -> None:
        if not isinstance(info[1], FileNotFoundError):
            faults.append(f"{name}: {info[1]}")

    if _removed(path):
        return
    try:
        shutil.rmtree(path, onerror=note)
    except RecursionError:
        faults.append(f"{path}: it is too deep")
    if faults:
        log.warning("%s is not removed in full (%d faults): %s", path, len(faults), faults[0])


def _removed(path: Path) -> bool:
    """Whether all of it could be, however deep an agent made it."""
    try:
        if not empty_folder(os.open(path, FOLDER)):
            return False
        path.rmdir()
    except OSError:
        return False
    return True


def _keeper(name: str) -> subprocess.Popen[bytes]:
    """It lives for as long as our end of its standard input is open, and then does its work: so its own start cannot
    come too late."""
    command = [sys.executable, "-I", "-S", process_marks.__file__, name]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={},
        start_new_session=True,
    )
