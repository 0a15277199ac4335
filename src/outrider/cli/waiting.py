"""Writes notes that explain why sessions make no progress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from outrider.cli.terminal import Terminal
from outrider.client.client import AsyncClient
from outrider.errors import OutriderError
from outrider.schemas import ServiceStatus

QUIET_SECONDS = 10.0
"""Seconds between two readings of the service's status. If no session made progress in this time, a note is printed."""


@asynccontextmanager
async def waits_noted(terminal: Terminal, client: AsyncClient, *, every: float = QUIET_SECONDS) -> AsyncIterator[None]:
    """While the block runs, print a note if no session of the service makes progress. If the reason changes, print
    another note."""
    async with asyncio.TaskGroup() as tasks:
        looking = tasks.create_task(_look(terminal, client, every))
        try:
            yield
        finally:
            looking.cancel()


async def _look(terminal: Terminal, client: AsyncClient, every: float) -> None:
    before, printed = None, ""
    while True:
        await asyncio.sleep(every)
        try:
            status = await client.status()
        except OutriderError:  # the block also calls the service, and raises a better error
            continue
        reason = reason_of_wait(status)
        if _progress(status) == before and reason != printed:
            terminal.note(f"waiting: {reason}")
            printed = reason
        before = _progress(status)


def _progress(status: ServiceStatus) -> object:
    """Return numbers from the status. Whenever a session makes progress, at least one of these numbers changes."""
    engines = [(each.in_flight, each.generated_tokens, each.failures) for each in status.engines]
    lanes = [(lane.in_use, lane.served) for node in status.nodes for lane in node.lanes]
    return status.sessions, engines, lanes, status.cursor


def reason_of_wait(status: ServiceStatus) -> str:
    """Return why the sessions of a service make no progress, as far as the service's status shows the reason."""
    engines = [each for each in status.engines if each.serves is None]
    nodes = [node for node in status.nodes if not node.drained]
    if status.policy.paused is not None:
        return "the policy is paused; `outrider policy resume` resumes it"
    if not engines:
        return "the service has no engine; add one with `outrider engines add`"
    if not any(each.ok for each in engines):
        first = engines[0]
        return f"no engine is up: {first.name} ({first.url or first.kind}): {first.detail or 'no reply yet'}"
    if not nodes:
        return "no node takes sessions; see `outrider nodes list`"
    for node in nodes:
        for lane in node.lanes:
            if lane.waiting and lane.in_use >= lane.size:
                return f"all {lane.size} slots of the lane {lane.name!r} of node {node.name} are in use"
    if waiting := sum(node.resources.waiting for node in nodes):
        return f"{waiting} sessions wait for processors, memory or GPUs that others have set aside: `outrider status`"
    if flight := sum(each.in_flight for each in engines):
        return f"{flight} replies are being generated, and no session has ended since"
    states = ", ".join(f"{count} {state}" for state, count in status.sessions.items() if count and state != "done")
    return f"no model call is under way, and the sessions are {states or 'done'}: `outrider status`"
