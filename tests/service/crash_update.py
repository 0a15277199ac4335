"""`python -m service.crash_update FOLDER TOKENIZER`: a service after three updates of the policy, which the test kills.

Prints the ids of two groups when all their sessions are in a model call. The first group began before the first update,
the second group after the third.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from outrider.spec import PolicyUpdateSpec
from support.stamping import StampingEngine

from .test_policy import running
from .world import group


async def begun(engine: StampingEngine, *, sessions: int) -> None:
    while len({request.session_key for request in engine.requests}) < sessions:  # noqa: ASYNC110  # no event
        await asyncio.sleep(0)


async def main() -> None:
    folder, tokenizer = map(Path, sys.argv[1:])
    async with running(folder, tokenizer) as world:
        engine = world.engines[0]
        engine.hold(8)
        old = await world.service.submit(group("ask", n=2))
        await begun(engine, sessions=2)
        for version in (1, 2, 3):
            update = PolicyUpdateSpec(version=version, mode="abort", weights=f"weights-{version}")
            await world.service.update_policy(update)
        young = await world.service.submit(group("ask", n=2))
        await begun(engine, sessions=4)
        print(old.id, young.id, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
