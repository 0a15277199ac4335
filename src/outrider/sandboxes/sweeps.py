"""When it starts, and every minute, a node ends what nodes that were killed left behind on this machine: folders,
processes, control groups, and whatever the parts of its host know of.

It knows no part. Invariant: a sweep that fails is told and tried again, and ends nothing else.
"""

from __future__ import annotations

import asyncio
import logging

from outrider.runtimes.kernel import cgroups
from outrider.runtimes.node_host import Host
from outrider.sandboxes.node_folder import NodeFolder

log = logging.getLogger("outrider.node")

EVERY_SECONDS = 60.0


async def keep_sweeping(host: Host, *, seconds: float = EVERY_SECONDS) -> None:
    """Until cancelled. The first sweep is not at once: a node's start is one."""
    while True:
        await asyncio.sleep(seconds)
        await try_to_sweep(host)


async def try_to_sweep(host: Host) -> None:
    """A bug of a sweep must not cost the node its sessions."""
    try:
        await sweep(host)
    except Exception:  # of whatever kind: the next sweep tries again
        log.exception("a sweep failed")


async def sweep(host: Host) -> dict[str, int]:
    """How many things were ended, by what they were."""
    folders = await asyncio.to_thread(NodeFolder.sweep)
    groups = await asyncio.to_thread(cgroups.sweep)
    counts = {"NodeFolder": folders, "Cgroups": groups}
    ended = {kind: number for kind, number in counts.items() if number} | await host.sweep()
    if ended:
        told = ", ".join(f"{kind} {number}" for kind, number in ended.items())
        log.info("%s removed what dead nodes had left: %s", host.name, told)
    return ended
