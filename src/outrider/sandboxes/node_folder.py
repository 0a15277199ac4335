"""A node's private folder below the system's temporary one, and the removal of what killed nodes left on this machine.

It knows no session. The folder's path is short, because that of the gateway's Unix socket in it must fit into 107
bytes. Every process that runs for a sandbox of the node carries the folder's name (runtimes/kernel/process_marks.py).
So two others can end them after a node was killed: its keeper, a small process beside it, at once; and any node, when
it starts and every minute, which also removes the folder. Invariant: a folder is removed, and what it marks is killed,
only by a process that holds the folder's lock, or by its keeper; a node holds its lock for as long as it lives.
"""

from __future__ import annotations

import asyncio
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
from outrider.runtimes.kernel import cgroups, process_marks
from outrider.runtimes.node_host import PREFIX, Host

log = logging.getLogger("outrider.node")

LOCK = "node.lock"
SWEEP_EVERY_SECONDS = 60.0


@dataclass(frozen=True)
class NodeFolder:
    """A node's folder; its methods block.

    `lock` is the descriptor of the lock file: the kernel releases the lock when this process ends, however it ends.
    `keeper` is None for the folder of a dead node.
    """

    path: Path
    lock: int
    keeper: subprocess.Popen[bytes] | None = None

    @classmethod
    def make(cls) -> Self:
        """A new folder, after dead nodes' folders were removed."""
        cls.sweep()
        while True:
            path = Path(tempfile.mkdtemp(prefix=PREFIX))
            # None if the sweep of another node took the folder for a dead one's before it was locked here.
            if (made := cls._lock(path, os.O_CREAT)) is not None:
                try:
                    return cls(made.path, made.lock, _start_keeper(path.name))
                except BaseException:  # without a keeper the folder must not be used
                    made.remove()
                    raise

    @classmethod
    def sweep(cls) -> int:
        """Remove the folders of this user's dead nodes. Returns how many there were."""
        removed = 0
        for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            if (dead := cls._lock(path)) is not None:
                dead.remove()
                removed += 1
        return removed

    def remove(self) -> None:
        """Remove the folder with all that is in it, and kill all processes that carry its mark."""
        if alive := process_marks.kill_marked(f"{self.path.name}/"):
            log.error("%d processes of the sandboxes in %s cannot be killed", alive, self.path)
        with contextlib.suppress(OSError):  # `remove_tree` logs what cannot be removed
            # The lock file goes last: a folder without one, left by a kill meanwhile, would never be swept.
            for entry in os.scandir(self.path):
                if entry.is_dir(follow_symlinks=False):
                    remove_tree(Path(entry.path))
                elif entry.name != LOCK:
                    os.unlink(entry.path)
        remove_tree(self.path)
        os.close(self.lock)
        if self.keeper is not None:
            self.keeper.kill()
            self.keeper.communicate()

    @classmethod
    def _lock(cls, path: Path, flags: int = 0) -> Self | None:
        """The folder at `path`, locked; None if it is no node's, another user's, or locked by a living node."""
        try:
            lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
        except OSError:
            return None
        try:
            if os.fstat(lock).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Between open and flock another process may have locked, removed and unlocked the folder: then the
                # lock is on a file that has no name any more.
                if os.fstat(lock).st_nlink:
                    return cls(path, lock)
        except BlockingIOError:
            pass
        os.close(lock)
        return None


def _start_keeper(name: str) -> subprocess.Popen[bytes]:
    """Start the process that kills what carries the folder's name when its standard input ends.

    Only this process has the other end of that pipe, so the kernel closes it however this process dies, also while the
    keeper still starts.
    """
    command = [sys.executable, "-I", "-S", process_marks.__file__, name]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={},
        start_new_session=True,  # a Ctrl-C in the node's terminal must not reach it
    )


def remove_tree(path: Path) -> None:
    """Remove a folder and all that is in it; what cannot be removed is left, and logged once. Blocks."""
    try:
        # However deep an agent made it: shutil.rmtree calls itself once for each level.
        if empty_folder(os.open(path, FOLDER)):
            path.rmdir()
            return
    except OSError:
        pass
    faults: list[str] = []

    def note(function: object, name: str, info: tuple[type[BaseException], BaseException, object]) -> None:
        if not isinstance(info[1], FileNotFoundError):
            faults.append(f"{name}: {info[1]}")

    try:
        shutil.rmtree(path, onerror=note)
    except RecursionError:
        faults.append(f"{path}: it is too deep")
    if faults:
        log.warning("%s is not removed in full (%d faults): %s", path, len(faults), faults[0])


async def keep_sweeping(host: Host, *, seconds: float = SWEEP_EVERY_SECONDS) -> None:
    """Sweep every so many seconds until cancelled. The first time is not at once: a node sweeps when it starts."""
    while True:
        await asyncio.sleep(seconds)
        await sweep(host)


async def sweep(host: Host) -> dict[str, int]:
    """End what killed nodes left behind: folders, processes, control groups, and what the parts of `host` know of.

    Returns how many things were ended, by kind. A sweep that fails is logged and raises nothing: it must not cost the
    node its sessions, and the next one tries again.
    """
    try:
        folders = await asyncio.to_thread(NodeFolder.sweep)
        groups = await asyncio.to_thread(cgroups.sweep)
        counts = {"NodeFolder": folders, "Cgroups": groups}
        ended = {kind: number for kind, number in counts.items() if number} | await host.sweep()
    except Exception:
        log.exception("a sweep failed")
        return {}
    if ended:
        listed = ", ".join(f"{kind} {number}" for kind, number in ended.items())
        log.info("%s removed what dead nodes had left: %s", host.name, listed)
    return ended
