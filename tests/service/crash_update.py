"""`python -m service.crash_update FOLDER TOKENIZER`: a service after three updates of the policy, waiting to be killed.

It says the ids of two groups: one began before the first update, and one after the third. Both are in the middle of
their replies.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from outrider.spec import PolicyUpdateSpec

from .test_policy import running
from .world import group


async def main() -> None:
    folder, tokenizer = map(Path, sys.argv[1:])
    async with running(folder, tokenizer) as world:
        engine = world.engines[0]
        engine.hold(8)
        old = await world.service.submit(group("ask", n=2))
        await engine.held.wait()
        for version in (1, 2, 3):
            update = PolicyUpdateSpec(version=version, mode="abort", weights=f"weights-{version}")
            await world.service.update_policy(update)
        engine.hold(8)
        young = await world.service.submit(group("ask", n=2))
        await engine.held.wait()
        while len(engine.requests) < 2 + 3 * 2 + 2:  # noqa: ASYNC110  # until both of the young ones have begun
            await asyncio.sleep(0)
        print(old.id, young.id, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
