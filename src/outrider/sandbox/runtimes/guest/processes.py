"""Starts processes, finds the descendants of a process in /proc, and kills them.

Invariant: `kill_tree` returns every process that was still alive in its last scan of /proc.
"""

from __future__ import annotations

import errno
import posix
import time
from typing import TYPE_CHECKING

from outrider.sandbox.runtimes.guest.filesystem.paths import execute, is_folder

if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")
else:
    import _signal  # importing `signal` would make the start longer by half

SIGINT, SIGKILL, SIGSTOP = _signal.SIGINT, _signal.SIGKILL, _signal.SIGSTOP
OTHER_ERROR = 255
"""Exit code of a child of `fork_with_pipe` that raised an exception without an errno."""
FAST_SCANS = 3
"""The first FAST_SCANS scans of `kill_tree` kill each process that they find. Later scans first stop every new
process."""
SCANS = 200
"""Maximum number of scans in `kill_tree`. Without a maximum, processes that fork faster than they are killed would keep
it busy forever."""


class Spare:
    """A spare descriptor for reading /proc. If programs make the server use up all other descriptors, the server can
    still find and kill these programs."""

    def __init__(self) -> None:
        self.fd = -1

    def hold(self) -> None:
        try:
            self.fd = posix.open("/dev/null", posix.O_RDONLY)
        except OSError:
            self.fd = -1

    def read(self, action: Callable[[str], T], path: str) -> T:
        """Return `action(path)`. The action opens and closes one descriptor, the spare one if no other is free. Raises
        OSError."""
        try:
            return action(path)
        except OSError as error:
            if error.errno != errno.EMFILE or self.fd < 0:
                raise
        posix.close(self.fd)
        try:
            return action(path)
        finally:
            self.hold()


SPARE = Spare()


class Process:
    """One process, as /proc/PID/stat describes it. `zombie` is True if the whole process has ended. The kernel calls a
    process a zombie even if only its first thread has ended, so the threads are counted, too."""

    def __init__(self, pid: int, fields: list[bytes]) -> None:
        self.pid = pid
        self.zombie = fields[0] in (b"Z", b"X") and len(threads(pid)) <= 1
        self.parent = int(fields[1])
        self.group = int(fields[2])


def processes() -> dict[int, Process]:
    found = {}
    for name in SPARE.read(posix.listdir, "/proc"):
        if name.isdigit():
            stat = read_or_empty("/proc/" + name + "/stat")
            if stat:
                # The program's name may contain any character, even a parenthesis. So the fields begin after the last
                # parenthesis.
                found[int(name)] = Process(int(name), stat.rpartition(b")")[2].split())
    return found


def read_or_empty(path: str) -> bytes:
    """Return a file's content, or b"" if it cannot be read, for example because the process has just ended."""
    try:
        return SPARE.read(read_file, path)
    except OSError:
        return b""


