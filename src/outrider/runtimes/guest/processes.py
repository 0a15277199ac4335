"""Processes as /proc tells of them: finding all that descend from one, killing them all, starting one.

Invariant: what `kill_tree` does not return was not alive at its last look at /proc.
"""

from __future__ import annotations

import errno
import posix
import time
from typing import TYPE_CHECKING

from outrider.runtimes.guest.filesystem.paths import execute, is_folder

if TYPE_CHECKING:
    import signal as _signal
else:
    import _signal  # `signal` would add half again to the start-up time


LOOKS = 200


class Process:
    """What is a zombie has ended. Its first thread alone may have, and is one then, while others go on."""

    def __init__(self, pid: int, fields: list[bytes]) -> None:
        self.pid = pid
        self.zombie = fields[0] in (b"Z", b"X") and len(threads(pid)) <= 1
        self.parent = int(fields[1])
        self.group = int(fields[2])


def processes() -> dict[int, Process]:
    found = {}
    for name in posix.listdir("/proc"):
        if name.isdigit():
            stat = slurp("/proc/" + name + "/stat")
            if stat:
                found[int(name)] = Process(int(name), stat.rpartition(b")")[2].split())
    return found


def slurp(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


def threads(pid: int) -> list[str]:
    """By their numbers; none of what is gone."""
    try:
        return posix.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def environment_of(pid: int) -> bytes:
    """As it was started. A thread that has ended has none to show, others have."""
    found = slurp(f"/proc/{pid}/environ")
    for thread in () if found else threads(pid):
        found = found or slurp(f"/proc/{pid}/task/{thread}/environ")
    return found


def descendants(table: dict[int, Process], roots: set[int]) -> set[int]:
    """`roots` and everything below them that is alive."""
    below: dict[int, list[int]] = {}
    for process in table.values():
        below.setdefault(process.parent, []).append(process.pid)
    found: set[int] = set()
    queue = list(roots)
    while queue:
        pid = queue.pop()
        if pid not in found:
            found.add(pid)
            queue += below.get(pid, ())
    return {pid for pid in found if pid in table and not table[pid].zombie}


def adopted(table: dict[int, Process], mark: bytes) -> set[int]:
    """Orphans that were re-parented to this server and carry `mark` in their environment."""
    me = posix.getpid()
    return {p.pid for p in table.values() if p.parent == me and mark in environment_of(p.pid)}


def send_signal(pid: int, number: int) -> bool:
    """False when there is no such process (any more)."""
    try:
        posix.kill(pid, number)
    except OSError:
        return False
    return True


def kill_tree(roots: set[int], mark: bytes | None = None) -> set[int]:
    """SIGKILL `roots`, all below them and all that carries `mark`, until a look at /proc finds none. What is still
    alive after many looks, because the kernel holds it or it multiplies too fast, is returned."""
    victims: set[int] = set()
    for attempt in range(LOOKS):
        table = processes()
        start = roots | (adopted(table, mark) if mark else set())
        victims = descendants(table, start) - {posix.getpid()}
        if not victims:
            break
        for pid in victims:
            send_signal(pid, _signal.SIGKILL)
        time.sleep(0 if attempt < 3 else 0.002)
    return victims


def exit_code(status: int) -> int:
    return 128 + posix.WTERMSIG(status) if posix.WIFSIGNALED(status) else posix.WEXITSTATUS(status)


def sacrifice() -> None:
    """When memory runs out, this process and its children go before the tool server."""
    try:
        fd = posix.open("/proc/self/oom_score_adj", posix.O_WRONLY)
        posix.write(fd, b"1000")
        posix.close(fd)
    except OSError:
        return


def spawn(argv: list[str], env: dict[str, str], cwd: str, fds: dict[int, int], tty: bool = False) -> int:
    """Fork and execute in a session of its own with `fds` {target: source} and nothing else open."""
    pid = posix.fork()
    if pid:
        return pid
    code = 127
    try:
        posix.setsid()
        sacrifice()
        _signal.set_wakeup_fd(-1)
        for number in (_signal.SIGCHLD, _signal.SIGPIPE, _signal.SIGXFSZ, _signal.SIGINT):
            _signal.signal(number, _signal.SIG_DFL)
        for target, source in fds.items():
            posix.dup2(source, target)
        if tty:
            import fcntl
            import termios

            fcntl.ioctl(1, termios.TIOCSCTTY, 0)
        posix.chdir(cwd)
        execute(argv, env)
    except OSError as error:
        code = 127 if error.errno == errno.ENOENT else 126
        where = cwd if not is_folder(cwd) else argv[0]
        posix.write(2, (where + ": " + posix.strerror(error.errno or 0) + "\n").encode("utf-8", "surrogateescape"))
    except BaseException as error:  # whatever it is: this fork ends, and must not go on as the server
        posix.write(2, (type(error).__name__ + ": " + str(error) + "\n").encode("utf-8", "replace"))
    finally:
        posix._exit(code)
