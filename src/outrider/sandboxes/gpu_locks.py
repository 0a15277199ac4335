"""Locks against the use of one GPU by the sandboxes of several programs of this machine.

`sessions/resources.py` assigns the GPUs of one service. It cannot see another service on the machine, or a hanging
process that was given up; the kernel's locks cover both. Invariant: a lock is held from before a sandbox starts until
the sandbox has stopped, or its process has died.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence
from contextlib import ExitStack

from outrider.errors import RuntimeFailure
from outrider.runtimes.nvidia import CDI_KIND

WAIT_SECONDS = 20.0
PAUSE_SECONDS = 0.1


async def lock_gpus(names: Sequence[str]) -> ExitStack:
    """Lock these GPUs. Closing the returned stack unlocks the GPUs. Raises RuntimeFailure if another program of this
    machine does not unlock a GPU within WAIT_SECONDS."""
    clock = asyncio.get_running_loop().time
    end = clock() + WAIT_SECONDS
    with ExitStack() as held:
        for name in sorted(names):
            # A name in the kernel and not a file: it is freed when its process dies, and any user can take it.
            lock = held.enter_context(socket.socket(socket.AF_UNIX))
            while not _bound(lock, f"\0outrider/gpu/{name.removeprefix(CDI_KIND)}"):
                if clock() >= end:
                    raise RuntimeFailure(
                        f"GPU {name} is in use by another program of this machine that gives GPUs to sandboxes",
                        hint="give each service, and each machine that joins one, GPUs of its own: the setting "
                        "sandboxes.gpus; or end a node process that hangs",
                    )
                await asyncio.sleep(PAUSE_SECONDS)
        return held.pop_all()


def _bound(lock: socket.socket, name: str) -> bool:
    try:
        lock.bind(name)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True
