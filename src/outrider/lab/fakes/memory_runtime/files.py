"""The files of a sandbox in memory. Patterns match the same paths as in real sandboxes.

Files have no owners and no modes, and there are no links. Modes in a patch are ignored, and a patch that makes a
symbolic link is refused. Invariant: every file's folder exists, and no path is both a file and a folder.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import posixpath
import subprocess
import tempfile
from pathlib import Path

from outrider.sandbox.runtimes.base import GIT_APPLY, GIT_ENVIRONMENT, PatchConflict


class MemoryFiles:
    """Files and folders by absolute, normalised path. A method raises the same OSErrors as the system call that it
    imitates."""

    def __init__(self) -> None:
        self._data: dict[str, bytes] = {}
        self._folders: set[str] = {"/", "/tmp", "/root"}

    def is_file(self, path: str) -> bool:
        return path in self._data

    def is_folder(self, path: str) -> bool:
        return path in self._folders

    def read(self, path: str) -> bytes:
        if path in self._folders:
            raise os_error(errno.EISDIR, path)
        if path not in self._data:
            raise os_error(errno.ENOENT, path)
        return self._data[path]

    def write(self, path: str, data: bytes, *, append: bool = False) -> None:
        """Write a file, or append to it. Its folder must exist."""
        if path in self._folders:
            raise os_error(errno.EISDIR, path)
        if posixpath.dirname(path) not in self._folders:
            raise os_error(errno.ENOENT, path)
        self._data[path] = (self._data.get(path, b"") if append else b"") + data

    def make_folder(self, path: str) -> None:
        """Make a folder and its parents. If one of these paths is a file, raises FileExistsError and makes nothing."""
        missing = set()
        while path not in self._folders:
            if path in self._data:
                raise os_error(errno.EEXIST, path)
            missing.add(path)
            path = posixpath.dirname(path)
        self._folders |= missing

    def below(self, path: str) -> list[str]:
        """Return the paths of all files and folders in a folder, at any depth, sorted."""
        prefix = path.rstrip("/") + "/"
        names = {*self._data, *self._folders}
        return sorted(name for name in names if name.startswith(prefix) and name != prefix)

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with its content, if it exists."""
        for name in [path, *self.below(path)]:
            self._data.pop(name, None)
            self._folders.discard(name)

    def glob(self, cwd: str, pattern: str) -> list[str]:
        """Return the paths that match the pattern, as `Runtime.glob` defines it."""
        root = "/" if pattern.startswith("/") else cwd
        parts = [part for part in pattern.split("/") if part]
        lead = "/" if pattern.startswith("/") else ""
        while parts and parts[0] in (".", ".."):
            lead += f"{parts[0]}/"
            root = posixpath.normpath(posixpath.join(root, parts.pop(0)))
        end = "/" if pattern.endswith("/") else ""
        names = [posixpath.relpath(path, root) for path in self.below(root) if not end or self.is_folder(path)]
        return sorted(f"{lead}{name}{end}" for name in names if fits(parts, name.split("/")))

    def patch(self, folder: str, text: bytes) -> None:
        """Apply a diff to the files below a folder, as `Runtime.patch` defines it. The files are written to a temporary
        folder of the host, patched there by git, and read back. The call blocks. Raises PatchConflict."""
        with tempfile.TemporaryDirectory(prefix="outrider-patch-") as host:
            for path in self.below(folder):
                place = Path(host, posixpath.relpath(path, folder))
                if self.is_folder(path):
                    place.mkdir()
                else:
                    place.write_bytes(self._data[path])
            environment = {"PATH": os.defpath, **GIT_ENVIRONMENT}
            done = subprocess.run(GIT_APPLY, cwd=host, env=environment, input=text, capture_output=True, check=False)
            if done.returncode != 0:
                raise PatchConflict(done.stderr.decode(errors="replace").strip())
            for path in self.below(folder):
                self.remove(path)
            for place in sorted(Path(host).rglob("*")):
                path = posixpath.join(folder, str(place.relative_to(host)))
                if place.is_symlink():
                    raise PatchConflict(f"{path}: there are no symbolic links in memory")
                if place.is_dir():
                    self.make_folder(path)
                else:
                    self.write(path, place.read_bytes())


def os_error(number: int, path: str) -> OSError:
    """Return the OSError for an error number, in the subclass that Python chooses."""
    return OSError(number, os.strerror(number), path)


def fits(pattern: list[str], names: list[str]) -> bool:
    """Return True if the parts of a path match the parts of a pattern."""
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
