"""Processes as /proc shows them: finding all that descend from one, killing them all, starting one.

It does not know what processes are for. Invariant: what `kill_tree` does not return was not alive when it last looked
at /proc.
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
"""Times that `kill_tree` looks before it gives up: a process that forks faster than it is killed can win forever."""


class Process:
    """A line of /proc/PID/stat. `zombie`: the process has ended. The kernel says the same of one whose first thread
    alone has ended, while others go on; its number of threads tells the two apart."""

    def __init__(self, pid: int, fields: list[bytes]) -> None:
        self.pid = pid
        self.zombie = fields[0] in (b"Z", b"X") and len(threads(pid)) <= 1
        self.parent = int(fields[1])
        self.group = int(fields[2])


def processes() -> dict[int, Process]:
    found = {}
    for name in posix.listdir("/proc"):
        if name.isdigit():
            stat = read_or_empty("/proc/" + name + "/stat")
            if stat:
                # Behind the last parenthesis: a program's name may have any character.
                found[int(name)] = Process(int(name), stat.rpartition(b")")[2].split())
    return found


def read_or_empty(path: str) -> bytes:
    """A file's content; b"" if it cannot be read. A process may end while it is looked at."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


def threads(pid: int) -> list[str]:
    """The numbers of a process's threads; none if it has ended."""
    try:
        return posix.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def environment_of(pid: int) -> bytes:
    """The environment that a process was started with. A first thread that has ended shows none, others do."""
    found = read_or_empty(f"/proc/{pid}/environ")
    for thread in () if found else threads(pid):
        found = found or read_or_empty(f"/proc/{pid}/task/{thread}/environ")
    return found


def descendants(table: dict[int, Process], roots: set[int]) -> set[int]:
    """Those of `roots` and of everything below them that are alive."""
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


def adopted_orphans(table: dict[int, Process], mark: bytes) -> set[int]:
    """Orphans that were reparented to this server and have `mark` in their environment: daemons leave their session and
    their parent, but keep their environment."""
    me = posix.getpid()
    return {p.pid for p in table.values() if p.parent == me and mark in environment_of(p.pid)}


def send_signal(pid: int, number: int) -> bool:
    """False when there is no such process any more."""
    try:
        posix.kill(pid, number)
    except OSError:
        return False
    return True


def kill_tree(roots: set[int], mark: bytes | None = None) -> set[int]:
    """Send SIGKILL to `roots`, to all below them and to all that has `mark`, until a look at /proc finds none of them.
    Returns what is still alive after many looks: processes that the kernel holds, or that fork too fast."""
    victims: set[int] = set()
    for attempt in range(LOOKS):
        table = processes()
        start = roots | (adopted_orphans(table, mark) if mark else set())
        victims = descendants(table, start) - {posix.getpid()}
        if not victims:
            break
        for pid in victims:
            send_signal(pid, _signal.SIGKILL)
        time.sleep(0 if attempt < 3 else 0.002)  # most have died by the second look
    return victims


def exit_code(status: int) -> int:
    """128 + N for a signal N, as shells have it."""
    return 128 + posix.WTERMSIG(status) if posix.WIFSIGNALED(status) else posix.WEXITSTATUS(status)


def offer_to_oom_killer() -> None:
    """Have the kernel kill this process and its children before the tool server when memory runs out."""
    try:
        fd = posix.open("/proc/self/oom_score_adj", posix.O_WRONLY)
        posix.write(fd, b"1000")
        posix.close(fd)
    except OSError:
        return


def spawn(argv: list[str], env: dict[str, str], cwd: str, fds: dict[int, int], tty: bool = False) -> int:
    """Fork, and execute a program in a session of its own with `fds` {target: source} and nothing else open. What goes
    wrong in the fork is printed on its standard error; its exit code is 127 for a missing program, else 126."""
    pid = posix.fork()
    if pid:
        return pid
    code = 127
    try:
        posix.setsid()
        offer_to_oom_killer()
        _signal.set_wakeup_fd(-1)  # the fork must not wake the server's loop
        for number in (_signal.SIGCHLD, _signal.SIGPIPE, _signal.SIGXFSZ, _signal.SIGINT):
            # Python and this server ignore or catch these, and an ignored signal stays ignored in the program.
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
