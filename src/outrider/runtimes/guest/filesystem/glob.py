"""Paths that match a pattern, and the files that a patch changes: for the host, by a forked child.

Invariant: a search ends, whatever links there are, because `**` does not go through them; and when a patch cannot be
put in place whole, what it had begun is undone.
"""

from __future__ import annotations

import posix
from typing import TYPE_CHECKING

from outrider.runtimes.guest.calls import Calls
from outrider.runtimes.guest.filesystem.files import Snapshot
from outrider.runtimes.guest.filesystem.patch import LINK_MODE, Conflict, Entry, plan_patch
from outrider.runtimes.guest.filesystem.paths import folder_of, is_folder, is_link, make_folders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WILD = "*?["


ANSWER_MAX = 64 << 20


HELP_SECONDS = 60


class Helper(Snapshot):
    """What `work` returns, from a child, in parts. A child that takes HELP_SECONDS is killed."""

    failed = f"it failed, or took longer than {HELP_SECONDS} s"

    def __init__(self, calls: Calls, call: int, work: Callable[[], bytes]) -> None:
        super().__init__(calls, call, ANSWER_MAX, lambda fd: write_all(fd, work()))
        calls.loop.at((self, "limit"), HELP_SECONDS, self.cancel)

    def _finish(self) -> None:
        if self.code is not None:
            self.calls.loop.timers.pop((self, "limit"), None)
        super()._finish()


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[posix.write(fd, view) :]


def found_paths(root: str, pattern: str, limit: int) -> bytes:
    """The paths below `root` that match, sorted, each with a NUL behind it; one more than `limit` at most."""
    found: set[str] = set()
    for path in matches(root, "", pattern.split("/")):
        found.add(path)
        if len(found) > limit:
            break
    return b"".join(sorted(path.encode("utf-8", "surrogateescape") + b"\0" for path in found))


def matches(root: str, above: str, parts: list[str]) -> Iterator[str]:
    """`above` is "" or ends with a slash; an empty last part asks for folders."""
    part, rest = parts[0], parts[1:]
    if part == "**":
        yield from anywhere(root, above, rest)
    elif not part:
        if above and is_folder(root + "/" + above):
            yield above
    elif not any(char in part for char in WILD):
        if rest or exists(root + "/" + above + part):
            yield from matches(root, above + part + "/", rest) if rest else [above + part]
    else:
        for name in matching_names(root + "/" + above, part):
            if not rest:
                yield above + name
            elif is_folder(root + "/" + above + name):
                yield from matches(root, above + name + "/", rest)


def anywhere(root: str, above: str, rest: list[str]) -> Iterator[str]:
    """`rest` here and in every folder below; without any, all that is below. By a list, for folders may be deep."""
    waiting = [above]
    while waiting:
        folder = waiting.pop()
        if rest:
            yield from matches(root, folder, rest)
        for name in listed(root + "/" + folder):
            if name.startswith("."):
                continue
            if not rest:
                yield folder + name
            path = root + "/" + folder + name
            if is_folder(path) and not is_link(path):
                waiting.append(folder + name + "/")


def listed(folder: str) -> list[str]:
    try:
        return posix.listdir(folder)
    except OSError:
        return []


def exists(path: str) -> bool:
    try:
        posix.lstat(path)
    except (OSError, ValueError):
        return False
    return True


def matching_names(folder: str, part: str) -> list[str]:
    import fnmatch

    names = listed(folder)
    if not part.startswith("."):
        names = [name for name in names if not name.startswith(".")]
    return fnmatch.filter(names, part)


def patched_files(folder: str, text: bytes, size: int) -> bytes:
    """Apply a patch below `folder`: "+" and the paths with NULs between them, or "-" and why it was not applied."""
    try:
        changes = plan_patch(text, lambda path: entry_at(folder, path, size))
        put_in_place(folder, changes)
    except Conflict as conflict:
        return b"-" + str(conflict).encode("utf-8", "backslashreplace")
    except OSError as error:
        where = str(error.filename or folder)
        return b"-" + (where + ": " + posix.strerror(error.errno or 0)).encode("utf-8", "backslashreplace")
    return b"+" + "\0".join(changes).encode("utf-8", "surrogateescape")


