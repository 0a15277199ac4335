"""A process that works for the service, watched through a pidfd, and its descendants.

The process is a child of this process, or a fork of the zygote. Invariants: after `Child.end` the process is dead, and
reaped if it was a child. A signal never reaches another process with a reused pid: it is sent through a pidfd, or to a
child that is not yet reaped.
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

from outrider.errors import LOG_TAIL, RuntimeFailure
from outrider.sandbox.runtimes.kernel.process_marks import stat_fields

END_SECONDS = 5.0
"""Time limit for the descendants of a child to exit by themselves."""


class Child:
    """One process. `pidfd` is its pidfd. `log` is the descriptor of a file in memory that contains its standard error.
    `close` closes both."""

    def __init__(self, pid: int, pidfd: int, log: int) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self._log = log
        self._exited: asyncio.Future[None] | None = None

    @classmethod
    def spawn(
        cls, argv: Sequence[str], env: Mapping[str, str], end: socket.socket, extra: Mapping[int, int] = {}
    ) -> Child:
        """Start `argv[0]` in a new session, with `end` as its standard input and output. `extra` maps further
        descriptors of the new process (> 2) to descriptors of this process. `posix_spawn` is used because it neither
        copies page tables nor needs a thread that waits for the exit.

        Raises RuntimeFailure when `argv[0]` cannot be executed, and OSError when no descriptor is left for the pidfd.
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

    def stopped_by_signal(self) -> bool:
        """Return whether a signal or a debugger has stopped the process. Call this method before `close`."""
        return stat_fields(self.pid)[0] in "Tt"

    def runs(self) -> bool:
        ended = select.poll()
        ended.register(self.pidfd, select.POLLIN)
        return not ended.poll(0)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    async def end(self, seconds: float) -> bool:
        """Wait until the process exits, and kill it after `seconds`. Then reap it and close the descriptors. Returns
        whether the process exited without being killed. Call once, shielded from cancellation."""
        in_time = await self.ends_within(seconds)
        if not in_time:
            self.kill()
            await self._exit()
        self.reap()
        return in_time

    async def ends_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._exit()
        except TimeoutError:
            return False
        return True

    async def _exit(self) -> None:
        """Wait for the exit. Concurrent waiters share one reader, because an event loop allows only one per
        descriptor."""
        if self._exited is None:
            if not self.runs():
                return
            loop = asyncio.get_running_loop()
            self._exited = loop.create_future()
            loop.add_reader(self.pidfd, self._note_exit, self._exited)
        await asyncio.shield(self._exited)

    def _note_exit(self, exited: asyncio.Future[None]) -> None:
        exited.get_loop().remove_reader(self.pidfd)
        exited.set_result(None)

    def reap(self) -> None:
        """Reap a process that has exited, and close the descriptors."""
        with contextlib.suppress(ChildProcessError):  # the process may be a child of the zygote
            os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
        self.close()

    def log_tail(self) -> str:
        """Return the last LOG_TAIL bytes of the process's standard error, or "" after `close`."""
        if self._log < 0:
            return ""
        size = os.fstat(self._log).st_size
        return os.pread(self._log, LOG_TAIL, max(0, size - LOG_TAIL)).decode(errors="replace").strip()

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        if self._log >= 0:
            if self._exited is not None and not self._exited.done() and not self._exited.get_loop().is_closed():
                self._note_exit(self._exited)
            os.close(self._log)
            os.close(self.pidfd)
            self._log = -1


async def readable(fd: int) -> None:
    """Wait until `fd` is readable. A pidfd is readable when its process is dead. Only one task may wait for an `fd` at
    a time."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


class Descendants:
    """The descendants of a child. Call `hold` before the child exits, and again after more processes have started,
    because only descendants that `hold` found are ended."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._held: dict[int, int] = {}

    def hold(self) -> None:
        """Open a pidfd of each current descendant of the child. Blocks for a few system calls per process."""
        todo = [self._child.pid, *self._held]
        while todo:
            above = todo.pop()
            for pid in _children(above) - self._held.keys():
                with contextlib.suppress(OSError):
                    self._held[pid] = os.pidfd_open(pid)
                    if _status(pid, "PPid") != [above]:  # another process has this pid, or the parent has exited
                        os.close(self._held.pop(pid))
                        continue
                    todo.append(pid)

    def kill_first_inside(self) -> None:
        """SIGKILL the first process of a pid namespace below the child. The kernel then kills all other processes of
        the namespace."""
        for pid, held in self._held.items():
            numbers = _status(pid, "NSpid")
            if len(numbers) > 1 and numbers[-1] == 1:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(held, signal.SIGKILL)

    async def end(self) -> None:
        """Wait until all processes found by `hold` have exited. Kills those that still run after END_SECONDS."""
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
    """Return the children of all threads of a process. Empty if the process is gone."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
                found.update(map(int, words))
    return found


def _status(pid: int, name: str) -> list[int]:
    """Return the numbers in one line of a process's status. Empty if the process is gone. Lines are split only at
    newlines, because the program's name may contain any other character."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_bytes().split(b"\n"):
            if line.startswith(f"{name}:".encode()):
                return [int(word) for word in line.split()[1:]]
    return []
