"""Locks that stop sandboxes of different programs on this machine from using the same GPU.

`sessions/resources.py` assigns GPUs within one service. It does not see the GPUs of another service, or of an
unresponsive node process for which the service no longer waits. Invariant: a GPU is locked before its sandbox starts.
The lock is held until the sandbox has stopped or this process has exited.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence
from contextlib import ExitStack

from outrider.errors import RuntimeFailure
from outrider.sandbox.runtimes.nvidia import CDI_KIND

WAIT_SECONDS = 20.0
PAUSE_SECONDS = 0.1


async def lock_gpus(names: Sequence[str]) -> ExitStack:
    """Lock these GPUs until the returned stack is closed. Raises RuntimeFailure if another program holds a lock for
    more than WAIT_SECONDS."""
    clock = asyncio.get_running_loop().time
    end = clock() + WAIT_SECONDS
    with ExitStack() as held:
        for name in sorted(names):
            # An abstract socket name serves as the lock. Unlike a lock file, it is freed by the kernel when this
            # process exits, and can be taken by any user.
            lock = held.enter_context(socket.socket(socket.AF_UNIX))
            while True:
                try:
                    lock.bind(f"\0outrider/gpu/{name.removeprefix(CDI_KIND)}")
                    break
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                if clock() >= end:
                    raise RuntimeFailure(
                        f"GPU {name} is in use by another program of this machine that gives GPUs to sandboxes",
                        hint="give each service, and each machine that joins a service, its own GPUs by the setting "
                        "sandboxes.gpus; or end a node process that hangs",
                    )
                await asyncio.sleep(PAUSE_SECONDS)
        return held.pop_all()
