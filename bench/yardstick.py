"""How fast the machine is just now: the smallest HTTP round trip through libraries that are not ours.

aiohttp to uvicorn, on uvloop, one call at a time: the same mix of system calls, wake-ups and Python as a model call
through the gateway. Machines differ in it by a factor, and a shared one differs from hour to hour, so it is measured
in between the figures that it stands beside.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from bench.processes import echo

REFERENCE_MS = 0.232
"""What it takes on the machine that the targets were set on: two quiet cores (AMD EPYC)."""
CALL = {"a": 1}


class Yardstick:
    """Milliseconds of so many calls, in blocks."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url
        self._spent: list[float] = []

    async def take(self, calls: int) -> None:
        for _ in range(calls):
            begun = time.perf_counter()
            async with self._http.post(self._url, json=CALL) as response:
                await response.read()
            self._spent.append(1000 * (time.perf_counter() - begun))

    def median_ms(self) -> float:
        return statistics.median(self._spent)


@asynccontextmanager
async def a_yardstick() -> AsyncIterator[Yardstick]:
    """Warm, and with nothing measured."""
    async with echo() as process, aiohttp.ClientSession() as http:
        await Yardstick(http, process.urls[0]).take(50)
        yield Yardstick(http, process.urls[0])
