"""Files of a sandbox that exists in memory only.

It knows no users, modes or links. Invariant: every file's folder exists, and no path is both a file and a folder.
"""

from __future__ import annotations

import posixpath


class FileTable:
    """Files and folders by absolute normalised path. Errors carry the path as their only argument."""

    def __init__(self) -> None:
        self._data: dict[str, bytes] = {}
        self._folders: set[str] = {"/", "/tmp", "/root"}

    def is_file(self, path: str) -> bool:
        return path in self._data

    def is_folder(self, path: str) -> bool:
        return path in self._folders

    def read(self, path: str) -> bytes:
        """Raises FileNotFoundError, IsADirectoryError."""
        if path in self._folders:
            raise IsADirectoryError(path)
        if path not in self._data:
            raise FileNotFoundError(path)
        return self._data[path]

    def write(self, path: str, data: bytes, *, append: bool = False) -> None:
        """Raises FileNotFoundError when the folder is missing, IsADirectoryError."""
        if path in self._folders:
            raise IsADirectoryError(path)
        if posixpath.dirname(path) not in self._folders:
            raise FileNotFoundError(path)
        self._data[path] = (self._data.get(path, b"") if append else b"") + data

    def make_folder(self, path: str) -> None:
        """A folder with its parents. Raises FileExistsError where a file is in the way."""
        while path not in self._folders:
            if path in self._data:
                raise FileExistsError(path)
            self._folders.add(path)
            path = posixpath.dirname(path)

    def below(self, path: str) -> list[str]:
        """Everything in a folder at any depth, sorted."""
        prefix = path.rstrip("/") + "/"
        names = {*self._data, *self._folders}
        return sorted(name for name in names if name.startswith(prefix) and name != prefix)

    def remove(self, path: str) -> None:
        """A file, or a folder with all in it; nothing when there is none."""
        for name in [path, *self.below(path)]:
            self._data.pop(name, None)
            self._folders.discard(name)
