"""A session's timeline through the API: what ran when, who may see commands, earlier attempts, and removal."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from outrider.client.client import AsyncClient
from outrider.errors import NotFound
from outrider.schemas import SpanView, TimelineView
from support.service import call, running_service, say

SECRET = "t0p-s3cr3t-value"


def task(**changes: Any) -> dict[str, Any]:
    return {
        "instruction": "do it",
        "harness": {"agent": "tools"},
        "runtime": {
            "kind": "process",
            "env": {"API_TOKEN": SECRET},
            "prepare": [{"run": f"echo prepared {SECRET} > mark"}],
        },
        "evaluator": {"kind": "command", "run": "test -f mark"},
        "max_attempts": 2,
        **changes,
    }


async def timeline_with(client: AsyncClient, session_id: str, kind: str, name: str, **about: Any) -> TimelineView:
    """Return the timeline once it has such a span: the node stores entries up to a second later."""
    async with asyncio.timeout(10):
        while True:
            view = await client.timeline(session_id, **about)
            if any(span.kind == kind and name in span.name and span.end is not None for span in view.spans):
                return view
            await asyncio.sleep(0.05)


def end(span: SpanView) -> float:
    assert span.end is not None
    return span.end


def named(view: TimelineView, kind: str, name: str = "") -> list[SpanView]:
    return [span for span in view.spans if span.kind == kind and name in span.name]


async def test_what_happened_when(tmp_path: Path) -> None:
    replies = [call("echo hi; exit 3"), say("done")]
    async with running_service(tmp_path=tmp_path, replies=replies, token="root") as (_, url):
        async with AsyncClient(url, token="root") as root:
            submits = (await root.create_token("alice", "submit")).text
            reads = (await root.create_token("alice-reads", "read", tenant="alice")).text
        async with AsyncClient(url, token=submits) as client:
            runtime = task()["runtime"] | {"kind": "namespace"}
            group = await client.submit({"task": task(runtime=runtime)})
            [done] = await client.wait([group.id])
            session = done.sessions[0]
            view = await timeline_with(client, session.id, "stage", "eval")
        async with AsyncClient(url, token=reads) as reader:
            shown = await reader.timeline(session.id)
    assert [one.attempt for one in view.attempts] == [1]
    assert view.attempts[0].ended is not None
    stages = {span.name: span for span in named(view, "stage")}
    assert {"waiting", "queued", "init", "run", "eval"} <= stages.keys()
    (sandbox,) = named(view, "sandbox")
    assert (sandbox.name, sandbox.data["warm"]) == ("namespace", False)
    prepared, ran, graded = (named(view, "command", text)[0] for text in ("prepared", "exit 3", "test -f"))
    assert SECRET not in "".join(span.name for span in view.spans)
    assert prepared.data == {"sandbox": "agent", "exit_code": 0}
    assert ran.data["exit_code"] == 3
    assert stages["init"].start <= prepared.start <= end(stages["init"])
    first, second = named(view, "call")
    assert first.data["tools"] == ["bash"]
    assert first.start <= first.data["joined"] <= first.data["first_token"] <= end(first) <= first.data["stored"]
    assert end(first) <= ran.start <= end(ran) <= second.start
    assert stages["run"].start <= first.start
    assert end(second) <= end(stages["run"])
    assert stages["eval"].start <= graded.start <= end(graded) <= end(stages["eval"])
    assert [span.start for span in view.spans] == sorted(span.start for span in view.spans)
    assert {"echo", "test"} <= {span.name for span in named(shown, "command")}
    assert all(" " not in span.name for span in (*named(shown, "command"), *named(shown, "process")))
    assert len(shown.spans) == len(view.spans)


async def test_a_session_that_is_tried_again_has_a_timeline_for_each_attempt(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=[say("done")]) as (_, url), AsyncClient(url) as client:
        once = str(tmp_path / "once")
        flaky = {
            "kind": "process",
            "prepare": [{"run": f"mkdir {once} || exit 0; exit 9"}],
        }  # fails in the first attempt
        group = await client.submit({"task": task(runtime=flaky, evaluator={"kind": "command", "run": "true"})})
        [done] = await client.wait([group.id])
        session = done.sessions[0].id
        newest = await timeline_with(client, session, "stage", "eval")
        first = await timeline_with(client, session, "command", "mkdir", attempt=1)
        with pytest.raises(NotFound, match="has no attempt 3"):
            await client.timeline(session, 3)
        with pytest.raises(NotFound):
            await client.timeline("s-none-0")
    assert newest.attempt == 2
    assert [one.error for one in newest.attempts] == ["runtime_failure", None]
    (error,) = named(first, "error")
    assert (error.name, error.start) == ("runtime_failure", first.attempts[0].ended)
    assert named(first, "command")[0].data["exit_code"] == 9
    assert all(span.end is not None for span in first.spans)
    (waited,) = named(newest, "stage", "waiting")
    assert (waited.start, waited.end) == (first.attempts[0].ended, newest.attempts[1].began)


async def test_a_running_session_shows_what_goes_on(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=[call("sleep 300")]) as (_, url), AsyncClient(url) as client:
        group = await client.submit({"task": task()})
        session = (await client.group(group.id)).sessions[0].id
        async with asyncio.timeout(15):
            sleeping: list[SpanView] = []
            while not sleeping:
                view = await client.timeline(session)
                sleeping = named(view, "command", "sleep 300")
        assert sleeping[0].end is None
        assert [span.name for span in named(view, "stage") if span.end is None] == ["run"]
        assert view.attempts[0].ended is None
        await client.cancel(group.id)
        [_] = await client.wait([group.id])
        ended = await client.timeline(session)
        assert all(span.end is not None for span in ended.spans)
