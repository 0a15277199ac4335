"""Traces received by OTLP: they are complete, connected and linked, also if a collector fails or the service is started
again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import TracerProvider

from outrider.client.client import AsyncClient
from outrider.concurrency.cancellation import OffloadThread
from outrider.concurrency.chores import Failures
from outrider.errors import InvalidField, ServiceError
from outrider.lifecycle import SessionState
from outrider.schemas import AttemptView, EventView, SessionView, SpanView, TimelineView
from outrider.service.trace_export import SETTLED_SECONDS, TraceExport
from outrider.service.trace_spans import TraceSpan, session_trace
from outrider.service.views import ViewReader
from outrider.store.rows import EventKind
from outrider.store.sqlite import SqliteDatabase
from outrider.store.store import Store
from outrider.tokens.rendering.tokenizer import Tokenizer
from support.service import call, running_service, say
from support.trace_collector import attribute, collecting, connected
from support.waiting import until

from .test_delivery import finished_group

TASK: dict[str, Any] = {
    "instruction": "do it",
    "harness": {"agent": "tools"},
    "runtime": {"kind": "process", "prepare": [{"run": "echo prepared > mark"}]},
    "evaluator": {"kind": "command", "run": "test -f mark"},
    "max_attempts": 1,
    "labels": {"run": "night"},
}


@pytest.mark.deep
async def test_a_rollout_is_a_trace_that_links_to_the_trainers(tmp_path: Path) -> None:
    tracer = TracerProvider().get_tracer("trainer")
    with collecting() as (collector, url):
        replies = [call("echo secret-argument; exit 3"), say("done")]
        async with running_service(tmp_path=tmp_path, replies=replies, traces_to=url) as (_, service):
            async with AsyncClient(service) as client:
                with tracer.start_as_current_span("step") as step:
                    group = await client.submit({"task": TASK})
                [done] = await client.wait([group.id])
                turns = await client.turns(done.sessions[0].id)
            spans = await collector.trace()
    session = done.sessions[0]
    root = connected(spans)
    assert root.name == "invoke_agent tools"
    assert attribute(root, "gen_ai.conversation.id") == session.id
    assert attribute(root, "outrider.reward") == 1.0
    assert attribute(root, "outrider.label.run") == "night"
    (link,) = root.links
    context = step.get_span_context()
    assert (int.from_bytes(link.trace_id), int.from_bytes(link.span_id)) == (context.trace_id, context.span_id)
    chats = [span for span in spans if attribute(span, "gen_ai.operation.name") == "chat"]
    assert [attribute(span, "outrider.turn") for span in chats] == [turn.index for turn in turns] == [0, 1]
    assert [attribute(span, "gen_ai.usage.output_tokens") for span in chats] == [turn.output_tokens for turn in turns]
    assert {span.kind for span in chats} == {Span.SPAN_KIND_CLIENT}
    tools = [span for span in spans if attribute(span, "gen_ai.operation.name") == "execute_tool"]
    assert [attribute(span, "process.exit.code") for span in tools if span.name == "execute_tool echo"] == [0, 3]
    names = {span.span_id: span.name for span in spans}
    assert {names[span.parent_span_id] for span in chats} == {"run"}
    assert b"secret-argument" not in b"".join(request.SerializeToString() for request in collector.requests)
    (resource,) = (each for request in collector.requests for each in request.resource_spans)
    assert ("service.name", "outrider") in [
        (each.key, each.value.string_value) for each in resource.resource.attributes
    ]


@pytest.mark.deep
async def test_a_failed_session_has_an_error(tmp_path: Path) -> None:
    task = TASK | {"runtime": {"kind": "process", "prepare": [{"run": "exit 9"}]}}
    with collecting() as (collector, url):
        async with running_service(tmp_path=tmp_path, traces_to=url) as (_, service), AsyncClient(service) as client:
            group = await client.submit({"task": task})
            await client.wait([group.id])
            spans = await collector.trace()
    root = connected(spans)
    assert root.status.code == Status.STATUS_CODE_ERROR
    assert attribute(root, "error.type") == "runtime_failure"


@pytest.mark.deep
async def test_a_collector_that_is_down_gets_the_traces_later_also_from_the_next_service(tmp_path: Path) -> None:
    with collecting() as (collector, url):
        collector.status = 503
        running = running_service(tmp_path=tmp_path, replies=[say("x")], traces_to=url)
        async with running as (service, address), AsyncClient(address) as client:
            group = await client.submit({"task": TASK})
            [done] = await client.wait([group.id])
            await until(lambda: "traces" in [each.name for each in service.failures.failing()])
            [_] = await client.wait([(await client.submit({"task": TASK})).id])  # nothing else is held up
        assert collector.spans == []
        collector.status = 200
        async with running_service(tmp_path=tmp_path, replies=[say("x")], traces_to=url):
            await until(lambda: len({span.trace_id for span in collector.spans}) == 2)
    roots = [span for span in collector.spans if not span.parent_span_id]
    assert done.sessions[0].id in [attribute(root, "gen_ai.conversation.id") for root in roots]
    assert len(roots) == 2


@pytest.mark.deep
async def test_a_trace_that_the_collector_refuses_for_good_is_left_out(tmp_path: Path) -> None:
    with collecting() as (collector, url):
        collector.refused = "invoke_agent tools"
        collector.status = 503
        running = running_service(tmp_path=tmp_path, replies=[say("x")], traces_to=url)
        async with running as (_, address), AsyncClient(address) as client:
            other = TASK | {"harness": {"command": ["sh", "-c", "curl -s $OPENAI_BASE_URL/models; exit 0"]}}
            groups = [await client.submit({"task": task}) for task in (TASK, other, TASK)]
            await client.wait([group.id for group in groups])
            await asyncio.sleep(SETTLED_SECONDS)
            collector.status = 200
            spans = await collector.trace()
    assert connected(spans).name == "invoke_agent command"


@pytest.mark.deep
async def test_a_message_holds_several_traces(tmp_path: Path) -> None:
    with collecting() as (collector, url):
        collector.status = 503
        running = running_service(tmp_path=tmp_path, replies=[say("x")], traces_to=url)
        async with running as (_, address), AsyncClient(address) as client:
            await client.wait([(await client.submit({"task": TASK, "n": 4})).id])
            await asyncio.sleep(SETTLED_SECONDS)
            collector.status = 200
            spans = await collector.trace()
    assert len(collector.requests) == 1
    assert len({span.trace_id for span in spans}) == 4


async def test_a_trace_survives_a_clock_that_is_ahead_for_a_moment(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first session ends while the clock is two hours ahead, the second one when it is right again."""
    now = time.time() - 60
    times = {"a": now + 7200, "b": now}
    exported: list[str] = []
    reading = "a"
    async with Store(SqliteDatabase(None), clock=lambda: times[reading]) as store:
        reader = ViewReader(store, Tokenizer.load(tokenizer), OffloadThread())
        exporter = TraceExport(store, reader, "http://127.0.0.1:9/", model="m", failures=Failures())

        def export(traces: Sequence[Sequence[TraceSpan]]) -> None:
            exported.extend(str(span.attributes["gen_ai.conversation.id"]) for spans in traces for span in spans[:1])

        monkeypatch.setattr(exporter, "_export", export)
        await exporter.send()
        for reading in times:
            await finished_group(store, reading, "http://127.0.0.1:9/")
        await exporter.send()
    assert exported == ["a.0", "b.0"]


