"""A child and every process below it: how a program's helpers are known to have ended.

It does not know what they do. Invariant: a signal goes only to a process that was held by a pidfd when it was found to
be below the child, never to a number.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from outrider.runtimes.kernel.child import Child, readable

END_SECONDS = 5.0


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
