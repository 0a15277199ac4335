"""Functions for paths and programs that the module `posix` lacks. `os` has them, but importing it would make the
interpreter's start longer by a sixth.
"""

from __future__ import annotations

import posix
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

KIND = 0o170000
REGULAR, DIRECTORY, LINK, PIPE, DEVICES = 0o100000, 0o040000, 0o120000, 0o010000, (0o020000, 0o060000)
"""The bits of a file's mode that state its type, and their values. Importing `stat` would lengthen the interpreter's
start."""
DEFAULT_PATH = "/bin:/usr/bin"
"""PATH for an environment without PATH, as in `os.defpath`."""


def folder_of(path: str) -> str:
    """Like `os.path.dirname`: return the part before the last slash, without slashes at its end. Returns "" if there is
    no slash."""
    head = path[: path.rfind("/") + 1]
    return head.rstrip("/") or head


def mode_of(path: str, status_of: Callable[[str], posix.stat_result] = posix.lstat) -> int:
    """Return the mode of the file at a path, or 0 if there is no file. `status_of` is `lstat`, or `stat` to follow
    links."""
    try:
        return status_of(path).st_mode
    except (OSError, ValueError):
        return 0


def exists(path: str) -> bool:
    """Like `os.path.lexists`: also return True for a link to a missing file."""
    return mode_of(path) != 0


def is_folder(path: str) -> bool:
    """Like `os.path.isdir`."""
    return mode_of(path, posix.stat) & KIND == DIRECTORY


def is_link(path: str) -> bool:
    """Like `os.path.islink`."""
    return mode_of(path) & KIND == LINK


def make_folders(path: str) -> None:
    """Like `os.makedirs(path, exist_ok=True)`, but without recursion, so a path may have any depth."""
    missing = [path]
    found = False  # True once the folder above the next missing one exists
    while missing:
        try:
            posix.mkdir(missing[-1])
        except FileNotFoundError:
            above = folder_of(missing[-1].rstrip("/"))
            # In /proc, the kernel raises this error for every new folder, although the folder above exists.
            if found or not above or above == missing[-1]:
                raise
            missing.append(above)
            continue
        except OSError:  # for an existing folder, macOS and read-only mounts raise other errors than EEXIST
            if not is_folder(missing[-1]):
                raise
        missing.pop()
        found = True


def find_program(name: str, path: str) -> bool:
    """Return whether an executable program exists. A `name` with a slash is the program's path. Any other name is
    searched in the folders of `path`, such as `/bin:/usr/bin`."""
    if "/" in name:
        return posix.access(name, posix.X_OK)
    return any(posix.access((folder or ".") + "/" + name, posix.X_OK) for folder in path.split(":"))


def execute(argv: list[str], env: dict[str, str]) -> None:
    """Like `os.execvpe`: replace this process by a program, which is searched in the PATH of `env`. Never returns.
    Raises OSError."""
    name = argv[0]
    if "/" in name:
        posix.execve(name, argv, env)
    failure: OSError | None = None
    missing: OSError | None = None
    for folder in env.get("PATH", DEFAULT_PATH).split(":"):
        try:
            posix.execve(folder.rstrip("/") + "/" + name if folder else name, argv, env)
        except (FileNotFoundError, NotADirectoryError) as error:
            missing = error
        except OSError as error:
            failure = failure or error
    raise failure or missing or FileNotFoundError(2, "No such file or directory", name)
