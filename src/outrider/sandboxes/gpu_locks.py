"""Locks by which the programs of this machine keep each other off the GPUs that their sandboxes use.

Who has which GPU is decided by `sessions/resources.py`, which knows nothing of another service here, nor of a process
that was given up because it hangs. The kernel knows both. Invariant: a lock is held from before a sandbox starts until
it has stopped, or its process has died.
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
    """Lock these GPUs; closing what is returned unlocks them. Raises RuntimeFailure when another program of this
    machine does not unlock one within WAIT_SECONDS."""
    clock = asyncio.get_running_loop().time
    end = clock() + WAIT_SECONDS
    with ExitStack() as held:
        for name in sorted(names):
            # A name of the kernel's and no file: it is free when its process is dead, and may be any user's.
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
