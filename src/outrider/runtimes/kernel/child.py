"""A process that works for the service: a child, spawned without copying the service's memory, or one forked for it
by its zygote. Watched by pidfd.

It knows nothing of sandboxes. Invariant: after `end` returned, the process is dead, and reaped if it was a child.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from outrider.errors import RuntimeFailure

LOG_TAIL = 4096


class Child:
    """Held by `pidfd`; `log` is a file of memory with what it writes to standard error. Both are ours from now on."""

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

    def stopped_by_signal(self) -> bool:
        """Whether it was sent a signal to stop, or is traced; to be asked before `close`."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in ("T", "t")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    async def end(self, seconds: float) -> bool:
        """Wait for its end, which comes by force after so many seconds, reap it and close. Whether it came by itself.
        Call once; not cancel-safe by itself."""
        in_time = await self.ends_within(seconds)
        if not in_time:
            self.kill()
            await readable(self.pidfd)
        self.bury()
        return in_time

    async def ends_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await readable(self.pidfd)
        except TimeoutError:
            return False
        return True

    def bury(self) -> None:
        """Reap what has ended, and close."""
        self._reap()
        self.close()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):  # it may be a child of the zygote's, not ours
            os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)

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
    """Wait until `fd` is readable: for a pidfd, until its process is dead."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)
