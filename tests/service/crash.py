"""`python -m service.crash FOLDER TOKENIZER [MARK]`: a service with sessions under way, which the test kills.

Prints `ready` when two groups have finished and the other sessions are stuck: in the queue, in a prepare step, ready,
in the middle of a reply, between calls, and in their evaluator. With MARK, one group of three sessions is under way in
real sandboxes, whose processes have MARK in their environment.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from outrider.config import LanesConfig
from outrider.lifecycle import SessionState

from .world import SAY, World, a_world

LANES = LanesConfig(init=2, ready=2, run=3, eval=1)  # room for the six sessions that are under way
REPLIES = (SAY, {"reply": SAY, "when": "stall here", "stall": 1})


async def fill(world: World) -> None:
    finished = [await world.submit("ask", n=2) for _ in range(2)]
    for view in finished:
        await world.done(view.id)
    await world.submit("ask", verdicts=["wait never"])
    await world.stage.arrived["never"].wait()
    for place in ("door", "hall"):
        await world.submit("ask", f"wait {place}")
        await world.stage.arrived[place].wait()
    await world.submit("ask", instruction="stall here")
    await world.engine.stalled.wait()
    ready = await world.submit("ask")
    await world.state(ready.sessions[0].id, SessionState.READY)
    await world.submit("ask", runtime={"env": {"HANG": "exec"}, "prepare": [{"run": "true"}]})
    await world.stage.arrived["exec"].wait()
    await world.submit("ask", "ask", n=3)


async def fill_sandboxes(world: World, mark: str) -> None:
    runtime = {"kind": "namespace", "env": {"MARK": mark}, "prepare": [{"run": "setsid sleep 4011 &"}]}
    await world.submit("ask", "run sleep 4011 & (setsid sleep 4011 &)", "wait door", n=3, runtime=runtime)
    await world.stage.arrived["door"].wait()


async def main() -> None:
    folder, tokenizer, *mark = sys.argv[1:]
    async with a_world(Path(folder), Path(tokenizer), REPLIES, http=True, lanes=LANES) as world:
        await (fill_sandboxes(world, *mark) if mark else fill(world))
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
