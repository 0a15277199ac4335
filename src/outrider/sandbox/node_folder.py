"""A node's private folder below the system's temporary folder, and the removal of the leftovers of killed nodes.

The folder's path is short, because the path of the gateway's Unix socket in the folder must fit into 107 bytes. Every
process run for a sandbox of the node is marked with the folder's name (runtimes/kernel/process_marks.py). The marks
show which processes a killed node has left. The node's keeper, a small process beside the node, ends these processes
within seconds. Every node, at its start and every minute, ends the processes of this user's dead nodes and removes the
folders of these nodes. Sandboxes that may outlive their node are kept for a while: the next node of the same owner gets
the whole folder from the keeper.

Invariant: only a process that holds the folder's lock removes the folder. Only such a process, or the folder's keeper,
kills the processes marked with the folder's name. A node and its keeper hold the lock as long as they need the folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from outrider.concurrency.chores import Failures
from outrider.environment import environment
from outrider.errors import ServiceError
from outrider.sandbox.runtimes.guest.filesystem.tree_writer import empty_folder
from outrider.sandbox.runtimes.guest.filesystem.trees import FOLDER
from outrider.sandbox.runtimes.kernel import cgroups, process_marks
from outrider.sandbox.runtimes.node_host import PREFIX, Host, sign_of_life, survives

log = logging.getLogger("outrider.node")

LOCK = "node.lock"
OWNER = "owner"
"""Name of the file that contains the name of the folder's owner."""
SWEEP_EVERY_SECONDS = 60.0
LOOK_SECONDS = 0.05
HANDOVER_SECONDS = 15.0
"""Seconds for which a node waits for the keeper of its predecessor's folder. The keeper first kills all processes that
are not to be kept."""


