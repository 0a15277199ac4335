"""A campaign's service with a planted bug: a sandbox is not stopped if its session is cancelled."""

from __future__ import annotations

import asyncio

from campaign import service
from outrider.sandbox.sandbox import Sandbox

stop = Sandbox.stop


async def unshielded(self: Sandbox) -> None:
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
    await stop(self)


def main(*arguments: str) -> None:
    Sandbox.stop = unshielded  # type: ignore[method-assign]
    service.main(*arguments)