class Events:
    """The parts of a `Store` that `TraceExport` uses, with the ends of three sessions."""

    def __init__(self) -> None:
        self.kept = 0
        self.all = [
            EventView(
                cursor=cursor, at=1.0, kind=EventKind.SESSION_DONE, group_id="g", session_id=f"s-{cursor}", data={}
            )
            for cursor in (1, 2, 3)
        ]

    async def position(self, name: str) -> int:
        return self.kept

    async def keep_position(self, name: str, cursor: int) -> None:
        self.kept = cursor

    async def events(self, *, after: int, limit: int) -> list[EventView]:
        return [event for event in self.all if event.cursor > after]


@pytest.mark.parametrize("case", ["built", "sent", "store"])
async def test_a_session_of_which_no_trace_can_be_made_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """The times are those of a node, and may be any numbers. An error of the store is no reason to leave a trace
    out."""

    async def spans(group_id: str, session_id: str) -> list[TraceSpan]:
        if session_id == "s-2" and case == "store":
            raise ServiceError("the database failed")
        moment = float("inf") if case == "built" else 2.0**52
        start = round((moment if session_id == "s-2" else 1.0) * 1e9)
        number = session_id.removeprefix("s-")
        return [
            TraceSpan(
                trace_id=number * 32,
                span_id=number * 16,
                parent_id=None,
                name=session_id,
                start=start,
                end=start,
                attributes={},
            )
        ]

    store: Any = Events()
    with collecting() as (collector, url):
        export = TraceExport(store, cast(Any, None), url, model="policy", failures=Failures())
        monkeypatch.setattr(export, "_spans", spans)
        if case == "store":
            with pytest.raises(ServiceError):
                await export.send()
            assert store.kept == 0
        else:
            await export.send()
            assert store.kept == 3
            assert [span.name for span in collector.spans] == ["s-1", "s-3"]


