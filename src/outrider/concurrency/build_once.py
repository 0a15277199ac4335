"""Files and folders of the cache that are built once, however many processes and threads want them at the same time.

It knows nothing of what is in them. A place is built as a draft beside it and then renamed, under a lock file of its
own:

    FOLDER/NAME             what was built
    FOLDER/.draft-NAME-X    what is being built, or what a killed builder has left
    FOLDER/.locks/NAME      held by whoever builds or removes NAME

The lock is `flock`, and not the library filelock: the kernel wakes the next waiter, where filelock asks again every
50 ms, and releases the lock when its process ends, however that ends. Invariant: what is at its place is whole, after a
loss of power, too.
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


def nothing() -> None:
    """A callback that does nothing."""


def build_once(
    place: Path,
    build: Callable[[Path], object],
    *,
    part: str = "",
    is_built: Callable[[Path], bool] = Path.exists,
    on_wait: Callable[[], object] = nothing,
) -> Path:
    """Return `place`, after building it unless `is_built` says that it is there. Blocks while another is at it.

    `build` is given an empty folder; that folder, or the file `part` in it, is then renamed to `place`. `on_wait` is
    called before waiting for another builder. Raises what `build` raises, and leaves nothing then.
    """
    if is_built(place):
        return place
    with locked(place, on_wait=on_wait):
        if is_built(place):
            return place
        _remove_abandoned(place)
        draft = new_draft(place)
        try:
            draft.chmod(0o755)  # mkdtemp's 700 would shut out other users of a shared cache
            build(draft)
            sync_file_system(draft)
            os.replace(draft / part if part else draft, place)
        finally:  # also after a cancel
            if draft.exists():
                remove_tree(draft)
    return place


@contextlib.contextmanager
def locked(place: Path, *, on_wait: Callable[[], object] = nothing) -> Iterator[None]:
    """Hold the lock of a place. Blocks while another process or thread holds it."""
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
    """It is never removed: a waiter may hold the old file open while another process makes and locks a new one."""
    return place.parent / ".locks" / place.name


def new_draft(place: Path) -> Path:
    """An empty folder beside a place. Call it with the lock held: a draft whose lock is free counts as abandoned."""
    return Path(tempfile.mkdtemp(prefix=f".draft-{place.name}-", dir=place.parent))


def sync_file_system(folder: Path) -> None:
    """Return once all files of the file system that holds `folder` are on its disk. Raises OSError.

    Call it before the name that says that something is whole: file systems may write a new name long before what is in
    the files that it names. One call for a tree of 100,000 files is faster than `fsync` of each.
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
    """Remove the drafts of killed builders: those of `place`, whose lock we hold, and those whose lock nobody holds."""
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
    """Remove a folder with all that is in it. What cannot be removed is left.

    Foreign archives describe trees that are deeper than a path can name. Folders inside are therefore moved right below
    the top first, so that no path is longer than two names.
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
