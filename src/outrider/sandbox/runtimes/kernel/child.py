"""A process that works for the service, and its descendants. The process is watched through a pidfd.

The watched process is a child of the Python process that runs this module, or a fork of the zygote. Invariants: after
`Child.end`, the process is dead. If it was a child, its exit code has been collected. A signal never reaches another
process that got the same pid: it is sent through a pidfd, or to a child whose exit code has not been collected.
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

SIGNALS = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
"""Signals whose default handling is restored in a new process. Otherwise the new process would inherit the signals that
this process ignores: Python ignores SIGPIPE, and `nohup` makes the service ignore SIGHUP."""
END_SECONDS = 5.0
"""Seconds in which the descendants of a child must exit by themselves."""


class Child:
    """One process. `pidfd` is a descriptor of the process. `log` is the descriptor of a file in memory with the
    process's standard error. `close` closes both descriptors."""

    def __init__(self, pid: int, pidfd: int, log: int) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self._log = log
        self._exited: asyncio.Future[None] | None = None

    @classmethod
    def spawn(
        cls, argv: Sequence[str], env: Mapping[str, str], end: socket.socket, extra: Mapping[int, int] = {}
    ) -> Child:
        """Start `argv[0]` in a new session, with `end` as its standard input and output. `extra` maps descriptors of
        the new process (> 2) to the descriptors of this process that they duplicate. `posix_spawn` is used, because it
        does not copy page tables, and needs no thread that waits for the exit.

        Raises RuntimeFailure if `argv[0]` cannot be executed, and OSError if no descriptor is left for the pidfd.
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
                setsigdef=SIGNALS,
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
        """Wait until the process exits. If it still runs after `seconds`, kill it. Then collect its exit code and close
        the descriptors. Returns whether the process exited without being killed. Call this once, shielded from
        cancellation."""
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
        """Wait for the exit of the process. All tasks that wait share one reader, because an event loop allows only one
        reader per descriptor."""
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
        """Collect the exit code of a process that has exited, and close the descriptors."""
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
        """Close both descriptors. May be called twice."""
        if self._log >= 0:
            if self._exited is not None and not self._exited.done() and not self._exited.get_loop().is_closed():
                self._note_exit(self._exited)
            os.close(self._log)
            os.close(self.pidfd)
            self._log = -1


async def readable(fd: int) -> None:
    """Wait until `fd` is readable. A pidfd is readable if its process is dead. Only one task at a time may wait for the
    same descriptor."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


class Descendants:
    """The descendants of a child. `end` ends only the descendants that `hold` has found. So call `hold` before the
    child exits, and again after more processes have started."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._held: dict[int, int] = {}

    def hold(self) -> None:
        """Open a pidfd of each descendant that the child has now. The call blocks for a few system calls per
        process."""
        todo = [self._child.pid, *self._held]
        while todo:
            above = todo.pop()
            for pid in _children(above) - self._held.keys():
                with contextlib.suppress(OSError):
                    self._held[pid] = os.pidfd_open(pid)
                    # drop the pidfd if the pid now belongs to another process, or the parent has exited
                    if _status(pid, "PPid") != [above]:
                        os.close(self._held.pop(pid))
                        continue
                    todo.append(pid)

    def kill_first_inside(self) -> None:
        """Send SIGKILL to the first process of a pid namespace below the child. The kernel then kills all other
        processes in the namespace."""
        for pid, held in self._held.items():
            numbers = _status(pid, "NSpid")
            if len(numbers) > 1 and numbers[-1] == 1:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(held, signal.SIGKILL)

    async def end(self) -> None:
        """Wait until all processes that `hold` found have exited. After END_SECONDS, kill those that still run."""
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
    """Return the children of all threads of a process. The set is empty if the process no longer exists."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
                found.update(map(int, words))
    return found


def _status(pid: int, name: str) -> list[int]:
    """Return the numbers in one line of a process's status, or no numbers if the process no longer exists. The text is
    split only at newlines, because the program's name may contain any other character."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_bytes().split(b"\n"):
            if line.startswith(f"{name}:".encode()):
                return [int(word) for word in line.split()[1:]]
    return []