async def test_without_the_exporter_the_error_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(InvalidField) as raised:
        async with running_service(tmp_path=tmp_path, traces_to="http://127.0.0.1:9/v1/traces"):
            raise AssertionError
    assert raised.value.field == "traces_to"
    assert "opentelemetry-exporter-otlp-proto-http" in (raised.value.hint or "")


USED_NETWORK = {"phase": "agent", "requests": 3, "sent": 10, "received": 20, "refused": 2, "refusal": "a secret path"}


def call_span(turn: int, start: float, end: float, branch: str, **data: Any) -> SpanView:
    about = {
        "turn": turn,
        "branch": branch,
        "dialect": "chat",
        "engine": "e",
        "prompt_tokens": 9,
        "output_tokens": 3,
        "finish": "stop",
        **data,
    }
    return SpanView(kind="call", name="", start=start, end=end, data=about)


def test_subagents_compactions_and_attempts_are_connected() -> None:
    session = SessionView(
        id="s-1",
        group_id="g-1",
        sample_index=0,
        state=SessionState.DONE,
        attempt=2,
        node="n",
        created=1.0,
        updated=20.0,
        last_error=None,
        result=None,
    )
    attempts = (
        AttemptView(attempt=1, began=2.0, ended=5.0, node="n", error="lease_expired", message="lost"),
        AttemptView(attempt=2, began=6.0, ended=20.0, node="n"),
    )

    def view(attempt: int, *spans: SpanView) -> TimelineView:
        return TimelineView(
            session_id="s-1",
            group_id="g-1",
            attempt=attempt,
            state=SessionState.DONE,
            now=30.0,
            attempts=attempts,
            spans=spans,
        )

    second = view(
        2,
        SpanView(kind="stage", name="waiting", start=5.0, end=6.0),
        SpanView(kind="stage", name="run", start=7.0, end=18.0),
        call_span(0, 7.5, 8.0, "main"),
        call_span(1, 8.0, 9.0, "subagent", agent_id="explore"),
        call_span(2, 8.5, 9.5, "subagent", agent_id="explore"),
        call_span(3, 10.0, 11.0, "compaction"),
        call_span(4, 12.0, 18.5, "main"),
        SpanView(kind="process", name="sh", start=8.0, end=None, data={"pid": 2, "exit_code": None}),
        SpanView(kind="network", name="[2001:db8::1]:443", start=8.0, end=8.5, data=USED_NETWORK),
        SpanView(kind="network", name="mirror.example:443", start=6.5, end=6.6, data=USED_NETWORK),
        SpanView(
            kind="network", name="of-an-agent.example:443", start=8.6, end=8.6, data=USED_NETWORK | {"received": 0}
        ),
        SpanView(kind="network", name="other servers", start=8.7, end=8.8, data=USED_NETWORK),
    )
    spans = session_trace(
        session,
        [view(1), second],
        agent="claude-code",
        model="policy",
        labels={},
        traceparent="00-" + "0" * 32 + "-1234567890abcdef-01",  # not a trace context
    )
    (root,) = (span for span in spans if span.parent_id is None)
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    assert root.links == ()
    assert (root.start, root.end) == (1_000_000_000, 20_000_000_000)
    assert all(span is root or span.parent_id in by_id for span in spans)
    assert all(root.start <= span.start <= span.end <= root.end for span in spans)
    failed = next(span for span in spans if span.name == "attempt 1")
    assert (failed.error, failed.message) == ("lease_expired", "lost")
    parents = {
        span.attributes["outrider.turn"]: by_id[span.parent_id or ""].name
        for span in spans
        if span.attributes.get("gen_ai.operation.name") == "chat"
    }
    reached = [span for span in spans if span.name == "network"]
    assert [by_id[span.parent_id or ""].name for span in reached] == ["run", "attempt 2", "run", "run"]
    assert [span.attributes.get("server.address") for span in reached] == ["2001:db8::1", "mirror.example", None, None]
    assert [span.attributes.get("server.port") for span in reached] == [443, 443, None, None]
    assert {span.attributes["outrider.refused"] for span in reached} == {2}
    assert not [text for text in ("a secret path", "of-an-agent") if text in str(spans)]
    assert parents == {0: "run", 1: "invoke_agent explore", 2: "invoke_agent explore", 3: "run", 4: "run"}
    again = session_trace(session, [view(1), second], agent="claude-code", model="policy", labels={}, traceparent=None)
    assert [span.span_id for span in again] == [span.span_id for span in spans]
