"""A node's private folder below the system's temporary folder, and the removal of the leftovers of killed nodes.

The folder's path is short, because the gateway's Unix socket is in the folder, and its path must fit into 107 bytes.
Every process run for a sandbox of the node is marked with the folder's name (runtimes/kernel/process_marks.py), so the
processes left by a killed node can be found. They are ended in two ways:
- The node's keeper, a small process beside the node, ends them within seconds.
- Every node, at its start and every minute, ends the processes of this user's dead nodes and removes the folders of
  these nodes.

Invariant: only a process that holds the folder's lock removes the folder. Only such a process, or the folder's keeper,
kills the processes marked with the folder's name. A node holds the lock as long as it needs the folder.
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
from functools import partial
from pathlib import Path
from typing import Self

from outrider.concurrency.chores import Failures
from outrider.environment import environment
from outrider.errors import ServiceError
from outrider.sandbox.runtimes.guest.filesystem.tree_writer import empty_folder
from outrider.sandbox.runtimes.guest.filesystem.trees import FOLDER
from outrider.sandbox.runtimes.kernel import cgroups, process_marks
from outrider.sandbox.runtimes.node_host import PREFIX, Host, swept

log = logging.getLogger("outrider.node")

LOCK = "node.lock"
SWEEP_EVERY_SECONDS = 60.0


@dataclass(frozen=True)
class NodeFolder:
    """A node's folder. The methods block.

    `lock` is the descriptor of the lock file. The kernel releases the lock when this process ends, even if the process
    is killed. `guard` is a lock on the folder itself, which makes systemd-tmpfiles spare the folder and its contents at
    any age (tmpfiles.d(5)). `keeper` and `guard` are None for the folder of a dead node.
    """

    path: Path
    lock: int
    keeper: subprocess.Popen[bytes] | None = None
    guard: int | None = None

    @classmethod
    def make(cls) -> Self:
        """Return a new folder for a node. The folders of dead nodes are removed first.

        Raises ServiceError if TMPDIR cannot be written, and OSError.
        """
        named = environment("TMPDIR")
        if named and not os.access(named, os.W_OK | os.X_OK):  # Python would silently use another folder
            raise ServiceError(f"TMPDIR is {named}, which cannot be written", hint="make that folder, or unset TMPDIR")
        with contextlib.suppress(OSError):  # a later sweep reports the error
            cls.sweep()
        while True:
            path = Path(tempfile.mkdtemp(prefix=PREFIX))
            # `_lock` returns None if another node's sweep removed the folder before it was locked here.
            if (made := cls._lock(path, os.O_CREAT)) is not None:
                try:
                    return cls(path, made.lock, _keeper(path), _guard(path))
                except BaseException:  # without a keeper the folder must not be used
                    made.remove()
                    raise

    @classmethod
    def sweep(cls) -> int:
        """Remove the folders of this user's dead nodes, and kill their processes. Returns the number of folders."""
        removed = 0
        for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            if (dead := cls._lock(path)) is not None:
                dead.remove()
                removed += 1
        return removed

    def check_writable(self) -> None:
        """Write a file in the folder and remove it. Raises OSError."""
        probe = self.path / "probe"
        probe.write_bytes(b"probe")
        probe.unlink()

    def remove(self) -> None:
        """Remove the folder with its contents, and kill all processes that are marked with its name."""
        try:
            if alive := process_marks.kill_marked(f"{self.path.name}/"):
                log.error("%d processes of the sandboxes in %s cannot be killed", alive, self.path)
            # The lock file is removed last, because a folder without a lock file would never be swept. If this process
            # is killed before, the next sweep removes the rest.
            with contextlib.suppress(OSError), os.scandir(self.path) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        remove_tree(Path(entry.path))
                    elif entry.name != LOCK:
                        os.unlink(entry.path)
            remove_tree(self.path)
        finally:  # the lock is released even if /proc cannot be read, so that the next sweep gets the lock
            os.close(self.lock)
            if self.keeper is not None:
                self.keeper.kill()
                self.keeper.communicate()
            if self.guard is not None:
                os.close(self.guard)

    @classmethod
    def _lock(cls, path: Path, flags: int = 0) -> Self | None:
        """Lock the folder at `path`. Returns None if the folder is not that of a node, belongs to another user, or is
        locked by a living node. Raises OSError on a file system without locks."""
        try:
            lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
        except OSError:
            return None
        locked = False
        try:
            if os.fstat(lock).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Between open and flock another process may have locked, removed and unlocked the folder. Then the
                # locked file no longer has a name.
                locked = os.fstat(lock).st_nlink > 0
        except BlockingIOError:
            pass
        finally:
            if not locked:
                os.close(lock)
        return cls(path, lock) if locked else None


def _keeper(path: Path) -> subprocess.Popen[bytes]:
    """Start the keeper of a folder. The keeper's standard input is a pipe from this process. No other process inherits
    the pipe's other end, so the input ends however this process ends. Raises OSError."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", process_marks.__file__, path.name],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={},
        start_new_session=True,  # a Ctrl-C in the node's terminal must not reach the keeper
    )


def _guard(path: Path) -> int | None:
    """Return a descriptor with a shared lock on the folder; None on a file system without locks."""
    guard = os.open(path, FOLDER)
    try:
        fcntl.flock(guard, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        os.close(guard)
        return None
    return guard


def remove_tree(path: Path) -> None:
    """Remove a folder and its contents. Entries that cannot be removed are left, and logged in one line. Blocks."""
    try:
        # `empty_folder` works at any depth. shutil.rmtree calls itself once for each level, and fails in folders that
        # an agent nested too deeply.
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
        faults.append(f"{path}: its folders are nested too deeply")
    if faults:
        log.warning("%s is not removed in full (%d faults): %s", path, len(faults), faults[0])


async def sweep(host: Host, failures: Failures) -> dict[str, int]:
    """Remove the leftovers of killed nodes: folders, processes, control groups, and what the parts of `host` find. Call
    this function every SWEEP_EVERY_SECONDS.

    Returns the number of things removed, by kind. Failures are recorded and never raised: a failed sweep must not end
    the node's sessions, and the next sweep tries again.
    """
    own = {"NodeFolder": NodeFolder.sweep, "Cgroups": cgroups.sweep}
    ended = await swept([(kind, partial(asyncio.to_thread, part)) for kind, part in own.items()], failures)
    ended |= await host.sweep(failures)
    if ended:
        listed = ", ".join(f"{kind} {number}" for kind, number in ended.items())
        log.info("%s removed what dead nodes had left: %s", host.name, listed)
    return ended
