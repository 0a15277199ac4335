"""A child and all below it, held from when they are looked for: how a program's helpers are known to have ended.

It knows nothing of what they do. Invariant: a signal goes only to a process that was held when it was found to be below
the child, never to a number.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from outrider.runtimes.kernel.child import Child, readable

END_SECONDS = 5.0


class Family:
    """Made before the child ends. `hold` may be called again for those that came later."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._held: dict[int, int] = {}

    def hold(self) -> None:
        """Take hold of all that is below the child now. Blocks, for as long as a few system calls each."""
        todo = [self._child.pid, *self._held]
        while todo:
            above = todo.pop()
            for pid in _children(above) - self._held.keys():
                with contextlib.suppress(OSError):
                    self._held[pid] = os.pidfd_open(pid)
                    if _status(pid, "PPid") != [above]:  # another of the same number
                        os.close(self._held.pop(pid))
                        continue
                    todo.append(pid)

    def kill_first_inside(self) -> None:
        """SIGKILL to the first process of a pid namespace, with which all that is in there dies."""
        for pid, held in self._held.items():
            numbers = _status(pid, "NSpid")
            if len(numbers) > 1 and numbers[-1] == 1:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(held, signal.SIGKILL)

    async def end(self) -> None:
        """Wait for the end of all but the child, which comes by force when it does not come by itself."""
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
    """None of what is gone, which it may be at any moment."""
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
