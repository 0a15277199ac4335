"""The cost of open pages for a service: the latency of model calls, and the service's processor time, with five pages
open and with none.

Processes: this client, the service with a scripted engine, and the readers (`page_readers.py`). The store has many
finished sessions, and with and without pages other sessions begin and end, so that the pages have changes to read.
Blocks with and without pages alternate. Each block makes the same number of calls at the same pace, so that the
processor times of two blocks can be compared.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.corpus import Corpus
from bench.http import Client
from bench.processes import Process, open_pages, service_process
from bench.service import DATABASE, copies, one_call, one_finished
from bench.speakers import CHAT
from outrider.client.client import AsyncClient, ExternalSession
from outrider.store.sqlite import sqlite_store

PAGES = 5
PROMPT_CHARACTERS = 2048
CALLS_A_SECOND = 50.0
SESSIONS_A_SECOND = 2.0
"""Number of sessions that begin and end per second beside the calls."""
TURNS = 20
"""Number of turns of the session that a page shows."""
REPLY_TOKENS = 16
LANE = 64
SESSION = {"limits": {"turns": 100_000, "response_tokens": 1 << 30}}


class Plan(msgspec.Struct, frozen=True):
    """Numbers of finished sessions (a multiple of 8), of pairs of blocks, and of calls of a block."""

    finished: int
    pairs: int
    calls: int


FULL = Plan(finished=100_000, pairs=12, calls=250)
QUICK = Plan(finished=2_000, pairs=3, calls=100)


class Block(msgspec.Struct, frozen=True):
    """The latency of each call in milliseconds, sorted, and the service's processor time in milliseconds a second."""

    spent: list[float]
    cpu_ms_per_second: float

    def at(self, share: float) -> float:
        return self.spent[int(share * (len(self.spent) - 1))]


async def run(quick: bool) -> dict[str, Any]:
    return await measure(QUICK if quick else FULL)


async def measure(plan: Plan) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as name:
        folder = Path(name)
        corpus = await asyncio.to_thread(Corpus.make, folder)
        data = folder / "data"
        async with service_process(corpus.folder, data, LANE, "") as process:
            copied = await one_finished(process)
        async with sqlite_store(data / DATABASE) as store:
            await copies(store, plan.finished, copied)
        async with (
            service_process(corpus.folder, data, LANE, "") as process,
            AsyncClient(process.urls[0]) as client,
            client.external_session(SESSION) as shown,
            Client() as calls,
            asyncio.TaskGroup() as tasks,
        ):
            await client.sessions(limit=1)  # this call waits for the index of the finished sessions
            load = Load(corpus, process, client, calls)
            await load.calls_of(shown, TURNS)
            others = tasks.create_task(_others(client))
            async with open_pages(load.process.urls[0], shown.group_id, shown.id):
                await load.block(plan.calls)  # the first calls and reads are slower
            closed, opened = await _pairs(plan, load, shown)
            others.cancel()
            await shown.complete(reward=1.0)
    return {"finished": plan.finished, "pages": PAGES, "pairs": plan.pairs, **_figures(closed, opened)}


async def _pairs(plan: Plan, load: Load, shown: ExternalSession) -> tuple[list[Block], list[Block]]:
    """Measure the blocks without pages and those with pages. The order within a pair alternates."""
    closed: list[Block] = []
    opened: list[Block] = []
    for number in range(plan.pairs):
        for pages in (False, True) if number % 2 else (True, False):
            if pages:
                async with open_pages(load.process.urls[0], shown.group_id, shown.id):
                    opened.append(await load.block(plan.calls))
            else:
                closed.append(await load.block(plan.calls))
    return closed, opened


def _figures(closed: Sequence[Block], opened: Sequence[Block]) -> dict[str, Any]:
    """Return the figures of pairs of blocks. `same` are the ratios of successive blocks without pages, which show the
    noise."""
    sides = {"closed": closed, "open": opened}
    return {
        "latency_ms": {
            name: {
                f"p{percent}": statistics.median(block.at(percent / 100) for block in blocks) for percent in (50, 95)
            }
            for name, blocks in sides.items()
        },
        "cpu_ms_per_second": {
            name: statistics.median(block.cpu_ms_per_second for block in blocks) for name, blocks in sides.items()
        },
        "ratio": _ratios([after.at(0.5) / before.at(0.5) for before, after in zip(closed, opened, strict=True)]),
        "same": _ratios([after.at(0.5) / before.at(0.5) for before, after in itertools.pairwise(closed)]),
    }


def _ratios(found: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high}


class Load:
    """Makes model calls at a pace."""

    def __init__(self, corpus: Corpus, process: Process, client: AsyncClient, calls: Client) -> None:
        self.process = process
        self._corpus = corpus
        self._client = client
        self._calls = calls

    async def block(self, calls: int) -> Block:
        """Make the calls of a new session, and complete it."""
        async with self._client.external_session(SESSION) as session:
            cpu, begun = self.process.cpu_seconds(), time.perf_counter()
            spent = await self.calls_of(session, calls)
            cpu, seconds = self.process.cpu_seconds() - cpu, time.perf_counter() - begun
            await session.complete(reward=1.0)
        return Block(sorted(spent), 1000 * cpu / seconds)

    async def calls_of(self, session: ExternalSession, calls: int) -> list[float]:
        """Make calls of a session, each a new conversation, one at a time. A call that would be late begins at once.
        Returns the milliseconds of each."""
        texts = [self._corpus.text(characters=PROMPT_CHARACTERS) for _ in range(calls)]
        bodies = [CHAT.talk(max_tokens=REPLY_TOKENS, stream=False).ask(text) for text in texts]
        spent = []
        begun = time.perf_counter()
        for number, body in enumerate(bodies):
            await asyncio.sleep(max(0.0, begun + number / CALLS_A_SECOND - time.perf_counter()))
            spent.append(await self._call(session.base_url + CHAT.target(False), body))
        return spent

    async def _call(self, url: str, body: bytes) -> float:
        begun = time.perf_counter()
        async with self._calls.post(url, body) as response:
            parts = []
            while part := await response.arrived():
                parts.append(part)
            if response.status != 200:
                raise RuntimeError(f"{url} answered {response.status}: {b''.join(parts)[:500]!r}")
        return (time.perf_counter() - begun) * 1000


async def _others(client: AsyncClient) -> None:
    """Have sessions begin and end until cancelled."""
    while True:
        await client.submit(one_call(1, wait=False))
        await asyncio.sleep(1 / SESSIONS_A_SECOND)
