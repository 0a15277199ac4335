"""Readers of a service that send the requests of open pages: the same paths in the same rhythm, and the stream of
events. No browser runs, so that the benchmark measures the service and not the browser.

The paths and seconds are those of `useGet` and `useEvents` in page/src; a test fails when these change.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import aiohttp
import msgspec

SLOWER = 10
"""Before a page reads again, it waits at least this many times as long as its last read took."""


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """A GET request that a page repeats. The page sends the request at first, then every `every` seconds (0: never),
    and also `pause` seconds after an event whose kind begins with one of `after`. If `of` is given, only events of the
    group or session with this id count."""

    path: str
    every: float = 0.0
    after: tuple[str, ...] = ()
    of: str = ""
    pause: float = 0.0


class Event(msgspec.Struct, frozen=True):
    """The fields of an event that the pages read."""

    kind: str
    group_id: str
    session_id: str | None


def five_pages(group: str, session: str) -> list[list[Read]]:
    """Return the reads of five pages: the overview, the lists of groups and of sessions, a group, a session that
    runs."""
    ended = ("group.done", "session.done")
    mine = f"/v1/sessions/{session}"
    return [
        [
            Read(path="/v1/status", every=2, after=("session.",), pause=1),
            Read(path="/v1/rates", every=5),
            Read(path="/v1/sessions?state=running&limit=12", every=5, after=("session.",), pause=1),
            Read(path="/v1/sessions?limit=300", every=20, after=ended, pause=5),
            Read(path="/v1/groups?limit=200", every=20, after=ended, pause=5),
        ],
        [Read(path="/v1/groups?limit=500", after=("group.", "session.done"), pause=1.5)],
        [Read(path="/v1/sessions?limit=200", after=("session.", "group.created"), pause=1.5)],
        [Read(path=f"/v1/groups/{group}", after=("",), of=group, pause=0.4)],
        [
            Read(path=mine, after=("",), of=session, pause=0.25),
            Read(path=f"{mine}/turns?tokens=true&pieces=true", every=1.5, after=("",), of=session, pause=0.25),
            Read(path=f"{mine}/timeline", every=1.5, after=("",), of=session, pause=0.25),
        ],
    ]


class PageReader:
    """One open page of the service at `url`."""

    def __init__(self, http: aiohttp.ClientSession, url: str, reads: Sequence[Read]) -> None:
        self.opened = asyncio.Event()
        """Set when the page has all its first replies."""
        self._http = http
        self._url = url
        self._due = {read: asyncio.Event() for read in reads}
        self._missing = len(reads)

    async def run(self) -> None:
        """Read until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            for read in self._due:
                tasks.create_task(self._repeat(read))

    async def _repeat(self, read: Read) -> None:
        first = True
        while True:
            begun = time.perf_counter()
            self._due[read].clear()
            async with self._http.get(self._url + read.path) as reply:
                reply.raise_for_status()
                await reply.read()
            if first:
                first = False
                self._missing -= 1
                if not self._missing:
                    self.opened.set()
            await self._wait(read, SLOWER * (time.perf_counter() - begun))

    async def _wait(self, read: Read, least: float) -> None:
        """Wait until the read is due again."""
        try:
            async with asyncio.timeout(max(read.every, least) if read.every else None):
                await self._due[read].wait()
                await asyncio.sleep(read.pause)
        except TimeoutError:
            pass

    async def _follow(self) -> None:
        data = b"data: "
        async with self._http.get(f"{self._url}/v1/events?new=true", timeout=aiohttp.ClientTimeout()) as reply:
            reply.raise_for_status()
            async for line in reply.content:
                if line.startswith(data):
                    event = msgspec.json.decode(line.removeprefix(data), type=Event)
                    for read, due in self._due.items():
                        mine = not read.of or read.of in (event.group_id, event.session_id)
                        if mine and read.after and event.kind.startswith(read.after):
                            due.set()
        raise RuntimeError("the stream of events has ended")
