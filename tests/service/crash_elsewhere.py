"""`python -m service.crash_elsewhere FOLDER TOKENIZER KIND IMAGE`: a service with sandboxes elsewhere, which the test
kills.

Prints `ready` when one group has finished, four sessions of another group are under way in their sandboxes, and two
more sandboxes have been made ahead.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from .elsewhere import sandboxes
from .world import SAY, World, a_world

BUSY = "run nohup setsid sleep 4012 > /dev/null 2>&1 & echo begun > begun"


async def fill(world: World, runtime: dict[str, str]) -> None:
    await world.done((await world.submit("ask", runtime=runtime, n=2)).id)
    await world.submit("ask", BUSY, "admit 0", "wait door", runtime=runtime, n=4)
    while world.stage.count["admit"] < 4 or world.node.stats().warm.ready < 2:  # noqa: ASYNC110  # both only count
        await asyncio.sleep(0.05)


async def main() -> None:
    folder, tokenizer, kind, image = sys.argv[1:]
    runtime = {"kind": kind} | ({"image": image} if image else {})
    settings = sandboxes(kind, warm=2)
    async with a_world(Path(folder), Path(tokenizer), (SAY,), http=True, sandboxes=settings) as world:
        await fill(world, runtime)
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
