"""A node's private folder in the system's temporary folder, and the cleanup after a node that was killed.

The folder's path is short, because the folder contains the gateway's Unix socket, and a socket's path may have at most
107 bytes. All sandbox processes of the node are marked with the folder's name (runtimes/kernel/process_marks.py). So
the processes of a killed node can be found and killed, in two ways:

- The keeper, a small process beside the node, kills them within seconds.
- Every node, at its start and once a minute, kills the processes of this user's dead nodes and removes their folders.

Invariants: a node holds the folder's lock as long as it uses the folder; only the process that holds the lock removes
the folder; only that process or the keeper kills the marked processes.
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
    """The folder of one node. The methods block.

    `lock`: the descriptor of the lock file. The kernel releases the lock when this process ends, even if it is killed.
    `guard`: the descriptor of a lock on the folder itself. The lock keeps systemd-tmpfiles from removing old files in
        the folder (tmpfiles.d(5)).
    `keeper`: the process that kills the node's sandbox processes if the node dies.

    `keeper` and `guard` are None for the folder of a dead node.
    """

    path: Path
    lock: int
    keeper: subprocess.Popen[bytes] | None = None
    guard: int | None = None

    @classmethod
    def make(cls) -> Self:
        """Create the folder of a new node. The folders of dead nodes are removed first. Raises ServiceError if TMPDIR
        is not writable, and OSError."""
        named = environment("TMPDIR")
        if named and not os.access(named, os.W_OK | os.X_OK):  # Python would silently use a different folder
            raise ServiceError(f"TMPDIR is {named}, which cannot be written", hint="make that folder, or unset TMPDIR")
        with contextlib.suppress(OSError):  # the next sweep will report the error
            cls.sweep()
        while True:
            path = Path(tempfile.mkdtemp(prefix=PREFIX))
            # `_lock` returns None if the sweep of another node has already removed the new folder.
            if (made := cls._lock(path, os.O_CREAT)) is not None:
                try:
                    return cls(path, made.lock, _keeper(path), _guard(path))
                except BaseException:  # a folder without a keeper must not be used
                    made.remove()
                    raise

    @classmethod
    def sweep(cls) -> int:
        """Remove the folders of this user's dead nodes, and kill the processes of these nodes. Returns the number of
        removed folders."""
        removed = 0
        for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            if (dead := cls._lock(path)) is not None:
                dead.remove()
                removed += 1
        return removed

    def check_writable(self) -> None:
        """Check that files can be written in the folder. Raises OSError."""
        probe = self.path / "probe"
        probe.write_bytes(b"probe")
        probe.unlink()

    def remove(self) -> None:
        """Remove the folder and its content, and kill all processes that are marked with its name."""
        try:
            if alive := process_marks.kill_marked(f"{self.path.name}/"):
                log.error("%d processes of the sandboxes in %s cannot be killed", alive, self.path)
            # The lock file is removed last, because a sweep ignores a folder without a lock file. So if this process is
            # killed here, the next sweep removes the rest.
            with contextlib.suppress(OSError), os.scandir(self.path) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        remove_tree(Path(entry.path))
                    elif entry.name != LOCK:
                        os.unlink(entry.path)
            remove_tree(self.path)
        finally:  # release the lock even after an error, for the next sweep
            os.close(self.lock)
            if self.keeper is not None:
                self.keeper.kill()
                self.keeper.communicate()
            if self.guard is not None:
                os.close(self.guard)

    @classmethod
    def _lock(cls, path: Path, flags: int = 0) -> Self | None:
        """Lock the folder at `path`. Returns None if it does not belong to a node, belongs to another user, or is
        locked by a running node. Raises OSError if the file system does not support locks."""
        try:
            lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
        except OSError:
            return None
        locked = False
        try:
            if os.fstat(lock).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Another process may have locked, removed and unlocked the folder since `open`. The lock is then on a
                # deleted file.
                locked = os.fstat(lock).st_nlink > 0
        except BlockingIOError:
            pass
        finally:
            if not locked:
                os.close(lock)
        return cls(path, lock) if locked else None


def _keeper(path: Path) -> subprocess.Popen[bytes]:
    """Start the keeper of a folder. Its standard input is a pipe, and only this process holds the other end. However
    this process ends, the pipe closes, and the keeper notices. Raises OSError."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", process_marks.__file__, path.name],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={},
        start_new_session=True,  # Ctrl-C in the node's terminal must not reach the keeper
    )


def _guard(path: Path) -> int | None:
    """Take a shared lock on the folder, and return its descriptor. Returns None if the file system does not support
    locks."""
    guard = os.open(path, FOLDER)
    try:
        fcntl.flock(guard, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        os.close(guard)
        return None
    return guard


def remove_tree(path: Path) -> None:
    """Remove a folder and its content. Whatever cannot be removed stays and is logged. Blocks."""
    try:
        # shutil.rmtree is recursive and fails if an agent has created very deep folders. `empty_folder` works at any
        # depth.
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


async def sweep(host: Host) -> dict[str, int]:
    """Remove what killed nodes have left: folders, processes, control groups, and whatever the parts of `host` find.
    Call this every SWEEP_EVERY_SECONDS.

    Returns how many things of each kind were removed. Errors are recorded and not raised, because a failed sweep must
    not end the node's sessions.
    """
    own = {"NodeFolder": NodeFolder.sweep, "Cgroups": cgroups.sweep}
    ended = await swept([(kind, partial(asyncio.to_thread, part)) for kind, part in own.items()], host.failures)
    ended |= await host.sweep()
    if ended:
        listed = ", ".join(f"{kind} {number}" for kind, number in ended.items())
        log.info("%s removed what dead nodes had left: %s", host.name, listed)
    return ended
