"""Searching and patching files in memory, as the tool server does it on disk.

It knows FileTable and nothing of sandboxes. Files there have no modes and no links: what a patch says of modes is
passed over, and a symbolic link that it makes is refused.
"""

from __future__ import annotations

import fnmatch
import posixpath

from outrider.runtimes.base import PatchConflict
from outrider.runtimes.guest.filesystem.patch import LINK_MODE, PLAIN_MODE, Conflict, Entry, plan_patch
from outrider.testing.memory_runtime.files import FileTable


def matching(files: FileTable, cwd: str, pattern: str) -> list[str]:
    """`Runtime.glob` over a table."""
    root = "/" if pattern.startswith("/") else cwd
    parts = [part for part in pattern.split("/") if part]
    lead = "/" if pattern.startswith("/") else ""
    while parts and parts[0] in (".", ".."):
        lead += f"{parts[0]}/"
        root = posixpath.normpath(posixpath.join(root, parts.pop(0)))
    end = "/" if pattern.endswith("/") else ""
    names = [posixpath.relpath(path, root) for path in files.below(root) if not end or files.is_folder(path)]
    return sorted(f"{lead}{name}{end}" for name in names if fits(parts, name.split("/")))


def fits(pattern: list[str], names: list[str]) -> bool:
    """Whether the parts of a path match those of a pattern."""
    if not pattern:
        return not names
    head, rest = pattern[0], pattern[1:]
    if head == "**":
        visible = next((at for at, name in enumerate(names) if name.startswith(".")), len(names))
        if not rest:
            return visible == len(names) > 0
        return any(fits(rest, names[at:]) for at in range(visible + 1))
    if not names or (names[0].startswith(".") and not head.startswith(".")):
        return False
    return fnmatch.fnmatchcase(names[0], head) and fits(rest, names[1:])


def apply_patch(files: FileTable, folder: str, text: bytes) -> list[str]:
    """`Runtime.patch` on a table. Raises PatchConflict."""

    def look(path: str) -> Entry | None:
        place = posixpath.join(folder, path)
        if files.is_folder(place):
            raise Conflict(f"{path}: not a regular file")
        return Entry(PLAIN_MODE, files.read(place)) if files.is_file(place) else None

    try:
        changes = plan_patch(text, look)
        for path, entry in changes.items():
            if entry is not None and entry.mode == LINK_MODE:
                raise Conflict(f"{path}: there are no symbolic links in memory")
    except Conflict as conflict:
        raise PatchConflict(str(conflict)) from None
    for path, entry in changes.items():
        if entry is None:
            remove(files, folder, path)
    for path, entry in changes.items():
        if entry is not None:
            files.make_folder(posixpath.dirname(posixpath.join(folder, path)))
            files.write(posixpath.join(folder, path), entry.data)
    return list(changes)


def remove(files: FileTable, folder: str, path: str) -> None:
    """With the folders that become empty."""
    files.remove(posixpath.join(folder, path))
    while (path := posixpath.dirname(path)) and not files.below(posixpath.join(folder, path)):
        files.remove(posixpath.join(folder, path))