def read_file(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


def threads(pid: int) -> list[str]:
    """Return the ids of a process's threads. The list is empty if the process has ended."""
    try:
        return SPARE.read(posix.listdir, f"/proc/{pid}/task")
    except OSError:
        return []


def read_of_process(pid: int, name: str, needed: bytes = b"") -> bytes:
    """Return the content of the file `name` in /proc/PID. If the process's first thread has ended, this file is empty
    or does not contain `needed`. The file of another thread is then returned."""
    text = read_or_empty(f"/proc/{pid}/{name}")
    for thread in () if text and needed in text else threads(pid):
        text = read_or_empty(f"/proc/{pid}/task/{thread}/{name}")
        if text and needed in text:
            break
    return text


def descendants(table: dict[int, Process], roots: set[int]) -> set[int]:
    """Return the living processes among `roots`, and all living processes below `roots`."""
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
    """Return the children of this server that have `mark` in their environment. Among them are adopted orphans, such as
    daemons: a daemon leaves its session and its parent, but keeps its environment."""
    me = posix.getpid()
    return {p.pid for p in table.values() if p.parent == me and mark in read_of_process(p.pid, "environ")}


def send_signal(pid: int, number: int) -> bool:
    """Send a signal. Returns False when the process no longer exists."""
    try:
        posix.kill(pid, number)
    except OSError:
        return False
    return True


def kill_tree(roots: set[int], mark: bytes | None = None) -> set[int]:
    """SIGKILL `roots`, adopted orphans with `mark`, and all descendants of both, until a scan of /proc finds none
    alive. Returns the processes that are still alive in the last of SCANS scans. The kernel does not let them exit, or
    they fork too fast.

    A fork bomb survives the first scans. If the number of processes is limited, each killed process makes room for
    another fork, but a stopped process does not. So later scans send SIGSTOP until all processes are stopped, and then
    SIGKILL."""
    victims: set[int] = set()
    stopped: set[int] = set()
    for attempt in range(SCANS):
        table = processes()
        start = roots | (adopted_orphans(table, mark) if mark else set())
        victims = descendants(table, start) - {posix.getpid()}
        if not victims:
            break
        number = SIGSTOP if FAST_SCANS <= attempt < SCANS // 2 and not victims <= stopped else SIGKILL
        if number == SIGSTOP:
            stopped |= victims
        for pid in victims:
            send_signal(pid, number)
        time.sleep(0 if attempt < FAST_SCANS else 0.002)  # by the second scan, most victims have exited
    return victims


def exit_code(status: int) -> int:
    """Return the exit code in a wait status. As in shells, it is 128 + N if signal N ended the process."""
    return 128 + posix.WTERMSIG(status) if posix.WIFSIGNALED(status) else posix.WEXITSTATUS(status)


def offer_to_oom_killer() -> None:
    """If memory runs out, let the kernel kill this process and its children before the tool server."""
    try:
        fd = posix.open("/proc/self/oom_score_adj", posix.O_WRONLY)
        posix.write(fd, b"1000")
        posix.close(fd)
    except OSError:
        return


def pipes(number: int) -> list[tuple[int, int]]:
    """Make several pipes, as pairs (reader, writer). If this raises OSError, no pipe stays open."""
    made: list[tuple[int, int]] = []
    try:
        for _ in range(number):
            made.append(posix.pipe())
    except OSError:
        for pair in made:
            for fd in pair:
                posix.close(fd)
        raise
    return made


def fork_with_pipe(work: Callable[[int], object], *, reads: bool = False) -> tuple[int, int]:
    """Fork a child that calls `work` with one end of a new pipe. With `reads`, `work` gets the end for reading,
    otherwise the end for writing.

    Returns the child's pid and the other end, which is non-blocking. The child exits with 0, with the errno of an
    OSError that `work` raised, or with OTHER_ERROR. If this function raises OSError, no pipe stays open."""
    reader, writer = posix.pipe()
    theirs, ours = (reader, writer) if reads else (writer, reader)
    try:
        pid = posix.fork()
    except OSError:
        posix.close(reader)
        posix.close(writer)
        raise
    if pid == 0:
        code = OTHER_ERROR
        try:
            posix.close(ours)
            work(theirs)
            code = 0
        except OSError as error:
            code = error.errno or OTHER_ERROR
        finally:
            posix._exit(code)
    posix.close(theirs)
    posix.set_blocking(ours, False)
    return pid, ours


def spawn(argv: list[str], env: dict[str, str], cwd: str, fds: dict[int, int], tty: bool = False) -> int:
    """Start a program in a new session. `fds` maps the program's descriptors to the descriptors of this process that
    they duplicate. The program inherits no other descriptor.

    If the program cannot be executed, the error is written to the program's standard error. The exit code is then 127
    if the program or folder is missing, and 126 for any other OSError."""
    pid = posix.fork()
    if pid:
        return pid
    code = 127
    try:
        posix.setsid()
        offer_to_oom_killer()
        _signal.set_wakeup_fd(-1)  # a signal to the fork must not wake the server's loop
        for number in (_signal.SIGCHLD, _signal.SIGPIPE, _signal.SIGXFSZ, SIGINT):
            # Reset the signals that Python or this server ignores or handles. A signal that is still ignored here would
            # also be ignored in the program.
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
    except BaseException as error:  # whatever the error is, this fork must not continue as the server
        posix.write(2, (type(error).__name__ + ": " + str(error) + "\n").encode("utf-8", "replace"))
    finally:
        posix._exit(code)
