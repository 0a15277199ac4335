"""Records which processes start and end in a sandbox that has its own process ids.

The kernel announces processes only to the host's root, so this module scans /proc. It scans often while processes start
or end, and seldom while nothing changes. A scan that finds nothing new reads one short file, and one more file for each
living process. Invariants: the record has a bounded size, and every recorded process has really run. A process that
ends between two scans may be missing.
"""

from __future__ import annotations

import posix
import time
from typing import TYPE_CHECKING

from outrider.sandbox.runtimes.guest.poll_loop import REST_FACTOR, Loop
from outrider.sandbox.runtimes.guest.processes import SPARE, read_or_empty, threads

if TYPE_CHECKING:
    from typing import Any

SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
"""Minimum and maximum seconds between two scans."""
IDLE_FACTOR = 5
"""The pause before the next scan is 1/IDLE_FACTOR of the time since the last change, within the two limits above. After
a slow scan, the pause is longer (REST_FACTOR)."""
MOST_WATCHED = 100
"""While the sandbox has more processes than this, new processes are not recorded, and no process's files in /proc are
read. Reading such a file waits while the process forks, so a fork bomb could block the server forever."""
SCAN_SECONDS = 0.01
"""After this many seconds a scan starts no further read. The next scan continues."""
MOST_REPORTED = 200
"""Maximum number of processes in one reply. `MOST_PROCESSES` in the host's `tool_server/client.py` has the same
value."""
MOST_WAITING = 1000
"""Maximum number of records that wait for the host's next call. Further records are dropped."""
COMMAND_BYTES = 400
"""Maximum bytes of a command line that are recorded."""
NAME_READS = 3
"""Number of scans that read a process's command line after the process, or a program in it, has started. Several are
needed, because a new process shows its parent's command line until it has started its own program."""
MOST_PROGRAMS = 10
"""After this many programs, the command line of a process is not read again. Otherwise a process that starts programs
all the time, without a fork, would fill the timeline."""
CLOCK_BOOTTIME = 7


class WatchedProcess:
    """One recorded process. `began` and `ended` are seconds of the monotonic clock."""

    def __init__(self, pid: int, stat: Stat, began: float, command: bytes) -> None:
        self.pid = pid
        self.parent = stat.parent
        self.program = stat.program
        self.programs = 1
        self.ticks = stat.ticks
        self.began = began
        self.command = command
        self.name_reads = 1
        self.ended: float | None = None
        self.code: int | None = None


