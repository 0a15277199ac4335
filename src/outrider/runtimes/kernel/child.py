"""A process that works for the service, watched by a pidfd, and the processes below it.

It is a child that was spawned without copying the service's memory, or one that the zygote forked. This module knows
nothing of sandboxes. Invariants: after `Child.end` the process is dead, and reaped if it was a child; and a signal goes
only to a process that is held by a pidfd, never to a number.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from outrider.errors import RuntimeFailure
from outrider.runtimes.kernel.process_marks import started

LOG_TAIL = 4096
END_SECONDS = 5.0
"""How long the descendants of a child may take to end by themselves."""


class Child:
    """`pidfd` refers to the process; `log` is a file in memory with its standard error. Both are closed by `close`."""

    def __init__(self, pid: int, pidfd: int, log: int) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self._log = log

    @classmethod
    def spawn(
        cls, argv: Sequence[str], env: Mapping[str, str], end: socket.socket, extra: Mapping[int, int] = {}
    ) -> Child:
        """Start `argv[0]` in a session of its own, with `end` as its standard input and output; `extra` maps its
        descriptors (> 2) to ours. `posix_spawn` neither copies page tables nor starts a watcher thread.

        Raises RuntimeFailure when it cannot be executed, OSError when there is no descriptor left to watch it by.
        """
        log = os.memfd_create("stderr")
        actions = [(os.POSIX_SPAWN_DUP2, end.fileno(), target) for target in (0, 1)]
        actions.append((os.POSIX_SPAWN_DUP2, log, 2))
        actions += [(os.POSIX_SPAWN_DUP2, source, target) for target, source in extra.items()]
        try:
            pid = os.posix_spawn(
                argv[0],
                list(argv),
                env,
                file_actions=actions,
                setsid=True,
                setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGXFSZ],
                setsigmask=[],
            )
        except OSError as error:
            os.close(log)
            raise RuntimeFailure(f"cannot start {argv[0]}: {error.strerror}") from error
        try:
            return cls(pid, os.pidfd_open(pid), log)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(log)
            raise

    @classmethod
    def found(cls, pid: int, since: str) -> Child:
        """A process that an earlier node has started, and was started at `since` (`process_marks.started`). Raises
        RuntimeFailure when it is dead."""
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            if started(pid) == since:
                return cls(pid, pidfd, os.memfd_create("stderr"))
            os.close(pidfd)
        raise RuntimeFailure(f"process {pid} of the sandbox has ended")

    def stopped_by_signal(self) -> bool:
        """Whether a signal has stopped it, or a debugger. Call it before `close`."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in ("T", "t")

    def runs(self) -> bool:
        ended = select.poll()
        ended.register(self.pidfd, select.POLLIN)
        return not ended.poll(0)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    async def end(self, seconds: float) -> bool:
        """Wait for its end, kill it when that does not come within `seconds`, reap it and close. Returns whether it
        ended by itself. Call it once, shielded from cancellation."""
        in_time = await self.ends_within(seconds)
        if not in_time:
            self.kill()
            await readable(self.pidfd)
        self.reap()
        return in_time

    async def ends_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await readable(self.pidfd)
        except TimeoutError:
            return False
        return True

    def reap(self) -> None:
        """Reap a process that has ended, and close."""
        with contextlib.suppress(ChildProcessError):  # it may be a child of the zygote's, not ours
            os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
        self.close()

    def log_tail(self) -> str:
        """The end of what it wrote to standard error; empty after `close`."""
        if self._log < 0:
            return ""
        size = os.fstat(self._log).st_size
        return os.pread(self._log, LOG_TAIL, max(0, size - LOG_TAIL)).decode(errors="replace").strip()

    def close(self) -> None:
        """Give the descriptors back. Idempotent."""
        if self._log >= 0:
            os.close(self._log)
            os.close(self.pidfd)
            self._log = -1


async def readable(fd: int) -> None:
    """Wait until `fd` is readable. A pidfd is when its process is dead."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


class Descendants:
    """Those of a child; made before that ends. `hold` is called again for processes that came later."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._held: dict[int, int] = {}

    def hold(self) -> None:
        """Open a pidfd of each process that is below the child now. Blocks for a few system calls each."""
        todo = [self._child.pid, *self._held]
        while todo:
            above = todo.pop()
            for pid in _children(above) - self._held.keys():
                with contextlib.suppress(OSError):
                    self._held[pid] = os.pidfd_open(pid)
                    if _status(pid, "PPid") != [above]:  # the number went to another process meanwhile
                        os.close(self._held.pop(pid))
                        continue
                    todo.append(pid)

    def kill_first_inside(self) -> None:
        """SIGKILL the first process of a pid namespace below the child: all processes in there die with it."""
        for pid, held in self._held.items():
            numbers = _status(pid, "NSpid")
            if len(numbers) > 1 and numbers[-1] == 1:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(held, signal.SIGKILL)

    async def end(self) -> None:
        """Wait until all held processes are dead, and kill those that have not ended after END_SECONDS."""
        held, self._held = self._held, {}
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    for descriptor in held.values():
                        await readable(descriptor)
            for descriptor in held.values():
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                await readable(descriptor)
        finally:
            for descriptor in held.values():
                os.close(descriptor)


def _children(pid: int) -> set[int]:
    """By the children of its threads; empty for a process that is gone, as it may be at any moment."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
                found.update(map(int, words))
    return found


def _status(pid: int, name: str) -> list[int]:
    """The numbers of one line of a process's status; empty when it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return [int(word) for word in line.split()[1:]]
    return []
