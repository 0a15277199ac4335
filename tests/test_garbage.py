"""Garbage is collected in pieces: a full collection happens in an idle moment, or when a busy process has grown by more
than GROWN_MOST.

The collections run in processes of their own, because Python has one collector per process.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from outrider.concurrency.garbage import GROWN_IDLE, GROWN_MOST

PROGRAM = """
import asyncio, gc, json, sys
from outrider.concurrency.chores import Failures
from outrider.concurrency.garbage import GROWN_IDLE, GROWN_MOST, GarbageKeeper, collected_in_pieces

full = 0
def count(phase, info):
    global full
    full += phase == "start" and info["generation"] == 2
gc.callbacks.append(count)

class Node:
    alive = 0
    def __init__(self):
        self.itself = self
        Node.alive += 1
    def __del__(self):
        Node.alive -= 1

async def main():
    {body}

asyncio.run(main())
"""


async def ran(body: str) -> Any:
    indented = body.strip().replace("\n", "\n    ")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM.replace("{body}", indented), stdout=pipe, stderr=pipe
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return json.loads(out)


@pytest.mark.deep
async def test_while_somebody_waits_only_young_objects_are_looked_at() -> None:
    found = await ran("""
size = 100 << 20
async with collected_in_pieces(lambda: False, Failures()):
    keeper = GarbageKeeper(lambda: False, lambda: size)
    kept = [[number] for number in range(1_000_000)]      # Python itself would look at all of them several times
    await keeper.turn()
    for _ in range(100):
        young = [Node() for _ in range(1000)]
        del young
        await keeper.turn()
    print(json.dumps({"full": full, "alive": Node.alive}))
""")
    assert found == {"full": 0, "alive": 0}


async def test_old_cycles_are_freed_in_an_idle_moment_if_memory_has_grown() -> None:
    found = await ran("""
size, idle = 100 << 20, False
keeper = GarbageKeeper(lambda: idle, lambda: size)
old = [Node() for _ in range(1000)]
await keeper.turn()
del old
size += GROWN_IDLE + 1
await keeper.turn()
busy = Node.alive
idle = True
await keeper.turn()
after = Node.alive
await keeper.turn()
print(json.dumps({"busy": busy, "after": after, "full": full}))
""")
    assert found == {"busy": 1000, "after": 0, "full": 1}


async def test_memory_has_a_bound_where_there_is_no_idle_moment() -> None:
    found = await ran("""
size = 100 << 20
keeper = GarbageKeeper(lambda: False, lambda: size)
old = [Node() for _ in range(1000)]
await keeper.turn()
del old
size += GROWN_MOST
await keeper.turn()
before = Node.alive
size += 1
await keeper.turn()
print(json.dumps({"before": before, "after": Node.alive, "full": full}))
""")
    assert found == {"before": 1000, "after": 0, "full": 1}


def test_the_bounds_are_in_order() -> None:
    assert GROWN_IDLE < GROWN_MOST
