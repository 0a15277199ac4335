"""Failed model calls in timelines and traces, of agents elsewhere, in a sandbox, and in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from external.world import Agent, Owner
from outrider.client.client import AsyncClient
from outrider.evaluators.base import Outcome
from outrider.schemas import SpanView
from support.service import call, running_service, say
from support.trace_collector import attribute, collecting, connected

from .test_timeline import SECRET, named, task, timeline_with

REPLIES: list[str | dict[str, Any]] = [
    {"when": "refuse", "reply": "no", "fail": "rejected"},
    {"when": "break off", "reply": "one two three four five", "fail": "unavailable", "after": 2},
    say("fine"),
]


def about(span: SpanView) -> tuple[Any, ...]:
    return span.name, *(span.data[name] for name in ("action", "dialect", "status"))


def graded(outcome: Outcome) -> float:
    return 1.0


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.mark.deep
async def test_failed_calls_of_an_agent_elsewhere(tmp_path: Path) -> None:
    with collecting() as (collector, traces):
        running = running_service(tmp_path=tmp_path, replies=REPLIES, traces_to=traces)
        async with running as (_, url), AsyncClient(url) as client, httpx.AsyncClient(timeout=60) as http:
            owner = Owner(http, url)
            opened = await owner.open(evaluator={"kind": "callable", "path": "api.test_failed_calls:graded"})
            agent = Agent(http, opened)
            assert (await agent.post("no messages")).status_code == 400  # type: ignore[arg-type]  # wrong on purpose
            assert (await agent.post(user("refuse"))).status_code == 400
            broken = await agent.post(user("break off"), stream=True)
            assert broken.status_code == 200
            assert "engine_unavailable" in broken.text
            assert await agent.ask("Hello?") == "fine"
            completed = await owner.call("POST", f"/sessions/{opened['session']['id']}/complete", {})
            assert completed.status_code == 200, completed.text
            await client.wait([opened["session"]["group_id"]])
            await timeline_with(client, opened["session"]["id"], "stage", "stop")  # an entry of the grading
            view = await timeline_with(client, opened["session"]["id"], "stage", "run")
            spans = await collector.trace()
    assert {"run", "stop"} <= {span.name for span in named(view, "stage")}, "the entries of the run and of the grading"
    failed = named(view, "failed_call")
    assert [about(span) for span in failed] == [
        ("bad_request", "generate", "chat", 400),
        ("engine_rejected", "generate", "chat", 400),
        ("engine_unavailable", "generate", "chat", 200),
    ]
    assert all(span.end is not None and span.start <= span.end for span in failed)
    assert "fails here by its script" in failed[1].data["message"]
    aborted, replied = named(view, "call")
    assert (aborted.data["finish"], replied.data["finish"]) == ("abort", "stop")
    assert replied.start <= replied.data["stored"]
    connected(spans)
    shown = {attribute(span, "error.type"): span for span in spans if span.kind == Span.SPAN_KIND_CLIENT}
    assert shown.keys() == {None, *(span.name for span in failed)}
    assert attribute(shown["engine_rejected"], "http.response.status_code") == 400
    assert shown["engine_rejected"].status.code == Status.STATUS_CODE_ERROR


async def test_failed_calls_of_a_program_in_a_sandbox(tmp_path: Path) -> None:
    # The program sends a secret of its task in a request whose refusal quotes the request.
    body = '{"model": "m", "messages": [{"role": "\'"$API_TOKEN"\'", "content": "x"}]}'
    program = f"curl -s -d '{body}' $OPENAI_BASE_URL/chat/completions"
    spec = task(harness={"command": ["sh", "-c", program]}, evaluator={"kind": "command", "run": "true"})
    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client:
        [done] = await client.wait([(await client.submit({"task": spec})).id])
        view = await timeline_with(client, done.sessions[0].id, "failed_call", "")
    [failed] = named(view, "failed_call")
    assert about(failed)[1:3] == ("generate", "chat")
    assert 400 <= failed.data["status"] < 500
    assert "role" in failed.data["message"]
    assert SECRET not in failed.data["message"]


async def test_failed_calls_of_an_agent_in_this_process(tmp_path: Path) -> None:
    spec = task(limits={"turns": 1}, evaluator={"kind": "command", "run": "true"})
    running = running_service(tmp_path=tmp_path, replies=[call("echo hi"), say("done")])
    async with running as (_, url), AsyncClient(url) as client:
        [done] = await client.wait([(await client.submit({"task": spec})).id])
        view = await timeline_with(client, done.sessions[0].id, "failed_call", "")
    [failed] = named(view, "failed_call")
    assert about(failed) == ("limit_reached", "generate", "inprocess", 429)
