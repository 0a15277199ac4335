"""Path and program functions that `posix` lacks. Importing `os` would lengthen the interpreter's start-up by a sixth.

Invariant: each function behaves like the function of `os` named in its docstring, or as its docstring describes.
"""

from __future__ import annotations

import posix

DEFAULT_PATH = "/bin:/usr/bin"
"""PATH for an environment without PATH, as in `os.defpath`."""


def folder_of(path: str) -> str:
    """Like `os.path.dirname`: the part before the last slash, without slashes at its end; "" for a bare name."""
    head = path[: path.rfind("/") + 1]
    return head.rstrip("/") or head


def exists(path: str) -> bool:
    """Like `os.path.lexists`: True also for a link that leads nowhere."""
    try:
        posix.lstat(path)
    except (OSError, ValueError):
        return False
    return True


def is_folder(path: str) -> bool:
    """Like `os.path.isdir`."""
    try:
        return posix.stat(path).st_mode & 0o170000 == 0o040000
    except (OSError, ValueError):
        return False


def is_link(path: str) -> bool:
    """Like `os.path.islink`."""
    try:
        return posix.lstat(path).st_mode & 0o170000 == 0o120000
    except (OSError, ValueError):
        return False


def make_folders(path: str) -> None:
    """Like `os.makedirs(path, exist_ok=True)`, but without recursion, and so without a limit of depth."""
    missing = [path]
    while missing:
        try:
            posix.mkdir(missing[-1])
        except FileNotFoundError:
            above = folder_of(missing[-1].rstrip("/"))
            if not above or above == missing[-1] or len(missing) > len(path):
                raise
            missing.append(above)
            continue
        except OSError:  # on macOS and read-only mounts, the error for an existing folder is not EEXIST
            if not is_folder(missing[-1]):
                raise
        missing.pop()


def same_file(one: int, other: int) -> bool:
    """Like `os.path.sameopenfile`: return whether two descriptors refer to the same file, socket or pipe."""
    a, b = posix.fstat(one), posix.fstat(other)
    return (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)


def find_program(name: str, path: str) -> bool:
    """Return whether `name` is an executable program in a folder of `path`, or, with a slash, a path of an executable
    program."""
    if "/" in name:
        return posix.access(name, posix.X_OK)
    return any(posix.access((folder or ".") + "/" + name, posix.X_OK) for folder in path.split(":"))


def execute(argv: list[str], env: dict[str, str]) -> None:
    """Like `os.execvpe`: become the program, found by the PATH of `env`. Never returns. Raises OSError."""
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