class Keeper:
    """A connection to the keeper of a folder, a process started by this node or by an earlier node."""

    def __init__(self, end: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._end = end
        self.process = process

    @classmethod
    def start(cls, folder: Path, lock: int, sign: int) -> Self:
        """Start the keeper of a folder. Only the node has the node's end of the connection. So the kernel closes the
        connection however the node ends, even while the keeper is still starting."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-I", "-S", process_marks.__file__, str(folder), str(lock), str(sign)]
        try:
            with theirs:
                process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={},
                    pass_fds=[lock, sign],
                    start_new_session=True,  # a Ctrl-C in the node's terminal must not reach the keeper
                )
        except BaseException:
            ours.close()
            raise
        return cls(ours, process)

    def end(self) -> None:
        """Make the keeper exit, after the folder was removed."""
        with contextlib.suppress(OSError):
            self._end.send(process_marks.DONE)
        self._end.close()
        if self.process is not None:
            self.process.wait()


@dataclass(frozen=True)
class NodeFolder:
    """A node's folder. The methods block.

    `lock` is the descriptor of the lock file. `sign` is the socket that marks the folder as in use
    (`node_host.sign_of_life`). The kernel releases both when this process and its keeper have ended, in whatever way.
    `guard` is a lock on the folder itself, which makes systemd-tmpfiles spare the folder and its contents at any age
    (tmpfiles.d(5)). `keeper`, `sign` and `guard` are None for the folder of a dead node.
    """

    path: Path
    lock: int
    keeper: Keeper | None = None
    sign: socket.socket | None = None
    guard: int | None = None

    @classmethod
    def make(cls, owner: str = "") -> Self:
        """Return a folder for a node: the folder of the owner's last node, with the sandboxes that have outlived that
        node, or a new folder. The folders of dead nodes are removed first. Without an owner nothing is kept for the
        next node.

        Raises ServiceError if TMPDIR cannot be written, and OSError.
        """
        named = environment("TMPDIR")
        if named and not os.access(named, os.W_OK | os.X_OK):  # Python would silently use another folder
            raise ServiceError(f"TMPDIR is {named}, which cannot be written", hint="make that folder, or unset TMPDIR")
        with contextlib.suppress(OSError):  # the node's own sweeps report the error
            cls.sweep()
        if owner and (left := cls._taken_over(owner)) is not None:
            return left
        while True:
            path = Path(tempfile.mkdtemp(prefix=PREFIX))
            # `_lock` returns None if another node's sweep removed the folder before it was locked here.
            if (made := cls._lock(path, os.O_CREAT)) is not None:
                try:
                    (path / OWNER).write_text(owner)
                    sign = sign_of_life(path)
                    try:
                        return cls(path, made.lock, Keeper.start(path, made.lock, sign.fileno()), sign, _guard(path))
                    except BaseException:
                        sign.close()
                        raise
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

    @classmethod
    def _taken_over(cls, owner: str) -> Self | None:
        for path in list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):  # a list: `return` would leave the glob open
            try:
                ours = path.stat().st_uid == os.getuid() and (path / OWNER).read_text() == owner
            except OSError:
                continue
            deadline = time.monotonic() + HANDOVER_SECONDS
            while ours and list(path.glob(f"*/{process_marks.RUN_FILE}")) and time.monotonic() < deadline:
                end = socket.socket(socket.AF_UNIX)
                end.settimeout(HANDOVER_SECONDS)
                try:
                    end.connect(str(path / process_marks.KEEPER))
                    _, [lock, sign], _, _ = socket.recv_fds(end, 1, 2)
                except (OSError, ValueError):  # the keeper is not ready yet, or has just given up
                    end.close()
                    time.sleep(LOOK_SECONDS)
                else:
                    end.settimeout(None)
                    return cls(path, lock, Keeper(end), socket.socket(fileno=sign), _guard(path))
        return None

    def outlived(self) -> list[Path]:
        """Return the folders of the sandboxes that have outlived the last node, after removing all other folders."""
        kept = [entry for entry in self.path.iterdir() if survives(entry)]
        for entry in self.path.iterdir():
            if entry.is_dir() and not entry.is_symlink() and entry not in kept:
                remove_tree(entry)
        return kept

    def remove(self) -> None:
        """Remove the folder with its contents, and kill all processes that carry its mark."""
        try:
            if alive := process_marks.kill_marked(f"{self.path.name}/"):
                log.error("%d processes of the sandboxes in %s cannot be killed", alive, self.path)
            # `remove_tree` logs failures. The lock file is removed last: if this process is killed before, the next
            # sweep removes the rest. A folder without a lock file would never be swept.
            with contextlib.suppress(OSError), os.scandir(self.path) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        remove_tree(Path(entry.path))
                    elif entry.name != LOCK:
                        os.unlink(entry.path)
            remove_tree(self.path)
        finally:  # also if no descriptor is left for reading /proc: the next sweep must get the lock
            os.close(self.lock)
            if self.keeper is not None:
                self.keeper.end()
            if self.sign is not None:
                self.sign.close()
            if self.guard is not None:
                os.close(self.guard)

    @classmethod
    def _lock(cls, path: Path, flags: int = 0) -> Self | None:
        """Lock the folder at `path`. Returns None if the folder is no node's, another user's, or locked by a living
        node."""
        try:
            lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
        except OSError:
            return None
        try:
            if os.fstat(lock).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Between open and flock another process may have locked, removed and unlocked the folder. Then the
                # locked file no longer has a name.
                if os.fstat(lock).st_nlink:
                    return cls(path, lock)
        except BlockingIOError:
            pass
        os.close(lock)
        return None


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
        faults.append(f"{path}: it is too deep")
    if faults:
        log.warning("%s is not removed in full (%d faults): %s", path, len(faults), faults[0])


async def sweep(host: Host, failures: Failures) -> dict[str, int]:
    """Remove the leftovers of killed nodes: folders, processes, control groups, and what the parts of `host` find. Call
    this function every SWEEP_EVERY_SECONDS.

    Returns the number of things removed, by kind. Failures are recorded and never raised: a failed sweep must not end
    the node's sessions, and the next sweep tries again.
    """
    ended: dict[str, int] = {}
    for kind, part in {"NodeFolder": NodeFolder.sweep, "Cgroups": cgroups.sweep}.items():
        try:
            if number := await asyncio.to_thread(part):
                ended[kind] = number
        except Exception as error:  # any error: the other parts are swept, too
            failures.note(f"sweep of {kind}", error)
        else:
            failures.note_success(f"sweep of {kind}")
    ended |= await host.sweep(failures)
    if ended:
        listed = ", ".join(f"{kind} {number}" for kind, number in ended.items())
        log.info("%s removed what dead nodes had left: %s", host.name, listed)
    return ended
