"""Control of the event loop's clock, for tests that would otherwise depend on how busy the machine is."""

from __future__ import annotations

import asyncio
import time


def stop_time() -> None:
    """Stop the running loop's clock. From then on, only `pass_time` advances the clock."""
    loop = asyncio.get_running_loop()
    now = loop.time()
    loop.time = lambda: now  # type: ignore[method-assign]  # asyncio reads the time from the loop everywhere


async def pass_time(seconds: float, *, step: float = 0.02, real_step: float = 0.0) -> None:
    """Advance the running loop's clock by `seconds`.

    With small steps, callbacks run in the step in which they are due. A single step for all the seconds has the effect
    of a blocked loop. `real_step`: real seconds of sleep per step, in which threads can work.
    """
    loop = asyncio.get_running_loop()
    real, ahead = loop.time, 0.0
    loop.time = lambda: real() + ahead  # type: ignore[method-assign]
    while ahead < seconds:
        ahead += step
        await (asyncio.to_thread(time.sleep, real_step) if real_step else asyncio.sleep(0))