def entry_at(folder: str, path: str, size: int) -> Entry | None:
    """What is there, without going through links."""
    parts = path.split("/")
    for count in range(1, len(parts)):
        if is_link(folder + "/" + "/".join(parts[:count])):
            raise Conflict(f"{path}: {'/'.join(parts[:count])} is a symbolic link, which a patch does not go through")
    place = folder + "/" + path
    try:
        status = posix.lstat(place)
    except (FileNotFoundError, NotADirectoryError):
        return None
    kind = status.st_mode & 0o170000
    if kind == 0o120000:
        return Entry(LINK_MODE, posix.readlink(place).encode("utf-8", "surrogateescape"))
    if kind != 0o100000:
        raise Conflict(f"{path}: not a regular file")
    if status.st_size > size:
        raise Conflict(f"{path}: larger than {size} bytes")
    with open(place, "rb") as file:
        return Entry(0o100755 if status.st_mode & 0o100 else 0o100644, file.read())


def put_in_place(folder: str, changes: dict[str, Entry | None]) -> None:
    """New contents first beside their places, then all into place; what was there is kept aside until all is done."""
    token = posix.urandom(4).hex()
    done: list[tuple[str, str]] = []
    """Renames that were made, for undoing them."""
    fresh: list[str] = []
    made: list[str] = []
    try:
        for number, (path, entry) in enumerate(changes.items()):
            if entry is not None:
                made += missing_folders(folder, path)
                make_folders(folder_of(folder + "/" + path))
                fresh.append(beside(folder, path, "new", token, number))
                write_entry(fresh[-1], entry, folder + "/" + path)
        for number, path in enumerate(changes):
            if exists(folder + "/" + path):
                move(folder + "/" + path, beside(folder, path, "old", token, number), done)
        for number, (path, entry) in enumerate(changes.items()):
            if entry is not None:
                move(beside(folder, path, "new", token, number), folder + "/" + path, done)
    except OSError:
        for source, target in reversed(done):
            posix.rename(target, source)
        for path in fresh:
            if exists(path):
                posix.unlink(path)
        for path in made:
            if exists(path):
                posix.rmdir(path)
        raise
    for number, (path, entry) in enumerate(changes.items()):
        aside = beside(folder, path, "old", token, number)
        if exists(aside):
            posix.unlink(aside)
        if entry is None:
            remove_empty(folder, path)


def missing_folders(folder: str, path: str) -> list[str]:
    """Those above a file that are not there, the deepest first."""
    missing = []
    above = folder_of(path)
    while above and not exists(folder + "/" + above):
        missing.append(folder + "/" + above)
        above = folder_of(above)
    return missing


def beside(folder: str, path: str, kind: str, token: str, number: int) -> str:
    """A name of our own next to a file."""
    return f"{folder_of(folder + '/' + path)}/.{kind}-{token}-{number}"


def move(source: str, target: str, done: list[tuple[str, str]]) -> None:
    posix.rename(source, target)
    done.append((source, target))


def write_entry(place: str, entry: Entry, like: str) -> None:
    """The mode is the patch's only as to who may execute; the rest of it is what the file had."""
    if entry.mode == LINK_MODE:
        posix.symlink(entry.data.decode("utf-8", "surrogateescape"), place)
        return
    fd = posix.open(place, posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | posix.O_CLOEXEC, 0o644)
    try:
        write_all(fd, entry.data)
        mode = posix.stat(like).st_mode & 0o7777 if exists(like) and not is_link(like) else 0o644
        readers = (mode & 0o444) >> 2
        posix.fchmod(fd, mode | readers if entry.mode == 0o100755 else mode & ~0o111)
    finally:
        posix.close(fd)


def remove_empty(folder: str, path: str) -> None:
    """The folders that a deletion has left empty, as git does."""
    above = folder_of(path)
    while above:
        try:
            posix.rmdir(folder + "/" + above)
        except OSError:
            return
        above = folder_of(above)
