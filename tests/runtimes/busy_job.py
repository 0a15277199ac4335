"""Runs sandboxes whose programs do not end by themselves, in a process that runs until it is killed.

    python -m runtimes.busy_job MARK KIND...

`sleep MARK` runs in one sandbox of each KIND, with a process session of its own. The line `busy` is printed when all
of them have been started.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from outrider.sandbox.runtimes.node_host import Host

from .world import World


async def main(mark: str, *kinds: str) -> None:
    with tempfile.TemporaryDirectory(prefix="or-") as name:
        async with Host(Path(name)) as host:
            world = World(host)
            for kind in kinds:
                sandbox = await world.start(kind)
                await sandbox.exec(f"setsid sleep {mark} >/dev/null 2>&1 & true", seconds=10)
            print("busy", flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
