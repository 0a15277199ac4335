"""Requests and downloads of trainers do not hold the event loop. The processor time of the loop's thread is measured,
which does not depend on the load of the machine."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from io import BytesIO
from typing import Any

import aiohttp
import pytest

from outrider.concurrency.watchdog import Watchdog
from outrider.lifecycle import StopReason
from outrider.schemas import SampleList
from outrider.service.principals import Principal
from outrider.spec import GroupSpec
from outrider.trajectory import BranchKind, LogprobKind, Sample, TokenMode
from support.samples import make_sample

from .conftest import MakeWorld
from .world import group

pytestmark = pytest.mark.usefixtures("others_objects_set_aside")
HELD = 0.1
"""Maximum hold of the event loop in seconds. On a quiet machine, holds are at most half as long."""


def with_files(*contents: tuple[str, str]) -> bytes:
    """Return the body of a group whose task writes these files, given as (text, encoding)."""
    spec: dict[str, Any] = group("ask").model_dump(mode="json", exclude_none=True)
    spec["task"]["runtime"]["prepare"] = [
        {"write": text, "to": f"file-{number}", "encoding": encoding}
        for number, (text, encoding) in enumerate(contents)
    ]
    return json.dumps(spec).encode()


@pytest.mark.deep
async def test_a_group_with_large_files_is_read_beside_the_loop(world: MakeWorld) -> None:
    noise = base64.b64encode(random.Random(0).randbytes(6 << 20)).decode()
    text = "a line of text\n" * (1 << 18)
    body = with_files((noise, "base64"), (noise, "base64"), (text, "utf-8"))
    async with world() as w, Watchdog() as watchdog:
        spec = await w.service.parse(GroupSpec, body)
        done = await w.service.submit(spec)
        await w.done(done.id)
    assert watchdog.stalls.held < HELD


@pytest.mark.deep
async def test_a_group_of_many_small_parts_is_read_beside_the_loop(world: MakeWorld) -> None:
    spec: dict[str, Any] = group("ask").model_dump(mode="json", exclude_none=True)
    spec["task"]["harness"]["options"]["do"] = [["note"] for _ in range(30_000)]
    async with world() as w, Watchdog() as watchdog:
        await w.service.parse(GroupSpec, json.dumps(spec).encode())
    assert watchdog.stalls.held < HELD


@pytest.mark.deep
@pytest.mark.parametrize(
    "path", ["/v1/groups", "/v1/groups/g-1/regrade", "/v1/sessions/s-1/regrade", "/v1/consumers/x/ack"]
)
async def test_no_body_of_any_call_is_read_on_the_loop(world: MakeWorld, path: str) -> None:
    wrong = json.dumps(dict.fromkeys(map(str, range(200_000)), 0)).encode()
    async with (
        world(http=True) as w,
        aiohttp.ClientSession(w.url) as http,
        Watchdog() as watchdog,
        http.post(path, data=BytesIO(wrong)) as reply,
    ):
        assert reply.status == 413, await reply.text()
    assert watchdog.stalls.held < HELD


@pytest.mark.deep
async def test_one_tenant_reads_one_body_at_a_time(world: MakeWorld) -> None:
    spec: dict[str, Any] = group("ask").model_dump(mode="json", exclude_none=True)
    small = json.dumps(spec).encode()
    spec["task"]["harness"]["options"]["do"] = [["note"] for _ in range(30_000)]
    large = json.dumps(spec).encode()
    alice, bob = Principal("alice", "submit", "alice"), Principal("bob", "submit", "bob")
    async with world() as w:
        flood = [asyncio.create_task(w.service.parse(GroupSpec, large, alice)) for _ in range(20)]
        await asyncio.sleep(0)
        await w.service.parse(GroupSpec, small + b" " * (64 << 10), bob)
        assert sum(each.done() for each in flood) <= 2
        await asyncio.gather(*flood)


@pytest.mark.deep
async def test_a_sessions_evaluator_is_made_beside_the_loop(world: MakeWorld) -> None:
    spec: dict[str, Any] = group("ask").model_dump(mode="json", exclude_none=True)
    options = {"inputs": ["x"], "outputs": ["a" + "\n" * 1_500_000]}
    spec["task"]["evaluator"] = {"kind": "code", "options": options}
    async with world() as w, Watchdog() as watchdog:
        done = await w.service.submit(await w.service.parse(GroupSpec, json.dumps(spec).encode()))
        await w.done(done.id)
    assert watchdog.stalls.held < HELD


def long_row(row: int, tokens: int) -> Sample:
    return make_sample(
        group_id="g",
        session_id="s",
        attempt=1,
        sample_index=0,
        row=row,
        rows=20,
        kind=BranchKind.MAIN,
        turns=(0,),
        ids=list(range(tokens)),
        loss_mask=[1] * tokens,
        logprobs=[-0.123456789] * tokens,
        versions=[7] * tokens,
        prompt_length=0,
        reward=1.0,
        mode=TokenMode.TOKENS,
        logprob_kind=LogprobKind.RAW,
        stop_reason=StopReason.COMPLETED,
        min_version=7,
        max_version=7,
    )


@pytest.mark.deep
async def test_rows_of_many_tokens_are_written_beside_the_loop(world: MakeWorld) -> None:
    view = SampleList(samples=tuple(long_row(row, 50_000) for row in range(20)))
    async with world() as w, Watchdog() as watchdog:
        body = await w.service.reader.encoded(view)
    assert watchdog.stalls.held < HELD
    rows = json.loads(body)["samples"]
    assert [row["row"] for row in rows] == list(range(20))
    assert rows[3]["ids"] == list(range(50_000))
