"""Builds each entry of a cache (a file or a folder) once, even if several processes and threads request it at the same
time.

An entry is built as a draft in the folder of the cache, and then renamed to its final path. Each entry has a lock file:

    FOLDER/NAME             the finished entry
    FOLDER/.draft-NAME-X    an entry under construction, or left behind by a killed builder
    FOLDER/.locks/NAME      the lock, held while NAME is built or removed

The lock is a `flock`: when the process that holds it is killed, the kernel releases the lock and wakes the next waiter
at once. (The library filelock polls every 50 ms instead.) Invariant: an entry at its final path is complete, even after
a power failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


def build_once(
    place: Path,
    build: Callable[[Path], object],
    *,
    part: str = "",
    is_built: Callable[[Path], bool] = Path.exists,
    on_wait: Callable[[], object] = lambda: None,
) -> Path:
    """Return `place`, the path of a cache entry. If `is_built(place)` is False, build the entry first. Blocks while
    another thread or process builds it.

    `build` receives an empty folder and fills it. Then this folder, or only the file `part` in it, is renamed to
    `place`. `on_wait` is called before a wait for another builder. If `build` raises, the folder is removed and the
    error is raised.
    """
    if is_built(place):
        return place
    with locked(place, on_wait=on_wait):
        if is_built(place):
            return place
        _remove_abandoned(place)
        draft = new_draft(place)
        try:
            draft.chmod(0o755)  # mkdtemp sets mode 700, but a cache may be shared with other users
            build(draft)
            sync_file_system(draft)
            os.replace(draft / part if part else draft, place)
        finally:  # the draft still exists after an error or a cancellation, or if only `part` was moved
            if draft.exists():
                remove_tree(draft)
    return place


@contextlib.contextmanager
def locked(place: Path, *, on_wait: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold the lock of the cache entry `place` while the block runs. If the lock is taken, calls `on_wait` and
    waits."""
    lock = lock_file(place)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def lock_file(place: Path) -> Path:
    """Return the path of the lock file of `place`. Lock files are never removed. Otherwise, one process could open a
    lock file and lock it only after its removal, while another process locks a new file at the same path."""
    return place.parent / ".locks" / place.name


def new_draft(place: Path) -> Path:
    """Create an empty draft folder for `place`. The caller must hold the lock of `place`, because builders remove the
    drafts of entries that are not locked."""
    return Path(tempfile.mkdtemp(prefix=f".draft-{place.name}-", dir=place.parent))


def sync_file_system(folder: Path) -> None:
    """Write all data of the file system that holds `folder` to its disk. Raises OSError.

    Call this function before an entry gets its final name, because a file system may store a new name long before the
    contents of the named file. For a tree of 100,000 files, this one call is faster than `fsync` for each file.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if libc.syncfs(descriptor) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(folder))
    finally:
        os.close(descriptor)


def _remove_abandoned(place: Path) -> None:
    """Remove the drafts that killed builders left behind: all drafts of `place`, whose lock the caller holds, and
    drafts of other entries whose lock is free."""
    for draft in place.parent.glob(".draft-*"):
        other = draft.name.removeprefix(".draft-").rpartition("-")[0]
        if other != place.name:
            with lock_file(place.parent / other).open("a") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
        remove_tree(draft)


def remove_tree(top: Path) -> None:
    """Remove a folder and everything in it. An OSError ends the removal, but is not raised.

    Archives from other sources may contain folders that are nested too deep for the maximum length of a path. So each
    inner folder is first moved directly below `top`, which keeps every path short.
    """
    numbers = itertools.count()
    try:
        below = [_made_writable(top)]
        while below:
            here = below.pop()
            with os.scandir(here) as entries:
                for entry in entries:
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry.path)
                    elif here == str(top):
                        below.append(_made_writable(entry.path))
                    else:
                        place = f"{top}/.outrider-gone-{next(numbers)}"
                        os.rename(_made_writable(entry.path), place)
                        below.append(place)
            if here != str(top):
                os.rmdir(here)
        os.rmdir(top)
    except OSError:
        return


def _made_writable(folder: str | Path) -> str:
    os.chmod(folder, stat.S_IRWXU)
    return str(folder)