class ProcessWatch:
    """Scans /proc as long as the loop runs."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.me = posix.getpid()
        self.own_command = command_of(self.me)
        """The server's command line. The server's forks have the same command line until they start a program."""
        self.living: dict[int, WatchedProcess] = {}
        self.news: dict[WatchedProcess, None] = {}
        """The processes to report, in the order in which they changed."""
        self.newest = b""
        self.changed = 0.0
        self.hurry()

    def hurry(self) -> None:
        """Scan soon, because a program is about to start."""
        self.changed = time.monotonic()
        self.loop.at(self, SHORTEST_PAUSE / 2, self.scan)

    def report(self) -> dict[str, Any]:
        """Return the processes that changed since the last report, at most MOST_REPORTED."""
        self.scan()
        now = time.monotonic()
        found = list(self.news)[:MOST_REPORTED]
        for process in found:
            del self.news[process]
        return {"processes": [reported(process, now) for process in found]}

    def note_exit(self, pid: int, code: int) -> None:
        """Record the exit of a child of the server. The loop has just collected its exit code."""
        process = self.living.get(pid)
        if process is not None:
            process.code = code
            self._end(process)

    def scan(self) -> None:
        began = time.monotonic()
        # the last field is the id of the newest process in this pid namespace
        newest = read_or_empty("/proc/loadavg").rpartition(b" ")[2]
        pids: set[int] = set()
        if newest != self.newest or not newest:
            self.newest = newest
            pids = {int(name) for name in SPARE.read(posix.listdir, "/proc") if name.isdigit()}
        if len(pids) > MOST_WATCHED:
            self.newest = b""
            for process in list(self.living.values()):
                if process.pid not in pids:
                    self._end(process)
        else:
            self._read_processes(pids, began + SCAN_SECONDS)
        now = time.monotonic()
        wait = min(LONGEST_PAUSE, max(SHORTEST_PAUSE, (now - self.changed) / IDLE_FACTOR))
        self.loop.at(self, max(wait, REST_FACTOR * (now - began)), self.scan)

    def _read_processes(self, pids: set[int], deadline: float) -> None:
        """Read the files of the recorded living processes, and of the new processes among `pids`."""
        for process in list(self.living.values()):
            if time.monotonic() > deadline:
                break
            self._read_process(process)
        since_boot = time.clock_gettime(CLOCK_BOOTTIME)
        for pid in pids - self.living.keys() - {self.me, 1}:  # process 1 is not one of the sandbox's programs
            if time.monotonic() > deadline:
                self.newest = b""
                break
            self._add(pid, since_boot)

    def _read_process(self, process: WatchedProcess) -> None:
        stat = stat_of(process.pid)
        if stat is not None and stat.state == b"Z" and stat.parent == self.me:
            return  # a child of the server has exited; `note_exit` will record this with the exit code
        if stat is None or has_ended(process.pid, stat) or stat.ticks != process.ticks:
            self._end(process)
            return
        if stat.program != process.program and process.programs < MOST_PROGRAMS:  # perhaps long after its own start
            process.program, process.name_reads = stat.program, 0
            process.programs += 1
        if process.name_reads < NAME_READS:
            process.name_reads += 1
            command = command_of(process.pid)
            if command and command != process.command:
                process.command = command
                self._note(process)

    def _add(self, pid: int, since_boot: float) -> None:
        stat = stat_of(pid)
        if stat is None or has_ended(pid, stat):
            return
        command = command_of(pid)
        if command == self.own_command:
            self.newest = b""  # this fork of the server has not started its program yet, so scan again
            return
        age = max(0.0, since_boot - int(stat.ticks) / posix.sysconf("SC_CLK_TCK"))
        process = WatchedProcess(pid, stat, time.monotonic() - age, command)
        self.living[pid] = process
        self._note(process)

    def _end(self, process: WatchedProcess) -> None:
        process.ended = time.monotonic()
        self.living.pop(process.pid, None)
        self._note(process)

    def _note(self, process: WatchedProcess) -> None:
        self.changed = time.monotonic()
        if process in self.news or len(self.news) < MOST_WAITING:
            self.news[process] = None


class Stat:
    """Fields of /proc/PID/stat: the state, one letter; the parent's process id; and the start of the process in clock
    ticks since the boot. `program` changes when the process starts a program: it is the address of the stack, or the
    program's name if the kernel hides the address."""

    def __init__(self, name: bytes, fields: list[bytes]) -> None:
        self.state = fields[0]
        self.parent = int(fields[1])
        self.ticks = fields[19]
        self.program = name if fields[25] == b"0" else fields[25]


def stat_of(pid: int) -> Stat | None:
    """Return None if the process does not exist."""
    # the name is in parentheses, and may contain some itself
    head, _, tail = read_or_empty(f"/proc/{pid}/stat").rpartition(b")")
    fields = tail.split()
    return Stat(head.partition(b"(")[2], fields) if len(fields) > 25 else None


def has_ended(pid: int, stat: Stat) -> bool:
    """Return whether all threads of a process have ended."""
    return stat.state in (b"Z", b"X") and len(threads(pid)) <= 1


def command_of(pid: int) -> bytes:
    """Return the beginning of a process's command line, or its name in brackets if the command line is empty."""
    words = read_or_empty(f"/proc/{pid}/cmdline")[:COMMAND_BYTES].rstrip(b"\0").replace(b"\0", b" ")
    return words or b"[" + read_or_empty(f"/proc/{pid}/comm").rstrip(b"\n") + b"]"


def reported(process: WatchedProcess, now: float) -> list[Any]:
    ended = None if process.ended is None else max(0, int((now - process.ended) * 1000))
    began = max(0, int((now - process.began) * 1000))
    return [process.pid, process.parent, process.command, began, ended, process.code]
