"""Time that a test lets pass, for what would else depend on how busy the machine is: clocks of the event loop only."""

from __future__ import annotations

import asyncio
import time


def stop_time() -> None:
    """From now on no time passes for the running loop, but what `pass_time` lets pass."""
    loop = asyncio.get_running_loop()
    now = loop.time()
    loop.time = lambda: now  # type: ignore[method-assign]  # asyncio asks the loop for the time, wherever it does


async def pass_time(seconds: float, *, step: float = 0.02, real_step: float = 0.0) -> None:
    """Let so many seconds pass at once for the running loop: in small steps, each with all that is due then; in one
    step, as when something holds the loop up. `real_step`: real seconds for each step, in which threads get on with
    their work."""
    loop = asyncio.get_running_loop()
    real, ahead = loop.time, 0.0
    loop.time = lambda: real() + ahead  # type: ignore[method-assign]
    while ahead < seconds:
        ahead += step
        await (asyncio.to_thread(time.sleep, real_step) if real_step else asyncio.sleep(0))
