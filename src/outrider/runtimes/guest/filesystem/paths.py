"""What the tool server needs of `os` beyond `posix`: importing `os` would add a sixth to the interpreter's start.

Invariant: what is named as in `os` behaves as it does there.
"""

from __future__ import annotations

import posix

DEFAULT_PATH = "/bin:/usr/bin"


def folder_of(path: str) -> str:
    """What comes before the last slash, without slashes at its end; "" for a bare name."""
    head = path[: path.rfind("/") + 1]
    return head.rstrip("/") or head


def is_folder(path: str) -> bool:
    try:
        return posix.stat(path).st_mode & 0o170000 == 0o040000
    except (OSError, ValueError):
        return False


def is_link(path: str) -> bool:
    try:
        return posix.lstat(path).st_mode & 0o170000 == 0o120000
    except (OSError, ValueError):
        return False


def make_folders(path: str) -> None:
    """`os.makedirs(path, exist_ok=True)`, for any number of folders."""
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
        except OSError:  # macOS and read-only mounts do not say EEXIST for what exists
            if not is_folder(missing[-1]):
                raise
        missing.pop()


def same_file(one: int, other: int) -> bool:
    """Whether two descriptors are of the same file, socket or pipe."""
    a, b = posix.fstat(one), posix.fstat(other)
    return (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)


def find_program(name: str, path: str) -> bool:
    """Whether a program of that name, or at that path, can be executed."""
    if "/" in name:
        return posix.access(name, posix.X_OK)
    return any(posix.access((folder or ".") + "/" + name, posix.X_OK) for folder in path.split(":"))


def execute(argv: list[str], env: dict[str, str]) -> None:
    """`os.execvpe`: become the program, found by the PATH of `env`. Returns never; raises OSError."""
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
