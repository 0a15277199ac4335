"""Builds each file or folder of a cache once, even if several processes and threads request the entry at the same time.

An entry is built as a draft in the folder of the cache, and then renamed to its final path. Each entry has a lock file:

    FOLDER/NAME             the finished entry
    FOLDER/.draft-NAME-X    an entry under construction, or left behind by a killed builder
    FOLDER/.locks/NAME      the lock, held while NAME is built or removed

The lock is `flock`: the kernel wakes the next waiter, and releases the lock however the holding process ends. The
library filelock instead polls every 50 ms. Invariant: an entry at its final path is complete, even after a loss of
power.
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
    """Return `place`. If `is_built(place)` is False, first build the entry there. Blocks while another builder is at
    work.

    `build` receives an empty folder. This folder, or the file `part` in it, is then renamed to `place`. `on_wait` is
    called before waiting for another builder. Raises the errors of `build`, and then leaves no draft behind.
    """
    if is_built(place):
        return place
    with locked(place, on_wait=on_wait):
        if is_built(place):
            return place
        _remove_abandoned(place)
        draft = new_draft(place)
        try:
            draft.chmod(0o755)  # mkdtemp's mode 700 would deny access to the other users of a shared cache
            build(draft)
            sync_file_system(draft)
            os.replace(draft / part if part else draft, place)
        finally:  # the draft is removed after any error, also after a cancellation
            if draft.exists():
                remove_tree(draft)
    return place


@contextlib.contextmanager
def locked(place: Path, *, on_wait: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold the lock of `place`. Blocks while another process or thread holds the lock."""
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
    """Return the path of the lock file of `place`. The file is never removed: a process that had opened it before could
    then lock the removed file, while another process locks a new file of the same path."""
    return place.parent / ".locks" / place.name


def new_draft(place: Path) -> Path:
    """Create an empty draft folder for `place`. The caller must hold the lock, because a draft whose lock is free
    counts as abandoned."""
    return Path(tempfile.mkdtemp(prefix=f".draft-{place.name}-", dir=place.parent))


def sync_file_system(folder: Path) -> None:
    """Return once all files of the file system that holds `folder` are on its disk. Raises OSError.

    Call this function before creating the name that marks an entry as complete: file systems may write a new name long
    before the contents of the named files. One call for a tree of 100,000 files is faster than `fsync` of each.
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
    """Remove the drafts of killed builders: all drafts of `place`, because the caller holds its lock, and all drafts
    whose lock is free."""
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
    """Remove a folder and everything in it. Stops at the first error without raising it.

    Archives from other sources may contain trees that are too deep for the maximum length of a path. So each inner
    folder is first moved directly below the top, and no path is longer than two names.
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
