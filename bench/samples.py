"""The cost of handing samples to a trainer: as an Arrow stream and as JSON, from a service as a process of its own.

A session has 40 turns and 57,000 tokens, of which 640 were sampled: the field's median coding session. The sessions are
stored before the service starts. The reader fetches pages of results; its processor time includes HTTP and decoding,
but no work on the samples. `built` adds the four columns as numpy arrays.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import msgspec
import numpy as np

from bench.corpus import Corpus
from bench.processes import Process, service_process
from outrider.client.client import AsyncClient
from outrider.client.sample_files import SampleFormat, sample_file
from outrider.lifecycle import StopReason
from outrider.messages import Message, Role, ToolCall
from outrider.sample_columns import MEDIA_TYPE
from outrider.schemas import JsonGroupView
from outrider.store.rows import GroupRow
from outrider.store.sqlite import sqlite_store
from outrider.store.store import Store
from outrider.tokens.samples import count_session
from outrider.trajectory import (
    FinishReason,
    JoinKind,
    LogprobKind,
    Sample,
    SessionResult,
    Turn,
    TurnTimings,
    Verdict,
    VersionSpan,
    pack_ids,
    pack_logprobs,
)

GROUP_SIZE = 8
TURNS = 40
TOKENS = 57_000
SAMPLED_EACH = 16
FORMATS = (SampleFormat.JSONL, SampleFormat.PARQUET, SampleFormat.ARROW)


class Plan(msgspec.Struct, frozen=True):
    """Numbers of stored groups, of readings of all groups as a stream, and of readings of all groups as JSON."""

    groups: int
    readings: int
    readings_json: int


FULL = Plan(16, 12, 2)
QUICK = Plan(4, 3, 1)


class JsonPage(msgspec.Struct, frozen=True):
    groups: tuple[JsonGroupView, ...]
    cursor: int


async def run(quick: bool) -> dict[str, Any]:
    return await measure(QUICK if quick else FULL)


async def measure(plan: Plan) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        corpus = Corpus.make(Path(folder))
        data = Path(folder) / "data"
        data.mkdir()
        async with sqlite_store(data / "outrider.sqlite3") as store:
            for number in range(plan.groups):
                await _stored_group(store, corpus, number)
        async with (
            service_process(corpus.folder, data, GROUP_SIZE, "") as service,
            AsyncClient(service.urls[0]) as client,
        ):
            samples = [sample async for page in _pages(client) for sample in page]
            assert len(samples) == plan.groups * GROUP_SIZE
            assert {len(sample) for sample in samples} == {TOKENS}
            return {
                "turns": TURNS,
                "tokens": TOKENS,
                "sampled": samples[0].trained_tokens,
                "stream": {
                    **await _reading(service, len(samples), plan.readings, lambda: _all(client)),
                    "bytes": await asyncio.to_thread(_bytes, service, {"Accept": MEDIA_TYPE}) / len(samples),
                },
                "json": {
                    **await _reading(
                        service, len(samples), plan.readings_json, lambda: asyncio.to_thread(_all_json, service)
                    ),
                    "bytes": await asyncio.to_thread(_bytes, service, {}) / len(samples),
                },
                "built_ms": _building(samples),
                "files": {kind.value: _writing(kind, samples, Path(folder)) for kind in FORMATS},
            }


async def _reading(
    service: Process, samples: int, readings: int, read: Callable[[], Awaitable[None]]
) -> dict[str, float]:
    """Return the processor times per sample, in ms, and the rates with one reader and with two."""
    await read()
    own, others, begun = time.process_time(), service.cpu_seconds(), time.perf_counter()
    for _ in range(readings):
        await read()
    seconds = time.perf_counter() - begun
    own, others = time.process_time() - own, service.cpu_seconds() - others
    begun = time.perf_counter()
    for _ in range(readings):
        await asyncio.gather(read(), read())
    return {
        "service_ms": 1000 * others / samples / readings,
        "reader_ms": 1000 * own / samples / readings,
        "per_second": samples * readings / seconds,
        "per_second_of_two": 2 * samples * readings / (time.perf_counter() - begun),
    }


async def _pages(client: AsyncClient) -> AsyncIterator[list[Sample]]:
    page = await client.results(after=0, samples=True)
    while page.groups:
        yield [sample for group in page.groups for sample in group.samples or ()]
        page = await client.results(after=page.cursor, samples=True)


async def _all(client: AsyncClient) -> None:
    async for _ in _pages(client):
        """A page is read and forgotten."""


def _all_json(service: Process) -> None:
    cursor = 0
    while (page := msgspec.json.decode(_page(service, cursor, {}), type=JsonPage)).groups:
        cursor = page.cursor


def _bytes(service: Process, headers: dict[str, str]) -> int:
    """Return the number of bytes of all groups, each as a page of its own."""
    cursor, size = 0, 0
    while (page := msgspec.json.decode(_page(service, cursor, {}), type=JsonPage)).groups:
        size += len(_page(service, cursor, headers))
        cursor = page.cursor
    return size


def _page(service: Process, cursor: int, headers: dict[str, str]) -> bytes:
    url = f"{service.urls[0]}/v1/results?after={cursor}&samples=true&limit=1"
    with urlopen(Request(url, headers=headers)) as reply:
        body: bytes = reply.read()
    return body


def _building(samples: Sequence[Sample]) -> float:
    """Return the milliseconds per sample in which the four columns are made as arrays."""
    begun = time.process_time()
    for sample in samples:
        assert len(sample.ids) == len(sample.loss_mask) == len(sample.logprobs) == len(sample.versions)
    return 1000 * (time.process_time() - begun) / len(samples)


def _writing(kind: SampleFormat, samples: Sequence[Sample], folder: Path) -> dict[str, float]:
    """Write the samples to a file. Returns the processor time in ms and the bytes per sample, and the rate.

    The second of two equal files is measured. The first takes 0.3 s longer in each process, for the import of pyarrow
    and for memory that the process does not have yet."""
    _write(kind, samples, folder)
    own, begun = time.process_time(), time.perf_counter()
    size = _write(kind, samples, folder)
    seconds = time.perf_counter() - begun
    return {
        "ms": 1000 * (time.process_time() - own) / len(samples),
        "per_second": len(samples) / seconds,
        "bytes": size / len(samples),
    }


def _write(kind: SampleFormat, samples: Sequence[Sample], folder: Path) -> int:
    """Write the samples to a file. Returns its bytes."""
    fresh = [msgspec.structs.replace(sample) for sample in samples]  # the copies lack the arrays that were already made
    path = folder / f"samples.{kind}"
    with sample_file(path, kind) as file:
        for at in range(0, len(fresh), GROUP_SIZE):
            file.write(fresh[at : at + GROUP_SIZE])
    return path.stat().st_size


async def _stored_group(store: Store, corpus: Corpus, number: int) -> None:
    """Store a group of finished sessions with different texts and token ids. The ids are random, because only their
    number matters."""
    name, now = f"group-{number}", time.time()
    row = GroupRow(id=name, n=GROUP_SIZE, priority=0, created=now)
    await store.create_group(row, b"{}", [f"{name}.{index}" for index in range(GROUP_SIZE)])
    for index in range(GROUP_SIZE):
        session_id = f"{name}.{index}"
        attempt = await store.start_attempt(session_id, node="bench", lease_until=now + 3600)
        turns = _turns(corpus, number * GROUP_SIZE + index)
        for turn in turns:
            await store.add_turn(session_id, attempt, turn)
        counts = count_session(turns)
        result = SessionResult(
            session_id=session_id,
            group_id=name,
            sample_index=index,
            attempt=attempt,
            stop_reason=StopReason.COMPLETED,
            verdict=Verdict(reward=float(index % 2), metrics={"tests": 3.0}),
            turns=len(turns),
            tokens=counts.tokens,
            samples=counts.samples,
        )
        await store.finish(session_id, attempt, result)


def _turns(corpus: Corpus, seed: int) -> list[Turn]:
    draw = np.random.default_rng(seed)
    read = TOKENS // TURNS - SAMPLED_EACH
    made = []
    for index in range(TURNS):
        said = corpus.tokens(read)
        role = Role.TOOL if index else Role.USER
        made.append(
            Turn(
                index=index,
                parent=index - 1 if index else None,
                join=JoinKind.APPEND if index else JoinKind.ROOT,
                prompt_length=read * (index + 1) + SAMPLED_EACH * index,
                prompt_delta=pack_ids(draw.integers(0, 150_000, read, dtype=np.int32)),
                output_ids=pack_ids(draw.integers(0, 150_000, SAMPLED_EACH, dtype=np.int32)),
                logprobs=pack_logprobs(-draw.random(SAMPLED_EACH)),
                logprob_kind=LogprobKind.RAW,
                versions=(VersionSpan(version=1, start=0, end=SAMPLED_EACH),),
                finish=FinishReason.STOP,
                dialect="chat",
                engine="bench",
                sampling={"temperature": 1.0, "top_p": 1.0, "max_tokens": 2048},
                messages=(Message(role=role, content=said, tool_call_id=f"call-{index - 1}" if index else None),),
                reply=Message(
                    role=Role.ASSISTANT,
                    content="",
                    tool_calls=(ToolCall(id=f"call-{index}", name="bash", arguments='{"command": "ls"}'),),
                ),
                timings=TurnTimings(received=0.0, first_token=0.0, finished=0.0),
            )
        )
    return made
